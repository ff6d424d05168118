"""What an engine remembers of the rounds done, and what it concludes from it."""

from typing import NamedTuple

import equinox as eqx
import numpy as np

from ..convergence import Check, Convergence, StoppingRule
from ..families import AbstractGlobalFamily

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

    @classmethod
    def empty(cls, names: list[str], family: AbstractGlobalFamily) -> "History":
        """Before the first round, of which at least `names` will be reported."""
        marginals = [np.asarray(part)[None][:0] for part in _marginals(family)]
        return cls({name: np.zeros(0) for name in names}, np.zeros(0, np.int64), *marginals)

    @property
    def elbo(self) -> np.ndarray:
        """The ELBO estimate of every round."""
        return self.trace["elbo"]


class Logbook:
    """Keeps the history of a run and says when to stop.

    Args:
        history: Of the rounds done already.
        num_rounds: Total number of rounds.
        rule: When to stop earlier.
        steps_per_round: Optimizer steps of a silo in a round.
        partial: Whether silos may be absent, so that the ELBO of a round depends on who came.
    """

    def __init__(
        self, history: History, num_rounds: int, rule: StoppingRule | None, *, steps_per_round: int, partial: bool
    ):
        self.num_rounds, self.rule, self._partial = num_rounds, rule, partial
        self.look_every = max(1, STEPS_PER_LOOK // steps_per_round) if rule is None else rule.check_every
        self.history = self._without_last_look(history)
        self.checks: list[Check] = []
        if rule is not None:  # make the checks again that were made before
            for done in range(rule.check_every, self.round + 1, rule.check_every):
                self._check(done)

    def _without_last_look(self, history):
        """A shorter run looked at its end too, which a longer one would not have done."""
        looks = history.snapshots
        kept = (looks % self.look_every == 0) | (looks == self.num_rounds)
        return history._replace(snapshots=looks[kept], means=history.means[kept], sds=history.sds[kept])

    @property
    def round(self) -> int:
        """Rounds done."""
        return len(self.history.elbo)

    @property
    def finished(self) -> bool:
        """Whether all rounds are done, or the rule says that no more are needed."""
        return self.round >= self.num_rounds or (self.rule is not None and self.rule.verdict(self.checks).converged)

    @property
    def until_next_look(self) -> int:
        """Rounds that may be done before the next look is due."""
        return min(self.num_rounds - self.round, self.look_every - self.round % self.look_every)

    @property
    def convergence(self) -> Convergence | None:
        """Evidence of the stopping rule; None without one."""
        return None if self.rule is None else self.rule.verdict(self.checks)

    def accept(self, trace: dict[str, np.ndarray], family: AbstractGlobalFamily) -> None:
        """Take in rounds, and look at the global marginals if that is due."""
        before = self.history.trace
        joined = {name: np.concatenate([before.get(name, np.zeros(0)), values]) for name, values in trace.items()}
        self.history = self.history._replace(trace=joined)
        if self.round % self.look_every == 0 or self.round == self.num_rounds:
            mean, sd = (np.asarray(part)[None] for part in _marginals(family))
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

    def runs_away(self, elbo: np.ndarray) -> bool:
        """Whether rounds after those remembered, with these ELBOs, went wrong.

        Where silos may be absent, the ELBO of a round depends on who came: as the start counts the lowest of the first
        rounds, and nothing is judged before they are over.
        """
        if not np.all(np.isfinite(elbo)):
            return True
        known = np.concatenate([self.history.elbo, elbo])
        start, recent = known[0], elbo[-RECENT:]
        if self._partial:
            if len(known) <= RECENT:
                return False
            start, recent = known[:RECENT].min(), known[-RECENT:]
        return bool(np.median(recent) < start - RUNAWAY * (1 + abs(start)))


@eqx.filter_jit
def _marginals(family):
    return family.marginals()
