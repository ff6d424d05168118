"""Starting a server or a silo: check everything, then become NVFlare's process."""

import os
import sys
from pathlib import Path
from typing import NoReturn

from .. import site
from . import kits

FILE = "sfvi.json"
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
) -> site.Site:
    """Write a site's file beside its kit."""
    name = kits.check(kit, role=role)
    mine = site.Site(
        name=name,
        model=model,
        app_dir=str(app_dir.resolve()),
        folder=str((folder or kit / "runs").resolve()),
        data=str(Path(data).resolve()) if data and Path(data).suffix.lower() in site.data.READERS else data,
        unit_ids=unit_ids,
        precision=precision,
    )
    if role == "server":
        kits.place(kit)
    Path(mine.folder).mkdir(parents=True, exist_ok=True)
    Path(mine.folder).chmod(0o700)
    mine.write(kit / "local" / FILE)
    return mine


def become(kit: Path, mine: site.Site, *, role: str) -> NoReturn:
    """Replace this process by NVFlare's."""
    kit = kit.resolve()
    (kit / "transfer").mkdir(exist_ok=True)
    for name in ("pid.fl", "shutdown.fl", "restart.fl"):
        (kit / name).unlink(missing_ok=True)
    module, settings = MODULES[role]
    identity = [] if role == "server" else [f"uid={mine.name}"]
    chosen = ["secure_train=true", *identity, f"org={kits.ORGANIZATION}", "config_folder=config"]
    command = [sys.executable, "-u", "-m", module, "-m", str(kit), "-s", settings, "--set", *chosen]
    environment = {**os.environ, **mine.environment(kit / "local" / FILE), "MALLOC_ARENA_MAX": "4"}
    os.chdir(kit)
    sys.stdout.flush()
    os.execve(sys.executable, command, environment)
