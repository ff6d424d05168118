"""Keys as users give them."""

from typing import Any

import jax
import jax.numpy as jnp

from ._types import Key
from .errors import OptionError


def as_key(key: Any) -> Key:
    """Accept a JAX key, new or old style, or a whole number."""
    if isinstance(key, jax.Array):
        return key if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else jax.random.wrap_key_data(key)
    if isinstance(key, int) and not isinstance(key, bool):
        return jax.random.key(key)
    raise OptionError(f"key is {key!r}; give jax.random.key(seed), or a whole number.")
