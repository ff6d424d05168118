"""What smaller replies do to the answer: six cities over two silos.

python -m experiments.wire
"""

import tempfile
from pathlib import Path

import numpy as np

import sfvi
from sfvi.deploy import RunSpec, SiloInput, Wire
from sfvi.deploy.code import Code
from sfvi.deploy.direct import Direct
from sfvi.deploy.server import Server
from sfvi.deploy.silo import Silo

HERE = Path(__file__).parent
SIZES = {"north": 300, "south": 237}
RUNS = {"SFVI": ({}, 2000), "Sites": ({}, 15)}
WIRES = {
    "float32": Wire(),
    "bfloat16": Wire(reply="bfloat16"),
    "top 25%": Wire(top_k=0.25),
    "top 25%, bfloat16": Wire(top_k=0.25, reply="bfloat16"),
}


def fit(algorithm: str, wire: Wire) -> sfvi.Fit:
    """One run, all of it but the network."""
    code = Code("sfvi.zoo:logistic_mixed_model")
    silos, ids = sfvi.data.split_units(sfvi.data.six_cities(), SIZES, seed=1)
    options, rounds = RUNS[algorithm]
    with tempfile.TemporaryDirectory() as folder:
        sides = {n: Silo(n, code, SiloInput(silos[n], ids[n]), Path(folder) / n) for n in SIZES}
        spec = RunSpec(
            name="wire", silos=tuple(SIZES), algorithm=algorithm, options=options, num_rounds=rounds, wire=wire
        )
        return Server(spec, code, Path(folder) / "server", Direct(sides)).run()


def main() -> None:
    """Print the table and keep it."""
    lines = ["| algorithm | replies | bytes of a reply | means off, sds | sds off |", "|---|---|---|---|---|"]
    for algorithm in RUNS:
        fits = {name: fit(algorithm, wire) for name, wire in WIRES.items()}
        mean, sd = (np.asarray(part) for part in fits["float32"].posterior.family.marginals())
        for name, found in fits.items():
            other, spread = (np.asarray(part) for part in found.posterior.family.marginals())
            size = found.communication["bytes from a silo"].iloc[0]
            off = np.abs((other - mean) / sd).max(), np.abs(spread / sd - 1).max()
            lines.append(f"| {algorithm} | {name} | {size} | {off[0]:.3f} | {off[1]:.1%} |")
            print(lines[-1], flush=True)
    (HERE / "table.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
