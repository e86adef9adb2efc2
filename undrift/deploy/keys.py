"""Makes the authority and certificate of a federation's server, and the keys of its clients.

The authority's key stays on the server, so that certificates can be renewed. A client makes its own key on its own machine
and gives away the public half alone.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import ipaddress
import os
import re
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from undrift.core.errors import BadSetting
from undrift.core.files import make_private
from undrift.deploy.settings import NAME

DAYS, YEARS = 365, 10  # a server's certificate and the authority's are valid for so long
AUTHORITY = "undrift federation"
LOOPBACK = "127.0.0.1"
HOST = re.compile(r"[A-Za-z0-9:][A-Za-z0-9.:-]{0,63}")  # a name, or an IPv4 or IPv6 address
Key = ec.EllipticCurvePrivateKey
Public = ec.EllipticCurvePublicKey
SSH = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
PEM = serialization.Encoding.PEM


def write_keys(folder: Path, host: str, force: bool = False) -> None:
    """Write the authority (ca.crt, ca.key) and the server's certificate and key (server.crt, server.key)."""
    if not HOST.fullmatch(host):
        raise BadSetting(
            f"{host!r} cannot be a server's address; give --host federation.example.org, or its IP address"
        )
    refuse_to_replace([folder / name for name in ("ca.crt", "ca.key", "server.crt", "server.key")], force)
    make_private(folder)
    authority = new_key()
    write(folder / "ca.key", private_bytes(authority))
    write(folder / "ca.crt", certify(AUTHORITY, authority, authority, None).public_bytes(PEM))
    write_certificate(folder, "server", host)


def renew(folder: Path) -> str:
    """Write a new certificate of the same server, with a new key; return the server's address."""
    try:
        old = x509.load_pem_x509_certificate((folder / "server.crt").read_bytes())
    except OSError as error:
        raise BadSetting(
            f"{folder} has no certificate to renew; make one with: undrift deploy keys {folder}"
        ) from error
    except ValueError as error:
        raise BadSetting(
            f"{folder / 'server.crt'} is damaged; put a copy of it in its place, or {anew(folder)}"
        ) from error
    host = str(old.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)
    write_certificate(folder, "server", host)
    return host


def anew(folder: Path) -> str:
    return f"begin with a new authority, whose ca.crt every client needs: undrift deploy keys {folder} --host ADDRESS --force"


def write_certificate(folder: Path, name: str, host: str, days: int = DAYS) -> None:
    """Write NAME.crt and NAME.key for a host, signed by the folder's authority."""
    try:
        authority = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
    except OSError as error:
        raise BadSetting(f"{folder} has no authority (ca.key); make one with: undrift deploy keys {folder}") from error
    except (ValueError, TypeError, UnsupportedAlgorithm):
        authority = None
    if not isinstance(authority, Key):
        raise BadSetting(f"{folder / 'ca.key'} is damaged; put a copy of it in its place, or {anew(folder)}")
    key = new_key()
    certificate = certify(host, key, authority, host, days)
    # The pair is read together: a server that looks in between sees a key that does not fit, and looks again.
    write(folder / f"{name}.key", private_bytes(key))
    write(folder / f"{name}.crt", certificate.public_bytes(PEM))


def write_identity(folder: Path, name: str, force: bool = False) -> str:
    """Write a client's private key (client.key) and public key (client.pub), and return its fingerprint."""
    check_name(name)
    refuse_to_replace([folder / "client.key", folder / "client.pub"], force)
    make_private(folder)
    key = new_key()
    write(folder / "client.key", private_bytes(key, serialization.PrivateFormat.OpenSSH))
    write(folder / "client.pub", public_line(key.public_key(), name))
    return fingerprint(key.public_key())


def check_name(name: str) -> None:
    if not NAME.fullmatch(name):
        raise BadSetting(f"{name!r} cannot be a client's name; use letters, digits, '.', '_', '-', at most 64")


def public_line(key: Public, name: str) -> bytes:
    return key.public_bytes(*SSH) + f" {name}\n".encode()


def read_public(file: Path) -> tuple[Public, str]:
    """Read a client's public key, and the name that stands beside it."""
    try:
        line = file.read_bytes()
        key = serialization.load_ssh_public_key(line)
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise BadSetting(f"{file} is no public key of undrift deploy identity: {error}") from error
    if not isinstance(key, Public) or not isinstance(key.curve, ec.SECP384R1):
        raise BadSetting(f"{file} is no P-384 key; a client makes one with: undrift deploy identity DIR --name NAME")
    return key, " ".join(line.decode("utf-8", "replace").split()[2:])


def read_private(file: Path) -> Key:
    """Read a client's private key."""
    try:
        key = serialization.load_ssh_private_key(file.read_bytes(), None)
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise BadSetting(f"{file} is no private key; make one with: undrift deploy identity DIR --name NAME") from error
    if not isinstance(key, Key):
        raise BadSetting(f"{file} is no P-384 key; make one with: undrift deploy identity DIR --name NAME")
    return key


def fingerprint(key: Public) -> str:
    """The fingerprint that ssh-keygen -lf shows, to be compared over another channel."""
    digest = hashlib.sha256(base64.b64decode(key.public_bytes(*SSH).split()[1])).digest()
    return f"SHA256:{base64.b64encode(digest).decode().rstrip('=')}"


def refuse_to_replace(files: list[Path], force: bool) -> None:
    there = [file for file in files if file.exists()]
    if there and not force:
        raise BadSetting(f"{there[0]} is there already; give another folder, or --force to replace it for good")


def refuse_open(folder: Path, *names: str) -> None:
    """Refuse a folder in which others may put keys of their own, and private keys in it that others can read."""
    for path, bits, verb, wanted in (
        (folder, 0o022, "change", "go-w"),
        *((folder / n, 0o077, "read", "600") for n in names),
    ):
        if path.stat().st_mode & bits:
            raise BadSetting(f"others on this machine can {verb} {path}; keep it to yourself: chmod {wanted} {path}")


def new_key() -> Key:
    return ec.generate_private_key(ec.SECP384R1())


def private_bytes(key: Key, form: serialization.PrivateFormat = serialization.PrivateFormat.PKCS8) -> bytes:
    return bytes(key.private_bytes(PEM, form, serialization.NoEncryption()))


def write(file: Path, content: bytes) -> None:
    """Write a file, as a whole, that only its owner can read."""
    temporary = file.with_name(f".{file.name}")
    temporary.unlink(missing_ok=True)
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as opened:
        opened.write(content)
    os.replace(temporary, file)


def certify(name: str, key: Key, signer: Key, host: str | None, days: int = DAYS) -> x509.Certificate:
    """Sign a certificate of `key`: a server's for its host, or the authority's own if `host` is None."""
    subject, issuer = (x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, n)]) for n in (name, AUTHORITY))
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))  # so that the gate can say whose clock is behind
        .not_valid_after(now + datetime.timedelta(days=days if host is not None else YEARS * DAYS))
        .add_extension(x509.BasicConstraints(ca=host is None, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    if host is None:
        uses = x509.KeyUsage(True, False, False, False, False, True, True, False, False)  # may sign certificates
        builder = builder.add_extension(uses, critical=True)
    else:
        builder = builder.add_extension(x509.SubjectAlternativeName(names_of(host)), critical=False)
        serves = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
        builder = builder.add_extension(serves, critical=False)
    return builder.sign(signer, hashes.SHA384())


def names_of(host: str) -> list[x509.GeneralName]:
    """The host, and loopback, which the server's processes use among themselves."""
    names: list[x509.GeneralName] = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address(LOOPBACK))]
    try:
        address: x509.GeneralName = x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        address = x509.DNSName(host)
    return names if address in names else [*names, address]
