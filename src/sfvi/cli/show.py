"""Printing: tables with lines on a terminal and plain ones elsewhere, or JSON."""

import json
import sys
from typing import Any

import pandas as pd
from rich.console import Console
from rich.table import Table


def as_json(found: Any) -> None:
    """One JSON object on standard output."""
    print(json.dumps(found, indent=1))


def table(title: str, frame: pd.DataFrame, number: str = "{:.3f}") -> None:
    """A table of numbers, its rows by name."""
    names = [", ".join(name) if isinstance(name, tuple) else str(name) for name in frame.index]
    cells = [["" if value != value else number.format(value) for value in row] for row in frame.to_numpy()]
    rows([""] + [str(column) for column in frame.columns], [[n, *c] for n, c in zip(names, cells, strict=True)], title)


def rows(header: list[str], cells: list[list[str]], title: str = "", *, numbers: bool = True) -> None:
    """A table of text; with `numbers` all columns but the first are set to the right."""
    if not sys.stdout.isatty():
        lines = [header, *cells] if any(header) else cells
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        print(*([f"{title}:"] if title else []), *(_line(row, widths, numbers) for row in lines), sep="\n")
        return
    shown = Table(title=title or None, title_justify="left", title_style="bold", show_header=any(header))
    for number, name in enumerate(header):
        shown.add_column(name, justify="right" if numbers and number else "left")
    for row in cells:
        shown.add_row(*row)
    Console(markup=False, highlight=False).print(shown)


def aside(*sentences: str) -> None:
    """What a person should know, on standard error."""
    for sentence in sentences:
        print(sentence, file=sys.stderr, flush=True)


def begin(sentence: str) -> None:
    """What is about to take long, on standard error; not on a terminal, where a bar shows it."""
    if not sys.stderr.isatty():
        aside(sentence)


def _line(row, widths, numbers):
    parts = [
        cell.rjust(width) if numbers and number else cell.ljust(width)
        for number, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
    return "  ".join(parts).rstrip()
