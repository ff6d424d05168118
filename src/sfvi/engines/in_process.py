"""The in-process engine: drives the compiled loop, watches it, and saves its state."""

import time
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .._types import Key
from ..convergence import Check, Convergence, StoppingRule
from .checkpoint import Checkpoint
from .loop import MAX_CHUNK, Loop, State
from .progress import ProgressBar, RunProgress

SECONDS_PER_CALL = 0.3
STEPS_PER_LOOK = 250  # steps between two looks at the global marginals
RUNAWAY = 1000.0  # an ELBO this many times worse than at the start counts as divergence
RECENT = 20  # rounds whose median ELBO is compared with the start


class History(NamedTuple):
    """What is remembered of the rounds done.

    Attributes:
        trace: ELBO estimates and what else the server says about each round.
        snapshots: After which rounds the global marginals were recorded.
        means: Their means, a row each.
        sds: Their standard deviations.
    """

    trace: dict[str, np.ndarray]
    snapshots: np.ndarray
    means: np.ndarray
    sds: np.ndarray

    @property
    def elbo(self) -> np.ndarray:
        """The ELBO estimate of every round."""
        return self.trace["elbo"]


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
        marginals = [np.asarray(m)[None][:0] for m in _marginals(state.server.shared.family)]
        trace = {name: np.zeros(0) for name in loop.trace_names(key, state)}
        history = History(trace, np.zeros(0, np.int64), *marginals)
        if checkpoint is not None:
            state, history = checkpoint.resume(state, history)
        self.loop, self.key, self.state, self.history = loop, key, state, history
        self.run = loop.run_on_one_thread if loop.calls_lapack(key, state) else loop.run
        self.num_rounds, self.rule, self.checkpoint = num_rounds, rule, checkpoint
        steps = loop.algorithm.steps_per_round
        self.look_every = max(1, STEPS_PER_LOOK // steps) if rule is None else rule.check_every
        self._forget_last_look()
        self.checks: list[Check] = []
        self.failed_round: int | None = None
        self.compiled, self.rate, self.seconds = False, None, 0.0
        self._replay_checks()

    def _forget_last_look(self):
        """A shorter run looked at its end too, which a longer one would not have done."""
        looks = self.history.snapshots
        kept = (looks % self.look_every == 0) | (looks == self.num_rounds)
        means, sds = self.history.means[kept], self.history.sds[kept]
        self.history = self.history._replace(snapshots=looks[kept], means=means, sds=sds)

    @property
    def round(self):
        return len(self.history.elbo)

    @property
    def converged(self):
        return self.rule is not None and self.rule.verdict(self.checks).converged

    @property
    def finished(self):
        return self.round >= self.num_rounds or self.converged or self.failed_round is not None

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
            self.checkpoint.save_if_due(self.state, self.history)

    def _call_size(self):
        size = (
            max(1, 10 // self.loop.algorithm.steps_per_round)
            if self.rate is None
            else int(self.rate * SECONDS_PER_CALL)
        )
        return min(
            max(size, 1), MAX_CHUNK, self.num_rounds - self.round, self.look_every - self.round % self.look_every
        )

    def _accept(self, state, trace):
        self.state = state
        joined = {name: np.concatenate([self.history.trace[name], values]) for name, values in trace.items()}
        self.history = self.history._replace(trace=joined)
        if self.round % self.look_every == 0 or self.round == self.num_rounds:
            mean, sd = (np.asarray(m)[None] for m in _marginals(state.server.shared.family))
            self.history = self.history._replace(
                snapshots=np.append(self.history.snapshots, self.round),
                means=np.concatenate([self.history.means, mean]),
                sds=np.concatenate([self.history.sds, sd]),
            )
            self._check(self.round)

    def _check(self, done):
        if self.rule is not None and done % self.look_every == 0 and done >= self.rule.min_rounds:
            _, *snapshots = self.history
            check = self.rule.check(self.history.elbo[:done], *snapshots)
            self.checks += [] if check is None else [check]

    def _replay_checks(self):
        """After a resume, make the checks again that were made before it."""
        if self.rule is not None:
            for done in range(self.rule.check_every, self.round + 1, self.rule.check_every):
                self._check(done)

    def _broken(self, elbo, state):
        """Whether rounds after those remembered, with these ELBOs, went wrong.

        Where silos may be absent, the ELBO of a round depends on who came: as the start counts the lowest of the first
        rounds, and nothing is judged before they are over.
        """
        if not np.all(np.isfinite(elbo)) or not _all_finite(state):
            return True
        known = np.concatenate([self.history.elbo, elbo])
        start, recent = known[0], elbo[-RECENT:]
        if self.loop.algorithm.elbo.options.participation.partial:
            if len(known) <= RECENT:
                return False
            start, recent = known[:RECENT].min(), known[-RECENT:]
        return np.median(recent) < start - RUNAWAY * (1 + abs(start))

    def _stop_at_last_good(self, size):
        """Find the last good round by bisection: runs are repeatable, so nothing has to be kept for this."""
        good, bad = 0, size
        while bad - good > 1:
            middle = (good + bad) // 2
            good, bad = self._halve(good, middle, bad)
        self.failed_round = self.round + good
        if good:
            chunk = self.run(self.key, self.state, jnp.asarray(good))
            self._accept(chunk.state, _rows(chunk.trace, good))

    def _halve(self, good, middle, bad):
        chunk = self.run(self.key, self.state, jnp.asarray(middle))
        elbo = _rows(chunk.trace, middle)["elbo"]
        return (good, middle) if self._broken(elbo, chunk.state) else (middle, bad)

    def save(self):
        if self.checkpoint is not None and self.round:
            self.checkpoint.save(self.state, self.history)

    def progress(self):
        recent = self.history.elbo[-100:]
        left = (self.num_rounds - self.round) / self.rate if self.rate else float("nan")
        elbo = float(recent.mean()) if len(recent) else float("nan")
        return RunProgress(self.round, self.num_rounds, elbo, self.rate or 0.0, left)

    def outcome(self):
        convergence = None if self.rule is None else self.rule.verdict(self.checks)
        return Outcome(self.state, self.history, convergence, self.failed_round, self.seconds)


def _rows(trace, size):
    return {name: np.asarray(values[:size], np.float64) for name, values in trace.items()}


def _all_finite(tree):
    """On the host: nothing to compile."""
    floats = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return all(np.isfinite(np.asarray(leaf)).all() for leaf in floats)


@eqx.filter_jit
def _marginals(family):
    return family.marginals()
