"""Makes certificates for TLS and keys for node authentication."""

from __future__ import annotations

import datetime
import ipaddress
import os
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAYS = 365  # a certificate is valid for so long
AUTHORITY = "undrift federation"
Key = ec.EllipticCurvePrivateKey


def write_keys(folder: Path, host: str, clients: int) -> None:
    """Write ca.crt, server.crt and server.key for the server's address, and client-i and client-i.pub for each client."""
    folder.mkdir(parents=True, exist_ok=True)
    authority, server = new_key(), new_key()
    root, signed = certify(AUTHORITY, authority, authority, None), certify(host, server, authority, host)
    write(folder / "ca.crt", root.public_bytes(serialization.Encoding.PEM))
    write(folder / "server.crt", signed.public_bytes(serialization.Encoding.PEM))
    write(folder / "server.key", private_bytes(server))
    for client in range(clients):
        write_client_key(folder / f"client-{client}")


def write_client_key(file: Path) -> None:
    """Write a client's private key, and its public key for the server."""
    key = new_key()
    form = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    write(file, private_bytes(key, serialization.PrivateFormat.OpenSSH))
    write(file.with_name(f"{file.name}.pub"), key.public_key().public_bytes(*form))


def new_key() -> Key:
    return ec.generate_private_key(ec.SECP384R1())


def private_bytes(key: Key, form: serialization.PrivateFormat = serialization.PrivateFormat.PKCS8) -> bytes:
    return bytes(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))


def write(file: Path, content: bytes) -> None:
    """Write a file that only its owner can read."""
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as opened:
        opened.write(content)


def certify(name: str, key: Key, signer: Key, host: str | None) -> x509.Certificate:
    """Sign a certificate of `key`: a server's for its host, or the authority's own if `host` is None."""
    subject, issuer = (x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, n)]) for n in (name, AUTHORITY))
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=DAYS))
        .add_extension(x509.BasicConstraints(ca=host is None, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    if host is None:
        uses = x509.KeyUsage(True, False, False, False, False, True, True, False, False)  # may sign certificates
        builder = builder.add_extension(uses, critical=True)
    else:
        builder = builder.add_extension(x509.SubjectAlternativeName(names_of(host)), critical=False)
    return builder.sign(signer, hashes.SHA384())


def names_of(host: str) -> list[x509.GeneralName]:
    """The host, and loopback, which the server's processes use among themselves."""
    names: list[x509.GeneralName] = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    try:
        address: x509.GeneralName = x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        address = x509.DNSName(host)
    return names if address in names else [*names, address]
