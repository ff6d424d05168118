"""One machine's part: who it is, which model and data it has, where it keeps its files.

`sfvi server start` and `sfvi silo start` (with Flower: `sfvi flower server` and `sfvi flower silo`) write it beside the
kit; the processes that do the work read it there.
"""

import dataclasses
import fcntl
import json
import logging
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import jax

from ..errors import DeploymentError, OptionError, RefusalError
from ..privacy import Policy
from . import data
from .code import Code
from .ledger import read_json, write_text
from .silo import Silo

ENVIRONMENT = "SFVI_SITE"
PRECISIONS = ("float32", "float64")
LOCK_SECONDS = 60.0
NVFLARE_FILE, FLOWER_FILE = "local/sfvi.json", "site.json"  # in a kit


@dataclasses.dataclass(frozen=True, kw_only=True)
class Site:
    """A machine of a deployment.

    Args:
        name: Of the silo, or "server".
        model: `module:object`.
        app_dir: Where its modules are looked for beside those installed.
        data: Of a silo: a file or `module:function`, see `data.read`; None at the server.
        unit_ids: The column with the units' ids.
        folder: Where runs are kept.
        precision: "float32" or "float64".
        policy: Of a silo: a file with what may leave it, see `privacy/policy.py`; None for the usual.
    """

    name: str
    model: str
    app_dir: str
    folder: str
    data: str | None = None
    unit_ids: str | None = None
    precision: str = "float32"
    policy: str | None = None

    def __post_init__(self):
        if self.precision not in PRECISIONS:
            raise OptionError(f"precision is {self.precision!r}; choose {' or '.join(PRECISIONS)}.")

    def write(self, path: Path) -> None:
        """Keep it in a file."""
        write_text(path, json.dumps(dataclasses.asdict(self), indent=1))

    def environment(self, path: Path) -> dict[str, str]:
        """What the processes of this site must find in their environment."""
        return {
            ENVIRONMENT: str(path),
            "JAX_ENABLE_X64": "1" if self.precision == "float64" else "0",
            "JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "cpu"),
            "JAX_COMPILATION_CACHE_DIR": str(Path(self.folder) / "compiled"),  # a restarted process compiles nothing
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
            "PYTHONPATH": os.pathsep.join(filter(None, [self.app_dir, os.environ.get("PYTHONPATH")])),
        }

    def configure(self) -> None:
        """Have JAX do the same in this process, which another program started and where it is imported already."""
        jax.config.update("jax_enable_x64", self.precision == "float64")
        jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS", "cpu"))
        jax.config.update("jax_compilation_cache_dir", str(Path(self.folder) / "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)

    def code(self) -> Code:
        """The model."""
        return Code(self.model, self.app_dir)

    def silo(self) -> Silo:
        """The silo with its data, checked."""
        assert self.data is not None
        code = self.code()
        policy = None if self.policy is None else Policy.read(self.policy)
        source = data.read(self.name, self.data, unit_ids=self.unit_ids)
        return Silo(self.name, code, source, Path(self.folder), policy)

    def silo_to_start(self) -> Silo:
        """The same for the person who starts it: a refusal names the silo, as the server does where it is told."""
        try:
            return self.silo()
        except RefusalError as error:
            raise RefusalError(f"Silo {self.name!r} does not start: {error}.") from None


def read(path: str | os.PathLike) -> Site:
    """The site that a file describes."""
    return Site(**read_json(Path(path)))


def of_kit(kit: Path) -> Site | None:
    """The site that was last started from a kit, if one was."""
    files = [kit / name for name in (NVFLARE_FILE, FLOWER_FILE) if (kit / name).is_file()]
    return read(files[0]) if files else None


def runs_of(kit: Path) -> Path:
    """Where the runs of a kit's site are."""
    mine = of_kit(kit)
    return kit / "runs" if mine is None else Path(mine.folder)


def policy_of(kit: Path) -> Policy:
    """The policy with which a kit's silo was last started."""
    mine = of_kit(kit)
    return Policy() if mine is None or mine.policy is None else Policy.read(mine.policy)


def here(environment: Mapping[str, str] = os.environ) -> Site:
    """The site whose process this is."""
    if ENVIRONMENT not in environment:
        raise DeploymentError("This process was not started by sfvi; use `sfvi server start` or `sfvi silo start`.")
    return read(environment[ENVIRONMENT])


def lock(folder: Path, *, seconds: float = LOCK_SECONDS) -> int:
    """Have a folder for this process alone; an earlier one may still be on its way out, so wait a while."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder / ".lock", os.O_CREAT | os.O_RDWR, 0o600)
    begin = time.monotonic()
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return handle
        except BlockingIOError:
            if time.monotonic() - begin > seconds:
                raise DeploymentError(f"Another process uses {str(folder)!r}; stop it first.") from None
            time.sleep(0.2)


def unlock(handle: int) -> None:
    """Let others have the folder."""
    os.close(handle)


def log_to(stream=sys.stdout) -> None:
    """Let people read along: one line an event, from this package only."""
    logging.getLogger().addHandler(logging.NullHandler())  # what others have to say is in their own files
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S"))
    log = logging.getLogger("sfvi")
    log.handlers[:], log.propagate = [handler], False
    log.setLevel(logging.INFO)
