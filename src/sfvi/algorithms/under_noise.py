r"""An optimizer for gradients with much noise: steps in posterior sds, which fall like one over the number of rounds.

With $\Sigma = A A^\top$ the covariance of $q$, and $g$ the gradient,

$$\mu \leftarrow \mu + r_t(10) \Sigma g_\mu, \qquad
  \log \sigma \leftarrow \log \sigma + \tfrac12 r_t(1) g_{\log \sigma}, \qquad
  r_t(w) = \frac{1}{10 + v_t / w^2 + (t - t_1)_+ / 2}$$

and $L$ as $\log \sigma$. In these units the curvature of the ELBO at its maximum is about one, so that from round $t_1$
on the steps average over all rounds since: of noise with standard deviation s in every round about
$1.15 s / \sqrt{T - t_1}$ is left in the means after T of them, and no optimizer has much less. Adam's steps are as
long as its step size says, however loud the noise. $v_t$ is the running mean of $g_\mu^\top \Sigma g_\mu / d$, the
variance of the noise where there is much of it: until $t_1$ means wander by about ten posterior sds, which is as far as
they may have to go, and scales by less than a factor of e. All other parameters move by Adam.
"""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from ..families import BlockGaussian, FullGaussian, LowRankGaussian, MeanFieldGaussian
from ..objectives import Shared
from .options import falling_to_zero

CAUTION = 10.0  # one over the largest part of a Newton step
FAR, NEAR = 10.0, 1.0  # posterior sds by which means may wander at first, and logarithms of scales
BEGIN = 0.4  # t_1, part of all rounds
GAIN = 2.0  # of steps that average: enough where the curvature is a quarter of what the scales say
MEMORY = 0.95  # of the running mean


class NoisyState(NamedTuple):
    """Rounds done, the running mean, and the state of Adam for all that is no location or scale."""

    count: Int[Array, ""]
    size: Float[Array, ""]
    others: optax.OptState


def under_noise(num_rounds: int) -> optax.GradientTransformation:
    """The optimizer for a run of so many rounds."""
    adam = optax.adam(falling_to_zero(num_rounds))

    def init(params: Any) -> NoisyState:
        return NoisyState(jnp.zeros((), jnp.int32), jnp.zeros(()), adam.init(params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, NoisyState]:
        moved, others = adam.update(updates, state.others, params)
        family, uphill = _gaussian(params), _gaussian(jax.tree.map(jnp.negative, updates))
        if family is None or uphill is None:
            return moved, NoisyState(state.count + 1, state.size, others)
        direction, size = _natural(family, uphill.loc)
        size = jnp.where(state.count == 0, size, MEMORY * state.size + (1 - MEMORY) * size).astype(state.size.dtype)
        since = jnp.maximum(state.count - BEGIN * num_rounds, 0.0)
        fast, slow = (
            (1.0 / (CAUTION + size / reach**2 + since / GAIN)).astype(uphill.loc.dtype) for reach in (FAR, NEAR)
        )
        steps = {"loc": fast * direction, "log_scale": 0.5 * slow * uphill.log_scale}
        if isinstance(uphill, FullGaussian | BlockGaussian) and uphill.lower is not None:
            steps["lower"] = 0.5 * slow * uphill.lower
        for name, step in steps.items():
            moved = eqx.tree_at(lambda tree, name=name: getattr(_gaussian(tree), name), moved, step)
        return moved, NoisyState(state.count + 1, size, others)

    return optax.GradientTransformation(init, update)


def _gaussian(params):
    """The Gaussian of a tree of parameters: of what is shared, or of a silo's own latents."""
    found = params.family if isinstance(params, Shared) else params
    return found if isinstance(found, MeanFieldGaussian | FullGaussian | LowRankGaussian | BlockGaussian) else None


def _natural(family, gradient):
    """The covariance times a gradient, and the gradient's mean square in units of sds."""
    if isinstance(family, BlockGaussian):
        scaled = jnp.exp(family.log_scale) * gradient
        return jnp.exp(family.log_scale) * scaled, jnp.mean(scaled**2)
    nowhere = jnp.zeros(family.noise_size, gradient.dtype)
    _, transposed = jax.vjp(family.sample, nowhere)
    (scaled,) = transposed(gradient)
    _, direction = jax.jvp(family.sample, (nowhere,), (scaled,))
    return direction, jnp.sum(scaled**2) / gradient.shape[0]
