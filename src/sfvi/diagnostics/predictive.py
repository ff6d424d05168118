r"""Whether the model could have made the data: posterior predictive checks, inside a silo.

For statistics $T$ of an observed site, $p = \Pr(T(y^{rep}) \ge T(y))$ over draws $y^{rep}$ of the posterior
predictive; near 0 or 1 the data are not like what the model makes. "fit" is the realized discrepancy
$T(y, z) = -\log p(y \mid z)$.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from .._compile import on_one_thread
from .._random import as_key
from .._types import Key
from ..model.observed import log_likelihood, observations, replicate
from ..prediction import draw_latents
from .verdicts import Trust, say

if TYPE_CHECKING:
    from ..posterior import SiloPosterior

Statistic = Callable[[np.ndarray], float]
ODD, ABSURD = 0.02, 0.002  # two-sided p-values
AT_A_TIME = 2 * 10**7  # replicated values kept together


def share_of_zeros(values: np.ndarray) -> float:
    """Of counts; it is left out for values that are not whole numbers."""
    return float(np.mean(values == 0))


STATISTICS: dict[str, Statistic] = {
    "mean": np.mean,
    "sd": np.std,
    "smallest": np.min,
    "largest": np.max,
    "share of zeros": share_of_zeros,
}


@dataclasses.dataclass(frozen=True)
class PredictiveCheck:
    """The check "predictive". It holds statistics of the data, so it belongs to the silo.

    Attributes:
        trust: How far to trust the model for this silo's data.
        verdict: Why.
        table: By site and statistic: its value for the data, mean and sd over replicated data, and p.
    """

    trust: Trust
    verdict: str
    table: pd.DataFrame = dataclasses.field(repr=False)
    name: str = "predictive"

    def disclosed(self) -> pd.DataFrame:
        """What may be told if the silo agrees: p by site and statistic, to two digits, no value of the data."""
        return pd.DataFrame(self.table["p"].round(2))


def check_predictive(
    silo: "SiloPosterior",
    *,
    key: Key | int = 0,
    num_samples: int = 1000,
    statistics: Mapping[str, Statistic] | None = None,
) -> PredictiveCheck:
    """Compare a silo's data with what its posterior predicts.

    Args:
        silo: The silo's posterior.
        key: Of the draws.
        num_samples: Replicated data sets.
        statistics: By name, functions of the values of a site, flattened; masked ones are left out. By default the
            mean, sd, smallest, largest, and the share of zeros.
    """
    chosen = STATISTICS if statistics is None else dict(statistics)
    seen = observations(silo.data, silo.shared.shared.theta)
    of_copies, misfit = _replicates(silo, key, num_samples, seen, chosen)
    rows, index, name = [], [], silo.shared.model.wording.name
    for site, observation in seen.items():
        counts = observation.counts
        if not counts.any():
            continue
        real = observation.value[counts]
        counted = np.array_equal(real, np.round(real))  # a share of zeros says nothing of what is measured
        for statistic, function in chosen.items():
            if function is share_of_zeros and not counted:
                continue
            value, others = float(function(real)), np.array(of_copies[site, statistic])
            if np.ptp(others) == 0 and others[0] == value:
                continue  # says nothing: the smallest of many zeros and ones
            index.append((name(site), statistic))
            rows.append([value, others.mean(), others.std(), _p_value(others - value)])
        real_misfit, others = misfit[site]
        index.append((name(site), "fit"))
        rows.append([real_misfit.mean(), others.mean(), others.std(), _p_value(others - real_misfit)])
    columns = ["data", "mean of replicates", "sd of replicates", "p"]
    table = pd.DataFrame(rows, pd.MultiIndex.from_tuples(index, names=["site", "statistic"]), columns)
    trust, why = _judge(table)
    return PredictiveCheck(trust, say(trust, why), table)


def _replicates(silo, key, num_samples, seen, statistics):
    """Statistics of replicated data, and by site the misfit of the data and of the replicates at the same draws.

    Data are replicated some at a time, so that memory does not grow with the number of draws.
    """
    posterior, data, num_draws = silo.shared, silo.data, silo.shared.bound.draws_of_units

    @on_one_thread
    def run(shared, family, data, noise, keys):
        def one(inputs):
            noise, key = inputs
            drawing, copying = jax.random.split(key)
            z_global, z_local = draw_latents(drawing, shared, family, data, noise, num_draws=num_draws)
            copies = replicate(copying, data, z_global, z_local, shared.theta)
            real = log_likelihood(data, z_global, z_local, shared.theta)
            again = log_likelihood(data, z_global, z_local, shared.theta, values=copies)
            sums = {site: (-jnp.sum(real[site]), -jnp.sum(again[site])) for site in real}
            return copies, sums

        return jax.lax.map(one, (noise, keys), batch_size=20)

    first, second = jax.random.split(as_key(key))
    noise = posterior.noise(first, num_samples)
    keys, values = jax.random.split(second, num_samples), sum(one.value.size for one in seen.values())
    together, found, sums = max(20, AT_A_TIME // max(1, values)), {}, []
    for first in range(0, num_samples, together):
        part = slice(first, first + together)
        copies, misfit = run(posterior.shared, silo.family, data, noise[part], keys[part])
        sums.append(jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), misfit))
        for site, observation in seen.items():
            counted = np.asarray(copies[site])[:, observation.counts]
            for statistic, function in statistics.items() if observation.counts.any() else ():
                found.setdefault((site, statistic), []).extend(float(function(copy)) for copy in counted)
    return found, jax.tree.map(lambda *parts: np.concatenate(parts), *sums)


def _p_value(differences):
    """How often a replicate is larger; ties count half, and half a replicate more on either side: none is certain."""
    return float((np.sum(differences > 0) + np.sum(differences == 0) / 2 + 0.5) / (len(differences) + 1))


def _judge(table) -> tuple[Trust, str]:
    if table.empty:
        return "doubtful", "no observed site could be checked."
    tails = 2 * np.minimum(table["p"], 1 - table["p"])
    site, statistic = tails.idxmin()
    worst = f"{statistic} of {site!r} has p = {table.loc[(site, statistic), 'p']:.3f}"
    if tails.min() < ABSURD:
        return "do not trust", f"the model does not make data like these: the {worst}; look at the silo's table."
    if tails.min() < ODD:
        return "doubtful", f"the model hardly makes data like these: the {worst}; look at the silo's table."
    return "fine", f"replicated data are like those of the silo; furthest off, the {worst}."
