"""Certificates for TLS and keys for node authentication, made on the spot."""

from __future__ import annotations

import datetime
import ipaddress
import os
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAYS = 365  # that a certificate is good for


def write_keys(folder: Path, host: str, clients: int) -> None:
    """ca.crt, server.crt and server.key for the server's address, and a pair client-i, client-i.pub for each client."""
    folder.mkdir(parents=True, exist_ok=True)
    authority, server = new_key(), new_key()
    root = certificate("undrift federation", authority, "undrift federation", authority, None)
    write(folder / "ca.crt", root.public_bytes(serialization.Encoding.PEM))
    signed = certificate(host, server, "undrift federation", authority, host)
    write(folder / "server.crt", signed.public_bytes(serialization.Encoding.PEM))
    write(folder / "server.key", private(server))
    for client in range(clients):
        write_client_key(folder / f"client-{client}")


def write_client_key(file: Path) -> None:
    """A client's private key, and beside it the public one that the server is told."""
    key = new_key()
    form = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    write(file, private(key, serialization.PrivateFormat.OpenSSH))
    write(file.with_name(f"{file.name}.pub"), key.public_key().public_bytes(*form))


def new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP384R1())


def private(
    key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat = serialization.PrivateFormat.PKCS8
) -> bytes:
    pem: bytes = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    return pem


def write(file: Path, content: bytes) -> None:
    """A file that only its owner reads."""
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as opened:
        opened.write(content)


def certificate(
    name: str, key: ec.EllipticCurvePrivateKey, issuer: str, signer: ec.EllipticCurvePrivateKey, host: str | None
) -> x509.Certificate:
    """A certificate of `key`; for a server's host, or for an authority where host is None."""
    called = [x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, n)]) for n in (name, issuer)]
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(called[0])
        .issuer_name(called[1])
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=DAYS))
        .add_extension(x509.BasicConstraints(ca=host is None, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    if host is None:
        uses = x509.KeyUsage(True, False, False, False, False, True, True, False, False)  # signs, also certificates
        made = made.add_extension(uses, critical=True)
    else:
        made = made.add_extension(x509.SubjectAlternativeName(names_of(host)), critical=False)
    return made.sign(signer, hashes.SHA384())


def names_of(host: str) -> list[x509.GeneralName]:
    """The host, and loopback, over which the server's own parts talk to each other."""
    names: list[x509.GeneralName] = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    try:
        address: x509.GeneralName = x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        address = x509.DNSName(host)
    return names if address in names else [*names, address]
