"""The record of what left a silo: a line for every message, written before it is sent."""

import os
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..accountant import Releases
from ..errors import RefusalError
from .record import CHANGED, Record

NO_NOISE = (0.0, 1.0)


class Audit:
    """What a silo's record says, a line for each message or refusal (`record.py`), and what follows for its budgets.

    Args:
        path: The file.
    """

    def __init__(self, path: str | os.PathLike):
        self._replies: dict[str, set[str]] = {}
        self._releases: dict[str, Counter[tuple[float, float]]] = {}
        self._record = Record(path, self._visit)

    def begin(self) -> None:
        """Have the file there, so that a record that was lost is not taken for one that was never begun."""
        self._record.begin()

    def replies(self, model: str) -> set[str]:
        """Digests of all requests that a reply of this model answered."""
        return self._replies.setdefault(model, set())

    def given(self, run: str) -> int:
        """How many replies a run has had."""
        return self._releases.get(run, Counter()).total()

    def releases(self, *more: Releases, run: str | None = None) -> list[Releases]:
        """All replies so far, of a run or of all, and some more, by their noise; those without have none."""
        known = [kinds for name, kinds in self._releases.items() if run in (None, name)]
        counts = sum(known, Counter({each[:2]: each.count for each in more}))
        return [Releases(*kind, count) for kind, count in counts.items()]

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
        release: Releases | None = None,
        epsilon: float | None = None,
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
            release: The noise of a reply; None if it has none.
            epsilon: What has been spent with it, if there is a budget.
        """
        numbers = {name: {"shape": list(a.shape), "norm": _norm(a)} for name, a in arrays.items()}
        entry = {"event": "sent", "kind": kind, "run": run, "model": model, "step": step, "fields": sorted(fields)}
        noise = None if release is None else [float(each) for each in release[:2]]
        about = {"arrays": numbers, "bytes": size, "request": request, "noise": noise, "epsilon": epsilon}
        self._add({**entry, **about})
        if request:
            self._count(run, model, request, noise)

    def refused(self, *, run: str, step: int, reason: str) -> None:
        """Record a refusal."""
        self._add({"event": "refused", "run": run, "step": step, "reason": reason})

    def _visit(self, entry):
        if entry.get("request"):
            self._count(*_reply(entry))

    def _count(self, run, model, request, noise):
        """The same answer to the same question counts once."""
        if request not in self.replies(model):
            self.replies(model).add(request)
            multiplier, rate = noise or NO_NOISE
            self._releases.setdefault(run, Counter())[multiplier, rate] += 1

    def _add(self, entry):
        self._record.add({"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **entry})


def _reply(line) -> tuple[str, str, str, tuple[float, float] | None]:
    """Run, model, question and noise of a reply that left."""
    run, model, request, noise = (line.get(name) for name in ("run", "model", "request", "noise"))
    whole = noise is None or (isinstance(noise, list) and [type(each) for each in noise] == [float, float])
    if not whole or not all(isinstance(text, str) for text in (run, model, request)):
        raise RefusalError(CHANGED)
    return run, model, request, None if noise is None else (noise[0], noise[1])


def _norm(array):
    if not np.issubdtype(array.dtype, np.number) and array.dtype.name != "bfloat16":
        return None
    return float(np.sqrt(np.sum(np.square(array.astype(np.float64)))))
