"""What one step costs, SFVI against the others, measured side by side."""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np
import optax

from ..data import six_cities
from . import contestants
from .contestants import Contestant

HAND = "hand-written loop, pooled"
TUNED = "hand-written loop, noise carried, pooled"
NUMPYRO = "numpyro.infer.SVI, pooled"
MERGED = "SFVI"
STACKED = "SFVI, silos stacked"

TARGETS = {2: {HAND: 1.10, NUMPYRO: 1.0}, 100: {HAND: 1.15, NUMPYRO: 1.0}}  # by number of silos
PEAK_STEP_SIZE = 0.02
MAX_DISAGREEMENT = 4.0  # standard errors between two ELBO averages,
SLACK = 1e-3  # or this part of their value: the noisier estimator is not quite done when the others are
NUM_BATCHES = 20  # batch means for those standard errors


class Effort(NamedTuple):
    """How much is measured: repetitions, and steps in each."""

    repetitions: int
    steps: int


class Measurement(NamedTuple):
    """One contestant's outcome.

    Attributes:
        seconds: Per step, of each repetition.
        elbo: Average over the last repetition.
        standard_error: Of that average.
    """

    seconds: np.ndarray
    elbo: float
    standard_error: float


class Comparison(NamedTuple):
    """The contestants on one case."""

    num_silos: int
    outcomes: dict[str, Measurement]

    def ratio(self, name: str, other: str, summary: Callable) -> float:
        """How many times as long as a step of `other` one of `name` takes, by minima or medians."""
        return float(summary(self.outcomes[name].seconds) / summary(self.outcomes[other].seconds))

    def disagreement(self, name: str) -> float:
        """Difference of the last ELBO average from the hand-written loop's, in standard errors."""
        mine, reference = self.outcomes[name], self.outcomes[HAND]
        spread = np.hypot(mine.standard_error, reference.standard_error)
        return float((mine.elbo - reference.elbo) / spread)

    def agree(self) -> bool:
        """Whether all contestants ended at the same ELBO."""
        reference = self.outcomes[HAND].elbo
        return all(
            abs(self.disagreement(name)) <= MAX_DISAGREEMENT or abs(outcome.elbo / reference - 1) <= SLACK
            for name, outcome in self.outcomes.items()
            if name != HAND
        )


def even_sizes(total: int, num_silos: int) -> list[int]:
    """Cut `total` into sizes that differ by at most one."""
    small, larger = divmod(total, num_silos)
    return [small + 1] * larger + [small] * (num_silos - larger)


def compare(effort: Effort, *, numbers: Sequence[int] = tuple(TARGETS), stacked: bool = True) -> list[Comparison]:
    """Measure all contestants on six cities, in float32, for each number of silos.

    Args:
        effort: How much is measured.
        numbers: Of silos.
        stacked: Whether SFVI with silos stacked takes part too.
    """
    with jax.enable_x64(False):
        return _compare(effort, numbers, stacked)


def _compare(effort, numbers, stacked):
    data = six_cities()
    # The step size falls to zero, so that estimators of different variance end at the same ELBO.
    schedule = optax.cosine_decay_schedule(PEAK_STEP_SIZE, (effort.repetitions + 1) * effort.steps)
    options = {"steps": effort.steps, "optimizer": optax.adam(schedule)}
    pooled = {
        HAND: contestants.hand_written(data, **options),
        TUNED: contestants.hand_tuned(data, **options),
        NUMPYRO: contestants.numpyro_svi(data, **options),
    }
    comparisons = []
    for num_silos in numbers:
        sizes = [300, 237] if num_silos == 2 else even_sizes(len(data["x"]), num_silos)
        federated = {MERGED: contestants.federated(data, sizes, merge=True, **options)}
        if stacked:
            federated[STACKED] = contestants.federated(data, sizes, merge=False, **options)
        comparisons.append(Comparison(num_silos, measure(pooled | federated, effort)))
    return comparisons


def measure(entries: dict[str, Contestant], effort: Effort) -> dict[str, Measurement]:
    """Run the contestants in turn, repetition by repetition; a first one, in which they compile, is not timed."""
    names = list(entries)
    states = {name: entry.state for name, entry in entries.items()}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    traces = {}
    for repetition in range(effort.repetitions + 1):
        first = repetition % len(names)  # nobody always runs after the same neighbour's heat
        for name in names[first:] + names[:first]:
            begin = time.perf_counter()
            states[name], traces[name] = jax.block_until_ready(entries[name].run(states[name]))
            seconds[name].append((time.perf_counter() - begin) / effort.steps)
    return {name: _summarize(np.array(seconds[name][1:]), np.asarray(traces[name])) for name in names}


def _summarize(seconds, trace):
    means = np.array([part.mean() for part in np.array_split(trace.astype(np.float64), NUM_BATCHES)])
    return Measurement(seconds, float(means.mean()), float(means.std(ddof=1) / np.sqrt(NUM_BATCHES)))
