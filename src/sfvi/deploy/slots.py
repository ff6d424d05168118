"""A silo's memory on its own disk: two places, so that one always holds what the server may come back to."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from .. import archive
from ..errors import ArchiveError, DeploymentError, RefusalError

KIND = "state of a silo"


class Held(NamedTuple):
    """A silo's state after a step.

    Attributes:
        version: Number of that step.
        attempt: Of the server, when it was made.
        leg: To which algorithm of the run it belongs.
        state: The algorithm's state; None between two algorithms.
        handed: The local family that the next algorithm begins from.
        residual: What lossy replies left over; None if they are not.
    """

    version: int
    attempt: int
    leg: int
    state: Any
    handed: Any
    residual: Any


class Slots:
    """Two files.

    Args:
        folder: Where they lie.
        identity: What they belong to, item by item.
        like: For a leg, the shapes of state, handed and residual.
    """

    def __init__(self, folder: Path, identity: dict[str, str], like: Callable[[int], tuple[Any, Any, Any]]):
        self._paths = [folder / f"state-{number}.npz" for number in (0, 1)]
        self._identity, self._like = identity, like
        self._versions = [self._version(path) for path in self._paths]

    @property
    def versions(self) -> list[int]:
        """Which states are there."""
        return sorted(version for version in self._versions if version is not None)

    @property
    def latest(self) -> tuple[int, int]:
        """Attempt and number of the last step that was saved."""
        known = [path for path, version in zip(self._paths, self._versions, strict=True) if version is not None]
        headers = [archive.read(path, kind=KIND)[1] for path in known]
        return max(((header["attempt"], header["version"]) for header in headers), default=(-1, -1))

    def read(self, version: int) -> Held | None:
        """One of the states, or None."""
        if version not in self._versions:
            return None
        path = self._paths[self._versions.index(version)]
        arrays, header = archive.read(path, kind=KIND)
        parts = []
        for name, shapes in zip(("state", "handed", "residual"), self._like(header["leg"]), strict=True):
            there = name in header["parts"]
            parts.append(archive.unflatten(shapes, arrays, prefix=name, path=path) if there else None)
        return Held(header["version"], header["attempt"], header["leg"], *parts)

    def write(self, held: Held, *, keep: int) -> None:
        """Save a state on disk, in the place of whatever is not `keep`."""
        ages = [-2 if version is None else version for version in self._versions]
        place = min((0, 1), key=lambda place: (self._versions[place] == keep, ages[place]))
        if held.version in self._versions:
            place = self._versions.index(held.version)
        parts = {"state": held.state, "handed": held.handed, "residual": held.residual}
        arrays = {}
        for name, tree in parts.items():
            arrays |= archive.flatten(tree, prefix=name)
        there = [name for name, tree in parts.items() if tree is not None]
        header = {"kind": KIND, "identity": self._identity, "parts": there}
        header |= {"version": held.version, "attempt": held.attempt, "leg": held.leg}
        archive.write(self._paths[place], arrays, header)
        self._versions[place] = held.version

    def _version(self, path):
        if not path.exists():
            return None
        try:
            _, header = archive.read(path, kind=KIND)
        except ArchiveError as error:
            raise DeploymentError(f"{error} Restore it from a backup, or begin a run of another name.") from error
        for item, value in self._identity.items():
            if header["identity"].get(item) != value:
                raise RefusalError(
                    f"this silo began the run with another {item}; go on with what it began with, or begin a run of "
                    "another name"
                )
        return header["version"]
