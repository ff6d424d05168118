"""The local refit: a silo's posterior given the final global one, without communication."""

import functools

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int

from .._types import Key, Scalar
from ..families import StructuredLocal
from ..model import SiloData
from ..objectives import Shared
from . import local_params
from .elbo import Elbo

STEP_SIZE = 0.02
STREAM = 0x5EF17  # keeps the noise of a refit apart from that of the rounds


def refit(
    elbo: Elbo,
    key: Key,
    shared: Shared,
    free: StructuredLocal,
    data: SiloData,
    *,
    num_steps: int,
    optimizer: optax.GradientTransformation | None = None,
) -> StructuredLocal:
    r"""Ascend $\mathrm{E}_{q(z_G)}[\mathcal{L}_j]$ in $\eta_{Lj}$ alone.

    After averaging, $\eta_{Lj}$ fits the silo's own copy of $\eta_G$ rather than the average; this repairs it. A silo
    that joins after training starts from nothing and needs more steps.

    Args:
        elbo: The model under the options.
        key: The silo's key.
        shared: $\eta_G$, $\theta$ and $\phi$; they stay.
        free: Where $\eta_{Lj}$ starts, measured from the center of `shared.family`.
        data: The silo's data.
        num_steps: Steps of each unit. In a minibatched plate a step moves only the units drawn, so there are as many
            times more steps as batches in the plate.
        optimizer: By default Adam with a step size that falls to zero over all steps of the refit, for units drawn late
            and seldom too: no noise of the last steps remains. The schedule of an optimizer given here counts, in a
            minibatched plate, the unit's own steps.
    """
    if num_steps == 0 or not jax.tree.leaves(free):
        return free
    own, most = _num_batches(free, data)
    total = num_steps * own
    noise_key = jax.random.fold_in(key, STREAM)
    own_key = jax.random.fold_in(noise_key, data.silo_word)

    def step(number, carry):
        free, opt_state = carry
        noise = elbo.global_noise(jax.random.fold_in(own_key, number), shared, elbo.options.num_samples)
        draw = elbo.draw(noise_key, number, data, noise)
        rows = local_params.select(free, draw.indices)
        gradient = jax.grad(elbo.silo, argnums=1)(shared, rows, draw, data)
        chosen = optimizer or optax.adam(falling_step_size(number, total))
        moved = local_params.ascend(chosen, free, opt_state, gradient, draw.indices)
        return jax.tree.map(lambda new, old: jnp.where(number < total, new, old), moved, carry)

    start = (free, local_params.init(optimizer or optax.adam(STEP_SIZE), free, data))
    free, _ = jax.lax.fori_loop(0, num_steps * most, step, start)
    return free


def falling_step_size(number: Int[Array, ""], total: Int[Array, ""] | int) -> Scalar:
    """The default step size: half a cosine, from `STEP_SIZE` to zero."""
    return STEP_SIZE * 0.5 * (1.0 + jnp.cos(jnp.pi * number / total))


def _num_batches(free, data):
    """Batches in the largest plate of units that is minibatched: without padding and, a plain number, with it.

    Silos side by side take as many steps as the padded one, and the shorter ones stand still at the end. Were the
    length of the loop a silo's own, so would be its counter, and LLVM takes hours over the random numbers made of it.
    """
    plates = [plate for plate in data.program.layout.subsampled if plate.name in free.units]
    own = [-(-data.sizes.get(plate.name, plate.size) // plate.drawn) for plate in plates]
    most = [-(-plate.size // plate.drawn) for plate in plates]
    return functools.reduce(jnp.maximum, own, 1), max(most, default=1)
