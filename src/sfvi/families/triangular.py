"""Unit lower triangular matrices stored as the entries below their diagonal.

Matrices come alone, or many at once with further axes behind: entry $(i, j)$ of all of them is one contiguous row,
which is what a CPU vectorizes.
"""

import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Float

UNROLL = 8  # up to this size substitution is written out: faster than a LAPACK call per matrix


def packed_size(size: int) -> int:
    """Number of entries below the diagonal of a `size` x `size` matrix."""
    return size * (size - 1) // 2


def unpack(packed: Float[Array, "m *batch"], size: int) -> Float[Array, "n n *batch"]:
    """Build the unit lower triangular matrix from slices and a reshape: no scatter, forward or back.

    The entries are laid out as in TensorFlow Probability's `fill_triangular`.
    """
    inner = size - 1  # below the diagonal lies a triangle of this side, its own diagonal included
    batch = packed.shape[1:]
    square = jnp.concatenate([packed[inner:], jnp.flip(packed, 0)], axis=0)
    square = square.reshape(inner, inner, *batch)
    trailing = (1,) * len(batch)
    below = jnp.tri(inner, dtype=packed.dtype).reshape(inner, inner, *trailing)
    padded = jnp.pad(square * below, [(1, 0), (0, 1)] + [(0, 0)] * len(batch))
    return padded + jnp.eye(size, dtype=packed.dtype).reshape(size, size, *trailing)


def pack(triangle: Float[Array, "n n"]) -> Float[Array, " m"]:
    """Invert `unpack`, which reads a stored entry at two places, one of them above the diagonal."""
    inner = triangle.shape[0] - 1
    size = packed_size(inner + 1)
    flat = jnp.tril(triangle[1:, :-1]).reshape(-1)
    return jnp.flip(flat)[:size].at[inner:].add(flat[: size - inner])


def multiply(matrix: Float[Array, "n n *batch"], vector: Float[Array, "n *batch"]) -> Float[Array, "n *batch"]:
    """Multiply each matrix with its vector."""
    return jnp.einsum("ij...,j...->i...", matrix, vector)


def solve(matrix: Float[Array, "n n *batch"], vector: Float[Array, "n *batch"]) -> Float[Array, "n *batch"]:
    r"""Solve $L x = v$ for unit lower triangular $L$."""
    size = vector.shape[0]
    if size > UNROLL:
        first = jnp.moveaxis(matrix, (0, 1), (-2, -1))
        right = jnp.moveaxis(vector, 0, -1)[..., None]
        solved = solve_triangular(first, right, lower=True, unit_diagonal=True)
        return jnp.moveaxis(solved[..., 0], -1, 0)
    solved = []
    for row in range(size):
        value = vector[row]
        for column in range(row):
            value = value - matrix[row, column] * solved[column]
        solved.append(value)
    return jnp.stack(solved)


def solve_all(matrix: Float[Array, "n n"], columns: Float[Array, "n m"]) -> Float[Array, "n m"]:
    r"""Solve $L X = V$ for one unit lower triangular $L$."""
    return solve_triangular(matrix, columns, lower=True, unit_diagonal=True)
