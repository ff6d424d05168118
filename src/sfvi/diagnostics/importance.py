r"""Whether $q(z_G)$ is the posterior: importance weights, and the Pareto k-hat of their tail.

$$\log w_s = \log p_\theta(z_G^s) + \sum_j \log \hat p(y_j \mid z_G^s) - \log q(z_G^s), \qquad z_G^s \sim q$$

with each silo's latents integrated out inside it (`evidence.py`). If $q$ is near the posterior the weights are nearly
constant; if it misses a part of it, few draws carry all of the weight, and k-hat, the shape of a Pareto distribution
fitted to the largest ones, says so (Yao et al. 2018, Vehtari et al. 2024). With a small one the weights also correct
$q$: `resample` draws from the posterior itself.
"""

import dataclasses
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from jaxtyping import Array, Int

from .._random import as_key
from .._types import Key
from ..errors import OptionError
from ..export import Draws
from .evidence import Evidence
from .verdicts import Trust, say

if TYPE_CHECKING:
    from ..posterior import GlobalPosterior

SHIFT, STRETCH = 0.2, 0.2  # of means in sds and of log sds, that do not matter
NOISE = 1.0  # of a log weight, above which the silos' integrals say nothing
ALIKE = 0.9  # share of effective draws above which weights are nearly the same
FEWEST = 100  # draws in whose weights a tail can be seen
SHOWN = 200  # coordinates beyond which no table of shifts is made


@dataclasses.dataclass(frozen=True)
class ImportanceCheck:
    """The check "importance".

    Attributes:
        trust: How far to trust the global posterior.
        verdict: Why.
        k_hat: Shape of the weights' tail; above `threshold` the posterior is not to be trusted, or doubtful if its
            draws weigh nearly the same.
        threshold: For this number of draws.
        effective_draws: So many draws of the posterior itself would be worth as much as the weighted ones.
        noise: Standard deviation of the log weights' error from integrating out the silos' latents.
        weights: Smoothed and normalized, one for each draw of `posterior.sample(key, num_samples)`.
        shifts: By coordinate, how far the weighted mean is from that of `q`, in sds, and the log ratio of the sds; None
            with very many coordinates.
        posterior: Whose draws are weighted.
        key: Of the draws.
    """

    trust: Trust
    verdict: str
    k_hat: float
    threshold: float
    effective_draws: float
    noise: float
    weights: np.ndarray = dataclasses.field(repr=False)
    shifts: pd.DataFrame | None = dataclasses.field(repr=False)
    posterior: "GlobalPosterior" = dataclasses.field(repr=False)
    key: Any = dataclasses.field(repr=False)
    name: str = "importance"

    def resample(self, num_samples: int = 1000, *, key: Key | int = 0) -> Draws:
        """Draws of the global latents, chosen by their weights: corrected, as far as `k_hat` says.

        Args:
            num_samples: How many.
            key: To choose with.
        """
        chosen = self.choose(num_samples, key=key)
        return jax.tree.map(lambda leaf: leaf[chosen], self.posterior.sample(self.key, len(self.weights)))

    def choose(self, num_samples: int, *, key: Key | int = 0) -> Int[Array, " samples"]:
        """Positions of draws, each as often as its weight says."""
        return _systematic(as_key(key), self.weights, num_samples)

    def summary(self, *, num_samples: int = 10_000, key: Key | int = 0) -> pd.DataFrame:
        """Like that of the posterior, from corrected draws."""
        return self.posterior.summarize(self.resample(num_samples, key=key))


def check_importance(
    posterior: "GlobalPosterior", evidence: Mapping[str, Evidence], *, key: Key | int = 0
) -> ImportanceCheck:
    r"""Weigh draws of $q(z_G)$ with what every silo says of them.

    Args:
        posterior: The global posterior.
        evidence: What `SiloPosterior.evidence` returned in each silo, for the same key and number of draws.
        key: Of the draws, the same as in the silos.
    """
    sizes = {name: len(part.log_marginals) for name, part in evidence.items()}
    if not sizes or len(set(sizes.values())) > 1:
        raise OptionError(f"The silos' evidence must be of the same draws, at least one silo's; there are {sizes}.")
    size = next(iter(sizes.values()))
    check_size(size)
    log_weights, z_global = _log_weights(posterior, key, size)
    log_weights = log_weights + sum(part.log_marginals for part in evidence.values())
    noise = float(np.sqrt(sum(part.noise**2 for part in evidence.values())))
    threshold = float(min(1 - 1 / np.log10(size), 0.7))
    if not _can_be_weighed(log_weights):
        odd = [name for name, part in evidence.items() if not _can_be_weighed(part.log_marginals)]
        where = f"in silo {odd[0]!r}" if odd else "of the population program"
        why = f"the log density {where} is not finite at draws of the posterior, so that nothing can be weighed."
        same, nan = np.full(size, 1 / size), float("nan")
        said = say("do not trust", why)
        return ImportanceCheck("do not trust", said, np.inf, threshold, nan, noise, same, None, posterior, as_key(key))
    weights, k_hat = smooth(log_weights)
    effective = float(1 / np.sum(weights**2))
    shifts = _shifts(posterior, z_global, weights) if z_global.shape[1] <= SHOWN else None
    trust, why = _judge(k_hat, threshold, effective, size, noise, shifts)
    return ImportanceCheck(
        trust, say(trust, why), k_hat, threshold, effective, noise, weights, shifts, posterior, as_key(key)
    )


def check_size(num_samples: int) -> None:
    """Refuse so few draws that they would say nothing."""
    if isinstance(num_samples, bool) or not isinstance(num_samples, int) or num_samples < FEWEST:
        raise OptionError(f"num_samples is {num_samples!r}; give at least {FEWEST}, in fewer no tail can be seen.")


def _can_be_weighed(log_weights):
    """Whether they are numbers, some of them finite: a draw that the model excludes has weight zero."""
    return bool(np.all(log_weights < np.inf) and np.any(np.isfinite(log_weights)))


def smooth(log_weights: np.ndarray) -> tuple[np.ndarray, float]:
    """Pareto-smoothed weights that sum to one, and k-hat."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ArviZ announces its next version; a constant tail has no shape
        import arviz

        if np.ptp(log_weights) < 1e-9:
            return np.full(len(log_weights), 1 / len(log_weights)), -np.inf
        smoothed, k_hat = arviz.psislw(log_weights)
    weights = np.exp(np.asarray(smoothed) - np.max(smoothed))
    return weights / weights.sum(), float(k_hat)


def _log_weights(posterior, key, size):
    r"""$\log p(z_G) - \log q(z_G)$ at the draws of `posterior.sample(key, size)`, and the draws, unconstrained."""
    population, shared = posterior.model.population, posterior.shared

    @jax.jit
    def both(shared, noise):
        def one(noise):
            z_global = shared.family.sample(noise)
            return population.log_prob(z_global, shared.theta) - shared.family.log_prob(z_global), z_global

        return jax.lax.map(one, noise, batch_size=100)

    values, z_global = both(shared, posterior.noise(key, size))
    return np.asarray(values, np.float64), np.asarray(z_global, np.float64)


def _shifts(posterior, z_global, weights):
    mean, sd = z_global.mean(0), z_global.std(0)
    weighted = weights @ z_global
    spread = np.sqrt(weights @ (z_global - weighted) ** 2)
    columns = {"shift of mean, in sds": (weighted - mean) / sd, "log ratio of sds": np.log(spread / sd)}
    return pd.DataFrame(columns, index=posterior.model.labels())


def _judge(k_hat, threshold, effective, size, noise, shifts) -> tuple[Trust, str]:
    figures = f"k-hat is {k_hat:.2f} (at most {threshold:.2f} is good)"
    if not noise <= NOISE:
        return "doubtful", (
            f"the silos' latents could not be integrated out well enough to tell (a log weight is uncertain by "
            f"{noise:.1f}); give more num_draws."
        )
    hardly, words = False, ""
    if shifts is not None:
        moved, stretched = (float(shifts[column].abs().max()) for column in shifts)
        names = [shifts[column].abs().idxmax() for column in shifts]
        words = (
            f"means move by at most {moved:.2f} sd ({names[0]}), sds by {100 * np.expm1(stretched):.0f}% ({names[1]})"
        )
        hardly = moved <= SHIFT and stretched <= STRETCH
    if k_hat > threshold and hardly and k_hat <= 1 and effective >= ALIKE * size:
        return "doubtful", f"{figures}, so tails of the posterior are heavier than q's, but weighted {words}."
    if not k_hat <= threshold:
        return "do not trust", (
            f"{figures}: q(z_G) misses a part of the posterior; use a richer global_family (full, flow), more draws in "
            "the bound, or run longer."
        )
    worth = f"{effective:,.0f} of {size:,} draws are effective"
    if shifts is None:
        return "fine", f"{figures}; {worth}."
    if not hardly:
        return "doubtful", f"{figures}, but weighted draws differ: {words}; take weighted draws (resample)."
    return "fine", f"{figures}; {worth}; weighted, {words}."


def _systematic(key, weights, num_samples):
    """Positions of draws, each as often as its weight says, up to one; shuffled."""
    first, second = jax.random.split(key)
    points = (np.arange(num_samples) + float(jax.random.uniform(first))) / num_samples
    chosen = np.minimum(np.searchsorted(np.cumsum(weights), points), len(weights) - 1)
    return jnp.asarray(chosen)[jax.random.permutation(second, num_samples)]
