"""Checking what a user hands over, before anything runs."""

import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._types import Scalar
from ..errors import DataError, ModelError, OptionError
from ..families import Local
from .layout import LocalLayout

CONSTANTS = (bool, int, float, complex, str, bytes)
EVERYWHERE = 0xFFFFFFFF  # first word of a unit whose id holds in every silo


def array_leaves(name: str, data: Any):
    """Split a silo's data into named arrays and the rest.

    Args:
        name: The silo's name.
        data: A data frame, whose columns of text are left out; or a tree whose leaves are arrays (with `__array__`, or
            lists of numbers) or constants.

    Returns:
        The arrays by name, the function that puts them back, and a hashable description of the rest.
    """
    if _is_frame(data):  # its columns by name
        text = text_columns(data)
        data = {str(column): values for column, values in data.items() if str(column) not in text}
    try:
        leaves, tree = jax.tree.flatten_with_path(data, is_leaf=lambda leaf: isinstance(leaf, list))
    except (TypeError, ValueError) as error:
        raise DataError(f"Silo {name!r}: the data's keys cannot be sorted ({error}); use strings as keys.") from error
    values, constants, names = {}, [], []
    for path, leaf in leaves:
        label = "data" + jax.tree_util.keystr(path)
        if isinstance(leaf, list) or hasattr(leaf, "__array__"):
            values[label] = _checked(name, label, leaf)
            constants.append(None)
        elif leaf is None or isinstance(leaf, CONSTANTS):
            constants.append(leaf)
        else:
            raise DataError(
                f"Silo {name!r}: {label} is a {type(leaf).__name__}; give arrays (for a sparse matrix .toarray()), "
                "numbers or text."
            )
        names.append(label)
    if not values:
        raise DataError(f"Silo {name!r} has no arrays in its data; give a dict of arrays.")

    def rebuild(values):
        merged = [values.get(n, c) for n, c in zip(names, constants, strict=True)]
        return jax.tree.unflatten(tree, merged)

    return values, rebuild, (str(tree), tuple((type(c), c) for c in constants))


def check_values(name: str, check: Callable[[Any], None], data: Any) -> None:
    """Let a model look at a silo's data, and say whose they are if it objects."""
    try:
        check(data)
    except KeyError as error:
        raise DataError(f"Silo {name!r}: there is no {error.args[0]!r} in the data; add it.") from error
    except ValueError as error:
        raise DataError(f"Silo {name!r}: {error}") from error


def text_columns(data: Any) -> list[str]:
    """Columns of a data frame that hold no numbers, which programs do not get; none of other data."""
    return (
        [str(c) for c, values in data.items() if np.asarray(values).dtype.kind not in "biuf"] if _is_frame(data) else []
    )


def _is_frame(data):
    return hasattr(data, "columns") and hasattr(data, "items")


def silo_word(name: str) -> int:
    """The number that stands for a silo's name in its noise."""
    return zlib.crc32(name.encode("utf-8", "surrogatepass"))


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


def count_units(name: str, num_units: Any, layout: LocalLayout) -> Scalar:
    """The number of exchangeable units of a silo, given or read off its plates; 0 if neither says."""
    if num_units is None:
        num_units = layout.num_units or 0
    elif (
        isinstance(num_units, bool) or not isinstance(num_units, int | float | np.number) or not 0 < num_units < np.inf
    ):
        raise OptionError(f"num_units of silo {name!r} is {num_units!r}; give a positive number.")
    return jnp.asarray(num_units, jnp.result_type(float))


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


def check_theta(theta: dict[str, Any]) -> None:
    """Parameters must be arrays or nested dicts of arrays: only those can be sent and saved by name."""
    for name, value in theta.items():
        for path, _ in jax.tree.flatten_with_path(value)[0]:
            if not all(isinstance(entry, jax.tree_util.DictKey) for entry in path):
                raise ModelError(
                    f"The parameter {name!r} holds a list, tuple or object; give an array or a dict of arrays."
                )


def describe(tree: Any) -> str:
    """Shapes of a tree of arrays, for messages and comparison."""
    shapes = [str(jnp.shape(leaf)) for leaf in jax.tree.leaves(tree)]
    return f"of shape {', '.join(shapes)}"


def _checked(name, label, leaf):
    try:
        array = np.asarray(leaf)
    except ValueError as error:
        raise DataError(f"Silo {name!r}: {label} is no array: {error}") from error
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
    with np.errstate(over="ignore"):  # said below, in a sentence
        converted = jnp.asarray(array)
    lost = np.isinf(converted) & np.isfinite(array) if array.dtype.kind == "f" else np.asarray(converted) != array
    if np.any(lost):
        raise DataError(
            f"Silo {name!r}: {label} has values too large for {converted.dtype}; rescale them, or enable 64 bits "
            "(jax.config.update('jax_enable_x64', True))."
        )
    return converted
