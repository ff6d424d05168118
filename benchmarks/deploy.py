"""Seconds per round of each engine, and six cities deployed end to end. `make bench-deploy` writes DEPLOY.md.

All processes run on this machine, with TLS, as an operator starts them.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
NAMES = [f"silo{number}" for number in range(8)]
REFERENCE = HERE.parent / "experiments" / "few_rounds" / "results.json"


def in_process(floats, silos, rounds=200):
    """Seconds per round in one process, round by round as an engine would."""
    os.environ["SFVI_BENCH_FLOATS"] = str(floats)
    script = (
        "import sys, time, numpy as np; sys.path.insert(0, sys.argv[1]);"
        "import sfvi, deploy_model as m; times = [];"
        "fit = sfvi.fit(m.model, {n: m.load(n) for n in sys.argv[2].split(',')}, key=0, num_rounds=int(sys.argv[3]),"
        "algorithm=m.algorithm, callback=lambda p: times.append((p.round, time.perf_counter())));"
        "r, t = np.array(times).T; s = np.diff(t) / np.diff(r); print(np.quantile(s, .5), np.quantile(s, .95))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(HERE), ",".join(NAMES[:silos]), str(rounds * 25)],
        capture_output=True,
        text=True,
        check=True,
    )
    return tuple(map(float, done.stdout.split()[-2:]))


def nvflare(floats, silos, rounds):
    """Seconds per round over NVFlare, all of our own work included."""
    from tests.deploy.federation import Federation

    os.environ["SFVI_BENCH_FLOATS"] = str(floats)
    with tempfile.TemporaryDirectory() as folder:
        options = {"model": "deploy_model:model", "data": "deploy_model:load", "app_dir": HERE}
        with Federation(folder, NAMES[:silos], **options) as federation:
            federation.run("bench", "--algorithm", "deploy_model:algorithm", "--rounds", str(rounds))
            found = federation.status("bench")["seconds per round"]
    return found["p50"], found["p95"]


def flower(floats, silos, rounds):
    """Seconds per round over Flower."""
    from tests.deploy.fleet import Fleet

    os.environ["SFVI_BENCH_FLOATS"] = str(floats)
    with tempfile.TemporaryDirectory() as folder:
        options = {"model": "deploy_model:model", "data": "deploy_model:load", "app_dir": HERE}
        with Fleet(folder, NAMES[:silos], **options) as fleet:
            fleet.run("bench", algorithm="deploy_model:algorithm", rounds=rounds)
            found = fleet.status("bench")["seconds per round"]
    return found["p50"], found["p95"]


ENGINES = {"in process": (in_process, 200), "NVFlare": (nvflare, 200), "Flower": (flower, 6)}
FLOATS = (5, 50_001, 500_001)
SILOS = (2, 8)


def six_cities():
    """Six cities over two silos on NVFlare with each algorithm: time, bytes, error against NUTS on pooled data."""
    import sfvi
    from tests.deploy import cities
    from tests.deploy.federation import Federation

    runs = {
        "SFVI": ["--rounds", "5000"],
        "SFVIAvg": ["--algorithm", "SFVIAvg", "--option", "num_local_steps=100", "--rounds", "50"],
        "Sites": ["--algorithm", "Sites", "--rounds", "15"],
    }
    reference = json.loads(REFERENCE.read_text())["six cities"]["NUTS, pooled"]
    mean, sd = np.asarray(reference["mean"]), np.asarray(reference["sd"])
    rows = []
    with tempfile.TemporaryDirectory() as folder, Federation(folder) as federation:
        for name, flags in runs.items():
            begin = time.perf_counter()
            federation.run(name, *flags)
            seconds = time.perf_counter() - begin
            fit = sfvi.load(Path(folder) / name, cities.model, {})
            found = [np.asarray(part) for part in fit.posterior.family.marginals()]
            table = fit.communication
            rounds = int(table["rounds"].sum())
            there, back = (float((table["rounds"] * table[f"bytes {way} a silo"]).sum()) for way in ("to", "from"))
            off = np.abs((found[0] - mean) / sd).max(), np.abs(found[1] / sd - 1).max()
            saving = federation.status(name)["share of time for saving"]
            row = {
                "algorithm": name,
                "rounds": rounds,
                "seconds": seconds,
                "kB": (there + back) / 1000,
                "saving": saving,
            }
            rows.append({**row, "mean": off[0], "sd": off[1]})
            print(row, off, flush=True)
    return rows


def main():
    """Measure what is asked for, keep it, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[*ENGINES, "six cities"])
    parser.add_argument("--fresh", action="store_true", help="measure again what is known")
    given = parser.parse_args()
    path = HERE / "deploy.json"
    known = json.loads(path.read_text()) if path.exists() else {"rounds": {}, "six cities": []}
    for name, (measure, rounds) in ENGINES.items():
        for silos in SILOS if name in given.only else ():
            for floats in FLOATS:
                if f"{name}/{silos}/{floats}" in known["rounds"] and not given.fresh:
                    continue
                number = max(3, rounds // 4) if floats > 100_000 or silos > 2 else rounds
                known["rounds"][f"{name}/{silos}/{floats}"] = measure(floats, silos, number)
                print(name, silos, floats, known["rounds"][f"{name}/{silos}/{floats}"], flush=True)
                path.write_text(json.dumps(known, indent=1))
    if "six cities" in given.only and (given.fresh or not known["six cities"]):
        known["six cities"] = six_cities()
        path.write_text(json.dumps(known, indent=1))
    write(known)


def write(known):
    """The table, from what was measured."""
    lines = [
        "# Deployed: seconds per round, and six cities end to end",
        "",
        "`make bench-deploy` on two cores, which 8 silos and the server share: they have a process or more each.",
        "",
    ]
    lines += ["| engine | silos | " + " | ".join(f"{n:,} floats p50 / p95" for n in FLOATS) + " |"]
    lines += ["|---|---|" + "---|" * len(FLOATS)]
    for name in ENGINES:
        for silos in SILOS:
            cells = [known["rounds"].get(f"{name}/{silos}/{n}") for n in FLOATS]
            shown = ["" if cell is None else f"{cell[0]:.2g} / {cell[1]:.2g}" for cell in cells]
            lines.append(f"| {name} | {silos} | " + " | ".join(shown) + " |")
    lines += [
        "",
        "Six cities over two silos on NVFlare, from `sfvi run` to the result; error against NUTS on pooled data.",
        "",
    ]
    lines += [
        "| algorithm | rounds | wall seconds | saving | kB per silo | means off, sds | sds off |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in known["six cities"]:
        saving = "every round" if row["saving"] is None else f"{row['saving']:.1%}"
        lines.append(
            f"| {row['algorithm']} | {row['rounds']} | {row['seconds']:.0f} | {saving} | {row['kB']:,.1f} | "
            f"{row['mean']:.2f} | {row['sd']:.1%} |"
        )
    (HERE / "DEPLOY.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
