"""Killing random processes of a real federation at random moments; the result must not differ by a digit.

python -m tests.deploy.kills --kills 20 --seed 0 FOLDER
"""

import argparse
import random
import tempfile
import time
from pathlib import Path

import numpy as np

import sfvi
from sfvi import archive

from . import cities
from .federation import Federation

OPTIONS = {"SFVI": [], "SFVIAvg": ["num_local_steps=400"], "Sites": ["num_local_steps=400"]}
VICTIMS = ("server", "server job", "silo", "silo job", "silo parent", "operator", "machine")
GIVE_UP = 600.0


def rounds_of(algorithm, kills):
    """Long enough for every kill to have a round of its own."""
    return max(600, 20 * kills) if algorithm == "SFVI" else max(30, 4 * kills)


def flags_of(algorithm, kills):
    options = [part for option in OPTIONS[algorithm] for part in ("--option", option)]
    return ["--algorithm", algorithm, *options, "--rounds", str(rounds_of(algorithm, kills))]


def arrays_of(federation, run):
    """All numbers of a run: the server's result and the silos' posteriors."""
    found = dict(archive.read(federation.folder / run / "global.npz", kind="global posterior")[0])
    found |= {f"fit.{k}": v for k, v in archive.read(federation.folder / run / "fit.npz", kind="fit")[0].items()}
    for silo in federation.silos:
        posterior, _ = archive.read(federation.silo_posterior(silo, run), kind="silo posterior")
        found |= {f"{silo}.{name}": array for name, array in posterior.items()}
    return found


def differences(one, other):
    names = sorted(set(one) | set(other))
    return [n for n in names if n not in one or n not in other or not np.array_equal(one[n], other[n], equal_nan=True)]


def strike(federation, victim, rng, operator):
    """Kill, and start again what an operator or a supervisor would."""
    silo = rng.choice(federation.silos)
    if victim == "operator":
        operator.kill()
        operator.wait()
    elif victim == "machine":
        operator.kill()
        operator.wait()
        for name in list(federation.processes):
            federation.kill(name)
        federation.start("server")
        federation.wait_for_server()
        for name in federation.silos:
            federation.start(name)
    elif victim == "server":
        federation.kill("server")
        federation.start("server")
        federation.wait_for_server()
    elif victim in ("server job", "silo job"):
        federation.kill("server" if victim == "server job" else silo, job=True)
    elif victim == "silo":
        federation.kill(silo)
        federation.start(silo)
    else:
        federation.kill_only_parent(silo)
        federation.start(silo)


def torment(federation, algorithm, run, number, rng, say=print):
    """One run with `number` kills; returns the arrays of its result."""
    flags = flags_of(algorithm, number)
    moments = sorted(rng.sample(range(1, rounds_of(algorithm, number) - 1), number))
    operator = federation.begin(run, *flags)
    begin = time.monotonic()
    while moments or operator.poll() is None:
        if operator.poll() is not None:
            if operator.returncode == 0 and not federation.status(run).get("state") == "finished":
                raise AssertionError(f"the run ended early\n{federation.logs()}")
            if operator.returncode > 0:
                raise AssertionError(f"the run failed\n{federation.logs()}")
            if operator.returncode == 0:
                break
            operator = federation.begin(run, *flags)
        at = federation.status(run).get("round", 0)
        if moments and at >= moments[0]:
            moment, victim = moments.pop(0), rng.choice(VICTIMS)
            say(f"  {algorithm} round {at} (wanted {moment}): kill {victim}", flush=True)
            strike(federation, victim, rng, operator)
            begin = time.monotonic()
            while federation.status(run).get("round", 0) <= at and time.monotonic() - begin < GIVE_UP:
                if operator.poll() is not None and operator.returncode < 0:
                    operator = federation.begin(run, *flags)
                elif operator.poll() is not None:
                    break
                time.sleep(0.1)
            say(f"    on again after {time.monotonic() - begin:.0f} s", flush=True)
        if time.monotonic() - begin > GIVE_UP:
            raise AssertionError(f"nothing happens any more\n{federation.logs()}")
        time.sleep(0.02)
    return arrays_of(federation, run)


def absence(federation, say=print):
    """With --min-silos a run goes on without a dead silo and takes it back; the result tells who was there.

    Returns what is wrong with it.
    """
    flags = ["--algorithm", "Sites", "--option", "num_local_steps=400", "--rounds", "400"]
    operator = federation.begin("absence", *flags, "--min-silos", "1", "--late", "2")

    def wait_for(condition):
        begin = time.monotonic()
        while not condition(federation.status("absence")):
            if operator.poll() is not None or time.monotonic() - begin > GIVE_UP:
                raise AssertionError(f"it does not come to that\n{federation.logs()}")
            time.sleep(0.05)
        return federation.status("absence")["round"]

    killed = wait_for(lambda status: status.get("round", 0) >= 10)
    gone = federation.silos[-1]
    federation.kill(gone)
    started = wait_for(lambda status: gone in status.get("lost", []) and status["round"] > killed + 10)
    federation.start(gone)
    back = wait_for(lambda status: gone in status.get("answered", []) and status["round"] > started)
    if operator.wait(timeout=GIVE_UP):
        raise AssertionError(f"the run failed\n{federation.logs()}")
    there = sfvi.load(federation.folder / "absence", cities.model, {}).participation[gone]
    say(f"{gone} was killed in round {killed} and back in round {back} of 400; it took part in {there.sum()}")
    right = there[:killed].all() and not there[killed + 10 : started].any() and there[back:].all()
    return [] if right else [f"absence: participation of {gone} is not what happened"]


def main(folder, *, kills, seed, say=print):
    """Undisturbed runs, then the same ones with kills; then a silo that is left out; returns what differs."""
    rng = random.Random(seed)
    shares = [kills // 3 + (position < kills % 3) for position in range(3)]
    wrong = []
    with Federation(folder) as federation:
        for algorithm, number in zip(OPTIONS, shares, strict=True):
            federation.run(f"{algorithm}-calm", *flags_of(algorithm, number))
            calm = arrays_of(federation, f"{algorithm}-calm")
            begin = time.monotonic()
            found = torment(federation, algorithm, f"{algorithm}-killed", number, rng, say)
            odd = differences(calm, found)
            wrong += [f"{algorithm}: {name}" for name in odd]
            seconds = time.monotonic() - begin
            say(f"{algorithm}: {number} kills, {len(odd)} of {len(calm)} arrays differ, {seconds:.0f} s")
        return wrong + absence(federation, say)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="keep the federation's files there")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        outcome = main(folder, kills=given.kills, seed=given.seed)
    raise SystemExit(f"differs: {outcome}" if outcome else 0)
