"""Where a run stands, for people: in a file that is always whole, and in the log."""

import json
import logging
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

from ..engines.logbook import Logbook
from .ledger import read_json, write_text
from .spec import RunSpec

log = logging.getLogger("sfvi")
FILE = "status.json"
WRITE_EVERY = 1.0
SAY_EVERY = 10.0


class Reporter:
    """Tells how a run is doing.

    Args:
        folder: Of the run.
        spec: The run.
    """

    def __init__(self, folder: Path, spec: RunSpec):
        self._path, self._spec = folder / FILE, spec
        self._known: dict[str, Any] = {"run": spec.name, "algorithm": spec.algorithm, "silos": list(spec.silos)}
        self._written = self._said = float("-inf")
        self._begin: tuple[float, int] | None = None
        self._seconds: deque[float] = deque(maxlen=1000)

    def round(
        self, leg: int, kind: str, book: Logbook, answered: list[str], *, seconds: float, saving: float | None
    ) -> None:
        """After a round; `saving` is the part of the time that goes into files."""
        now = time.monotonic()
        if self._begin is None or self._known.get("leg") != leg:  # the first round compiles
            self._begin = (now, book.round)
        else:
            self._seconds.append(seconds)
            middle, slow = np.quantile(self._seconds, (0.5, 0.95))
            self._known |= {"seconds per round": {"p50": middle, "p95": slow}}
        since, first = self._begin
        rate = (book.round - first) / (now - since) if book.round > first else 0.0
        left = (book.num_rounds - book.round) / rate if rate else None
        elbo = float(book.history.elbo[-100:].mean())
        self._known |= {"state": "running", "leg": leg, "part": kind, "round": book.round, "rounds": book.num_rounds}
        self._known |= {"answered": answered, "waiting for": [], "elbo": elbo if elbo == elbo else None}
        self._known |= {"rounds per second": rate, "seconds left": left, "share of time for saving": saving}
        if now - self._written > WRITE_EVERY or book.finished:
            self._write(now)
        if now - self._said > SAY_EVERY or book.finished:
            self._said = now
            log.info("%s", line(self._known))

    def waiting(self, names: list[str]) -> None:
        """While silos do not answer."""
        self._known |= {"state": "waiting", "waiting for": names}
        self._write(time.monotonic())

    def lost(self, names: list[str]) -> None:
        """Silos that cannot be reached any more in this attempt."""
        self._known["lost"] = names
        self._write(time.monotonic())

    def stopped(self, error: BaseException) -> None:
        """The attempt is over."""
        self._known |= {"state": "stopped", "reason": str(error), "waiting for": [], "seconds left": None}
        self._write(time.monotonic())
        log.error("run %s stopped: %s", self._spec.name, error)

    def finished(self) -> None:
        """All is done."""
        self._known |= {"state": "finished", "waiting for": [], "seconds left": 0.0}
        self._write(time.monotonic())
        log.info("run %s is finished", self._spec.name)

    def _write(self, now):
        self._written = now
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_text(self._path, json.dumps({**self._known, "time": time.time()}, indent=1))


def read(folder: Path) -> dict[str, Any] | None:
    """The status of the run in a folder, or None."""
    path = Path(folder) / FILE
    return read_json(path) if path.exists() else None


def all_in(folders: list[Path]) -> list[dict[str, Any]]:
    """The status of all runs in these folders: those that the server leads, then those that a silo takes part in."""
    led = [found for folder in folders if (found := read(folder))]
    return led + [found for folder in folders if (found := _at_silo(folder))]


def _at_silo(folder):
    if not (folder / "run.npz").exists():
        return None
    posterior = folder / "posterior.npz"
    if posterior.exists():
        return {"run": folder.name, "state": "finished", "posterior": str(posterior)}
    return {"run": folder.name, "state": "under way"}


def line(status: dict[str, Any]) -> str:
    """One line for a person."""
    parts = [f"{status['run']}: {status.get('state', 'not begun')}"]
    if "posterior" in status:
        parts[0] += f", its posterior is in {status['posterior']}"
    if status.get("state") == "stopped":
        parts.append(str(status.get("reason")))
    if "round" in status:
        parts.append(f"{status['algorithm']} round {status['round']}/{status['rounds']}")
    if status.get("answered") and status.get("state") != "finished":
        parts.append(f"answered: {', '.join(status['answered'])}")
    if status.get("waiting for"):
        parts.append(f"waiting for: {', '.join(status['waiting for'])}")
    if status.get("lost") and status.get("state") != "finished":
        parts.append(f"without: {', '.join(status['lost'])}")
    if status.get("elbo") is not None:
        parts.append(f"ELBO {status['elbo']:,.2f}")
    if status.get("rounds per second"):
        parts.append(f"{status['rounds per second']:.3g} rounds/s")
    if status.get("seconds left"):
        parts.append(f"{duration(status['seconds left'])} left")
    return "  ".join(parts)


def duration(seconds: float) -> str:
    """Like 1:02:03."""
    whole = int(seconds + 0.5)
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"
