r"""An optimizer for gradients with much noise: steps in posterior sds, which fall like one over the number of rounds.

Let $A A^\top$ be the covariance of $q$, and $g$ the gradient in the units of `measure.py`, in the means and in $M$ of
$A (I + M)$. The latter is the lower half of a symmetric $G = I - A^\top H A$, where $-H$ is the curvature that the
round has seen:

$$\mu \leftarrow \mu + r_t(3) A g_\mu, \qquad A A^\top \leftarrow A\, (I - r_t(0.7)\, G)^{-1} A^\top, \qquad
  \frac{1}{r_t(w)} = 10 + \frac{v_t}{w^2} + \frac{(t - t_1)_+}{2}$$

In these units the curvature of the ELBO at its maximum is about one, so that from round $t_1$ on the steps average over
all rounds since: of noise with standard deviation s in every round about $1.15 s / \sqrt{T - t_1}$ is left in the means
after T of them (`average`), and no optimizer has much less. Adam's steps are as long as its step size says, however
loud the noise.

The second rule says that precisions are averages, $\Lambda \leftarrow (1 - r) \Lambda + r H$, so that noise cancels in
them whatever $\Lambda$ is. Steps of $A$ itself make it shrink under noise, the more so the larger it is: $A^\top H A$
grows with the square of what noise does to $A$. Of averaged precisions sds are the roots of inverses, and too wide
instead, by a factor of about $\sqrt{1 + d\, r_T v_T / 2}$ for d latents with a full covariance.

Until $t_1$ parameters wander, and where they wander far they may not come back: data say nothing of a variance
component that is nearly zero. $v_t$ is the variance of the noise, half the running mean square of the difference
between $g_\mu$ and that of the round before. With these steps means wander by about 2 posterior sds ($w / \sqrt2$), and
logarithms of scales by a quarter ($w / \sqrt8$). Less would not arrive where the start is hundreds of sds away, as with
very many units. Of a mean field $G$ is diagonal; of low rank, and of silos' own latents, $\sigma$ moves as if it were
one. All other parameters move by Adam.
"""

import math
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from ..families import BlockGaussian, FullGaussian
from ..families.triangular import pack, unpack
from ..objectives import Shared
from .measure import Gaussian, moved, whiten
from .options import AbstractVariationalOptions, falling_to_zero
from .privacy import UnitPrivacy

CAUTION = 10.0  # one over the largest part of a Newton step
MEANS, SCALES = 3.0, 0.7  # w
LEAST, MOST = 0.25, 4.0  # times the precision in any direction, after a round
FARTHEST = 0.5  # that an entry of L of silos' own latents moves in a round
BEGIN = 0.4  # t_1, part of all rounds
GAIN = 2.0  # of steps that average: enough where the curvature is a quarter of what the scales say
MEMORY = 0.95  # of the running mean


class NoisyState(NamedTuple):
    """Rounds done, the variance of the noise, the gradient of the last round in units of sds, and the state of Adam."""

    count: Int[Array, ""]
    variance: Float[Array, ""]
    before: Float[Array, "..."]
    others: optax.OptState


class UnderNoise(optax.GradientTransformation):
    """An optimizer of this kind, to be told from others."""


def under_noise(num_rounds: int) -> UnderNoise:
    """The optimizer for a run of so many rounds."""
    adam = optax.adam(falling_to_zero(num_rounds))

    def init(params: Any) -> NoisyState:
        family = _gaussian(params)
        before = jnp.zeros(()) if family is None else jnp.zeros_like(family.loc)
        return NoisyState(jnp.zeros((), jnp.int32), jnp.zeros(()), before, adam.init(params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, NoisyState]:
        others, adams = adam.update(updates, state.others, params)
        family = _gaussian(params)
        if family is None or not family.loc.size:
            return others, NoisyState(state.count + 1, state.variance, state.before, adams)
        uphill = whiten(family, _gaussian(jax.tree.map(jnp.negative, updates)))
        memory = jnp.minimum(MEMORY, state.count / (state.count + 1))
        change = 0.5 * jnp.mean((uphill.loc - state.before) ** 2)
        variance = (memory * state.variance + (1 - memory) * change).astype(state.variance.dtype)
        fast, slow = (_rate(variance, reach, state.count, num_rounds).astype(change.dtype) for reach in (MEANS, SCALES))
        steps = _spread(family, uphill, slow)
        carried = moved(family, _with(_gaussian(others), steps | {"loc": fast * uphill.loc}))
        chosen = _with(others, {name: getattr(carried, name) for name in ("loc", *steps)})
        return chosen, NoisyState(state.count + 1, variance, uphill.loc, adams)

    return UnderNoise(init, update)


def noise_left(options: AbstractVariationalOptions, family: Any, *, num_silos: int, num_rounds: int) -> float | None:
    """How many posterior sds of noise are left in the means of a Gaussian $q(z_G)$ after a run, about; see `average`.

    Args:
        options: The algorithm's, as planned for this run.
        family: $q(z_G)$.
        num_silos: J; all take part in every round.
        num_rounds: T.

    Returns:
        None where this is not known: without noise for units, with another optimizer than this one, of a flow, and
        where not all silos take part.
    """
    privacy = options.privacy
    if not isinstance(privacy, UnitPrivacy) or not isinstance(options.optimizer, UnderNoise):
        return None
    if options.participation.partial or not isinstance(family, Gaussian) or not family.loc.size:
        return None
    return average(privacy, num_silos=num_silos, num_rounds=num_rounds)


def average(privacy: UnitPrivacy, *, num_silos: int, num_rounds: int) -> float:
    r"""What averages over a run leave of its noise in every mean, in posterior sds.

    In a round each of J silos adds $\sigma C / q$, or its share of it, and that only a part of the units is drawn adds
    about $\sqrt{(1 - q) / q}$. So it is known before the first round.

    Where $\ell$ is left, the steps of precisions add up to about $1 / \ell^2$ in a run, so that above one $q$ keeps
    more of the width that it started with than it learns. Then $\ell$ is no longer the error: where $q$ is many times
    too wide, units' gradients are that many times too long, the clip shortens nearly all of them, and what it does to
    the direction of their sum, above all in variance components, is never undone.

    Args:
        privacy: With its noise.
        num_silos: J.
        num_rounds: T.
    """
    silo = privacy.noise * privacy.clip / privacy.rate
    variance = silo**2 * num_silos / privacy.shared_by + (1 - privacy.rate) / privacy.rate
    return GAIN * math.sqrt(variance / ((2 * GAIN - 1) * (1 - BEGIN) * num_rounds))


def _rate(variance, reach, count, num_rounds):
    """$r_t(w)$."""
    return 1.0 / (CAUTION + variance / reach**2 + jnp.maximum(count - BEGIN * num_rounds, 0.0) / GAIN)


def _gaussian(params):
    """The Gaussian of a tree of parameters: of what is shared, or of a silo's own latents."""
    found = params.family if isinstance(params, Shared) else params
    return found if isinstance(found, Gaussian) else None


def _spread(family, uphill, rate):
    """Steps of the parameters of a covariance, by name, as `moved` takes them: its inverse goes a part of the way."""
    if not isinstance(family, FullGaussian):
        steps = {"log_scale": -0.5 * jnp.log(jnp.clip(1.0 - rate * uphill.log_scale, LEAST, MOST))}
        if isinstance(family, BlockGaussian) and family.lower is not None:
            steps["lower"] = jnp.clip(0.5 * rate * uphill.lower, -FARTHEST, FARTHEST)
        return steps
    identity = jnp.eye(family.loc.shape[0], dtype=family.loc.dtype)
    below = unpack(uphill.lower, identity.shape[0]) - identity
    values, vectors = jnp.linalg.eigh(identity - rate * (below + below.T + jnp.diag(uphill.log_scale)))
    root = jnp.linalg.cholesky((vectors / jnp.clip(values, LEAST, MOST)) @ vectors.T)
    return {"log_scale": jnp.diag(root) - 1.0, "lower": pack(root)}


def _with(params, leaves):
    """A tree of parameters with some of those of its Gaussian replaced."""
    for name, leaf in leaves.items():
        params = eqx.tree_at(lambda tree, name=name: getattr(_gaussian(tree), name), params, leaf)
    return params
