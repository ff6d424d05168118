"""Running an experiment: fill its cells, write its tables into its README, draw its picture."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from ..errors import OptionError
from . import spec
from .base import Cell, Experiment
from .spec import names
from .store import Store

README = "README.md"
Say = Callable[[str], None]


def reproduce(
    folder: Path,
    kinds: dict[str, type],
    name: str,
    *,
    preset: str,
    only: str = "",
    fresh: bool = False,
    say: Say = print,
) -> str:
    """Fill the cells of an experiment that are not filled yet, and report all of them.

    Args:
        folder: With a folder for each experiment.
        kinds: Classes of experiments, by name.
        name: Of the experiment.
        preset: Of its settings.
        only: Run only cells whose name holds this.
        fresh: Forget first what earlier runs found.
        say: Receives a line for each cell.

    Returns:
        The tables, which are written into the experiment's README too.
    """
    if name not in kinds or name not in names(folder):
        known = ", ".join(sorted(set(kinds) & set(names(folder))))
        raise OptionError(
            f"There is no experiment {name!r} in {str(folder)!r}; "
            + (f"there are: {known}." if known else "say where they are with --folder, or go to the repository's root.")
        )
    home = folder / name
    experiment: Any = spec.read(home, kinds[name], preset)
    cells, store = experiment.cells(), Store(home, preset)
    _check_readme(home / README, preset)
    chosen = [cell for cell in cells if only in cell.name]
    if not chosen:
        raise OptionError(f"No cell of {name} holds {only!r} in its name; one is {cells[0].name!r}.")
    if fresh:
        store.forget(chosen)
    _fill(store, chosen, say)
    store.tidy(cells)
    return publish(home, experiment, preset, store.results(cells))


def publish(home: Path, experiment: Experiment, preset: str, results: dict) -> str:
    """Write the tables into the README and draw the picture."""
    report = experiment.report(results)
    experiment.draw(results, home / f"{preset}.png")
    path = home / README
    if path.exists():
        temporary = path.with_suffix(".part")
        temporary.write_text(filled(path.read_text(), preset, report))
        os.replace(temporary, path)
    return report


def _check_readme(path, preset):
    """Refuse a README in which the tables have half a place, before any work is done."""
    text = path.read_text() if path.exists() else ""
    places = [text.find(f"<!-- {preset}: {part} -->") for part in ("begin", "end")]
    if places != sorted(places) or places.count(-1) == 1:
        raise OptionError(
            f"{path}: write <!-- {preset}: begin --> and then <!-- {preset}: end --> where the tables go."
        )


def filled(text: str, preset: str, report: str) -> str:
    """A README with the tables of a preset in their place, between two comments; unchanged if it has none."""
    begin, end = f"<!-- {preset}: begin -->", f"<!-- {preset}: end -->"
    if begin not in text or end not in text:
        return text
    before, rest = text.split(begin, 1)
    _, after = rest.split(end, 1)
    return f"{before}{begin}\n{report}{end}{after}"


def _fill(store: Store, chosen: list[Cell], say: Say):
    missing = [cell for cell in chosen if not store.has(cell)]
    known = len(chosen) - len(missing)
    if known:
        say(f"{known} of {len(chosen)} cells are known already")
    begin = time.monotonic()
    for number, cell in enumerate(missing):
        since = time.monotonic()
        store.refresh()
        if store.has(cell):
            continue
        store.fill(cell)
        jax.clear_caches()  # compiled programs use up a process's memory maps, some 65,000, after dozens of fits
        now = time.monotonic()
        left = (now - begin) / (number + 1) * (len(missing) - number - 1)
        say(f"[{known + number + 1}/{len(chosen)}] {cell.name}: {now - since:.0f} s, about {left / 60:.0f} min left")
