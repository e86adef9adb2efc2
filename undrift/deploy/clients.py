"""Which keys the operator has admitted, and under which names: NAME.pub in the folder `clients` of the server's folder.

A name has one key, and a key has one name. A revoked key is kept in `revoked` and never comes back, also where its file does,
as from a backup.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from undrift.core.errors import BadSetting, UnknownName
from undrift.core.files import make_private, one_at_a_time
from undrift.deploy.keys import Public, check_name, fingerprint, public_line, read_public, write

ADMITTED, REVOKED = "clients", "revoked"


def admitted_keys(server: Path) -> dict[str, Public]:
    """The admitted keys by name, without those that were revoked."""
    gone = revoked_keys(server)
    found = {file.stem: read_public(file)[0] for file in sorted((server / ADMITTED).glob("[!.]*.pub"))}
    return {name: key for name, key in found.items() if fingerprint(key) not in gone}


def revoked_keys(server: Path) -> set[str]:
    """The fingerprints of the revoked keys."""
    return {fingerprint(read_public(file)[0]) for file in (server / REVOKED).glob("[!.]*.pub")}


@contextlib.contextmanager
def changing(server: Path) -> Iterator[None]:
    """Let one command at a time look at who is admitted and change it."""
    make_private(server / ADMITTED)
    with one_at_a_time(server / ADMITTED / ".lock"):
        yield


def admit(server: Path, file: Path, name: str = "") -> tuple[str, str]:
    """Admit the public key in a file under a name, or under the one that stands in it; return name and fingerprint."""
    key, said = read_public(file)
    name = name or said
    check_name(name)
    mark = fingerprint(key)
    with changing(server):
        for other, known in admitted_keys(server).items():
            if other == name and fingerprint(known) != mark:
                raise BadSetting(
                    f"{name} has another key, {fingerprint(known)}; if it has lost that one: undrift deploy revoke {server} "
                    f"--name {name}"
                )
            if other != name and other.lower() == name.lower():  # people, and some file systems, take them for one
                raise BadSetting(
                    f"{other} is admitted, and {name} differs from it by capitals alone; choose another name"
                )
            if fingerprint(known) == mark and other != name:
                raise BadSetting(f"this key is admitted as {other}; {name} needs a key of its own")
        if mark in revoked_keys(server):
            raise BadSetting(f"the key {mark} was revoked; {name} needs a new one: undrift deploy identity")
        write(server / ADMITTED / f"{name}.pub", public_line(key, name))
    return name, mark


def revoke(server: Path, name: str) -> str:
    """Take the name's key away for good, and return its fingerprint."""
    check_name(name)
    with changing(server):
        known = admitted_keys(server)
        if name not in known:
            raise UnknownName("client", name, known)
        mark = fingerprint(known[name])
        make_private(server / REVOKED)
        write(server / REVOKED / f"{name}-{mark[7:15].replace('/', '_')}.pub", public_line(known[name], name))
        (server / ADMITTED / f"{name}.pub").unlink()
    return mark
