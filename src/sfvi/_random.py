"""Keys as users give them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._types import Key
from .errors import OptionError

IMPLEMENTATION = "threefry2x32"


def as_key(key: Any) -> Key:
    """Accept a JAX key, new or old style, or a whole number; give a Threefry key, whatever JAX's default is."""
    if isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.shape == ():
        if str(jax.random.key_impl(key)) == IMPLEMENTATION:
            return key
        key = jax.random.bits(key, (2,), jnp.uint32)
    if isinstance(key, jax.Array | np.ndarray) and key.dtype == np.uint32 and key.shape == (2,):
        return jax.random.wrap_key_data(jnp.asarray(key), impl=IMPLEMENTATION)
    if isinstance(key, int | np.integer) and not isinstance(key, bool) and abs(int(key)) < 2**63:
        return jax.random.key(int(key), impl=IMPLEMENTATION)
    raise OptionError(f"key is {key!r}; give jax.random.key(seed), or a whole number.")
