"""The one place where an optax optimizer touches our parameters."""

from typing import Any

import jax
import optax


def init(optimizer: optax.GradientTransformation, params: Any, *, per_unit: bool = False) -> optax.OptState:
    """Start the optimizer; with `per_unit`, one state for each unit, the leaves' last axis.

    Units of a minibatched plate are visited at different times, so each needs moments and a
    step count of its own.
    """
    with jax.numpy_dtype_promotion("standard"):
        return jax.vmap(optimizer.init, -1, -1)(params) if per_unit else optimizer.init(params)


def ascend(
    optimizer: optax.GradientTransformation,
    gradient: Any,
    opt_state: optax.OptState,
    params: Any,
    *,
    per_unit: bool = False,
) -> tuple[Any, optax.OptState]:
    """Take one step uphill: optax minimizes, an ELBO rises."""

    def step(gradient, opt_state, params):
        descent = jax.tree.map(lambda g: -g, gradient)
        updates, opt_state = optimizer.update(descent, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    with jax.numpy_dtype_promotion("standard"):
        return (jax.vmap(step, -1, -1) if per_unit else step)(gradient, opt_state, params)
