r"""The units in which gradients are shortened and get noise: public, for they follow from $q$, which all know.

The gradient in the means of a Gaussian $z = \mu + A \epsilon$ becomes $A^\top g$: what is left is about $\sqrt{d / n}$
for each of n units whatever the scale of the data, and noise of size s in it is noise of s posterior sds in every
direction of $z$. Where $A$ has no inverse (low rank), and in the silos' own latents, each number is multiplied by its
standard deviation. All other parameters are measured as they are.
"""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float

from ..families import BlockGaussian, FullGaussian, LowRankGaussian, MeanFieldGaussian
from ..objectives import Shared


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
        shared, own = gradient
        family = _with_loc(shared.family, self.shared.family, _whiten)
        return ravel_pytree((shared._replace(family=family), _with_loc(own, self.own, _whiten)))[0]

    def back(self, vector: Float[Array, " n"]) -> tuple[Shared, Any]:
        """The gradient with these units."""
        shared, own = ravel_pytree((self.shared, self.own))[1](vector)
        family = _with_loc(shared.family, self.shared.family, _unwhiten)
        return shared._replace(family=family), _with_loc(own, self.own, _unwhiten)


def _with_loc(gradient, gaussian, change):
    """A tree with the gradient in the means changed."""
    if not isinstance(gaussian, MeanFieldGaussian | FullGaussian | LowRankGaussian | BlockGaussian):
        return gradient
    return eqx.tree_at(lambda tree: tree.loc, gradient, change(gaussian, gradient.loc))


def _whiten(gaussian, gradient):
    if isinstance(gaussian, FullGaussian):
        return jax.vjp(gaussian.sample, jnp.zeros_like(gaussian.loc))[1](gradient)[0]
    return _sds(gaussian) * gradient


def _unwhiten(gaussian, whitened):
    if isinstance(gaussian, FullGaussian):
        return jax.vjp(gaussian.standardized, jnp.zeros_like(gaussian.loc))[1](whitened)[0]
    return whitened / _sds(gaussian)


def _sds(gaussian):
    return jnp.exp(gaussian.log_scale) if isinstance(gaussian, BlockGaussian) else gaussian.marginals()[1]
