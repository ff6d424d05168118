"""Folders for a server and its silos: keys, certificates, and whose key is whose."""

import json
from pathlib import Path
from typing import Any

from ...errors import DeploymentError, OptionError
from ..ledger import read_json, write_text
from ..spec import check_kits
from . import keys

SERVER = "server"
AUTHORITY = "authority"
FILE = "kit.json"
TABLE = "silos"
AUTHORITY_LASTS = 10  # times as long as the certificates that it signs
LOCAL = ("localhost", "127.0.0.1")


def init(folder: Path, *, host: str, port: int, silos: list[str], valid_days: int = 360) -> dict[str, Path]:
    """Make, or complete, a folder with a kit for the server and for each silo.

    What is there is left as it is. So a silo can be added later, and whatever shall be new is deleted first: the
    server's certificate, or a silo's public key in the server's kit, with which its private one is made anew.

    Args:
        folder: For all kits.
        host: Name or address under which silos reach the server.
        port: Of the server, the only one that has to be open.
        silos: Their names.
        valid_days: How long the server's certificate lasts; the authority's lasts ten times as long.
    """
    check_kits(silos, host, port, valid_days, taken=(SERVER, AUTHORITY, FILE))
    folder = Path(folder)
    _check_known(folder, host, port)
    keys.private_folder(folder)
    address = {"host": host, "port": port}
    write_text(folder / FILE, json.dumps(address, indent=1))
    signer = keys.authority(keys.private_folder(folder / AUTHORITY), days=AUTHORITY_LASTS * valid_days)
    server = _server(folder, signer, address, valid_days)
    kits = {SERVER: server}
    for name in silos:
        kits[name] = folder / name
        public = server / TABLE / f"{name}.pub"
        if not public.exists():
            public.write_bytes(keys.node_key(_kit(folder, name, address) / "node.key"))
    return kits


def _check_known(folder, host, port):
    path = folder / FILE
    if path.exists():
        known = read_json(path)
        if (known["host"], known["port"]) != (host, port):
            raise OptionError(
                f"{str(folder)!r} holds kits for {known['host']}:{known['port']}; give the same, or another folder."
            )
    elif folder.exists() and any(folder.iterdir()):
        raise OptionError(f"{str(folder)!r} is not empty and holds no kits of sfvi; give another folder.")


def _kit(folder, name, address):
    kit = keys.private_folder(folder / name)
    write_text(kit / FILE, json.dumps({"name": name, **address}, indent=1))
    (kit / "ca.crt").write_bytes((folder / AUTHORITY / "ca.crt").read_bytes())
    return kit


def _server(folder, signer, address, valid_days):
    kit = _kit(folder, SERVER, address)
    if not ((kit / "server.crt").exists() and (kit / "server.key").exists()):
        hosts = [address["host"], *(host for host in LOCAL if host != address["host"])]
        keys.server_certificate(kit, signer, hosts=hosts, days=valid_days)
    if not (kit / "exec.secret").exists():
        keys.secret(kit / "exec.secret")
    keys.private_folder(kit / TABLE)
    return kit


def read(kit: Path) -> dict[str, Any]:
    """Whose kit a folder is, and where its server is."""
    path = Path(kit) / FILE
    found = read_json(path) if path.is_file() else {}
    if "name" not in found:
        raise DeploymentError(f"{str(kit)!r} is no kit for Flower: `sfvi flower init` makes kits.")
    return found


def table(kit: Path) -> dict[str, bytes]:
    """For each silo what its node must prove to be, see `keys.identity`."""
    found = {}
    for path in sorted((Path(kit) / TABLE).glob("*.pub")):
        try:
            public = keys.identity(path.read_bytes())
        except Exception as error:
            raise DeploymentError(f"{str(path)!r} is no public key; make it anew, see `sfvi flower init`.") from error
        for name, other in found.items():
            if other == public:
                raise DeploymentError(f"{name!r} and {path.stem!r} have the same key; make one of them anew.")
        found[path.stem] = public
    if not found:
        raise DeploymentError(f"{str(Path(kit) / TABLE)!r} has no silo's public key; make them by `sfvi flower init`.")
    return found
