r"""The units in which gradients are shortened and get noise: public, for they follow from $q$, which all know.

The gradient in the means of a Gaussian $z = \mu + A \epsilon$ becomes $A^\top g$: what is left is about $\sqrt{d / n}$
for each of n units whatever the scale of the data, and noise of size s in it is noise of s posterior sds in every
direction of $z$. Where the covariance is full, $A = \mathrm{diag}(\sigma) L$ is measured in the same way, by $M$ in
$A (I + M)$, lower triangular: there too the curvature of the ELBO at its maximum is about one in every direction,
however strong correlations are. Of low rank, $A = \mathrm{diag}(\sigma) (I + F F^\top)^{1/2}$; of silos' own latents,
$A$ has the standard deviations on its diagonal. All other parameters are measured as they are.
"""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float

from ..families import BlockGaussian, FullGaussian, LowRankGaussian, MeanFieldGaussian
from ..families.triangular import pack, solve_all, unpack
from ..objectives import Shared

Gaussian = MeanFieldGaussian | FullGaussian | LowRankGaussian | BlockGaussian


class Measure(NamedTuple):
    """The linear map M for gradients in what is shared and in the parameters of a silo's own latents.

    Attributes:
        shared: What is shared.
        own: Of the silo's own latents; None if there are none.
    """

    shared: Shared
    own: BlockGaussian | None

    def into(self, gradient: tuple[Shared, Any]) -> Float[Array, " n"]:
        """A gradient in these units, as one vector."""
        return ravel_pytree(self._each(whiten, *gradient))[0]

    def back(self, vector: Float[Array, " n"]) -> tuple[Shared, Any]:
        """The gradient with these units."""
        return self._each(_unwhiten, *ravel_pytree((self.shared, self.own))[1](vector))

    def _each(self, change, shared, own):
        if isinstance(self.shared.family, Gaussian):
            shared = shared._replace(family=change(self.shared.family, shared.family))
        return shared, own if self.own is None else change(self.own, own)


def whiten(gaussian: Gaussian, gradient: Any) -> Any:
    r"""The gradient in the parameters of a Gaussian as that in the steps that `moved` takes."""
    return jax.vjp(lambda step: moved(gaussian, step), _zero(gaussian))[1](gradient)[0]


def moved(gaussian: Gaussian, step: Any) -> Any:
    r"""By how much a step changes parameters: means by $A \delta$, and $A$, if it is triangular, by $A M$.

    To first order only it would not do: where correlations are strong, $M^2$ is many conditional sds.

    Args:
        gaussian: Where the step is taken.
        step: $\delta$ in place of the means, the diagonal of M in place of $\log \sigma$, the rest in place of $L$; the
            diagonal is above -1.
    """
    if not isinstance(gaussian, FullGaussian):
        return _with_loc(step, _root(gaussian, step.loc))
    size = gaussian.loc.shape[0]
    triangle, grown = unpack(gaussian.lower, size), 1.0 + step.log_scale
    after = (triangle @ (unpack(step.lower, size) + jnp.diag(step.log_scale))) / grown[:, None]
    loc = jnp.exp(gaussian.log_scale) * (triangle @ step.loc)
    return FullGaussian(loc, jnp.log(grown), pack(after - triangle))


def _unwhiten(gaussian, whitened):
    """The inverse of `whiten`."""
    return jax.vjp(lambda change: _step_to(gaussian, change), _zero(gaussian))[1](whitened)[0]


def _step_to(gaussian, change):
    """The inverse of `moved`, for small changes."""
    if not isinstance(gaussian, FullGaussian):
        return _with_loc(change, _root(gaussian, change.loc, inverse=True))
    size = gaussian.loc.shape[0]
    triangle = unpack(gaussian.lower, size)
    product = unpack(change.lower, size) + triangle * change.log_scale[:, None] - jnp.eye(size, dtype=triangle.dtype)
    columns = jnp.concatenate([product, (change.loc * jnp.exp(-gaussian.log_scale))[:, None]], axis=1)
    found, delta = jnp.split(solve_all(triangle, columns), [size], axis=1)
    return FullGaussian(delta[:, 0], jnp.diag(found), pack(found))


def _root(gaussian, vector, *, inverse=False):
    r"""$A$ times a vector, or $A^{-1}$; $(I + F F^\top)^{\pm 1/2} = I + F U k(\Lambda) U^\top F^\top$."""
    scale = jnp.exp(-gaussian.log_scale if inverse else gaussian.log_scale)
    if not isinstance(gaussian, LowRankGaussian):
        return scale * vector
    values, vectors = jnp.linalg.eigh(gaussian.factor.T @ gaussian.factor)
    roots, directions = jnp.sqrt(1.0 + jnp.maximum(values, 0.0)), gaussian.factor @ vectors
    along = (-1.0 / roots if inverse else 1.0) / (1.0 + roots)
    vector = scale * vector if inverse else vector
    turned = vector + directions @ (along * (directions.T @ vector))
    return turned if inverse else scale * turned


def _zero(gaussian):
    return jax.tree.map(jnp.zeros_like, gaussian)


def _with_loc(tree, loc):
    return eqx.tree_at(lambda tree: tree.loc, tree, loc)
