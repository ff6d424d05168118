r"""The noise of a step, a function of keys, rounds and units and of nothing else.

$\epsilon_G$ is the same at the server and in every silo; $\epsilon_L$ belongs to a unit, and neither its position in a
silo's arrays, nor padding, nor the way an engine batches silos changes a digit of it.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from .._types import Indices, Key
from ..families import Local
from ..model import SiloData

Words = UInt32[Array, " n"]
KeyWords = UInt32[Array, "*n"]

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = np.uint32(0x1BD11BDA)
MANY = 1000  # numbers from which it pays to keep them


def global_noise(key: Key, num_samples: int, size: int, dtype) -> Float[Array, "samples size"]:
    r"""Draw $\epsilon_G$ from the key of the round."""
    left, right = jax.random.key_data(key)

    def draw():
        counter = jnp.arange(num_samples * size, dtype=jnp.uint32)
        return _normal(*_encrypt((left, right), jnp.zeros_like(counter), counter), dtype).reshape(num_samples, size)

    return _materialized(draw, left) if num_samples * size >= MANY else draw()


def local_noise(key: Key, round: Int[Array, ""], data: SiloData, indices: Indices, num_samples: int, dtype) -> Local:
    r"""Draw $\epsilon_L$, of shape (samples, block, units) for every part of a silo.

    Args:
        key: The silo's key, the same in all rounds. Silos may share it: their units differ.
        round: Number of the round.
        data: The silo's data, which know its units.
        indices: The drawn units of each subsampled plate.
        num_samples: Monte Carlo samples.
        dtype: Of the noise.
    """
    layout = data.program.layout
    round_key = jax.random.fold_in(key, round)

    def draw(part, ids, block):
        lanes, size = num_samples * block, ids.shape[1]
        left, right = jax.random.key_data(round_key)
        counter = jnp.arange(lanes, dtype=jnp.uint32)
        words = _encrypt((left, right), jnp.full_like(counter, part), counter)  # a key for each lane
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

    return _materialized(draw_all, round)


def matched(noise: Float[Array, "samples size"]) -> Float[Array, "samples size"]:
    r"""Shift and turn draws of $\epsilon_G$ so that their mean is zero and, if they are enough, their covariance I.

    Averages of quadratics are then exact: what noise is left in an optimum comes from what is not Gaussian.
    """
    samples, size = noise.shape
    centered = noise - jnp.mean(noise, axis=0)
    if samples < 2 * size + 2:
        return centered / jnp.sqrt(jnp.mean(centered**2, axis=0))
    root = jnp.linalg.cholesky(centered.T @ centered / samples)
    return jax.scipy.linalg.solve_triangular(root, centered.T, lower=True).T


def matched_local(noise: Local, of_globals: Float[Array, "samples size"]) -> Local:
    r"""The same for each number of $\epsilon_L$, and no correlation with $\epsilon_G$ that is not there."""
    samples, size = of_globals.shape

    def match(leaf):
        draws = leaf.reshape(samples, -1, *leaf.shape[1:])
        draws = draws - jnp.mean(draws, axis=(0, 1))
        if samples >= 2 * size + 2:
            draws = draws - jnp.tensordot(of_globals, jnp.tensordot(of_globals, draws, [[0], [0]]) / samples, 1)
        return (draws / jnp.sqrt(jnp.mean(draws**2, axis=(0, 1)))).reshape(leaf.shape)

    return jax.tree.map(match, noise)


def _materialized(make, any_number):
    """Keep the noise in memory: made in a branch that is always taken, which the compiler does not know.

    Otherwise XLA's CPU compiler computes `erf_inv` again in every fusion that uses the noise, about twenty times a
    round; it cannot look into a branch, and optimization barriers are gone before it fuses. The other branch must use a
    number too: a branch that uses nothing keeps the compiler from seeing that server and silos draw the same noise.
    """
    shapes = jax.eval_shape(make)
    return jax.lax.cond(
        _is_a_number(any_number),
        make,
        lambda: jax.tree.map(lambda leaf: jnp.full(leaf.shape, any_number.astype(leaf.dtype)), shapes),
    )


@jax.custom_batching.custom_vmap
def _is_a_number(value):
    """True. Of silos side by side one answer for all: by answers of their own both branches would be computed."""
    return (value.astype(jnp.uint32) | np.uint32(1)) > 0


@_is_a_number.def_vmap
def _are_numbers(size, batched, values):
    del size, batched
    return _is_a_number(jnp.max(values)), False


def _encrypt(key: tuple[KeyWords, KeyWords], left: Words, right: Words) -> tuple[Words, Words]:
    """Threefry-2x32, JAX's own generator, of pairs of counter words under one key or a key for each.

    `jax.random` would want a key object for every unit, and rolls the twenty rounds into a loop, which costs more than
    the rest of a step; written out they are one vectorized pass.
    """
    schedule = (*key, key[0] ^ key[1] ^ PARITY)
    left, right = left + schedule[0], right + schedule[1]
    for group in range(5):
        for bits in ROTATIONS[group % 2]:
            left = left + right
            right = left ^ ((right << np.uint32(bits)) | (right >> np.uint32(32 - bits)))
        left = left + schedule[(group + 1) % 3]
        right = right + schedule[(group + 2) % 3] + np.uint32(group + 1)
    return left, right


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
