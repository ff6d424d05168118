"""A silo's data, read at the silo: from a table, or by its own function."""

from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from ..errors import DataError, first_line
from .code import load_object


class SiloInput(NamedTuple):
    """What a loader may return instead of the data alone.

    Attributes:
        data: As the silo program expects them.
        unit_ids: See `StructuredModel.silo_data`.
        num_units: See `StructuredModel.silo_data`.
    """

    data: Any
    unit_ids: Any = None
    num_units: float | None = None


def read(name: str, source: str, *, unit_ids: str | None = None) -> SiloInput:
    """Read a silo's data.

    Args:
        name: The silo.
        source: A .csv or .parquet file, whose columns the program finds by name; or `module:function`, which is called
            with the silo's name and returns the data or a `SiloInput`.
        unit_ids: The column that holds the units' ids; it is taken out of the data.
    """
    path = Path(source)
    kind = path.suffix.lower()
    if kind not in READERS:
        if ":" not in source:
            raise DataError(f"data is {source!r}; give a .csv or .parquet file, or module:function.")
        return _load(name, source)
    if not path.is_file():
        raise DataError(f"Silo {name!r}: there is no file {source!r}.")
    try:
        table = READERS[kind](path)
    except ImportError:
        raise DataError(f"Silo {name!r}: reading {source!r} needs pyarrow; pip install 'sfvi[parquet]'.") from None
    except Exception as error:
        raise DataError(f"Silo {name!r}: {source!r} cannot be read ({first_line(error)}).") from error
    if table.empty:
        raise DataError(f"Silo {name!r} is empty: {source!r} has no rows.")
    if unit_ids is None:
        return SiloInput(table)
    if unit_ids not in table:
        raise DataError(f"Silo {name!r}: {source!r} has no column {unit_ids!r} for unit_ids.")
    return SiloInput(table.drop(columns=unit_ids), table[unit_ids].to_numpy())


READERS = {".csv": pd.read_csv, ".parquet": pd.read_parquet}


def _load(name, source):
    function = load_object("data", source)
    if not callable(function):
        raise DataError(f"Silo {name!r}: data names {source!r}, which is no function.")
    try:
        found = function(name)
    except Exception as error:
        raise DataError(f"Silo {name!r}: the loader {source!r} fails ({first_line(error)}).") from error
    return found if isinstance(found, SiloInput) else SiloInput(found)
