"""When to stop: a rule that works on a noisy ELBO, and keeps its evidence."""

import dataclasses
from typing import NamedTuple

import numpy as np

from .errors import OptionError


class Check(NamedTuple):
    """What the rule saw at one round.

    Attributes:
        round: Rounds done.
        gain: Mean ELBO of the last third of all rounds minus that of the third before.
        gain_se: Standard error of `gain`, from batch means.
        drift: Largest change of a global latent's mean between the same thirds, in its posterior sds.
        scale_drift: Largest change of the log of a global latent's sd.
        passed: Whether all were below their limits.
    """

    round: int
    gain: float
    gain_se: float
    drift: float
    scale_drift: float
    passed: bool


class Convergence(NamedTuple):
    """Evidence of the stopping rule: the verdict, in a sentence, and every check."""

    converged: bool
    verdict: str
    checks: tuple[Check, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoppingRule:
    r"""Stop when neither the ELBO nor the global posterior moves any more.

    All rounds so far are cut into thirds, and the last is compared with the middle one: windows grow with the run, so
    noise averages out and slow progress shows. Two things must hold at `patience` checks in a row:

    - the ELBO's gain is below `max(tolerance, 2 standard errors)`, in nats;
    - no global latent's mean moved by more than `drift` posterior sds, and no sd by more than a factor $e^{drift}$.
      This is far more sensitive: a shift by a tenth of an sd costs only 0.005 nats.

    Args:
        check_every: Rounds between checks.
        min_rounds: No verdict before this.
        tolerance: Gain in nats that does not matter.
        drift: Movement of the posterior, in sds, that does not matter.
        patience: Checks in a row that must pass.
    """

    check_every: int = 250
    min_rounds: int = 1500
    tolerance: float = 0.1
    drift: float = 0.05
    patience: int = 2

    @classmethod
    def for_rounds_of(cls, num_steps: int) -> "StoppingRule":
        """The default rule for rounds of so many local steps: fewer rounds, at least 12, hold as many steps."""
        every = max(2, round(250 / num_steps))
        return cls(check_every=every, min_rounds=6 * every)

    def __post_init__(self):
        whole = all(isinstance(n, int) for n in (self.check_every, self.min_rounds, self.patience))
        if not (whole and self.check_every >= 1 and self.patience >= 1 and self.tolerance >= 0 and self.drift > 0):
            raise OptionError(
                f"{self}: check_every and patience must be whole numbers of at least 1, tolerance not "
                "negative, drift positive."
            )
        if self.min_rounds < 6 * self.check_every:
            raise OptionError(
                f"StoppingRule: min_rounds is {self.min_rounds}; give at least six times check_every "
                f"({6 * self.check_every}), so that each third holds two checks."
            )

    def check(self, elbo: np.ndarray, rounds: np.ndarray, means: np.ndarray, sds: np.ndarray) -> Check | None:
        """Compare the last two thirds; None while there are no snapshots in one of them.

        Args:
            elbo: ELBO estimate of every round.
            rounds: After how many rounds each snapshot was taken.
            means: Means of the global latents, a row per snapshot.
            sds: Their standard deviations, likewise.
        """
        done, third = len(elbo), len(elbo) // 3
        middle, last = elbo[-2 * third : -third], elbo[-third:]
        before = (rounds > done - 2 * third) & (rounds <= done - third)
        after = (rounds > done - third) & (rounds <= done)
        if not (before.any() and after.any()):
            return None
        gain = float(last.mean() - middle.mean())
        gain_se = float(np.hypot(_mean_se(middle), _mean_se(last)))
        moved = means[after].mean(0) - means[before].mean(0)
        stretched = np.log(sds[after]).mean(0) - np.log(sds[before]).mean(0)
        drift = float(np.max(np.abs(moved) / sds[after][-1], initial=0.0))
        scale_drift = float(np.max(np.abs(stretched), initial=0.0))
        passed = gain < max(self.tolerance, 2 * gain_se) and max(drift, scale_drift) < self.drift
        return Check(len(elbo), gain, gain_se, drift, scale_drift, bool(passed))

    def verdict(self, checks: list[Check]) -> Convergence:
        """Sum up the checks made so far."""
        recent = checks[-self.patience :]
        converged = len(recent) == self.patience and all(check.passed for check in recent)
        if not checks:
            return Convergence(False, "No check was made: too few rounds under this rule.", ())
        last = checks[-1]
        figures = (
            f"over the last third the ELBO gained {last.gain:.3g} (se {last.gain_se:.2g}) nats, means moved by at most "
            f"{last.drift:.2g} sd and sds by {100 * last.scale_drift:.2g}%"
        )
        start = f"Converged after {last.round} rounds" if converged else f"Not converged after {last.round} rounds"
        return Convergence(converged, f"{start}: {figures}.", tuple(checks))


def _mean_se(values, batches=10):
    """Standard error of a mean of correlated values, by batch means."""
    size = len(values) // batches
    if size < 2:
        return float(values.std(ddof=1) / np.sqrt(len(values)))
    means = values[-batches * size :].reshape(batches, size).mean(1)
    return float(means.std(ddof=1) / np.sqrt(batches))
