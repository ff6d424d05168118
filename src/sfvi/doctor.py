"""Is this machine fit for sfvi? What is there, what is missing, and what to do about it."""

import importlib.util
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from packaging.requirements import Requirement

from .algorithms import SFVI
from .bounds import elbo
from .data import images, posts, six_cities
from .data.store import VARIABLE, cache_folder
from .errors import first_line
from .families import block, full
from .fitting import fit
from .model import StructuredModel

State = Literal["ok", "missing", "broken"]
OLDEST_PYTHON = (3, 11)
LITTLE_MEMORY = 1e9  # bytes
DEVELOPMENT = ("dev", "docs", "lint", "test")  # extras that users do not need
ENGINES = {"nvflare": ("nvflare", 8002), "flower": ("flwr", 8000)}  # extras: module, and port that `init` suggests
FILES = {  # of each data set that is not shipped: any of these sets of files will do
    "mnist": (("mnist.npz",), images.FILES),
    "fashion_mnist": (("fashion_mnist.npz",), images.FILES),
    posts.DATASET: ((posts.RAW,), (posts.ARCHIVE,)),
}
ROUNDS = 1500
TOLERANCE = 0.05  # of the mean in posterior sds, and of the sd as a part of it


class Finding(NamedTuple):
    """One line of the examination.

    Attributes:
        part: Of the machine.
        name: What was looked at.
        state: "ok", "missing" or "broken".
        found: What was found.
        remedy: What to do; nothing if all is well.
        needed: Whether nothing works without it.
    """

    part: str
    name: str
    state: State
    found: str
    remedy: str = ""
    needed: bool = False


def examine() -> list[Finding]:
    """Look at everything; a part that cannot be looked at is broken, and the others are looked at all the same."""
    return [finding for part, look in PARTS.items() for finding in _guarded(part, look)]


def healthy(findings: list[Finding]) -> bool:
    """Whether all that is needed is there."""
    return all(finding.state == "ok" for finding in findings if finding.needed)


def _guarded(part: str, look: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    try:
        yield from look()
    except Exception as error:  # whatever is wrong with a machine, the examination goes on
        yield Finding(part, "examination", "broken", first_line(error), "see what this error is about", needed=True)


def _python() -> Iterator[Finding]:
    fine = sys.version_info >= OLDEST_PYTHON
    wanted = ".".join(map(str, OLDEST_PYTHON))
    yield Finding(
        "python",
        "python",
        "ok" if fine else "broken",
        f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "" if fine else f"install Python {wanted} or newer",
        needed=True,
    )
    yield Finding("python", "sfvi", "ok", f"{metadata.version('sfvi')} in {Path(__file__).parent}", needed=True)


def _packages() -> Iterator[Finding]:
    for requirement in _requirements():
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            state, found = _installed(requirement)
            remedy = "" if state == "ok" else f"pip install '{requirement.name}{requirement.specifier}'"
            yield Finding("packages", requirement.name, state, found, remedy, needed=True)


def _extras() -> Iterator[Finding]:
    for extra in extras():
        states = {
            requirement.name: _installed(requirement)
            for requirement in _requirements()
            if requirement.marker is not None and requirement.marker.evaluate({"extra": extra})
        }
        worst: State = "ok"
        for state, _ in states.values():
            worst = state if worst == "ok" or state == "broken" else worst
        found = ", ".join(f"{name} {text}" for name, (_, text) in states.items())
        yield Finding("extras", extra, worst, found, "" if worst == "ok" else f"pip install 'sfvi[{extra}]'")


def extras() -> list[str]:
    """What can be installed beside the package itself, for users."""
    return [name for name in metadata.metadata("sfvi").get_all("Provides-Extra") or [] if name not in DEVELOPMENT]


def _requirements():
    return [Requirement(text) for text in metadata.requires("sfvi") or []]


def _installed(requirement: Requirement) -> tuple[State, str]:
    """Whether a package is there, in a version that is known to work."""
    try:
        found = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return "missing", "is not installed"
    if not requirement.specifier.contains(found, prereleases=True):
        return "broken", f"{found}, but {requirement.specifier} is known to work"
    return "ok", found


def _machine() -> Iterator[Finding]:
    devices = ", ".join(f"{device.platform} {device.id}" for device in jax.devices())
    yield Finding("machine", "devices", "ok", devices, needed=True)
    yield Finding("machine", "precision", "ok", f"{jnp.result_type(float)} by default")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Finding("machine", "cores", "ok", str(cores))
    free = _free_memory()
    if free is not None:
        enough = free >= LITTLE_MEMORY
        remedy = "" if enough else "end other programs: compiling may fail"
        yield Finding("machine", "free memory", "ok" if enough else "broken", f"{free / 1e9:.1f} GB", remedy)
    with tempfile.TemporaryDirectory() as folder:  # raises where nothing can be written
        space = shutil.disk_usage(folder).free
        yield Finding("machine", "temporary files", "ok", f"{space / 1e9:.1f} GB free in {Path(folder).parent}")


def _free_memory() -> float | None:
    path = Path("/proc/meminfo")
    if not path.is_file():
        return None
    numbers = dict(line.split(":", 1) for line in path.read_text().splitlines())
    return 1024.0 * int(numbers["MemAvailable"].split()[0])


def _fit() -> Iterator[Finding]:
    begin = time.perf_counter()
    shift, ratio = _conjugate()
    spent = time.perf_counter() - begin
    fine = abs(shift) <= TOLERANCE and abs(ratio - 1) <= TOLERANCE
    found = f"mean off by {shift:+.3f} sds, sd {ratio:.3f} times the exact one, {spent:.0f} s with compiling"
    remedy = "" if fine else "install the versions of jax, numpyro, optax and equinox that are known to work"
    yield Finding("fit", "closed form", "ok" if fine else "broken", found, remedy, needed=True)


def _conjugate() -> tuple[float, float]:
    r"""Error of a small fit: $\mu \sim N(0, 2^2)$, $b_i \sim N(\mu, 1)$, $y_i \sim N(b_i, 1)$ over two silos."""

    def population():
        return numpyro.sample("mu", dist.Normal(0.0, 2.0))

    def silo(mu, data):
        with numpyro.plate("units", len(data["y"])):
            b = numpyro.sample("b", dist.Normal(mu, 1.0))
            numpyro.sample("y", dist.Normal(b, 1.0), obs=data["y"])

    y = np.random.default_rng(0).normal(1.0, np.sqrt(2.0), 30)
    algorithm = SFVI(bound=elbo(), global_family=full(), local_family=block(coupling="mean"))
    model, silos = StructuredModel(population, silo), {"a": {"y": y[:10]}, "b": {"y": y[10:]}}
    found = fit(model, silos, key=0, num_rounds=ROUNDS, algorithm=algorithm, progress=False)
    mean, sd = (float(part[0]) for part in found.posterior.family.marginals())
    precision = 1 / 2.0**2 + len(y) / 2.0
    exact_mean, exact_sd = y.sum() / 2.0 / precision, precision**-0.5
    return (mean - exact_mean) / exact_sd, sd / exact_sd


def _data() -> Iterator[Finding]:
    root = os.environ.get(VARIABLE)
    if root is None:
        yield Finding("data", VARIABLE, "ok", "is not set: data sets are downloaded when they are used first")
    elif not Path(root).expanduser().is_dir():
        yield Finding("data", VARIABLE, "broken", f"{root!r} is no folder", f"make it, or unset {VARIABLE}")
    else:
        yield Finding("data", VARIABLE, "ok", root)
    six_cities()
    yield Finding("data", "six_cities, heart_disease", "ok", "come with the package")
    for dataset, choices in FILES.items():
        folder = Path(root).expanduser() / dataset if root else cache_folder(dataset)
        if any(all((folder / name).is_file() for name in names) for names in choices):
            yield Finding("data", dataset, "ok", str(folder))
        else:
            wanted = " or ".join(names[0] for names in choices)
            remedy = f"add {wanted}, or unset {VARIABLE}" if root else "it is downloaded when it is used first"
            yield Finding("data", dataset, "missing", f"not in {folder}", remedy)


def _deployment() -> Iterator[Finding]:
    there = {extra: port for extra, (module, port) in ENGINES.items() if importlib.util.find_spec(module) is not None}
    if not there:
        remedy = "pip install 'sfvi[nvflare]' or 'sfvi[flower]' to fit over a network"
        yield Finding("deployment", "engines", "missing", "neither NVFlare nor Flower is installed", remedy)
        return
    for extra, port in there.items():
        free = _free(port)
        found, remedy = ("free", "") if free else ("in use", "end what uses it, or choose another with --port")
        yield Finding("deployment", f"port {port} ({extra})", "ok" if free else "broken", found, remedy)
    spec = importlib.util.find_spec("cryptography")
    found = metadata.version("cryptography") if spec else "is not installed"
    remedy = "" if spec else "pip install cryptography: it makes certificates"
    yield Finding("deployment", "cryptography", "ok" if spec else "missing", found, remedy)
    yield from _clock()


def _free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def _clock() -> Iterator[Finding]:
    """Certificates hold from one time to another: a clock that is wrong makes them invalid."""
    now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    if time.time() < Path(__file__).stat().st_mtime - 86_400:
        yield Finding("deployment", "clock", "broken", f"{now}, before sfvi was installed", "set the clock")
        return
    tool = shutil.which("timedatectl")
    if tool:
        asked = [tool, "show", "--property=NTPSynchronized", "--value"]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=10, check=False)
        if done.stdout.strip() == "no":
            remedy = "switch time synchronization on: certificates depend on the clock"
            yield Finding("deployment", "clock", "missing", f"{now}, not synchronized", remedy)
            return
    yield Finding("deployment", "clock", "ok", now)


PARTS: dict[str, Callable[[], Iterator[Finding]]] = {
    "python": _python,
    "packages": _packages,
    "extras": _extras,
    "machine": _machine,
    "fit": _fit,
    "data": _data,
    "deployment": _deployment,
}


def to_dict(findings: list[Finding]) -> dict[str, Any]:
    """As plain values."""
    return {"healthy": healthy(findings), "findings": [finding._asdict() for finding in findings]}
