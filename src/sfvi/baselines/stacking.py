"""Silos laid one above the other, for methods that do the same in all of them."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from ..errors import DataError, OptionError


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


def stack_labelled(who: str, silos: Mapping[str, Any], num_classes: int) -> Stacked:
    """The same for silos that hold `{"x": features, one row each, "y": classes}`, with classes that are such."""
    for name, data in silos.items():
        if not isinstance(data, Mapping) or set(data) != {"x", "y"}:
            raise DataError(f"{who}: silo {name!r} does not hold x and y; give features and classes by these names.")
        y = np.asarray(data["y"])
        if y.ndim != 1 or y.dtype.kind not in "iu" or (len(y) and not 0 <= y.min() <= y.max() < num_classes):
            raise DataError(f"{who}: y of silo {name!r} must be whole numbers from 0 to {num_classes - 1}, one a row.")
    return stack(who, silos)


def position_of(silo: str, names: Sequence[str]) -> int:
    """Where a silo lies."""
    if silo not in names:
        raise OptionError(f"There is no silo {silo!r} here; there are {', '.join(map(repr, names))}.")
    return list(names).index(silo)


def _padded(leaves, length):
    first = np.asarray(leaves[0])
    stacked = np.zeros((len(leaves), length, *first.shape[1:]), np.result_type(*map(np.asarray, leaves)))
    for position, leaf in enumerate(leaves):
        stacked[position, : len(leaf)] = leaf
    return jnp.asarray(stacked)
