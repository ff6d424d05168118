"""Starting a server or a silo: check everything, then become NVFlare's process."""

import os
import socket
import sys
from pathlib import Path
from typing import NoReturn

from ...errors import DeploymentError
from .. import site
from ..ledger import read_json
from . import kits

HOLD_SECONDS = 10.0  # one that was stopped may still be on its way out
MODULES = {
    "server": ("nvflare.private.fed.app.server.server_train", "fed_server.json"),
    "client": ("nvflare.private.fed.app.client.client_train", "fed_client.json"),
}


def prepare(
    kit: Path,
    *,
    role: str,
    model: str,
    app_dir: Path,
    folder: Path | None,
    data: str | None = None,
    unit_ids: str | None = None,
    precision: str = "float32",
    policy: Path | None = None,
) -> site.Site:
    """Check a kit and say what its site is; nothing is written."""
    name = kits.check(kit, role=role)
    return site.Site(
        name=name,
        model=model,
        app_dir=str(app_dir.resolve()),
        folder=str((folder or kit / "runs").resolve()),
        data=str(Path(data).resolve()) if data and Path(data).suffix.lower() in site.data.READERS else data,
        unit_ids=unit_ids,
        precision=precision,
        policy=None if policy is None else str(policy.resolve()),
    )


def install(kit: Path, mine: site.Site, *, role: str) -> None:
    """Write a site's file into its kit, which has been checked."""
    if role == "server":
        kits.place(kit)
        _check_port(kit)
    Path(mine.folder).mkdir(parents=True, exist_ok=True)
    Path(mine.folder).chmod(0o700)
    mine.write(kit / site.NVFLARE_FILE)


def _hold(kit):
    try:
        return site.lock(kit / "local", seconds=HOLD_SECONDS)
    except DeploymentError:
        raise DeploymentError(f"{str(kit)!r} is in use: it was started already; stop that first.") from None


def _check_port(kit):
    """NVFlare would try for ever."""
    target = read_json(kit / "startup" / "fed_server.json")["servers"][0]["service"]["target"]
    port = int(target.rpartition(":")[2])
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise DeploymentError(
                f"Port {port} of this machine cannot be used ({os.strerror(error.errno or 0)}); stop what uses it, or "
                "make kits with another port."
            ) from None


def become(kit: Path, mine: site.Site, *, role: str) -> NoReturn:
    """Install the site and replace this process by NVFlare's."""
    os.set_inheritable(_hold(kit), True)  # as long as the process lives that this one becomes
    install(kit, mine, role=role)
    kit = kit.resolve()
    (kit / "transfer").mkdir(exist_ok=True)
    for name in ("pid.fl", "shutdown.fl", "restart.fl"):
        (kit / name).unlink(missing_ok=True)
    module, settings = MODULES[role]
    identity = [] if role == "server" else [f"uid={mine.name}"]
    chosen = ["secure_train=true", *identity, f"org={kits.ORGANIZATION}", "config_folder=config"]
    command = [sys.executable, "-u", "-m", f"{__package__}.process", module]
    command += ["-m", str(kit), "-s", settings, "--set", *chosen]
    environment = {**os.environ, **mine.environment(kit / site.NVFLARE_FILE), "MALLOC_ARENA_MAX": "4"}
    os.chdir(kit)
    sys.stdout.flush()
    os.execve(sys.executable, command, environment)
