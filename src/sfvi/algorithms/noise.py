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

    def draw(part, ids, block):
        lanes, size = num_samples * block, ids.shape[1]
        words = jax.random.bits(jax.random.fold_in(jax.random.fold_in(key, part), round), (2, lanes), jnp.uint32)
        if lanes == 1:  # the same key for all: half the work
            encrypted = _encrypt((words[0, 0], words[1, 0]), ids[0], ids[1])
        else:
            # One long axis: XLA's CPU loops are vectorized over the last axis only.
            lane_key = (jnp.repeat(words[0], size), jnp.repeat(words[1], size))
            encrypted = _encrypt(lane_key, jnp.tile(ids[0], lanes), jnp.tile(ids[1], lanes))
        return _normal(*encrypted, dtype).reshape(num_samples, block, -1)

    def draw_all():
        own = draw(0, data.ids.silo, layout.own.size) if layout.own.size else None
        units = {}
        for part, group in enumerate(layout.groups, start=1):
            plate = group.plate.name
            ids = data.ids.units[plate]
            drawn = ids[:, indices[plate]] if plate in indices else ids
            units[plate] = draw(part, drawn, group.block)
        return Local(own, units)

    return _materialized(round, draw_all)


def _materialized(round, make):
    """Keep the noise in memory.

    Otherwise XLA's CPU compiler computes `erf_inv` again in every fusion that uses the noise, about twenty times a
    round; it cannot look into a branch, and optimization barriers are gone before it fuses.
    """
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(make))
    return jax.lax.cond(round >= 0, make, lambda: zeros)


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
