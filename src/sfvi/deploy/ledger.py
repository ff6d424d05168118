"""The server's memory on its own disk, and when it writes there."""

import json
import os
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .. import archive
from ..bounds import Bound
from ..convergence import Check, Convergence
from ..engines.logbook import History
from ..errors import DeploymentError
from ..objectives import Shared
from . import agreement
from .code import Code
from .spec import RunSpec

AGREED, STATE = "what was agreed", "state of the server"
SHARE = 0.04  # of a round's time that saving may take
LONG = 1.0  # seconds of a round beside which a save is nothing


class Agreed(NamedTuple):
    r"""What was settled with the silos when the run began.

    Attributes:
        bound: What is maximized.
        theta: The initial $\theta$.
        units: The number of units of each silo.
        network: What the inference network computes, see `network_identity`.
        keys: Public keys of the silos for secure sums; none without them.
    """

    bound: Bound
    theta: dict[str, Any]
    units: dict[str, float]
    network: Any
    keys: dict[str, str]


class Finished(NamedTuple):
    r"""An algorithm's part of the run that is over.

    Attributes:
        shared: Where it ended.
        theta: $\theta$ of the silos' programs in the model's own space.
        history: Of its rounds.
        present: Who took part in each.
        convergence: Evidence of the stopping rule.
        seconds: Time spent.
        sizes: Bytes to and from a silo in a round.
    """

    shared: Shared
    theta: dict[str, Any]
    history: History
    present: np.ndarray
    convergence: Convergence | None
    seconds: float
    sizes: tuple[int, int]


class Position(NamedTuple):
    """Where a run stands.

    Attributes:
        leg: Which of its algorithms.
        step: Number of the next step, counted through all of them.
        state: The server's state; None between two algorithms.
        history: Of this algorithm's rounds; None before the first.
        done: The algorithms that are over.
        last: For each silo the last step whose reply was applied; -1 for none.
        present: Who took part in each round of this algorithm.
        seconds: That they took.
        sizes: Bytes to and from a silo in the last of them.
    """

    leg: int
    step: int
    state: Any
    history: History | None
    done: list[Finished]
    last: dict[str, int]
    present: np.ndarray
    seconds: float
    sizes: tuple[int, int]


class Ledger:
    """The files of one run at the server.

    Args:
        folder: Where they lie.
        spec: The run.
        code: The model.
    """

    def __init__(self, folder: Path, spec: RunSpec, code: Code):
        self._folder = folder
        self._agreed, self._state, self._attempt = (folder / n for n in ("agreed.npz", "state.npz", "attempt.json"))
        self._identity = {"description": spec.identity(), "version of the model": code.hash}

    def check(self) -> None:
        """Refuse to go on with a run that was begun as another one."""
        if self._agreed.exists():
            self._read(self._agreed, AGREED)

    def begin(self) -> int:
        """Count this attempt; it is on disk before anybody hears of it."""
        self._folder.mkdir(parents=True, exist_ok=True)
        known = read_json(self._attempt)["attempt"] if self._attempt.exists() else -1
        write_text(self._attempt, json.dumps({"attempt": known + 1}))
        return known + 1

    def agreed(self) -> Agreed | None:
        """What was settled with the silos when the run began."""
        if not self._agreed.exists():
            return None
        arrays, header = self._read(self._agreed, AGREED)
        theta = agreement.theta_tree(header["theta"], arrays)
        return Agreed(Bound(*header["bound"]), theta, header["units"], header["network"], header["keys"])

    def agree(self, agreed: Agreed) -> None:
        """Keep it."""
        paths, arrays = agreement.theta_arrays(agreed.theta)
        header = {**agreed._asdict(), "bound": list(agreed.bound), "theta": paths}
        archive.write(self._agreed, arrays, {"kind": AGREED, "identity": self._identity, **header})

    def read(self, states: list[Any], shared: Shared) -> Position | None:
        """Where the run stands on disk; `states` and `shared` give the shapes, by leg."""
        if not self._state.exists():
            return None
        arrays, header = self._read(self._state, STATE)
        state = history = None
        if header["running"]:
            state = archive.unflatten(states[header["leg"]], arrays, prefix="state", path=self._state)
            history = _history(arrays, "history")
        done = []
        for number, entry in enumerate(header["done"]):
            prefix = f"done{number}"
            mine = {name[len(prefix) + 1 :]: array for name, array in arrays.items() if name.startswith(prefix + ".")}
            theta = agreement.theta_tree(entry["theta"], {n: a for n, a in mine.items() if n.startswith("theta.")})
            convergence = entry["convergence"]
            if convergence is not None:
                checks = tuple(Check(**check) for check in convergence["checks"])
                convergence = Convergence(**{**convergence, "checks": checks})
            ended = archive.unflatten(shared, mine, prefix="shared", path=self._state)
            done.append(
                Finished(
                    ended,
                    theta,
                    _history(mine, "history"),
                    mine["present"],
                    convergence,
                    entry["seconds"],
                    tuple(entry["sizes"]),
                )
            )
        now = header["seconds"], tuple(header["sizes"])
        return Position(header["leg"], header["step"], state, history, done, header["last"], arrays["present"], *now)

    def write(self, position: Position) -> None:
        """Keep where the run stands, whole or not at all."""
        arrays = {"present": position.present}
        if position.state is not None and position.history is not None:
            arrays |= archive.flatten(position.state, prefix="state") | _history_arrays(position.history, "history")
        entries = []
        for number, part in enumerate(position.done):
            paths, theta = agreement.theta_arrays(part.theta)
            mine = archive.flatten(part.shared, prefix="shared") | theta | _history_arrays(part.history, "history")
            arrays |= {f"done{number}.{name}": array for name, array in {**mine, "present": part.present}.items()}
            evidence = None
            if part.convergence is not None:
                checks = [check._asdict() for check in part.convergence.checks]
                evidence = {**part.convergence._asdict(), "checks": checks}
            entries.append({"theta": paths, "convergence": evidence, "seconds": part.seconds, "sizes": part.sizes})
        header = {"leg": position.leg, "step": position.step, "last": position.last, "done": entries}
        header |= {"seconds": position.seconds, "sizes": position.sizes}
        header["running"] = position.state is not None and position.history is not None
        archive.write(self._state, arrays, {"kind": STATE, "identity": self._identity, **header})

    def _read(self, path, kind):
        arrays, header = archive.read(path, kind=kind)
        known, mine = header["identity"], self._identity
        entries = mine["description"]
        odd = [
            f"{n} {known['description'].get(n)!r}, not {v!r}"
            for n, v in entries.items()
            if known["description"].get(n) != v
        ]
        if known["version of the model"] != mine["version of the model"]:
            odd.append("another version of the model")
        if odd:
            raise DeploymentError(
                f"This run was begun with {odd[0]}; go on with what it was begun with, or choose another name."
            )
        return arrays, header


class Cadence:
    """Says in which rounds everyone saves, so that saving costs less than `SHARE` of the time.

    What a save costs is measured, in the silos and at the server together: by how much rounds with it take longer.

    Args:
        always: Save in every round, whatever it costs: where a silo may be absent, or is a new process each time.
    """

    def __init__(self, *, always: bool):
        self._always = always
        self._times: dict[bool, deque] = {marked: deque(maxlen=20) for marked in (False, True)}
        self._since = 0

    def due(self) -> bool:
        """Whether the next round is one with a save."""
        return self._always or self._since + 1 >= self.every

    @property
    def every(self) -> int:
        """Rounds from one save to the next."""
        known = [seconds for times in self._times.values() for seconds in times]
        if known and np.median(known) > LONG:
            return 1
        plain, marked = (np.median(times) if len(times) > 2 else None for times in self._times.values())
        if plain is None or marked is None:
            return 2
        return max(1, int(np.ceil((marked - plain) / (SHARE * plain))))

    @property
    def share(self) -> float | None:
        """The part of the time that saving takes, as far as it is known."""
        plain, marked = (np.median(times) if len(times) > 2 else None for times in self._times.values())
        if plain is None or marked is None:
            return None
        return float(max(0.0, marked - plain) / (self.every * plain))

    def took(self, seconds: float, *, marked: bool) -> None:
        """Learn from a round."""
        self._times[marked].append(seconds)
        self._since = 0 if marked else self._since + 1


def write_text(path: Path, text: str) -> None:
    """Write a small file whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(temporary, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_json(path: Path) -> dict[str, Any]:
    """A small file that `write_text` wrote."""
    try:
        found = json.loads(path.read_text())
    except (ValueError, UnicodeDecodeError):
        found = None
    if not isinstance(found, dict):
        raise DeploymentError(f"{str(path)!r} is damaged; restore it from a backup.")
    return found


def _history_arrays(history, prefix):
    arrays = {f"{prefix}.{name}": value for name, value in history._asdict().items() if name != "trace"}
    return arrays | {f"{prefix}.trace.{name}": values for name, values in history.trace.items()}


def _history(arrays, prefix):
    start = f"{prefix}.trace."
    trace = {name[len(start) :]: values for name, values in arrays.items() if name.startswith(start)}
    return History(trace, *(arrays[f"{prefix}.{name}"] for name in ("snapshots", "means", "sds")))
