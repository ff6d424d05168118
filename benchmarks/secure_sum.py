"""What a secure sum costs: bytes and time of a round against a plain one, in one process; writes SECURE_SUM.md.

python -m benchmarks.secure_sum            # about two minutes
"""

import tempfile
import time
from pathlib import Path

import numpy as np
import numpyro
import numpyro.distributions as dist

import sfvi
from sfvi.deploy import RunSpec, SiloInput
from sfvi.deploy.code import Code
from sfvi.deploy.direct import Direct
from sfvi.deploy.server import Server
from sfvi.deploy.silo import Silo
from sfvi.privacy import Policy

ROUNDS = 60


def model(size):
    def population():
        return numpyro.sample("z", dist.Normal(0.0, 1.0).expand([size]).to_event(1))

    def silo(z, data):
        with numpyro.plate("rows", data["y"].shape[0]):
            numpyro.sample("y", dist.Normal(z[:50], 1.0), obs=data["y"])

    return sfvi.StructuredModel(population, silo)


small, large = model(50), model(50_000)
NUMBERS = {"small": 50, "large": 50_000}


def run(name, silos, *, secure):
    """Median seconds of a round, and bytes of a request and an answer."""
    code = Code(f"benchmarks.secure_sum:{name}")
    names = tuple(f"s{i:02d}" for i in range(silos))
    with tempfile.TemporaryDirectory() as folder:
        data = {"y": np.random.default_rng(0).normal(size=50)}
        sides = {n: Silo(n, code, SiloInput(data), Path(folder) / n, Policy(min_sum=3)) for n in names}
        first = []

        def before(silo, request):
            del request
            if silo == names[0]:
                first.append(time.perf_counter())

        spec = RunSpec(name="run", silos=names, num_rounds=ROUNDS, secure_sum=secure)
        fit = Server(spec, code, Path(folder) / "server", Direct(sides, before=before)).run()
        step = 2 if secure else 1
        rounds = np.diff(first[3::step])[5:-2]
        _, _, there, back = fit.communication.iloc[0]
        return float(np.median(rounds)), int(there), int(back)


COLUMNS = ("silos", "numbers in a reply", "plain, ms", "secure, ms", "ratio", "plain, bytes", "secure, bytes")
HEAD = """# Secure sums: time of a round, and bytes of a silo's answers in it

`python -m benchmarks.secure_sum`: all silos and the server in one process, one after the other, no network. A network
adds one exchange to each round.
"""


def main():
    lines = [f"| {' | '.join(COLUMNS)} |", "|" + "---:|" * len(COLUMNS)]
    for name, size in NUMBERS.items():
        for silos in (3, 10):
            plain, secure = (run(name, silos, secure=s) for s in (False, True))
            cells = [silos, f"{2 * size if size > 200 else size * (size + 3) // 2:,}"]
            cells += [f"{plain[0] * 1e3:.1f}", f"{secure[0] * 1e3:.1f}", f"{secure[0] / plain[0]:.1f}"]
            lines.append("| " + " | ".join(map(str, [*cells, f"{plain[2]:,}", f"{secure[2]:,}"])) + " |")
            print(lines[-1], flush=True)
    Path(__file__).with_name("SECURE_SUM.md").write_text(HEAD + "\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
