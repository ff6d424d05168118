"""Settings of experiments: `experiments/<name>/spec.toml`, checked against the fields of the experiment's class."""

import dataclasses
import math
import tomllib
import types
import typing
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin

from ..errors import OptionError

FILE = "spec.toml"


class Rounds(NamedTuple):
    """Exchanges, and local steps of a silo in each."""

    rounds: int
    steps: int


def names(folder: Path) -> list[str]:
    """Experiments that have a specification in a folder."""
    return sorted(path.parent.name for path in Path(folder).glob(f"*/{FILE}"))


def read(folder: Path, kind: type, preset: str) -> Any:
    """Make an experiment from its specification.

    Args:
        folder: Of the experiment.
        kind: Its class, a dataclass: its fields are the settings, and all of them must be given.
        preset: Which of its presets.
    """
    path = folder / FILE
    try:
        content = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise OptionError(f"There is no {path}; say where experiments are with --folder.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise OptionError(f"{path} cannot be read: {error}.") from error
    presets = content.get("presets")
    if not isinstance(presets, dict) or not presets:
        raise OptionError(f"{path} has no presets; begin one with [presets.quick].")
    if preset not in presets:
        raise OptionError(f"{path} has no preset {preset!r}; choose one of {', '.join(sorted(presets))}.")
    where = f"{path}, preset {preset}"
    hints = typing.get_type_hints(kind)
    fields = {field.name: hints[field.name] for field in dataclasses.fields(kind)}
    return kind(**_fill(presets[preset], fields, {}, where))


def check_seeds(name: str, seeds: tuple[int, ...]) -> None:
    """Refuse seeds that are none, or twice the same."""
    if not seeds or len(set(seeds)) < len(seeds):
        raise OptionError(f"{name}: seeds are {list(seeds)}; give at least one, each once.")


def _fill(given, fields, defaults, where):
    if not isinstance(given, dict):
        raise OptionError(f"{where} is {given!r}; give a table of settings.")
    for setting in sorted(given.keys() - fields.keys()):
        raise OptionError(f"{where}: {setting!r} is not a setting; there are {', '.join(fields)}.")
    for setting in sorted(fields.keys() - given.keys() - defaults.keys()):
        raise OptionError(f"{where}: {setting!r} is missing; add it.")
    return {setting: _build(value, fields[setting], f"{where}, {setting}") for setting, value in given.items()}


def _build(value, expected, where):
    """A value of the expected type, or a sentence about what it should be."""
    kind = get_origin(expected)
    if kind is tuple:
        if not isinstance(value, list):
            raise OptionError(f"{where} is {value!r}; give a list.")
        return tuple(_build(item, get_args(expected)[0], where) for item in value)
    if kind is typing.Literal:
        if value not in get_args(expected):
            raise OptionError(f"{where} is {value!r}; choose one of {', '.join(map(str, get_args(expected)))}.")
        return value
    if kind is types.UnionType:  # something or None, which TOML cannot say
        return _build(value, get_args(expected)[0], where)
    if issubclass(expected, tuple):
        hints = typing.get_type_hints(expected)
        return expected(**_fill(value, hints, expected._field_defaults, where))
    return _scalar(value, expected, where)


def _scalar(value, expected, where):
    number = isinstance(value, int | float) and not isinstance(value, bool)
    least = 0 if where.endswith("seeds") else 1
    if expected is int and not (number and isinstance(value, int) and value >= least):
        raise OptionError(f"{where} is {value!r}; give a whole number of at least {least}.")
    if expected is float and not (number and 0 < value < math.inf):
        raise OptionError(f"{where} is {value!r}; give a positive number.")
    if expected in (bool, str) and not isinstance(value, expected):
        raise OptionError(f"{where} is {value!r}; give {'true or false' if expected is bool else 'a text'}.")
    return float(value) if expected is float else value
