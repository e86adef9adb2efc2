"""Which keys the operator has admitted, and under which names: NAME.pub in the folder `clients` of the server's folder.

A name has one key, and a key has one name. A revoked key is kept in `revoked` and never comes back.
"""

from __future__ import annotations

from pathlib import Path

from undrift.core.errors import BadSetting, UnknownName
from undrift.core.files import make_private
from undrift.deploy.keys import Public, check_name, fingerprint, public_line, read_public, write

ADMITTED, REVOKED = "clients", "revoked"


def admitted(server: Path) -> dict[str, Public]:
    """The admitted keys by name."""
    return {file.stem: read_public(file)[0] for file in sorted((server / ADMITTED).glob("[!.]*.pub"))}


def admit(server: Path, file: Path, name: str = "") -> tuple[str, str]:
    """Admit the public key in a file under a name, or under the one that stands in it; return name and fingerprint."""
    key, said = read_public(file)
    name = name or said
    check_name(name)
    mark = fingerprint(key)
    for other, known in admitted(server).items():
        if other == name and fingerprint(known) != mark:
            raise BadSetting(
                f"{name} has another key, {fingerprint(known)}; if it has lost that one: undrift deploy revoke {server} "
                f"--name {name}"
            )
        if fingerprint(known) == mark and other != name:
            raise BadSetting(f"this key is admitted as {other}; {name} needs a key of its own")
    if any(fingerprint(read_public(old)[0]) == mark for old in (server / REVOKED).glob("[!.]*.pub")):
        raise BadSetting(f"the key {mark} was revoked; {name} needs a new one: undrift deploy identity")
    make_private(server / ADMITTED)
    write(server / ADMITTED / f"{name}.pub", public_line(key, name))
    return name, mark


def revoke(server: Path, name: str) -> str:
    """Take the name's key away for good, and return its fingerprint."""
    check_name(name)
    known = admitted(server)
    if name not in known:
        raise UnknownName("client", name, known)
    mark = fingerprint(known[name])
    make_private(server / REVOKED)
    write(server / REVOKED / f"{name}-{mark[7:15].replace('/', '_')}.pub", public_line(known[name], name))
    (server / ADMITTED / f"{name}.pub").unlink()
    return mark
