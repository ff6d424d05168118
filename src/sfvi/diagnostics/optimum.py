r"""Whether the bound is at its maximum: its gradient there, in units of posterior sds.

Let every coordinate of $z_G$ be moved by $a$ sds and stretched by $e^b$. At a maximum the bound's gradient in $(a, b)$
is zero; elsewhere Newton steps, with $q$'s own correlations $R$ for those of the posterior, are about the way there:
$R g_a$ in the means and $(I + R \circ R^{-1})^{-1} g_b$ in the log sds. Silos add their parts of the gradient, so one
more exchange does. It needs no history, and it holds whatever algorithm ended there: SFVI-Avg ends beside the maximum,
and a step size that has fallen to zero stops anywhere.
"""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from jaxtyping import Array, Float

from .._compile import on_one_thread
from .._random import as_key
from .._types import GlobalVec, Key, Scalar
from ..algorithms import SFVI, Elbo, local_params
from ..families import AbstractGlobalFamily
from .verdicts import Trust, percent, say

if TYPE_CHECKING:
    from ..posterior import GlobalPosterior, SiloPosterior

MOST = 2 * 10**7  # numbers in the draws of all coordinates; with very many coordinates draws are fewer
SMALL, LARGE = 0.1, 0.3  # sds, or log sds, away from the maximum: below is fine, above is not


class Moved(AbstractGlobalFamily):
    """A family whose coordinates are moved and stretched.

    Attributes:
        base: The family.
        shift: In sds.
        stretch: Log factors.
        scale: The sds.
    """

    base: AbstractGlobalFamily
    shift: GlobalVec
    stretch: GlobalVec
    scale: GlobalVec

    @property
    def noise_size(self) -> int:
        return self.base.noise_size

    @property
    def center(self) -> GlobalVec:
        return self.base.center

    def sample(self, noise: Float[Array, " n_noise"]) -> GlobalVec:
        deviation = self.base.sample(noise) - self.center
        return self.center + self.scale * self.shift + jnp.exp(self.stretch) * deviation

    def log_prob(self, z_global: GlobalVec) -> Scalar:
        back = (z_global - self.center - self.scale * self.shift) * jnp.exp(-self.stretch)
        return self.base.log_prob(self.center + back) - jnp.sum(self.stretch)

    def marginals(self) -> tuple[GlobalVec, GlobalVec]:
        mean, sd = self.base.marginals()
        return self.center + self.scale * self.shift + jnp.exp(self.stretch) * (mean - self.center), sd


@dataclasses.dataclass(frozen=True)
class OptimumCheck:
    """The check "optimum".

    Attributes:
        trust: How far to trust that the bound is at its maximum.
        verdict: Why.
        steps: By coordinate of the unconstrained global latents: the way to the maximum in sds (`mean`), in log sds
            (`log sd`), their standard errors, and the noise of one round's gradient in the same units.
        gradient_noise: The largest `noise of a round`: how many sds the estimate of one round is off.
    """

    trust: Trust
    verdict: str
    steps: pd.DataFrame = dataclasses.field(repr=False)
    gradient_noise: float
    name: str = "optimum"


def check_optimum(
    posterior: "GlobalPosterior", silos: Mapping[str, "SiloPosterior"], *, key: Key | int = 0, num_samples: int = 1000
) -> OptimumCheck:
    """Estimate how far a posterior is from the maximum of its bound.

    Args:
        posterior: The global posterior.
        silos: Those of all silos.
        key: Of the draws.
        num_samples: Draws.
    """
    run_key = as_key(key)
    noise = posterior.noise(run_key, min(num_samples, max(100, MOST // posterior.family.noise_size)))
    total, silo_part = np.array(_server(posterior, noise), np.float64), _of_silo(posterior)
    for name in sorted(silos):
        total += np.asarray(silo_part(jax.random.fold_in(run_key, 1), silos[name], noise))
    draws = np.asarray(jax.vmap(posterior.family.sample)(noise), np.float64)
    steps = _steps(total, draws, posterior.model.labels())
    trust, why = _judge(steps)
    return OptimumCheck(trust, say(trust, why), steps, float(np.max(steps["noise of a round"].to_numpy())))


def _moved(family, move):
    _, scale = family.marginals()
    return Moved(family, move[0], move[1], jax.lax.stop_gradient(scale))


def _still(posterior):
    return jnp.zeros((2, posterior.family.center.shape[0]), posterior.family.center.dtype)


def _elbo(posterior):
    return Elbo(SFVI(local_family=posterior.local_family, bound=posterior.bound), posterior.model)


def _server(posterior, noise):
    """The server's part of the gradient in (shift, stretch), draw by draw."""
    elbo = _elbo(posterior)

    @on_one_thread
    def run(shared, noise, still):
        def one(noise):
            return jax.grad(lambda move: elbo.server(shared._replace(family=_moved(shared.family, move)), noise[None]))(
                still
            )

        return jax.lax.map(one, noise, batch_size=50)

    return run(posterior.shared, noise, _still(posterior))


def _of_silo(posterior):
    """A silo's part as a function; its minibatches and its draws of local latents are those of rounds.

    It is one for all silos, so that those of the same shape are compiled once.
    """
    elbo = _elbo(posterior)

    @on_one_thread
    def run(key, shared, free, data, noise, still):
        def one(inputs):
            number, noise = inputs
            draw = elbo.draw(key, number, data, noise[None])
            rows = local_params.select(free, draw.indices)

            def term(move):
                return elbo.silo(shared._replace(family=_moved(shared.family, move)), rows, draw, data)

            return jax.grad(term)(still)

        return jax.lax.map(one, (jnp.arange(noise.shape[0]), noise))

    def part(key, silo, noise):
        return run(key, posterior.shared, silo.free, silo.data, noise, _still(posterior))

    return part


def _steps(gradients, draws, labels):
    """Newton steps with q's covariance, from gradients by draw (draws, 2, n) in (shift, stretch)."""
    size, sd = len(draws), draws.std(0)
    whitened = (draws - draws.mean(0)) / sd
    means, log_sds = gradients[:, 0], gradients[:, 1] / 2
    if 5 * len(sd) <= size:  # correlations of more coordinates would be noise
        correlation = whitened.T @ whitened / size
        curvature = np.eye(len(sd)) + correlation * np.linalg.inv(correlation)
        means, log_sds = means @ correlation, np.linalg.solve(curvature, gradients[:, 1].T).T

    def error(values):
        return values.std(0, ddof=1) / np.sqrt(size)

    columns = {
        "mean": means.mean(0),
        "se of mean": error(means),
        "log sd": log_sds.mean(0),
        "se of log sd": error(log_sds),
        "noise of a round": means.std(0, ddof=1),
    }
    return pd.DataFrame(columns, index=labels)


def _judge(steps) -> tuple[Trust, str]:
    if not np.isfinite(steps.to_numpy()).all():
        return "do not trust", "the bound's gradient is not finite at draws of the posterior."
    sure = {c: steps[c].abs() - 3 * steps[f"se of {c}"] for c in ("mean", "log sd")}
    away = {column: steps[column].abs() for column in sure}
    where = (
        f"means are about {away['mean'].max():.2g} sd ({away['mean'].idxmax()}) and sds "
        f"{percent(away['log sd'].max())} ({away['log sd'].idxmax()}) away from the maximum of the bound"
    )
    furthest = max(values.max() for values in sure.values())
    if furthest > LARGE:
        return "do not trust", f"{where}; run longer, or with another algorithm."
    if furthest > SMALL:
        return "doubtful", f"{where}; run longer."
    return "fine", f"{where}, at most."
