"""Killing processes of a real Flower fleet in the middle of rounds; the result must not differ by a digit.

python -m tests.deploy.flower_kills FOLDER
"""

import argparse
import json
import random
import time
from pathlib import Path

from sfvi import archive

from .fleet import Fleet
from .kills import differences

ROUNDS = 6
RUN = {"algorithm": "Sites", "options": json.dumps({"num_local_steps": 200, "refit_steps": 20}), "rounds": ROUNDS}
VICTIMS = ("supernode", "serverapp", "superlink", "clientapp")
GIVE_UP = 400.0


def arrays_of(fleet, run):
    """All numbers of a run: the server's result and the silos' posteriors."""
    found = dict(archive.read(fleet.result(run) / "global.npz", kind="global posterior")[0])
    found |= {f"fit.{k}": v for k, v in archive.read(fleet.result(run) / "fit.npz", kind="fit")[0].items()}
    for silo in fleet.silos:
        posterior, _ = archive.read(fleet.silo_posterior(silo, run), kind="silo posterior")
        found |= {f"{silo}.{name}": array for name, array in posterior.items()}
    return found


def strike(fleet, victim, silo, run):
    """SIGKILL; what a supervisor starts again it will, and runs are begun again as an operator does."""
    if victim == "supernode":
        fleet.kill(silo)
    elif victim == "superlink":
        fleet.kill("flower-superlink")
    elif victim == "clientapp":
        while not fleet.kill(silo, "flwr-clientapp"):
            time.sleep(0.05)
    else:
        fleet.kill("flower-superexec", "flwr-serverapp")
        fleet.begin(run, **RUN)


def torment(fleet, run, rng, say):
    """One run, a kill in every round; returns its arrays."""
    left = list(VICTIMS)
    fleet.begin(run, **RUN)
    begin = time.monotonic()
    while fleet.status(run).get("state") != "finished":
        at = fleet.status(run).get("round", 0)
        if left and at >= len(VICTIMS) - len(left) + 1:
            victim, silo, pause = left.pop(0), rng.choice(fleet.silos), rng.uniform(0, 8)
            time.sleep(pause)
            at = fleet.status(run).get("round", 0)
            say(f"round {at} + {pause:.1f} s: kill {victim} {silo if 'node' in victim or 'client' in victim else ''}")
            begin = time.monotonic()
            strike(fleet, victim, silo, run)
            while fleet.status(run).get("round", 0) <= at and time.monotonic() - begin < GIVE_UP:
                fleet.supervise()
                time.sleep(0.2)
            say(f"  the next round is done {time.monotonic() - begin:.0f} s later")
            begin = time.monotonic()
        if time.monotonic() - begin > GIVE_UP or fleet.status(run).get("state") == "stopped":
            raise AssertionError(f"the run does not go on: {fleet.status(run)}\n{fleet.logs()}")
        fleet.supervise()
        time.sleep(0.2)
    return arrays_of(fleet, run)


def main(folder, *, seed, say=print):
    """An undisturbed run, then the same one with kills; returns what differs."""
    rng = random.Random(seed)
    with Fleet(folder) as fleet:
        begin = time.monotonic()
        fleet.run("calm", **RUN)
        seconds = time.monotonic() - begin
        say(f"calm: {ROUNDS} rounds in {seconds:.0f} s, {1 / fleet.status('calm')['rounds per second']:.1f} s a round")
        begin = time.monotonic()
        calm, found = arrays_of(fleet, "calm"), torment(fleet, "killed", rng, say)
        odd = differences(calm, found)
        seconds = time.monotonic() - begin
        say(f"{len(VICTIMS)} kills, {len(odd)} of {len(calm)} arrays differ, {seconds:.0f} s")
    return odd


def told(text):
    print(text, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    outcome = main(given.folder, seed=given.seed, say=told)
    raise SystemExit(f"differs: {outcome}" if outcome else 0)
