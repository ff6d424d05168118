"""The in-process engine: drives the compiled loop, watches it, and saves its state."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._types import Key
from ..convergence import Convergence, StoppingRule
from .checkpoint import Checkpoint
from .logbook import History, Logbook
from .loop import MAX_CHUNK, Loop, State
from .progress import ProgressBar, RunProgress

SECONDS_PER_CALL = 0.3


class Outcome(NamedTuple):
    """Where a run ended.

    Attributes:
        state: The last good state.
        history: Of all rounds that led there.
        convergence: Evidence of the stopping rule; None without one.
        failed_round: The round that produced NaN or ran away; None if all went well.
        seconds: Time spent in rounds.
    """

    state: State
    history: History
    convergence: Convergence | None
    failed_round: int | None
    seconds: float


def run(
    loop: Loop,
    key: Key,
    state: State,
    num_rounds: int,
    *,
    rule: StoppingRule | None = None,
    checkpoint: Checkpoint | None = None,
    callback: Callable[[RunProgress], None] | None = None,
    progress: bool | None = None,
) -> Outcome:
    """Run rounds until `num_rounds` are done, the rule says stop, or something breaks.

    Args:
        loop: The compiled loop.
        key: Of all randomness.
        state: Where to start if there is no checkpoint yet.
        num_rounds: Total number of rounds, those in the checkpoint included.
        rule: When to stop earlier.
        checkpoint: Where to save, and to resume from.
        callback: Called with the progress several times a second.
        progress: Show a bar; by default only on a terminal.
    """
    driver = _Driver(loop, key, state, num_rounds, rule, checkpoint)
    with ProgressBar(num_rounds, show=progress) as bar:
        try:
            while not driver.finished:
                driver.advance()
                bar.update(driver.progress())
                if callback is not None:
                    callback(driver.progress())
        finally:
            driver.save()
    return driver.outcome()


class _Driver:
    def __init__(self, loop, key, state, num_rounds, rule, checkpoint):
        history = History.empty(loop.trace_names(key, state), state.server.shared.family)
        if checkpoint is not None:
            state, history = checkpoint.resume(state, history)
        self.loop, self.key, self.state, self.checkpoint = loop, key, state, checkpoint
        self.run = loop.run_on_one_thread if loop.calls_lapack(key, state) else loop.run
        algorithm = loop.algorithm
        partial = algorithm.elbo.options.participation.partial
        self.log = Logbook(history, num_rounds, rule, steps_per_round=algorithm.steps_per_round, partial=partial)
        self.failed_round: int | None = None
        self.compiled, self.rate, self.seconds = False, None, 0.0

    @property
    def finished(self):
        return self.log.finished or self.failed_round is not None

    def advance(self):
        """Call the compiled loop once and take in what came of it."""
        size = self._call_size()
        begin = time.perf_counter()
        chunk = self.run(self.key, self.state, jnp.asarray(size))
        trace = _rows(chunk.trace, int(chunk.rounds))
        elbo = trace["elbo"]
        spent = time.perf_counter() - begin
        if self._broken(elbo, chunk.state):
            self._stop_at_last_good(len(elbo))
            return
        if self.compiled:
            self.seconds += spent
            self.rate = len(elbo) / max(spent, 1e-6)
        self.compiled = True
        self._accept(chunk.state, trace)
        if self.checkpoint is not None:
            self.checkpoint.save_if_due(self.state, self.log.history)

    def _call_size(self):
        size = (
            max(1, 10 // self.loop.algorithm.steps_per_round)
            if self.rate is None
            else int(self.rate * SECONDS_PER_CALL)
        )
        return min(max(size, 1), MAX_CHUNK, self.log.until_next_look)

    def _accept(self, state, trace):
        self.state = state
        self.log.accept(trace, state.server.shared.family)

    def _broken(self, elbo, state):
        return self.log.runs_away(elbo) or not all_finite(state)

    def _stop_at_last_good(self, size):
        """Find the last good round by bisection: runs are repeatable, so nothing has to be kept for this."""
        good, bad = 0, size
        while bad - good > 1:
            middle = (good + bad) // 2
            good, bad = self._halve(good, middle, bad)
        self.failed_round = self.log.round + good
        if good:
            chunk = self.run(self.key, self.state, jnp.asarray(good))
            self._accept(chunk.state, _rows(chunk.trace, good))

    def _halve(self, good, middle, bad):
        chunk = self.run(self.key, self.state, jnp.asarray(middle))
        elbo = _rows(chunk.trace, middle)["elbo"]
        return (good, middle) if self._broken(elbo, chunk.state) else (middle, bad)

    def save(self):
        if self.checkpoint is not None and self.log.round:
            self.checkpoint.save(self.state, self.log.history)

    def progress(self):
        done, num_rounds = self.log.round, self.log.num_rounds
        recent = self.log.history.elbo[-100:]
        left = (num_rounds - done) / self.rate if self.rate else float("nan")
        elbo = float(recent.mean()) if len(recent) else float("nan")
        return RunProgress(done, num_rounds, elbo, self.rate or 0.0, left)

    def outcome(self):
        return Outcome(self.state, self.log.history, self.log.convergence, self.failed_round, self.seconds)


def _rows(trace, size):
    return {name: np.asarray(values[:size], np.float64) for name, values in trace.items()}


def all_finite(tree: Any) -> bool:
    """Whether all numbers of a tree are; on the host, so nothing has to be compiled."""
    floats = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return all(np.isfinite(np.asarray(leaf)).all() for leaf in floats)
