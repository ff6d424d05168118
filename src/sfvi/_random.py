"""Keys as users give them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._types import Key
from .errors import OptionError


def as_key(key: Any) -> Key:
    """Accept a JAX key, new or old style, or a whole number."""
    if isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.shape == ():
        return key
    if isinstance(key, jax.Array | np.ndarray) and key.dtype == np.uint32 and key.shape == (2,):
        return jax.random.wrap_key_data(jnp.asarray(key), impl="threefry2x32")
    if isinstance(key, int | np.integer) and not isinstance(key, bool) and abs(int(key)) < 2**63:
        return jax.random.key(int(key))
    raise OptionError(f"key is {key!r}; give jax.random.key(seed), or a whole number.")
