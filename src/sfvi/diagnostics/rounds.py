"""Whether the rounds had come to rest: the ELBO and the global posterior on their way."""

import dataclasses
import warnings

import numpy as np
import pandas as pd

from ..convergence import Convergence
from .verdicts import Trust, percent, say

DRIFT = (0.2, 0.5)  # sds from the middle third to the last: below is fine, above is not
GAIN = 1.0  # nats from the middle third to the last, beyond twice the standard error
SMALL_GAIN = 0.1  # the same, where nothing else is known
FEWEST_ROUNDS = 10  # in a third, below which the ELBO shows no trend
FEWEST = 3  # snapshots in a third, below which nothing can be said


@dataclasses.dataclass(frozen=True)
class RoundsCheck:
    """The check "convergence".

    Attributes:
        trust: How far to trust that more rounds would change nothing.
        verdict: Why.
        rounds: Done.
        gain: Mean ELBO of the last third of the rounds minus that of the third before; NaN if silos do not tell it.
        gain_se: Its standard error.
        drift: Largest change of a global latent's mean between these thirds, in posterior sds, beyond twice the
            standard error of its wandering.
        scale_drift: Likewise of the log of a global latent's sd.
        effective_rounds: So many independent rounds would tell as much about the ELBO as the last third does.
    """

    trust: Trust
    verdict: str
    rounds: int
    gain: float
    gain_se: float
    drift: float
    scale_drift: float
    effective_rounds: float
    name: str = "convergence"


def check_rounds(elbo: np.ndarray, path: pd.DataFrame, convergence: Convergence | None) -> RoundsCheck:
    """Compare the last third of the rounds with the third before.

    Args:
        elbo: Of every round.
        path: Means and sds of the global latents after some rounds.
        convergence: What the stopping rule saw, if there was one.
    """
    done, rounds = len(elbo), path.index.to_numpy()
    third = done // 3
    middle, last = (rounds > done - 2 * third) & (rounds <= done - third), rounds > done - third
    drift = scale_drift = float("nan")
    if min(middle.sum(), last.sum()) >= FEWEST:
        means, sds = (path[part].to_numpy() for part in ("mean", "sd"))
        drift = _drift(means[middle] / sds[last][-1], means[last] / sds[last][-1])
        scale_drift = _drift(np.log(sds[middle]), np.log(sds[last]))
    gain = gain_se = effective = float("nan")
    if np.isfinite(elbo).all() and third >= FEWEST_ROUNDS:
        before, after = elbo[-2 * third : -third], elbo[-third:]
        effective = _effective(after)
        gain = float(after.mean() - before.mean())
        gain_se = float(np.hypot(_error(before), _error(after)))
    found = RoundsCheck("fine", "", done, gain, gain_se, drift, scale_drift, effective)
    trust, why = _judge(found, convergence)
    return dataclasses.replace(found, trust=trust, verdict=say(trust, why))


def _drift(before, after):
    """The largest change of a column's mean that is more than two standard errors of its own wandering."""
    error = np.sqrt(before.var(0, ddof=1) / len(before) + after.var(0, ddof=1) / len(after))
    return float(np.max(np.abs(after.mean(0) - before.mean(0)) - 2 * error, initial=0.0))


def _judge(found, convergence) -> tuple[Trust, str]:
    if convergence is not None:
        return ("fine" if convergence.converged else "do not trust"), convergence.verdict
    gained = f"the ELBO gained {found.gain:.3g} (se {found.gain_se:.2g}) nats" if np.isfinite(found.gain) else ""
    span, climbing = (
        f"from the middle third of {found.rounds} rounds to the last",
        found.gain - 2 * found.gain_se > GAIN,
    )
    if np.isnan(found.drift) and np.isnan(found.scale_drift):  # no snapshots to compare
        if not gained:
            return "doubtful", "too few rounds to see a trend."
        if found.gain > max(SMALL_GAIN, 2 * found.gain_se):
            return "doubtful", f"{span}, {gained}: the run had not come to rest; run longer."
        return "fine", f"{span}, {gained}; the rounds are too few to see how the posterior moved."
    most = max(found.drift, found.scale_drift)
    figures = f"{span}, means moved by at most {found.drift:.2g} sd "
    figures += f"and sds by {percent(found.scale_drift)} more than by chance"
    figures += f", and {gained}" if gained else ""
    if most > DRIFT[1]:
        return "do not trust", f"{figures}: the run had not come to rest; run longer."
    if not most <= DRIFT[0]:
        return "doubtful", f'{figures}; run longer, unless the check "optimum" says that it is there.'
    if climbing:
        return "doubtful", f"{figures}: parameters or the silos' latents were still being learned; run longer."
    return "fine", f"{figures}."


def _error(values):
    """Standard error of the mean, a steady rise left out: it would hide itself."""
    rounds = np.arange(len(values))
    rest = values - np.polyval(np.polyfit(rounds, values, 1), rounds) if len(values) > 2 else values
    return rest.std() / np.sqrt(_effective(rest))


def _effective(values):
    """How many independent values have a mean as uncertain as that of these."""
    if len(values) < 8 or np.ptp(values) == 0:
        return float(len(values))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ArviZ announces its next version
        import arviz
    return float(min(arviz.ess(values[None], method="mean"), len(values)))
