"""The one place where an optax optimizer touches our parameters."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax


def init(optimizer: optax.GradientTransformation, params: Any, *, per_unit: bool = False) -> optax.OptState:
    """Start the optimizer; with `per_unit`, one state for each unit, the leaves' last axis.

    Units of a minibatched plate are visited at different times, so each needs moments and a
    step count of its own.
    """
    with jax.numpy_dtype_promotion("standard"):
        return jax.vmap(optimizer.init, -1, -1)(params) if per_unit else optimizer.init(params)


@functools.lru_cache(maxsize=32)
def is_elementwise(optimizer: optax.GradientTransformation) -> bool:
    """Whether the optimizer treats every number by itself, so that splitting its parameters changes nothing."""
    params, gradient = jnp.array([0.3, -2.0]), jnp.array([40.0, 0.01])

    @jax.jit
    def together_and_apart():
        def step(rows):
            return ascend(optimizer, gradient[rows], init(optimizer, params[rows]), params[rows])[0]

        return step(slice(0, 2)), jnp.concatenate([step(slice(0, 1)), step(slice(1, 2))])

    return np.allclose(*together_and_apart(), rtol=1e-5, atol=1e-7)


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
