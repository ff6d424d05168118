"""A file to which lines are only added: JSON objects, each with the SHA-256 of the line before.

A line that is taken out, put in or altered breaks the chain at the line after it. What a chain cannot show: lines cut
off its end, a change of the last line, a file that was written anew as a whole. Who knows the hash of an earlier last
line (`sfvi silo audit` prints it) can tell those too.
"""

import hashlib
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import RefusalError

log = logging.getLogger("sfvi")
START = "0" * 64  # stands before the first line
BEFORE = "before"
CHANGED = (
    "its record of what left was changed or is damaged, so nothing leaves; `sfvi silo audit` says where: restore it "
    "from a backup, then start the silo again"
)


class Chain(NamedTuple):
    """What is in a file, up to the first line that does not fit.

    Attributes:
        entries: Of each line.
        hashes: Of each line.
        broken: Number of the first line that does not fit, counted from 1; None if all do.
        why: What is wrong with it.
        size: Bytes of whole lines; what stands behind them was torn off when a process died.
    """

    entries: list[dict[str, Any]]
    hashes: list[str]
    broken: int | None
    why: str
    size: int

    @property
    def last(self) -> str:
        """The hash of the last line."""
        return self.hashes[-1] if self.hashes else START


class Record:
    """The file, as the one process sees it that writes it.

    Args:
        path: The file.
        visit: Called with the entry of each line that is there already.
    """

    def __init__(self, path: str | os.PathLike, visit: Callable[[dict[str, Any]], None]):
        self.path = Path(path)
        self._known = self._load(visit)

    def begin(self) -> None:
        """Have the file there, so that a record that was lost is not taken for one that was never begun."""
        if self._known.stamp is not None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.touch()
        except OSError as error:
            raise RefusalError("it cannot keep its record of what leaves, so nothing does") from error
        self._known = self._load()

    def add(self, entry: dict[str, Any]) -> None:
        """Write a line, on disk when this returns; refused if the file is not as this process left it."""
        self.begin()
        line = json.dumps({**entry, BEFORE: self._known.last}).encode() + b"\n"
        try:
            self._check()
            with open(self.path, "ab", buffering=0) as file:
                file.truncate(self._known.size)  # what a process that was killed, or a full disk, left of a line
                if file.write(line) < len(line):
                    raise OSError("a line was not written to its end")
                os.fsync(file.fileno())
                stamp = _stamp(os.fstat(file.fileno()))
        except OSError as error:
            raise RefusalError("it cannot keep its record of what leaves, so nothing does") from error
        self._known = _Known(self._known.lines + 1, _hash(line[:-1]), self._known.size + len(line), stamp)

    def _check(self):
        """Somebody else's hand: looked for only if the file was touched since the last line."""
        if self.path.exists() and self._known.stamp == _stamp(self.path.stat()):
            return
        now = self._load()
        if (now.lines, now.last) != (self._known.lines, self._known.last):
            log.error("%s was changed by somebody else while this silo ran", self.path)
            raise RefusalError(CHANGED)

    def _load(self, visit=lambda _: None):
        try:
            stamp = _stamp(self.path.stat()) if self.path.exists() else None
            found = read(self.path)
        except OSError as error:
            raise RefusalError("it cannot read its record of what left, so nothing does") from error
        if found.broken is not None:
            log.error("%s, line %d: %s", self.path, found.broken, found.why)
            raise RefusalError(CHANGED)
        for entry in found.entries:
            visit(entry)
        return _Known(len(found.entries), found.last, found.size, stamp)


class _Known(NamedTuple):
    lines: int
    last: str
    size: int
    stamp: tuple[int, ...] | None


def read(path: Path) -> Chain:
    """Read a file and follow its chain; nothing is written, and a file that is not there has no lines."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        data = b""
    size = data.rfind(b"\n") + 1
    entries, hashes = [], []
    before = START
    for number, line in enumerate(data[:size].split(b"\n")[:-1], start=1):
        entry = _parse(line)
        why = "it is no entry of a record" if entry is None else ""
        if entry is not None and entry.pop(BEFORE, None) != before:
            why = "it does not follow on the line before: that one was altered, or lines were taken out or put in"
        if entry is None or why:
            return Chain(entries, hashes, number, why, size)
        before = _hash(line)
        entries.append(entry)
        hashes.append(before)
    return Chain(entries, hashes, None, "", size)


def _parse(line):
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _hash(line):
    return hashlib.sha256(line).hexdigest()


def _stamp(found):
    """By which it is seen that a file was touched: any change moves the last of the three."""
    return (found.st_ino, found.st_size, found.st_ctime_ns)
