"""A silo's data frame: the columns that a formula needs, complete and of known types."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from ..errors import DataError, OptionError
from .parsing import SILO, Parsed, variables

MISSING = ("error", "drop")


class Table(NamedTuple):
    """The rows of one silo that take part.

    Attributes:
        silo: The silo's name, for messages.
        frame: Numbers as floats, categories as they are.
        kinds: Of every column that is computed with, "numeric" or "categorical".
        orders: Levels of columns whose categories are ordered.
        dropped: How many rows were left out because of missing values.
    """

    silo: str
    frame: pd.DataFrame
    kinds: dict[str, str]
    orders: dict[str, tuple]
    dropped: int


def read(frame: pd.DataFrame, parsed: Parsed, *, silo: str, missing: str) -> Table:
    """Take the formula's columns out of a frame.

    Args:
        frame: One row an observation.
        parsed: The formula.
        silo: The silo's name.
        missing: "error", or "drop" for leaving incomplete rows out.
    """
    if missing not in MISSING:
        raise OptionError(f"missing is {missing!r}; choose 'error' or 'drop'.")
    check(frame, parsed, silo)
    needed: Any = frame[list(parsed.columns)]
    complete = ~needed.isna().any(axis=1).to_numpy()
    if missing == "error" and not complete.all():
        counts = needed.isna().sum()
        told = ", ".join(f"{column!r} {count}" for column, count in counts[counts > 0].items())
        raise DataError(
            f"Silo {silo!r} has missing values in {(~complete).sum()} of {len(frame)} rows (by column: {told}); remove "
            "or impute them, or leave those rows out of all silos: missing='drop' (--missing drop)."
        )
    if not complete.any():
        why = "every row has missing values" if len(frame) else "its table has no rows"
        raise DataError(f"Silo {silo!r} is empty: {why}; leave the silo out.")
    rows = needed[complete].reset_index(drop=True)
    computed = {name for part in (parsed.response, *parsed.components()) for name in variables(part)}
    kinds = {column: _kind(rows[column], silo) for column in parsed.columns if column in computed}
    orders = {
        column: tuple(_plain(c) for c in rows[column].cat.categories) for column in kinds if _ordered(rows[column])
    }
    converted = {column: _converted(rows[column], kinds.get(column)) for column in parsed.columns}
    return Table(silo, pd.DataFrame(converted, index=rows.index), kinds, orders, int((~complete).sum()))


def levels(table: Table, column: str) -> tuple:
    """The levels that occur in a column, sorted."""
    found: Any = table.frame[column]
    return sort_levels({_plain(value) for value in found.unique()}, column)


def sort_levels(found: set, column: str) -> tuple:
    """Levels in order, as formulae sorts them."""
    try:
        return tuple(sorted(found))
    except TypeError as error:
        raise DataError(f"The levels of column {column!r} mix numbers and text; give it one type.") from error


def group_ids(table: Table, columns: tuple[str, ...]) -> tuple[list, np.ndarray]:
    """The groups of a silo in order, and the number of each row's group."""
    chosen: Any = table.frame[list(columns)]
    index = pd.MultiIndex.from_frame(chosen)
    codes, found = pd.factorize(index, sort=True)
    ids = [_plain(values[0]) if len(columns) == 1 else tuple(map(_plain, values)) for values in found]
    return ids, codes.astype(np.int32)


def with_new_groups(frame: Any, columns: Sequence[str]) -> Any:
    """Give rows that have no group in one of these columns one of their own; what is no table is left as it is."""
    if not isinstance(frame, pd.DataFrame):
        return frame
    filled = frame.copy(deep=False)
    for column in columns:
        found = filled[column] if column in filled else pd.Series([None] * len(filled), filled.index, object)
        if not isinstance(found, pd.Series) or not found.isna().any():
            continue
        numbers = pd.api.types.is_numeric_dtype(found)  # ids are compared with those of the silo: these are none
        invented = [-row - 0.5 if numbers else f"(a new group, row {row})" for row in range(len(found))]
        filled[column] = found.astype(object).where(found.notna().to_numpy(), pd.Series(invented, found.index))
        filled[column] = filled[column].astype(float) if numbers else filled[column]
    return filled


def check(frame: pd.DataFrame, parsed: Parsed, silo: str) -> None:
    """Refuse what is no table, or lacks columns of the formula."""
    if not isinstance(frame, pd.DataFrame):
        raise DataError(f"Silo {silo!r} has a {type(frame).__name__}; give a pandas DataFrame, one row an observation.")
    for column in parsed.columns:
        if column not in frame.columns:
            known = ", ".join(map(str, frame.columns))
            raise DataError(f"Silo {silo!r} has no column {column!r}, which the formula uses; its columns are {known}.")
        if list(frame.columns).count(column) > 1:
            raise DataError(f"Silo {silo!r} has several columns named {column!r}; keep one.")
    if SILO in frame.columns and any(block.name == SILO for block in parsed.blocks):
        raise DataError(
            f"Silo {silo!r} has a column named '{SILO}', but in the formula that stands for the silo itself; rename "
            "the column."
        )


def _kind(column: pd.Series, silo: str) -> str:
    if pd.api.types.is_bool_dtype(column) or (
        pd.api.types.is_numeric_dtype(column) and not pd.api.types.is_complex_dtype(column)
    ):
        return "numeric"
    if isinstance(column.dtype, pd.CategoricalDtype):
        return "categorical"
    if pd.api.types.infer_dtype(column) == "boolean":
        return "numeric"
    if pd.api.types.is_string_dtype(column):
        return "categorical"
    raise DataError(
        f"Silo {silo!r}: column {column.name!r} is of type {column.dtype} with {pd.api.types.infer_dtype(column)} "
        "values; give numbers, text or categories."
    )


def _ordered(column: pd.Series) -> bool:
    return isinstance(column.dtype, pd.CategoricalDtype) and bool(column.dtype.ordered)


def _converted(column: pd.Series, kind: str | None) -> Any:
    if kind == "numeric":
        return column.astype(float)
    return pd.Series([_plain(value) for value in column], dtype=object) if kind == "categorical" else column


def _plain(value: Any) -> Any:
    """A level as Python has it, whole numbers without a point: 2.0 of one silo is 2 of another."""
    value = value.item() if isinstance(value, np.generic) else value
    return int(value) if isinstance(value, float) and value.is_integer() else value
