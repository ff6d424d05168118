"""Saving a run so that killing it at any moment loses little and changes nothing."""

import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from .. import archive
from ..errors import ArchiveError, OptionError, first_line

KIND = "checkpoint"


class Checkpoint:
    """One file that holds the state of a run.

    Args:
        path: Of the file.
        fingerprint: What the run is, item by item; a file made by another run is refused, naming the item that differs.
        every: Seconds between saves.
    """

    def __init__(self, path: str | os.PathLike, fingerprint: dict[str, str], *, every: float):
        self.path = Path(path)
        self.fingerprint = fingerprint
        self.every = every
        try:
            archive.probe(self.path)
        except OSError as error:
            raise OptionError(f"The checkpoint {str(path)!r} cannot be written ({first_line(error)}).") from error
        self._saved = time.monotonic()

    def check(self, num_rounds: int) -> None:
        """Refuse a file that a run like this one, of so many rounds, cannot go on from."""
        if not self.path.exists():
            return
        done = len(self._read()["trace.elbo"])
        if done > num_rounds:
            raise OptionError(
                f"num_rounds is {num_rounds}, but the checkpoint {str(self.path)!r} has {done} rounds already; give at "
                "least as many, or a new checkpoint file."
            )

    def resume(self, state: Any, history: Any) -> tuple[Any, Any]:
        """The saved state and history, or those given if there is no file yet."""
        if not self.path.exists():
            return state, history
        arrays = self._read()
        state = archive.unflatten(state, arrays, prefix="state", path=self.path)
        saved = {name: np.asarray(arrays[f"history.{name}"]) for name in history._fields if name != "trace"}
        trace = {name: np.asarray(arrays[f"trace.{name}"]) for name in history.trace}
        return state, history._replace(trace=trace, **saved)

    def _read(self):
        """The file's arrays, if this run made it."""
        arrays, header = archive.read(self.path, kind=KIND)
        for item, value in self.fingerprint.items():
            if header["fingerprint"].get(item) != value:
                raise ArchiveError(
                    f"The checkpoint {str(self.path)!r} was made with another {item}; "
                    "resume with what made it, or give a new checkpoint file."
                )
        return arrays

    def save_if_due(self, state: Any, history: Any) -> None:
        """Save if the last time was long enough ago."""
        if time.monotonic() - self._saved >= self.every:
            self.save(state, history)

    def save(self, state: Any, history: Any) -> None:
        """Save now, atomically."""
        arrays = archive.flatten(state, prefix="state")
        arrays |= {f"history.{name}": value for name, value in history._asdict().items() if name != "trace"}
        arrays |= {f"trace.{name}": value for name, value in history.trace.items()}
        archive.write(self.path, arrays, {"kind": KIND, "fingerprint": self.fingerprint})
        self._saved = time.monotonic()
