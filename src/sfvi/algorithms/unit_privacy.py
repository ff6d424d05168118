r"""SFVI that protects every unit: what leaves a silo is a noisy sum of shortened gradients.

With $g_i$ the gradient of unit i's part $\ell_i$ of $\mathcal{L}_j$ in $(\eta_G, \theta, \phi)$ and $\eta_s$, the
parameters of the silo's own latents, $\mathcal{S}$ the units drawn in this round, each with probability $q$, and
$r$ what is left of $\mathcal{L}_j$ without units, the gradient of $\mathcal{L}_j$ is replaced by

$$\nabla r + \frac1q M^{-1} \Big(\sum_{i \in \mathcal{S}} M g_i \min(1, C / \lVert M g_i \rVert)
  + \sigma C \, \xi\Big), \qquad \xi \sim \mathrm{N}(0, I)$$

$M$ measures gradients in posterior sds, see `measure.py`. The sum is of whole numbers, see `grid.py`.

$\eta_i$ needs no noise: it is made from unit i's data and from what left earlier, so taking the unit away changes no
other unit's summand, and its own is bounded. It moves in every round, whether the unit is drawn or not. $\eta_s$ is
made from all units' data, every summand depends on it, and so it sees their gradients through the same noise.

Where there is noise, $q(z_i \mid z_G, z_s)$ stays what it is when $\mu_G$ and $\mu_s$ move (`followed`): the units'
means move along by $C_i$ times as much, and $g_i$ is the gradient for means that move along. If they had to follow by
steps of their own, $\mu_G$ would see the curvature of data in which latents are known, many times that of the
posterior, and arrive as slowly as EM does.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import _optim
from .._types import GlobalVec, Key, Scalar
from ..errors import OptionError
from ..families import Local, StructuredLocal
from ..model import SiloData
from ..model.apart import Apart
from ..objectives import Shared
from . import local_params
from .elbo import Draw, Elbo
from .grid import Whole
from .measure import Measure
from .options import AbstractVariationalOptions
from .privacy import UnitPrivacy, noisy, secret_key, summand

AT_ONCE = 64  # units whose gradients are computed together


class Summed(NamedTuple):
    """What a round gathers from those drawn: the sum of their gradients and of their terms."""

    gradient: Any
    value: Any


def start(options: AbstractVariationalOptions, family: StructuredLocal) -> local_params.LocalOptState:
    """Start the optimizers of a silo's parameters; every unit has a state of its own."""
    if family.silo is not None and options.privacy is not None and options.privacy.shared_by > 1:
        raise OptionError(
            "privacy: shared_by is for models without latents of a silo's own: those learn in the silo, where only its "
            "share of the noise is; leave shared_by out."
        )
    own = None if family.silo is None else _optim.init(options.shared_optimizer, family.silo)
    units = {plate: _optim.init(options.own_optimizer, block, per_unit=True) for plate, block in family.units.items()}
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
        opt_state: Of their optimizers.
        broadcast: What the server sent.
        data: The silo's, with its units apart.

    Returns:
        The silo's parameters and optimizer after a step, the gradient that may leave, and the silo's term.
    """
    noise = elbo.global_noise(broadcast.key, broadcast.shared, elbo.options.num_samples)
    of_units, of_sum = jax.random.split(secret_key(key, broadcast.round, data))
    present = _drawn(of_units, privacy, data)
    assert data.apart is not None
    draw = elbo.draw(key, broadcast.round, data, noise)
    at = _At(elbo, family, broadcast, draw, data, data.apart, follows=privacy.noise > 0)
    nothing = at.nothing()
    units = Measure(broadcast.shared, family.silo)
    total = _sum(at, privacy, nothing, present, units)
    of_drawn = units.back(noisy(privacy, of_sum, total.gradient, noise.dtype) / privacy.rate)
    gradient, own = jax.tree.map(jnp.add, nothing.gradient, of_drawn)
    own_gradient = StructuredLocal(own, at.own())
    stepped = _ascend(elbo.options, family, opt_state, own_gradient, broadcast.shared.family.center)
    return stepped, gradient, nothing.value + total.value / privacy.rate


class _At(NamedTuple):
    """Where terms are evaluated."""

    elbo: Elbo
    family: StructuredLocal
    broadcast: Any
    draw: Draw
    data: SiloData
    apart: Apart
    follows: bool

    def unit(self, number):
        """A unit's term, and its gradients in what is shared and in the parameters of the silo's own latents."""
        return self._term(self._rows(number), self._noise(number), self.apart.take(self.data, number))

    def nothing(self):
        """The same of a silo without units: of its own latents only."""
        if self.data.program.layout.own.size:
            first = jnp.zeros((), jnp.int32)
            units = jax.tree.map(jnp.zeros_like, self._rows(first))  # nobody's
            return self._term(units, self._noise(first), self.apart.nobody(self.data))
        zeros = jax.tree.map(jnp.zeros_like, (self.broadcast.shared, self.family.silo))
        return Summed(zeros, jnp.zeros((), self.draw.noise.dtype))

    def own(self):
        """The gradients of all units' terms in their own parameters, which stay.

        `AT_ONCE` are computed together, however many there are, so that hardly a digit of one depends on who else is
        there (docs/threats.md).
        """
        size = self.apart.num_units(self.data)
        blocks = jnp.minimum(jnp.arange(-(-size // AT_ONCE) * AT_ONCE), size - 1).reshape(-1, AT_ONCE)

        def one(number):
            silo, draw = self.apart.take(self.data, number), self._noise(number)

            def term(units):
                return self.elbo.silo(self.broadcast.shared, StructuredLocal(self.family.silo, units), draw, silo)

            return jax.grad(term)(self._rows(number))

        found = jax.lax.map(jax.vmap(one), blocks)
        return jax.tree.map(
            lambda leaf: jnp.moveaxis(leaf.reshape(blocks.size, *leaf.shape[2:-1])[:size], 0, -1), found
        )

    def _rows(self, number):
        return jax.tree.map(lambda leaf: jnp.take(leaf, number[None], axis=-1), self.family.units)

    def _noise(self, number):
        """A unit's part of what was drawn for all, which depends on nothing but its id."""
        own = self.draw.local_noise
        return self.draw._replace(local_noise=Local(own.silo, jax.tree.map(lambda x: x[..., number[None]], own.units)))

    def _term(self, units, draw, silo):
        def term(shared, own):
            family = StructuredLocal(own, units)
            if self.follows:
                family = _along(family, shared.family.center)
            return self.elbo.silo(shared, family, draw, silo)

        value, gradient = jax.value_and_grad(term, argnums=(0, 1))(self.broadcast.shared, self.family.silo)
        return Summed(gradient, value)


def _drawn(key, privacy, data):
    """Which units take part; padding never does."""
    size = data.apart.num_units(data)
    present = jnp.arange(size) < data.sizes.get(data.apart.plate, size)
    if privacy.rate == 1:
        return present
    threshold = jnp.asarray(int(privacy.rate * 2**32), jnp.uint32)  # rounded down: never more often than promised
    return present & (jax.random.bits(key, (size,), jnp.uint32) < threshold)


def _sum(at, privacy, nothing, present, units):
    """The shortened gradients of those present, added up; memory is that of `AT_ONCE` gradients."""
    less = units.into(nothing.gradient)
    size = present.shape[0]
    width, count = min(AT_ONCE, size), jnp.sum(present)
    order = jnp.pad(jnp.argsort(~present, stable=True), (0, -size % width))

    def one(unit):
        found = at.unit(unit)
        value = found.value - nothing.value
        value = jnp.where(jnp.isfinite(value), value, 0.0)  # as its gradient
        return Summed(summand(privacy, units.into(found.gradient) - less), value)

    def some(number, total):
        places = number * width + jnp.arange(width)
        real = places < count
        found = jax.vmap(one)(order[places])
        theirs = jax.tree.map(
            lambda leaf: jnp.sum(jnp.where(real[:, None], leaf, 0), axis=0, dtype=leaf.dtype), found.gradient
        )
        gradient = total.gradient.plus(theirs) if isinstance(theirs, Whole) else total.gradient + theirs
        return Summed(gradient, total.value + jnp.sum(jnp.where(real, found.value, 0.0)))

    begin = Summed(jax.tree.map(jnp.zeros_like, summand(privacy, less)), jnp.zeros_like(nothing.value))
    return some(0, begin) if width == size else jax.lax.fori_loop(0, (count + width - 1) // width, some, begin)


def _ascend(options, family, opt_state, gradient, center):
    """Step uphill: the silo's own latents under noise, hence as what is shared, and all units without."""
    before: dict[str, Any] = family.units
    own, own_state = None, None
    if family.silo is not None:
        own, own_state = _optim.ascend(options.shared_optimizer, gradient.silo, opt_state.silo, family.silo)
        if options.privacy.noise > 0:
            before = _units_followed(family, jnp.zeros_like(center), (own.loc - family.silo.loc)[:, 0]).units
    units, states = {}, {}
    for plate, block in before.items():
        old = (block, opt_state.units[plate])
        new = _optim.ascend(options.own_optimizer, gradient.units[plate], old[1], block, per_unit=True)
        finite = _finite(new, block.loc.shape[-1])  # whoever breaks stays as it was, and nobody hears of it
        units[plate], states[plate] = jax.tree.map(lambda n, o, t=finite: jnp.where(t, n, o), new, old)
    return StructuredLocal(own, units), local_params.LocalOptState(own_state, states)


def followed(family: StructuredLocal, shift: GlobalVec) -> StructuredLocal:
    r"""A silo's parameters when $\mu_G$ has moved: units' posteriors given $(z_G, z_s)$ are as they were.

    The silo's own latents stay where they are: their $C_s$ is full of noise, and would carry it on.
    """
    moved = jnp.zeros(0, shift.dtype)
    if family.silo is not None:
        moved = -(family.silo.mean(shift) - family.silo.loc)[:, 0]  # of the mean of z_s where z_G stays
    return _units_followed(family, shift, moved)


def _along(family, center):
    r"""The same family, whose units move along where $\mu_G$ and $\mu_s$ do: for derivatives."""
    still = jax.lax.stop_gradient
    shift, moved = center - still(center), jnp.zeros(0, center.dtype)
    if family.silo is not None:
        fixed = still(family.silo)
        moved = (family.silo.loc - fixed.loc - (fixed.mean(shift) - fixed.loc))[:, 0]
    return _units_followed(family, shift, moved)


def _units_followed(family, shift, moved):
    """Units' blocks recentered, where the center of z_G moves by `shift` and the mean of z_s given z_G by `moved`."""
    parents = jnp.concatenate([shift, moved])
    parents = jnp.where(jnp.all(jnp.isfinite(parents)), parents, 0.0)
    units = {plate: block.recentered(parents) for plate, block in family.units.items()}
    return StructuredLocal(family.silo, units)


def _finite(tree, size):
    """Of each unit, on the last axis, whether all its numbers are."""
    parts = [jnp.isfinite(leaf).reshape(-1, size).all(axis=0) for leaf in jax.tree.leaves(tree)]
    return jnp.stack(parts).all(axis=0)
