"""Many local steps between two exchanges: what SFVI-Avg and Sites have in common."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from .._types import Key, Scalar
from ..families import StructuredLocal
from ..model import SiloData
from ..objectives import Shared
from . import local_params
from .elbo import Draw, Elbo

STEPS_PER_EVALUATION = 20  # one more draw of the ELBO for as many local steps: about 2% of the work

Carry = TypeVar("Carry")


def num_evaluations(num_local_steps: int) -> int:
    """Draws of the ELBO at the start of a round."""
    return max(1, num_local_steps // STEPS_PER_EVALUATION)


def own_draw(elbo: Elbo, key: Key, shared: Shared, number: Int[Array, ""], data: SiloData) -> Draw:
    r"""The randomness of a local step, $\epsilon_G$ included, which is the silo's own here."""
    own_key = jax.random.fold_in(jax.random.fold_in(key, data.silo_word), number)
    noise = elbo.global_noise(own_key, shared, elbo.options.num_samples)
    return elbo.draw(key, number, data, noise)


def common_draw(elbo: Elbo, key: Key, broadcast: Any, data: SiloData, num_local_steps: int) -> Draw:
    r"""Randomness to evaluate the ELBO with at the broadcast: all silos and the server share $\epsilon_G$."""
    noise = elbo.global_noise(broadcast.key, broadcast.shared, num_evaluations(num_local_steps))
    return elbo.draw(key, broadcast.round * num_local_steps, data, noise)


def at_draw(elbo: Elbo, shared: Shared, free: StructuredLocal, draw: Draw, data: SiloData) -> Scalar:
    r"""$\mathcal{L}_j$ at a draw."""
    return elbo.silo(shared, local_params.select(free, draw.indices), draw, data)


def estimate(
    elbo: Elbo, key: Key, broadcast: Any, free: StructuredLocal, data: SiloData, num_local_steps: int
) -> Scalar:
    r"""Estimate $\mathcal{L}_j$ at the broadcast; of minibatches another one for every draw of $\epsilon_G$."""
    shared, whole = broadcast.shared, common_draw(elbo, key, broadcast, data, num_local_steps)
    if not whole.indices:
        return at_draw(elbo, shared, free, whole, data)

    def one(inputs):
        number, noise = inputs
        return at_draw(elbo, shared, free, elbo.draw(key, number, data, noise[None]), data)

    numbers = broadcast.round * num_local_steps + jnp.arange(whole.noise.shape[0])
    return jnp.mean(jax.lax.map(one, (numbers, whole.noise)))


def before_break(
    step: Callable[[Carry, Int[Array, ""]], tuple[Carry, Scalar]], start: Carry, first: Int[Array, ""], num_steps: int
) -> tuple[Int[Array, ""], Carry]:
    """The first step whose value or outcome is not finite, or else the last, and what it starts from."""

    def going(carry):
        number, _, finite, _ = carry
        return finite & (number + 1 < first + num_steps)

    def advance(carry):
        number, _, _, current = carry
        following, value = step(current, number + 1)
        return number + 1, current, jnp.isfinite(value) & _all_finite(following), following

    following, value = step(start, first)
    carry = (first, start, jnp.isfinite(value) & _all_finite(following), following)
    number, current, _, _ = jax.lax.while_loop(going, advance, carry)
    return number, current


def _all_finite(tree):
    floats = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return jnp.all(jnp.array([jnp.all(jnp.isfinite(leaf)) for leaf in floats]))
