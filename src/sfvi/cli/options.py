"""Options that several commands have, and how they are read."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import OptionError

Algorithm = Annotated[str, typer.Option(help="SFVI, SFVIAvg, Sites, or module:object.")]
Option = Annotated[list[str] | None, typer.Option(help="Of the algorithm, as name=value; once for each.")]
Rounds = Annotated[int | None, typer.Option(help="Rounds; by default what mostly suffices.", min=1)]
Key = Annotated[int, typer.Option(help="Of all randomness.")]
UntilConverged = Annotated[bool, typer.Option("--until-converged", help="Stop when nothing moves.")]
UnitIds = Annotated[
    str | None, typer.Option(help="Column with the units' ids, whole numbers; the program does not see it.")
]
AppDir = Annotated[Path, typer.Option(help="Where modules are looked for beside installed ones.", exists=True)]
Precision = Annotated[str, typer.Option(help="float32 or float64, the same everywhere.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


def examples(*lines: str) -> str:
    """The end of a command's help."""
    return "\n\n".join(["Example:" if len(lines) == 1 else "Examples:", *lines])


def options_of(given: list[str] | None) -> dict[str, Any]:
    """Options of an algorithm, written name=value; values are read as JSON where they are, else as text."""
    return {name: _value(text) for name, text in pairs("--option", given, "name=value").items()}


def pairs(option: str, given: list[str] | None, form: str) -> dict[str, str]:
    """What was written as name=text, each name once."""
    found: dict[str, str] = {}
    for item in given or []:
        name, equals, text = item.partition("=")
        if not equals or not name or not text:
            raise OptionError(f"{option} {item!r}: write {form}.")
        if name in found:
            raise OptionError(f"{option} {name!r} is given twice.")
        found[name] = text
    return found


def _value(text):
    try:
        return json.loads(text)
    except ValueError:
        return text
