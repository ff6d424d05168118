"""What proves who is who: a certificate authority, the server's certificate, a key for each silo."""

import datetime
import ipaddress
import os
import secrets
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ...errors import DeploymentError

PRIVATE = 0o600
SECRET_SIZE = 32
TOLERANCE = datetime.timedelta(minutes=5)  # clocks differ
OPENSSH = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH


class Authority(NamedTuple):
    """Who signs the server's certificate.

    Attributes:
        key: Its private key.
        certificate: What everybody trusts.
    """

    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate


def private_folder(folder: Path) -> Path:
    """Make a folder that nobody else can look into."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    return folder


def write_private(path: Path, content: bytes) -> None:
    """Write a file that nobody else can read, at no moment."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def check_private(path: Path) -> None:
    """Whether a secret is there, and for its owner only."""
    if not path.is_file():
        raise DeploymentError(f"{str(path)!r} is missing; `sfvi flower init` makes it.")
    if path.stat().st_mode & 0o077:
        raise DeploymentError(f"{str(path)!r} can be read by others; chmod 600 it, and think about who has seen it.")


def authority(folder: Path, *, days: int) -> Authority:
    """The authority that is kept in a folder; a new one if there is none."""
    paths = folder / "ca.key", folder / "ca.crt"
    if all(path.is_file() for path in paths):
        key = serialization.load_pem_private_key(paths[0].read_bytes(), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        return Authority(key, x509.load_pem_x509_certificate(paths[1].read_bytes()))
    key = ec.generate_private_key(ec.SECP384R1())
    name = _named("sfvi authority")
    usage = dict.fromkeys(USES, False) | {"key_cert_sign": True, "crl_sign": True}
    certificate = (
        _blank(name, name, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.KeyUsage(**usage), critical=True)
        .sign(key, hashes.SHA384())
    )
    write_private(paths[0], _pem(key))
    paths[1].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return Authority(key, certificate)


USES = (
    "digital_signature",
    "content_commitment",
    "key_encipherment",
    "data_encipherment",
    "key_agreement",
    "key_cert_sign",
    "crl_sign",
    "encipher_only",
    "decipher_only",
)


def server_certificate(folder: Path, signer: Authority, *, hosts: list[str], days: int) -> None:
    """Write the server's key and certificate."""
    key = ec.generate_private_key(ec.SECP256R1())
    identifier = signer.certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    certificate = (
        _blank(_named(hosts[0]), signer.certificate.subject, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False)
        .add_extension(x509.SubjectAlternativeName([_alternative(host) for host in hosts]), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(signer.key, hashes.SHA384())
    )
    write_private(folder / "server.key", _pem(key))
    (folder / "server.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))


def node_key(path: Path) -> bytes:
    """Write a silo's private key as Flower wants it; returns the public one for the server."""
    key = ec.generate_private_key(ec.SECP384R1())
    unprotected = serialization.NoEncryption()
    write_private(path, key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, unprotected))
    return key.public_key().public_bytes(*OPENSSH) + b"\n"


def secret(path: Path) -> None:
    """Write what a SuperLink and its SuperExec know each other by."""
    write_private(path, secrets.token_bytes(SECRET_SIZE))


def identity(public: bytes) -> bytes:
    """What two writings of the same public key have in common; OpenSSH's or PEM."""
    load = serialization.load_pem_public_key if public.startswith(b"-----BEGIN") else serialization.load_ssh_public_key
    return load(public).public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


def _named(name):
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])


def _blank(subject, issuer, public_key, days):
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - TOLERANCE)
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _alternative(host):
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(key):
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    return key.private_bytes(encoding, form, serialization.NoEncryption())
