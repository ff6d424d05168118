"""The record of what left a silo: a line for every message, written before it is sent."""

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import RefusalError


class Audit:
    """A file to which lines are only added: JSON objects, one for each message or refusal.

    Attributes:
        path: The file.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        self._replies: dict[str, set[str]] = {}
        for line in self._lines():
            if line.get("request"):
                self._replies.setdefault(line["model"], set()).add(line["request"])

    def replies(self, model: str) -> set[str]:
        """Digests of all requests that a reply of this model answered."""
        return self._replies.setdefault(model, set())

    def sent(
        self,
        *,
        kind: str,
        run: str,
        model: str,
        step: int,
        fields: Mapping[str, Any],
        arrays: Mapping[str, np.ndarray],
        size: int,
        request: str = "",
    ) -> None:
        """Record a message that is about to leave.

        Args:
            kind: What it is.
            run: Of which run.
            model: Of which model, by its hash.
            step: Number of the step.
            fields: Its JSON part, of which the names are kept.
            arrays: Its numbers, of which names, shapes and norms are kept.
            size: In bytes.
            request: Digest of what it answers, if that is a round.
        """
        numbers = {name: {"shape": list(a.shape), "norm": _norm(a)} for name, a in arrays.items()}
        entry = {"event": "sent", "kind": kind, "run": run, "model": model, "step": step, "fields": sorted(fields)}
        self._add({**entry, "arrays": numbers, "bytes": size, "request": request})
        if request:
            self.replies(model).add(request)

    def refused(self, *, run: str, step: int, reason: str) -> None:
        """Record a refusal."""
        self._add({"event": "refused", "run": run, "step": step, "reason": reason})

    def _add(self, entry):
        line = json.dumps({"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **entry})
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:
            raise RefusalError("it cannot keep its record of what leaves, so nothing does") from error

    def _lines(self):
        try:
            text = self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return
        except OSError as error:
            raise RefusalError("it cannot read its record of what left, so nothing does") from error
        for line in text.splitlines():
            try:
                yield json.loads(line)
            except ValueError:
                continue  # the last line of a process that was killed: that message did not leave


def _norm(array):
    if not np.issubdtype(array.dtype, np.number) and array.dtype.name != "bfloat16":
        return None
    return float(np.sqrt(np.sum(np.square(array.astype(np.float64)))))
