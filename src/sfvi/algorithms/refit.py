"""The local refit: a silo's posterior given the final global one, without communication."""

import jax
import jax.numpy as jnp
import optax

from .._types import Key
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
        num_steps: Steps.
        optimizer: By default Adam with a step size that falls to zero: no noise of the last steps remains.
    """
    if num_steps == 0 or not jax.tree.leaves(free):
        return free
    optimizer = optimizer or default_optimizer(num_steps)
    noise_key = jax.random.fold_in(key, STREAM)
    own_key = jax.random.fold_in(noise_key, data.silo_word)

    def step(carry, number):
        free, opt_state = carry
        noise = elbo.global_noise(jax.random.fold_in(own_key, number), shared, elbo.options.num_samples)
        draw = elbo.draw(noise_key, number, data, noise)
        rows = local_params.select(free, draw.indices)
        gradient = jax.grad(elbo.silo, argnums=1)(shared, rows, draw, data)
        return local_params.ascend(optimizer, free, opt_state, gradient, draw.indices), None

    start = (free, local_params.init(optimizer, free, data))
    (free, _), _ = jax.lax.scan(step, start, jnp.arange(num_steps))
    return free


def default_optimizer(num_steps: int) -> optax.GradientTransformation:
    """Adam with a step size that falls to zero."""
    return optax.adam(optax.cosine_decay_schedule(STEP_SIZE, num_steps))
