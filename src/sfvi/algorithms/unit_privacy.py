r"""SFVI that protects every unit: what leaves a silo is a noisy sum of shortened gradients.

With $g_i$ the gradient of unit i's part $\ell_i$ of $\mathcal{L}_j$ in $(\eta_G, \theta, \phi)$ and $\eta_s$, the
parameters of the silo's own latents, $\mathcal{S}$ the units drawn in this round, each with probability $q$, and
$r$ what is left of $\mathcal{L}_j$ without units, the gradient of $\mathcal{L}_j$ is replaced by

$$\nabla r + \frac1q M^{-1} \Big(\sum_{i \in \mathcal{S}} M g_i \min(1, C / \lVert M g_i \rVert)
  + \sigma C \, \xi\Big), \qquad \xi \sim \mathrm{N}(0, I)$$

$M$ multiplies the gradient in a mean by the standard deviation that belongs to it, which all know: what is left is
about $\sqrt{d / n}$ for each of n units whatever the scale of the data, and as large in means as in scales. The sum is
of whole numbers, see `grid.py`.

$\eta_i$ needs no noise: it is made from unit i's data and from what left earlier, so taking the unit away changes no
other unit's summand, and its own is bounded. $\eta_s$ is made from all units' data, every summand depends on it, and
so it sees their gradients through the same noise.
"""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from .. import _optim
from .._types import Key, Scalar
from ..families import StructuredLocal
from ..model import SiloData
from ..model.apart import Apart
from ..objectives import Shared
from . import local_params
from .elbo import Elbo
from .grid import Whole
from .privacy import UnitPrivacy, noisy, secret_key, summand

AT_ONCE = 64  # units whose gradients are in memory together


class Summed(NamedTuple):
    """What a round gathers from units: the sum of their gradients and of their terms, and their own gradients."""

    gradient: Any
    value: Any
    own: Any


def start(optimizer: Any, family: StructuredLocal) -> local_params.LocalOptState:
    """Start the optimizer of a silo's parameters; every unit has a state of its own."""
    own = None if family.silo is None else _optim.init(optimizer, family.silo)
    units = {plate: _optim.init(optimizer, block, per_unit=True) for plate, block in family.units.items()}
    return local_params.LocalOptState(own, units)


def step(
    elbo: Elbo,
    privacy: UnitPrivacy,
    key: Key,
    family: StructuredLocal,
    opt_state: local_params.LocalOptState,
    broadcast: Any,
    data: SiloData,
) -> tuple[tuple[StructuredLocal, local_params.LocalOptState], Shared, Scalar]:
    """A silo's round.

    Args:
        elbo: The model under the user's options.
        privacy: What is promised.
        key: Whoever knows it can take the noise away: of a real silo, nobody else does.
        family: The silo's parameters.
        opt_state: Of their optimizer.
        broadcast: What the server sent.
        data: The silo's, with its units apart.

    Returns:
        The silo's parameters and optimizer after a step, the gradient that may leave, and the silo's term.
    """
    noise = elbo.global_noise(broadcast.key, broadcast.shared, elbo.options.num_samples)
    of_units, of_sum = jax.random.split(secret_key(key, broadcast.round, data))
    present = _drawn(of_units, privacy, data)
    assert data.apart is not None
    at = _At(elbo, key, family, broadcast, noise, data, data.apart)
    nothing = at.nothing()
    scales, rebuild = ravel_pytree(measure(broadcast.shared, family.silo))
    total = _sum(at, privacy, nothing, present, scales)
    vector, _ = ravel_pytree((nothing.gradient, nothing.own.silo))
    gradient, own = rebuild(vector + noisy(privacy, of_sum, total.gradient, scales.dtype) / scales / privacy.rate)
    stepped = _ascend(elbo.options.own_optimizer, family, opt_state, StructuredLocal(own, total.own), present)
    return stepped, gradient, nothing.value + total.value / privacy.rate


class _At(NamedTuple):
    """Where terms are evaluated."""

    elbo: Elbo
    key: Key
    family: StructuredLocal
    broadcast: Any
    noise: Any
    data: SiloData
    apart: Apart

    def unit(self, number):
        """A unit's term and its gradients in what is shared and in the silo's parameters."""
        return self._term(number, self.apart.take(self.data, number))

    def nothing(self):
        """The term of a silo without units: of its own latents only."""
        first = jnp.zeros((), jnp.int32)
        if self.data.program.layout.own.size:
            return self._term(first, self.apart.nobody(self.data))
        zeros = jax.tree.map(jnp.zeros_like, (self.broadcast.shared, self._rows(first)))
        return Summed(zeros[0], jnp.zeros((), self.noise.dtype), zeros[1])

    def _term(self, number, silo):
        draw = self.elbo.draw(self.key, self.broadcast.round, silo, self.noise)
        term = jax.value_and_grad(self.elbo.silo, argnums=(0, 1))
        value, (shared, own) = term(self.broadcast.shared, self._rows(number), draw, silo)
        return Summed(shared, value, own)

    def _rows(self, number):
        units = jax.tree.map(lambda leaf: jnp.take(leaf, number[None], axis=-1), self.family.units)
        return StructuredLocal(self.family.silo, units)


def _drawn(key, privacy, data):
    """Which units take part; padding never does."""
    size = data.apart.num_units(data)
    present = jnp.arange(size) < data.sizes.get(data.apart.plate, size)
    return present if privacy.rate == 1 else present & (jax.random.uniform(key, (size,)) < privacy.rate)


def measure(shared: Shared, own: Any) -> tuple[Shared, Any]:
    """By what each number of a gradient is multiplied before it is shortened, and divided after: public numbers."""

    def of(gaussian):
        ones = jax.tree.map(jnp.ones_like, gaussian)
        if not hasattr(gaussian, "loc") or not hasattr(gaussian, "log_scale"):
            return ones
        return eqx.tree_at(lambda family: family.loc, ones, jnp.exp(gaussian.log_scale))

    theta, network = jax.tree.map(jnp.ones_like, (shared.theta, shared.network))
    return Shared(of(shared.family), theta, network), None if own is None else of(own)


def _sum(at, privacy, nothing, present, scales):
    """The shortened gradients of those present, added up; memory is that of `AT_ONCE` gradients."""
    less, _ = ravel_pytree((nothing.gradient, nothing.own.silo))
    size = present.shape[0]
    width, count = min(AT_ONCE, size), jnp.sum(present)
    order = jnp.pad(jnp.argsort(~present, stable=True), (0, -size % width))

    def one(unit):
        found = at.unit(unit)
        vector, _ = ravel_pytree((found.gradient, found.own.silo))
        return Summed(summand(privacy, (vector - less) * scales), found.value - nothing.value, found.own.units)

    def some(number, total):
        places = number * width + jnp.arange(width)
        real = places < count
        found = jax.vmap(one)(order[places])
        where = jnp.where(real, order[places], size)  # the others fall out
        own = jax.tree.map(
            lambda leaf, new: leaf.at[..., where].set(jnp.moveaxis(new[..., 0], 0, -1), mode="drop"),
            total.own,
            found.own,
        )
        theirs = jax.tree.map(
            lambda leaf: jnp.sum(jnp.where(real[:, None], leaf, 0), axis=0, dtype=leaf.dtype), found.gradient
        )
        gradient = total.gradient.plus(theirs) if isinstance(theirs, Whole) else total.gradient + theirs
        return Summed(gradient, total.value + jnp.sum(jnp.where(real, found.value, 0.0)), own)

    nobody = jax.tree.map(jnp.zeros_like, summand(privacy, less))
    begin = Summed(nobody, jnp.zeros_like(nothing.value), jax.tree.map(jnp.zeros_like, at.family.units))
    return some(0, begin) if width == size else jax.lax.fori_loop(0, (count + width - 1) // width, some, begin)


def _ascend(optimizer, family, opt_state, gradient, present):
    """Step uphill: the silo's own latents, and the units that took part."""
    own, own_state = None, None
    if family.silo is not None:
        own, own_state = _optim.ascend(optimizer, gradient.silo, opt_state.silo, family.silo)
    units, states = {}, {}
    for plate, block in family.units.items():
        old = (block, opt_state.units[plate])
        new = _optim.ascend(optimizer, gradient.units[plate], old[1], block, per_unit=True)
        taken = present & _finite(new, len(present))  # whoever breaks stays as it was, and nobody hears of it
        units[plate], states[plate] = jax.tree.map(lambda n, o, t=taken: jnp.where(t, n, o), new, old)
    return StructuredLocal(own, units), local_params.LocalOptState(own_state, states)


def _finite(tree, size):
    """Of each unit, on the last axis, whether all its numbers are."""
    parts = [jnp.isfinite(leaf).reshape(-1, size).all(axis=0) for leaf in jax.tree.leaves(tree)]
    return jnp.stack(parts).all(axis=0)
