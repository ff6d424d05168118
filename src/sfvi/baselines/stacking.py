"""Silos laid one above the other, for methods that do the same in all of them."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from ..errors import DataError


class Stacked(NamedTuple):
    """Data of all silos.

    Attributes:
        names: Of the silos.
        data: Their trees of arrays, silos on the first axis, rows on the second, padded.
        rows: How many rows of each are real.
    """

    names: tuple[str, ...]
    data: Any
    rows: Int[Array, " silos"]


def stack(who: str, silos: Mapping[str, Any]) -> Stacked:
    """Check data of silos and lay them above each other.

    Args:
        who: The method, for messages.
        silos: Data by name: trees of arrays with the rows on the first axis.
    """
    if not silos:
        raise DataError(f"{who}: there are no silos; give the data of at least one.")
    first, kind = next(iter(silos.items()))
    shapes, rows = {}, []
    for name, data in silos.items():
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(data)]
        if any(leaf.ndim == 0 or not np.isfinite(leaf).all() for leaf in leaves):
            raise DataError(f"{who}: silo {name!r} has numbers without rows, or such that are not finite.")
        shapes[name] = [leaf.shape[1:] for leaf in leaves]
        if jax.tree.structure(data) != jax.tree.structure(kind) or shapes[name] != shapes[first]:
            raise DataError(f"{who}: the arrays of silo {name!r} are not like those of {first!r}; give all the same.")
        lengths = {len(leaf) for leaf in leaves}
        if len(lengths) != 1 or 0 in lengths:
            raise DataError(
                f"{who}: silo {name!r} has arrays of {sorted(lengths)} rows; give as many of each, at least 1."
            )
        rows.append(lengths.pop())
    stacked = jax.tree.map(lambda *leaves: _padded(leaves, max(rows)), *silos.values())
    return Stacked(tuple(silos), stacked, jnp.asarray(rows))


def _padded(leaves, length):
    first = np.asarray(leaves[0])
    stacked = np.zeros((len(leaves), length, *first.shape[1:]), np.result_type(*map(np.asarray, leaves)))
    for position, leaf in enumerate(leaves):
        stacked[position, : len(leaf)] = leaf
    return jnp.asarray(stacked)
