"""Startup kits: certificates and settings for a server and named silos."""

import json
import shutil
from pathlib import Path
from typing import Any

from nvflare.lighter.entity import Project
from nvflare.lighter.impl.cert import CertBuilder
from nvflare.lighter.impl.signature import SignatureBuilder
from nvflare.lighter.impl.static_file import StaticFileBuilder
from nvflare.lighter.impl.workspace import WorkspaceBuilder
from nvflare.lighter.provisioner import Provisioner

from ...errors import DeploymentError, OptionError
from ..ledger import read_json, write_text
from ..spec import check_kits

ORGANIZATION = "sfvi"
OPERATOR = "operator@sfvi.org"
SERVER = "server"
CLASSES = [
    "nvflare.collab.runtime.controller.CollabController",
    "nvflare.collab.runtime.executor.CollabExecutor",
    "sfvi.deploy.nvflare.roles.",
]
PROJECT = "project.json"
PRIVATE = 0o600
ROLES = {"server": "a server", "client": "a silo", "admin": "an operator"}


def init(folder: Path, *, host: str, port: int, silos: list[str], valid_days: int = 360) -> dict[str, Path]:
    """Make, or complete, a folder with a kit for the server, each silo and the operator.

    The certificate authority is kept in the folder and stays with whoever made it. Silos that are new get kits signed
    by it; kits that are there already are left as they are.

    Args:
        folder: For all kits.
        host: Name or address under which silos reach the server.
        port: Of the server, the only one that has to be open.
        silos: Their names.
        valid_days: How long certificates last.
    """
    check_kits(silos, host, port, valid_days, taken=(SERVER, "operator", "authority"))
    folder = Path(folder)
    known = _project(folder)
    project = {"host": host, "port": port, "silos": sorted({*silos, *(known or {}).get("silos", [])})}
    if known is not None and (known["host"], known["port"]) != (host, port):
        raise OptionError(
            f"{str(folder)!r} holds kits for {known['host']}:{known['port']}; give the same, or another folder."
        )
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    try:
        made = _provision(folder / "authority", project, valid_days)
    except BaseException:
        if known is None:
            shutil.rmtree(folder / "authority", ignore_errors=True)
        raise
    write_text(folder / PROJECT, json.dumps(project, indent=1))
    kits = {}
    for name, identity in {SERVER: SERVER, "operator": OPERATOR, **{silo: silo for silo in project["silos"]}}.items():
        kits[name] = folder / name
        if not kits[name].exists():
            half = folder / f".{name}.part"  # a kit appears with its settings or not at all
            shutil.rmtree(half, ignore_errors=True)
            shutil.copytree(made / identity, half)
            _settle(half, identity)
            half.rename(kits[name])
    for path in (folder / "authority").rglob("*"):
        path.chmod(0o700 if path.is_dir() else PRIVATE)
    (folder / "authority").chmod(0o700)
    return kits


def _project(folder):
    path = folder / PROJECT
    if path.exists():
        return read_json(path)
    if folder.exists() and any(folder.iterdir()):
        raise OptionError(f"{str(folder)!r} is not empty and holds no kits of sfvi; give another folder.")
    return None


def _provision(folder, project, valid_days):
    entity = Project(ORGANIZATION, "sfvi")
    host = {"fed_learn_port": project["port"], "admin_port": project["port"], "default_host": project["host"]}
    if project["host"] == "localhost":
        host["host_names"] = ["127.0.0.1"]
    entity.set_server(SERVER, ORGANIZATION, host)
    for name in project["silos"]:
        entity.add_client(name, ORGANIZATION, {})
    entity.add_admin(OPERATOR, ORGANIZATION, {"role": "project_admin"})
    builders: list[Any] = [
        WorkspaceBuilder(template_file="master_template.yml"),
        StaticFileBuilder(config_folder="config", scheme="grpc"),
        CertBuilder(root_valid_days=valid_days),
        SignatureBuilder(),
    ]
    context = Provisioner(str(folder), builders).provision(entity)
    if context.get("build_error") or "current_prod_dir" not in context:
        raise DeploymentError("NVFlare could not make the kits; its messages above say why.")
    return Path(context["current_prod_dir"])


def _settle(kit, name):
    """Our own settings: no code from outside, nothing in shared folders, failures noticed in seconds."""
    for path in (kit / "startup").glob("*.key"):
        path.chmod(PRIVATE)
    if name == OPERATOR:
        return
    local = kit / "local"
    resources = json.loads((local / "resources.json.default").read_text())
    resources |= {"class_list_enforcement_mode": "enforce", "class_allow_list": CLASSES}
    if name == SERVER:
        resources["servers"][0] |= {"heart_beat_timeout": 30, "admin_timeout": 5.0}
        for component in resources["components"]:
            if component["id"] == "job_scheduler":
                component["args"] = {
                    "max_jobs": 1,
                    "min_schedule_interval": 1.0,
                    "max_schedule_interval": 5.0,
                    "max_schedule_count": 1_000_000,
                }
    else:
        resources["client"] |= {"retry_timeout": 10, "client_register_interval": 1.0, "maint_msg_timeout": 5.0}
        resources["components"] = [part for part in resources["components"] if part["id"] != "site_log_streamer"]
        resources["allow_log_streaming"] = False
    for file, content in (
        ("resources.json", resources),
        ("authorization.json", AUTHORIZATION),
        ("log_config.json", LOGS),
    ):
        write_text(local / file, json.dumps(content, indent=1))


def place(kit: Path) -> None:
    """Have NVFlare's server keep its files in the kit, wherever that lies now."""
    path = kit / "local" / "resources.json"
    resources = json.loads(path.read_text())
    resources["snapshot_persistor"]["args"]["storage"]["args"]["root_dir"] = str(kit.resolve() / "snapshots")
    for component in resources["components"]:
        if component["id"] == "job_manager":
            component["args"]["uri_root"] = str(kit.resolve() / "jobs")
    write_text(path, json.dumps(resources, indent=1))


RIGHTS = ("submit_job", "clone_job", "manage_job", "download_job", "view", "operate", "app_command")
AUTHORIZATION = {
    "format_version": "1.0",
    "permissions": {
        "project_admin": {**dict.fromkeys(RIGHTS, "any"), "shell_commands": "none", "byoc": "none"},
        **{role: {"view": "any", "submit_job": "none", "byoc": "none"} for role in ("org_admin", "lead", "member")},
    },
}
LOGS = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {
        "baseFormatter": {
            "()": "nvflare.fuel.utils.log_utils.BaseFormatter",
            "fmt": "%(asctime)s - %(name)s - %(levelname)s - %(message)s",
        }
    },
    "filters": {},
    "handlers": {
        "logFileHandler": {
            "class": "logging.handlers.RotatingFileHandler",
            "level": "DEBUG",
            "formatter": "baseFormatter",
            "filename": "log.txt",
            "mode": "a",
            "maxBytes": 20971520,
            "backupCount": 3,
        }
    },
    "loggers": {"root": {"level": "WARNING", "handlers": ["logFileHandler"]}},
}


def check(kit: Path, *, role: str) -> str:
    """Whether a folder is a whole kit of this role ("server", "client" or "admin"); returns whose."""
    files = "server" if role == "server" else "client"
    wanted = [f"startup/fed_{role}.json", f"startup/{files}.crt", f"startup/{files}.key", "startup/rootCA.pem"]
    missing = [file for file in wanted if not (kit / file).is_file()]
    if missing:
        raise DeploymentError(
            f"{str(kit)!r} is no kit of {ROLES[role]}: {missing[0]} is missing; `sfvi deploy init` makes kits."
        )
    key = kit / f"startup/{files}.key"
    if key.stat().st_mode & 0o077:
        raise DeploymentError(f"{str(key)!r} can be read by others; chmod 600 it, and think about who has seen it.")
    if role == "server":
        return SERVER
    return _common_name(kit / "startup/client.crt")


def _common_name(path):
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
    except ValueError:
        raise DeploymentError(f"{str(path)!r} is damaged; take it from the kit again.") from None
    return str(certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)
