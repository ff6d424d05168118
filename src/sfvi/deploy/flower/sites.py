"""A server's or a silo's machine: check everything, write its files, and say which Flower commands to run."""

import os
import shlex
import sys
from pathlib import Path
from typing import NamedTuple

from ...errors import DeploymentError
from .. import site
from ..ledger import write_text
from . import keys, kits

ENVIRONMENT = "flower.env"
CONNECTION = "sfvi"
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.25",
}
APP = """\
[project]
name = "sfvi"
version = "1.0.0"
description = "Names the apps of the installed package sfvi; carries no code"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "sfvi"

[tool.flwr.app.components]
serverapp = "sfvi.deploy.flower.apps:server_app"
clientapp = "sfvi.deploy.flower.apps:client_app"

[tool.flwr.app.config]
site = {site}
name = "run"
algorithm = "Sites"
options = "{{}}"
rounds = 0
key = 0
silos = ""
min-silos = 0
late = 10.0
deadline = 600.0
disclose-elbo = false
secure-sum = false
until-converged = false
wire = "float32"
reply = ""
top-k = 0.0
"""
CONFIG = """\
[superlink]
default = "{connection}"

[superlink.{connection}]
address = "127.0.0.1:{port}"
root-certificates = {authority}
"""


class Command(NamedTuple):
    """A command for a person or a supervisor.

    Attributes:
        about: What it is for.
        words: The command.
    """

    about: str
    words: list[str]

    def __str__(self) -> str:
        return f"# {self.about}\n{shlex.join(self.words)}"


def prepare(
    kit: Path,
    *,
    model: str,
    app_dir: Path,
    data: str | None = None,
    unit_ids: str | None = None,
    precision: str = "float32",
    policy: Path | None = None,
) -> site.Site:
    """Check a kit and say what its site is; nothing is written."""
    kit, known = kit.resolve(), kits.read(kit)
    if (data is None) != (known["name"] == kits.SERVER):
        role = "the server" if data is None else "a silo"
        raise DeploymentError(f"{str(kit)!r} is the kit of {known['name']!r}, not of {role}.")
    for name in ("server.key", "exec.secret") if data is None else ("node.key",):
        keys.check_private(kit / name)
    return site.Site(
        name=known["name"],
        model=model,
        app_dir=str(app_dir.resolve()),
        folder=str(kit / "runs"),
        data=str(Path(data).resolve()) if data and Path(data).suffix.lower() in site.data.READERS else data,
        unit_ids=unit_ids,
        precision=precision,
        policy=None if policy is None else str(policy.resolve()),
    )


def install(kit: Path, mine: site.Site) -> None:
    """Write a site's files into its kit, which has been checked: what it is, and what Flower's commands need."""
    kit, known = kit.resolve(), kits.read(kit)
    keys.private_folder(kit / "runs")
    mine.write(kit / site.FLOWER_FILE)
    home = keys.private_folder(kit / "flower")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    settings = {"FLWR_HOME": str(home), **QUIET, "PATH": path}
    write_text(kit / ENVIRONMENT, "".join(f"{name}={shlex.quote(value)}\n" for name, value in settings.items()))
    if mine.data is None:
        text = CONFIG.format(connection=CONNECTION, port=known["port"], authority=_toml(kit / "ca.crt"))
        write_text(home / "config.toml", text)
        keys.private_folder(kit / "app")
        write_text(kit / "app" / "pyproject.toml", APP.format(site=_toml(kit / site.FLOWER_FILE)))


def environment(kit: Path) -> str:
    """How a shell takes over the environment of the commands."""
    return f"set -a; . {shlex.quote(str(kit.resolve() / ENVIRONMENT))}; set +a"


def server_commands(kit: Path) -> list[Command]:
    """What runs at the server: two processes that stay, then a registration for each silo, then the runs."""
    kit, known = kit.resolve(), kits.read(kit)
    address = ["--host", "127.0.0.1", "--port", str(known["port"])]
    trust = [f"127.0.0.1:{known['port']}", "--root-certificates", str(kit / "ca.crt")]
    identity = ["--ssl-ca-certfile", "ca.crt", "--ssl-certfile", "server.crt", "--ssl-keyfile", "server.key"]
    identity = [word if word.startswith("--") else str(kit / word) for word in identity]
    process = ["--isolation", "process", "--disable-runtime-dependency-installation"]
    secret = ["--superexec-auth-secret-file", str(kit / "exec.secret")]
    database = ["--database", str(kit / "flower" / "superlink.db")]
    superlink = ["flower-superlink", *identity, "--enable-supernode-auth", *address, *database, *process, *secret]
    register = [
        Command(
            f"once, when SuperLink is up and before {name} starts",
            ["flwr", "supernode", "register", str(kit / kits.TABLE / f"{name}.pub"), CONNECTION, "--name", name],
        )
        for name in kits.table(kit)
    ]
    run = ["flwr", "run", str(kit / "app"), CONNECTION, "--stream", "--run-config", 'name="first" rounds=40']
    return [
        Command("stays: what silos connect to", superlink),
        Command("stays: starts runs", ["flower-superexec", "--runtime-api-address", *trust, *secret]),
        *register,
        Command("a run; the same name goes on where it was", run),
    ]


def silo_command(kit: Path, *, port: int) -> Command:
    """What runs at a silo; `port` is for its own processes on its machine."""
    kit, known = kit.resolve(), kits.read(kit)
    superlink = ["--superlink", f"{known['host']}:{known['port']}", "--root-certificates", str(kit / "ca.crt")]
    identity = ["--auth-supernode-private-key", str(kit / "node.key")]
    own = ["--isolation", "subprocess", "--host", "127.0.0.1", "--port", str(port)]
    config = ["--node-config", f"site={_toml(kit / site.FLOWER_FILE)}"]
    return Command(
        "stays: start it again 10 s after it ends", ["flower-supernode", *superlink, *identity, *own, *config]
    )


def _toml(path):
    text = str(path)
    if any(character in text for character in "\"'\\\n"):
        raise DeploymentError(f"{text!r} has quotes or backslashes in it, which Flower does not take; move the folder.")
    return f'"{text}"'
