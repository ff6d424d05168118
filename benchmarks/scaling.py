"""How a step of SFVI, its preparation and its memory grow with silos and with rows.

Every case runs in a process of its own (`python -m benchmarks.scaling CASE`), whose peak memory is then the case's.
"""

import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

from sfvi import SFVI
from sfvi.bench.contestants import prepare
from sfvi.bench.step import even_sizes
from sfvi.families import block
from sfvi.zoo import logistic_mixed_model

from . import datasets

PROJECT = Path(__file__).resolve().parent.parent
REPETITIONS = 5
MAX_ROUNDS = 500  # in one repetition


class Case(NamedTuple):
    """A simulated data set over silos.

    Attributes:
        num_silos: Number of silos; 0 measures a process that only imports.
        rows: Rows in all, four to a unit.
        ragged: Silos of half to one and a half times the mean size; otherwise all the same.
        merge: As `sfvi.fit` does, or stacked.
        seconds: Time to spend on steps.
    """

    num_silos: int
    rows: int
    ragged: bool = False
    merge: bool = True
    seconds: float = 3.0


class Cost(NamedTuple):
    """What a case costs.

    Attributes:
        step_seconds: Of the fastest repetition.
        setup_seconds: From the silos' arrays to the state before the first round.
        compile_seconds: First call of the loop, less the time of its one round.
        memory_bytes: Peak of the process; `measure` takes off that of one that only imports.
    """

    step_seconds: float
    setup_seconds: float
    compile_seconds: float
    memory_bytes: float


BASELINE = Case(num_silos=0, rows=0)


def measure(cases: Iterable[Case], *, passes: int) -> dict[Case, Cost]:
    """Run each case `passes` times, in turn, and keep the smallest of every cost."""
    costs: dict[Case, list[Cost]] = {case: [] for case in [BASELINE, *cases]}
    for _ in range(passes):
        for case, found in costs.items():
            found.append(_in_subprocess(case))
    best = {case: Cost(*map(min, zip(*found, strict=True))) for case, found in costs.items()}
    empty = best.pop(BASELINE).memory_bytes
    return {case: cost._replace(memory_bytes=cost.memory_bytes - empty) for case, cost in best.items()}


def run(case: Case) -> Cost:
    """Measure one case in this process."""
    jax.block_until_ready(jnp.zeros(1))  # the backend is part of the baseline
    if not case.num_silos:
        return Cost(0.0, 0.0, 0.0, peak_memory())
    cut = datasets.ragged_sizes if case.ragged else even_sizes
    silos = datasets.simulate(cut(case.rows // datasets.ROWS_PER_UNIT, case.num_silos))
    algorithm = SFVI(local_family=block(coupling="mean"))
    begin = time.perf_counter()
    rounds, state = jax.block_until_ready(prepare(logistic_mixed_model(), silos, algorithm, merge=case.merge))
    setup = time.perf_counter() - begin
    key = jax.random.key(0)

    def advance(state, num_rounds):
        begin = time.perf_counter()
        chunk = jax.block_until_ready(rounds.run(key, state, jnp.asarray(num_rounds)))
        return chunk.state, time.perf_counter() - begin

    state, first = advance(state, 1)
    state, one = advance(state, 1)
    num_rounds = min(max(int(case.seconds / REPETITIONS / one), 1), MAX_ROUNDS)
    spent = []
    for _ in range(REPETITIONS):
        state, seconds = advance(state, num_rounds)
        spent.append(seconds / num_rounds)
    return Cost(min(spent), setup, first - one, peak_memory())


def _in_subprocess(case):
    command = [sys.executable, "-m", "benchmarks.scaling", json.dumps(case)]
    done = subprocess.run(command, cwd=PROJECT, check=True, stdout=subprocess.PIPE, text=True)
    return Cost(*json.loads(done.stdout))


def peak_memory() -> int:
    """Bytes at the peak of this process.

    `ru_maxrss` of a process starts at its parent's, so Linux's own count is taken where there is one.
    """
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return 1024 * int(line.split()[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


if __name__ == "__main__":
    print(json.dumps(run(Case(*json.loads(sys.argv[1])))))
