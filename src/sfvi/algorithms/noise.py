"""Noise of the local latents: a function of (key, unit, round) and of nothing else.

Neither the position of a unit in a silo's arrays, nor padding, nor the way an engine batches silos changes a digit.
One call of JAX's own counter-based generator serves all units; `jax.random` with one key per unit would cost several
times as much.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry_2x32
from jaxtyping import Array, Float, Int, UInt32

from .._types import Indices, Key
from ..families import Local
from ..model import SiloData

Words = UInt32[Array, " n"]
KeyWords = UInt32[Array, "*n"]


def local_noise(key: Key, round: Int[Array, ""], data: SiloData, indices: Indices, num_samples: int, dtype) -> Local:
    """Draw standard normals of shape (samples, block, units) for every part of a silo.

    Args:
        key: The silo's key, the same in all rounds. Silos may share it: their units differ.
        round: Number of the round.
        data: The silo's data, which know its units.
        indices: The drawn units of each subsampled plate.
        num_samples: Monte Carlo samples.
        dtype: Of the noise.
    """
    layout = data.program.layout

    def draw(part, units, block):
        words = jax.random.bits(jax.random.fold_in(key, part), (2,), jnp.uint32)
        unit_key = _encrypt((words[0], words[1]), units[0], units[1])
        # One long axis: XLA's CPU loops are vectorized over the last axis only.
        shape = (num_samples * block, units.shape[1])
        lanes = jnp.broadcast_to(jnp.arange(shape[0], dtype=jnp.uint32)[:, None], shape).ravel()
        rounds = jnp.full_like(lanes, round)
        first, second = (jnp.broadcast_to(word, shape).ravel() for word in unit_key)
        drawn = _normal(*_encrypt((first, second), rounds, lanes), dtype)
        return drawn.reshape(num_samples, block, -1)

    own = draw(0, data.ids.silo, layout.own.size) if layout.own.size else None
    units = {}
    for part, group in enumerate(layout.groups, start=1):
        plate = group.plate.name
        ids = data.ids.units[plate]
        drawn = ids[:, indices[plate]] if plate in indices else ids
        units[plate] = draw(part, drawn, group.block)
    return Local(own, units)


def _encrypt(key: tuple[KeyWords, KeyWords], left: Words, right: Words) -> tuple[Words, Words]:
    """Threefry-2x32 of pairs of counter words, each with its own pair of key words."""
    first, second = jnp.split(threefry_2x32(key, jnp.concatenate([left, right])), 2)
    return first, second


def _normal(left: Words, right: Words, dtype) -> Float[Array, " n"]:
    """Turn random words into standard normals, as `jax.random.normal` does."""
    if dtype == jnp.float64:
        bits = (left.astype(jnp.uint64) << np.uint64(32)) | right.astype(jnp.uint64)
        mantissa, one = bits >> np.uint64(12), np.uint64(0x3FF0000000000000)
    else:
        mantissa, one = left >> np.uint32(9), np.uint32(0x3F800000)
    uniform = jax.lax.bitcast_convert_type(mantissa | one, dtype) - np.ones((), dtype)
    low = np.nextafter(np.array(-1, dtype), np.array(0, dtype))
    symmetric = jnp.maximum(low, uniform * (1 - low) + low)
    return jnp.asarray(np.sqrt(2), dtype) * jax.lax.erf_inv(symmetric)
