"""Checking what a user hands over, before anything runs."""

import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import DataError, OptionError
from ..families import Local
from .layout import LocalLayout

EVERYWHERE = 0xFFFFFFFF  # first word of a unit whose id holds in every silo


def array_leaves(name: str, data: Any):
    """Split a silo's data into named arrays and the rest.

    Args:
        name: The silo's name.
        data: A data frame, or a tree whose leaves are arrays (with `__array__`, or lists of numbers) or constants.

    Returns:
        The arrays by name, the function that puts them back, and a hashable description of the rest.
    """
    if hasattr(data, "columns") and hasattr(data, "items"):  # a data frame: its columns by name
        data = {str(column): values for column, values in data.items()}
    leaves, tree = jax.tree.flatten_with_path(data, is_leaf=lambda leaf: isinstance(leaf, list))
    values, constants, names = {}, [], []
    for path, leaf in leaves:
        label = "data" + jax.tree_util.keystr(path)
        if isinstance(leaf, list) or hasattr(leaf, "__array__"):
            values[label] = _checked(name, label, leaf)
            constants.append(None)
        else:
            constants.append(leaf)
        names.append(label)
    if not values:
        raise DataError(f"Silo {name!r} has no arrays in its data; give a dict of arrays.")

    def rebuild(values):
        merged = [values.get(n, c) for n, c in zip(names, constants, strict=True)]
        return jax.tree.unflatten(tree, merged)

    return values, rebuild, (str(tree), tuple(map(repr, constants)))


def silo_word(name: str) -> int:
    """The number that stands for a silo's name in its noise."""
    return zlib.crc32(name.encode())


def identify(name: str, unit_ids: Any, layout: LocalLayout) -> Local:
    """Give the silo and every unit of it a pair of words.

    Without `unit_ids` a unit is (silo, position); with them it is (`EVERYWHERE`, id), whichever silo holds it.
    """
    word = silo_word(name)
    own = np.array([[word], [EVERYWHERE]], np.uint32)
    plates = {group.plate.name: group.plate.size for group in layout.groups}
    if unit_ids is None:
        pairs = {plate: (word, np.arange(size)) for plate, size in plates.items()}
    else:
        checked = _check_unit_ids(name, unit_ids, plates)
        pairs = {plate: (EVERYWHERE, ids) for plate, ids in checked.items()}
    units = {}
    for plate, (first, second) in pairs.items():
        columns = np.broadcast_arrays(np.uint32(first), second.astype(np.uint32))
        units[plate] = jnp.asarray(np.stack(columns))
    return Local(jnp.asarray(own), units)


def _check_unit_ids(name, unit_ids, plates):
    if not isinstance(unit_ids, dict):
        if len(plates) != 1:
            raise OptionError(
                f"Silo {name!r} has {len(plates)} plates with local latents ({', '.join(plates)}); "
                "give unit_ids as a mapping from plate to ids."
            )
        unit_ids = dict.fromkeys(plates, unit_ids)
    if set(unit_ids) != set(plates):
        raise OptionError(
            f"unit_ids of silo {name!r} name the plates {sorted(unit_ids)}; its plates with local "
            f"latents are {sorted(plates)}."
        )
    checked = {}
    for plate, size in plates.items():
        ids = np.asarray(unit_ids[plate])
        if ids.shape != (size,) or not np.issubdtype(ids.dtype, np.integer):
            raise OptionError(
                f"unit_ids of silo {name!r}, plate {plate!r}, must be {size} whole numbers, "
                f"not {ids.dtype} of shape {ids.shape}."
            )
        if ids.min() < 0 or ids.max() >= EVERYWHERE:
            raise OptionError(f"unit_ids of silo {name!r}, plate {plate!r}, must lie between 0 and {EVERYWHERE - 1}.")
        if len(np.unique(ids)) < size:
            raise OptionError(f"unit_ids of silo {name!r}, plate {plate!r}, hold an id twice.")
        checked[plate] = ids
    return checked


def describe(tree: Any) -> str:
    """Shapes of a tree of arrays, for messages and comparison."""
    shapes = [str(jnp.shape(leaf)) for leaf in jax.tree.leaves(tree)]
    return f"of shape {', '.join(shapes)}"


def _checked(name, label, leaf):
    array = np.asarray(leaf)
    if array.dtype.kind not in "biuf":
        raise DataError(f"Silo {name!r}: {label} has type {array.dtype}; turn it into numbers (codes for categories).")
    if 0 in array.shape:
        raise DataError(f"Silo {name!r} is empty: {label} has shape {array.shape}; leave the silo out.")
    if array.dtype.kind == "f" and np.isnan(array).any():
        count = int(np.isnan(array).sum())
        raise DataError(
            f"Silo {name!r}: {label} has {count} NaN of {array.size} values; remove or impute them, or "
            "pass a mask beside the data."
        )
    return jnp.asarray(array)
