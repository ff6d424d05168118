"""The bijection inside a `NormalizingFlow`, from flowjax's parts; imported only when a flow is asked for."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from flowjax.bijections import AbstractBijection, Chain, RationalQuadraticSpline, Scan, Vmap
from flowjax.utils import get_ravelled_pytree_constructor
from jaxtyping import Array, Bool, Float
from paramax import Parameterize

INTERVAL = 4.0  # splines bend between -4 and 4 and go straight on beyond
MIN_SLOPE = 1e-2  # of a spline at a knot, and of an affine map
UNIT_SLOPE = float(np.log(np.expm1(1.0 - MIN_SLOPE)))  # where `_slope` is 1
GAIN = 0.03  # weights are stored divided by this: then a step size that suits means and log scales suits them too


def splines(size: int, knots: int) -> AbstractBijection:
    """A spline for each coordinate by itself."""
    return Vmap(eqx.filter_vmap(lambda: _spline(knots), axis_size=size)(), in_axes=eqx.if_array(0))


def couplings(size: int, num_layers: int, width: int, knots: int) -> AbstractBijection:
    r"""Coupling layers: coordinates whose number has bit m set given those without it, then the other way round.

    Two coordinates differ in one of the first $\log_2 n$ bits, so after that many layers each has seen each other. All
    couplings have networks of the same shape and are scanned over: compiling takes as long for many as for one.
    """
    bits = np.arange(num_layers) % (size - 1).bit_length()
    ones = (np.arange(size) >> bits[:, None]) & 1 == 1
    seen = jnp.asarray(np.stack([~ones, ones], axis=1).reshape(-1, size))
    build, count = get_ravelled_pytree_constructor(Chain([_spline(knots), _Affine()]), eqx.is_inexact_array)

    def make(key, seen):
        network = eqx.nn.MLP(size, size * count, width, 1, jax.nn.silu, key=key)
        first, last = network.layers
        start = jax.tree.map(lambda leaf: leaf / GAIN, first), jax.tree.map(jnp.zeros_like, last)
        return _Coupling(eqx.tree_at(lambda n: n.layers, network, start), build, seen)

    return Scan(eqx.filter_vmap(make)(jax.random.split(jax.random.key(0), len(seen)), seen))


class _Coupling(AbstractBijection):
    """Maps the coordinates not seen, each by itself, in a way that a network makes of those seen."""

    network: eqx.nn.MLP
    build: Callable
    seen: Bool[Array, " n"]
    shape: tuple[int, ...]
    cond_shape = None

    def __init__(self, network, build, seen):
        self.network, self.build, self.seen, self.shape = network, build, seen, seen.shape

    def transform_and_log_det(self, x, condition=None):
        return self._apply(x, lambda transformer, value: transformer.transform_and_log_det(value))

    def inverse_and_log_det(self, y, condition=None):
        return self._apply(y, lambda transformer, value: transformer.inverse_and_log_det(value))

    def _apply(self, x, function):
        network = jax.tree.map(lambda leaf: GAIN * leaf if eqx.is_array(leaf) else leaf, self.network)
        params = network(jnp.where(self.seen, x, 0.0))
        mapped, log_det = jax.vmap(lambda p, value: function(self.build(p), value))(params.reshape(*x.shape, -1), x)
        return jnp.where(self.seen, x, mapped), jnp.sum(jnp.where(self.seen, 0.0, log_det))


class _Affine(AbstractBijection):
    """One number's affine map, at first the identity. That of flowjax cannot be made while JAX traces."""

    loc: Float[Array, ""]
    scale: Float[Array, ""]
    shape = ()
    cond_shape = None

    def __init__(self):
        self.loc = jnp.zeros(())
        self.scale = Parameterize(_slope, jnp.full((), UNIT_SLOPE))  # type: ignore

    def transform_and_log_det(self, x, condition=None):
        return self.loc + self.scale * x, jnp.log(self.scale)

    def inverse_and_log_det(self, y, condition=None):
        return (y - self.loc) / self.scale, -jnp.log(self.scale)


def _spline(knots):
    """At first the identity. Its slope at both ends is 1, as beyond: a jump there would make gradients biased."""
    spline = RationalQuadraticSpline(knots=knots, interval=INTERVAL)
    slopes = Parameterize(_slopes, jnp.full(knots, UNIT_SLOPE))
    return eqx.tree_at(lambda s: s.derivatives, spline, slopes)


def _slopes(free):
    ends = jnp.ones_like(free[..., :1])
    return jnp.concatenate([ends, _slope(free), ends], axis=-1)


def _slope(free):
    return MIN_SLOPE + jax.nn.softplus(free)
