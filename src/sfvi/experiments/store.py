"""Results on file, cell by cell: an experiment that was killed goes on where it was."""

import contextlib
import fcntl
import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

from ..errors import ArchiveError
from .base import Cell, Result


class Store:
    """The results of one preset; several processes may fill cells of it at the same time.

    Args:
        folder: Of the experiment.
        preset: Of its settings.
    """

    def __init__(self, folder: Path, preset: str):
        self._path = folder / f"{preset}.json"
        self._unfinished = folder / ".unfinished" / preset
        self._cells = self._read()

    def has(self, cell: Cell) -> bool:
        """Whether a cell is filled, with the settings it has now."""
        return cell.name in self._cells and self._cells[cell.name]["settings"] == _plain(cell.settings)

    def results(self, cells: list[Cell]) -> dict[str, Result]:
        """What is known of these cells."""
        return {cell.name: self._cells[cell.name]["result"] for cell in cells if self.has(cell)}

    def refresh(self) -> None:
        """Look what other processes have found meanwhile."""
        self._cells = self._read()

    def forget(self, cells: list[Cell]) -> None:
        """Empty cells, and what was begun of them."""
        with self._changing():
            for cell in cells:
                self._cells.pop(cell.name, None)
                self._clear(cell)

    def fill(self, cell: Cell) -> None:
        """Run a cell and keep its result; while it runs, its state is in a file of its own."""
        self._unfinished.mkdir(parents=True, exist_ok=True)
        result = cell.run(self._state(cell))
        with self._changing():
            self._cells[cell.name] = {"settings": _plain(cell.settings), "result": result}
        self._clear(cell)

    def tidy(self, cells: list[Cell]) -> None:
        """Drop cells that the experiment no longer has, and order the others as it does."""
        with self._changing():
            self._cells = {cell.name: self._cells[cell.name] for cell in cells if cell.name in self._cells}

    def _state(self, cell):
        """Where a cell keeps its state while it runs; with other settings elsewhere."""
        settings = json.dumps([cell.name, _plain(cell.settings)], sort_keys=True).encode()
        number = hashlib.sha256(settings).hexdigest()[:8]
        return self._unfinished / f"{re.sub(r'[^a-zA-Z0-9]+', '-', cell.name)}.{number}"

    def _clear(self, cell):
        for path in self._unfinished.glob(self._state(cell).name + "*"):
            path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _changing(self):
        """Change what is on file now, which another process may have added to."""
        self._unfinished.mkdir(parents=True, exist_ok=True)
        with open(self._unfinished / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._cells = self._read()
            yield
            lines = [f"{json.dumps(name)}: {json.dumps(cell, sort_keys=True)}" for name, cell in self._cells.items()]
            temporary = self._path.with_suffix(".part")
            temporary.write_text("{\n" + ",\n".join(lines) + "\n}\n")
            os.replace(temporary, self._path)

    def _read(self) -> dict[str, dict[str, Any]]:
        if not self._path.exists():
            return {}
        try:
            content = json.loads(self._path.read_text())
            if any(set(cell) != {"settings", "result"} for cell in content.values()):
                raise ValueError("no cells")
        except (ValueError, TypeError, AttributeError) as error:
            raise ArchiveError(f"{str(self._path)!r} is damaged; remove it, or bring an older one back.") from error
        return content


def _plain(settings):
    """As they come back from a file."""
    return json.loads(json.dumps(settings))
