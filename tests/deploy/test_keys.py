"""Keys and certificates: nothing is replaced by accident, each name has one key, and only their owners can read them."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr")

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from undrift.cli import main
from undrift.core.errors import BadSetting, UnknownName
from undrift.deploy.clients import admit, admitted_keys, revoke
from undrift.deploy.keys import SSH, fingerprint, read_private, read_public, renew, write_identity, write_keys
from undrift.deploy.link import state_of
from undrift.deploy.state import Store


@pytest.fixture(autouse=True)
def loose() -> Iterator[None]:
    """The umask of most machines, under which new files can be read by everybody."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def open_to_others(folder: Path) -> list[Path]:
    return [path for path in (folder, *folder.rglob("*")) if stat.S_IMODE(path.stat().st_mode) & 0o077]


def client(root: Path, name: str) -> Path:
    write_identity(root / name, name)
    return root / name / "client.pub"


def test_keys_and_identities_are_never_replaced_without_force(tmp_path: Path, capsys: Any) -> None:
    server, own = str(tmp_path / "server"), str(tmp_path / "own")
    commands = ["deploy", "keys", server, "--host", "h.example.org"], ["deploy", "identity", own, "--name", "clinic-a"]
    for command in commands:
        assert main(command) == 0
        before = contents(tmp_path)
        assert main(command) == 2 and contents(tmp_path) == before
        assert "is there already" in capsys.readouterr().err
        assert main([*command, "--force"]) == 0
        after = contents(tmp_path)
        assert after.keys() == before.keys() and after != before
    (tmp_path / "server" / "server.crt").unlink()  # the rest is still worth keeping
    before = contents(tmp_path)
    assert main(commands[0]) == 2 and contents(tmp_path) == before


def test_the_authority_is_kept_and_certificates_are_renewed(tmp_path: Path) -> None:
    write_keys(tmp_path, "h.example.org")
    authority = x509.load_pem_x509_certificate((tmp_path / "ca.crt").read_bytes())
    old, kept = (tmp_path / "server.crt").read_bytes(), {n: (tmp_path / n).read_bytes() for n in ("ca.crt", "ca.key")}
    assert main(["deploy", "keys", str(tmp_path), "--renew"]) == 0
    assert {n: (tmp_path / n).read_bytes() for n in kept} == kept and (tmp_path / "server.crt").read_bytes() != old
    new = x509.load_pem_x509_certificate((tmp_path / "server.crt").read_bytes())
    new.verify_directly_issued_by(authority)
    names = new.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert "h.example.org" in names.get_values_for_type(x509.DNSName)
    assert authority.not_valid_after_utc > new.not_valid_after_utc
    key = serialization.load_pem_private_key((tmp_path / "server.key").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey) and key.public_key() == new.public_key()
    with pytest.raises(BadSetting, match="no certificate to renew"):
        renew(tmp_path / "elsewhere")


@pytest.mark.parametrize("name", ["ca.key", "server.crt"])
def test_damaged_keys_are_named(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_keys(tmp_path, "127.0.0.1")
    (tmp_path / name).write_text("rubbish")
    assert main(["deploy", "keys", str(tmp_path), "--renew"]) == 2
    assert f"{name} is damaged; put a copy of it in its place" in capsys.readouterr().err
    if name == "server.crt":
        assert main(["deploy", "server", str(tmp_path), "--listen", "127.0.0.1:8999"]) == 2
        assert "server.crt with server.key" in capsys.readouterr().err


def test_only_their_owners_can_read_keys_and_states(tmp_path: Path) -> None:
    write_keys(tmp_path / "server", "127.0.0.1")
    admit(tmp_path / "server", client(tmp_path, "clinic-a"))
    admit(tmp_path / "server", client(tmp_path, "clinic-b"))
    revoke(tmp_path / "server", "clinic-b")
    Store(tmp_path / "states", "run", "clinic-a").write(0, 1, {"c": torch.zeros(3)})
    folders = ("server", "clinic-a", "states")
    assert [path for folder in folders for path in open_to_others(tmp_path / folder)] == []


def test_a_clients_private_key_is_nowhere_but_with_the_client(tmp_path: Path) -> None:
    write_keys(tmp_path / "server", "127.0.0.1")
    name, mark = admit(tmp_path / "server", client(tmp_path, "clinic-a"))
    private = read_private(tmp_path / "clinic-a" / "client.key")
    assert (name, mark) == ("clinic-a", fingerprint(private.public_key())) and mark.startswith("SHA256:")
    secret = private.private_numbers().private_value.to_bytes(48)
    for content in contents(tmp_path / "server").values():
        assert b"OPENSSH PRIVATE" not in content and secret not in content
    assert admitted_keys(tmp_path / "server") == {"clinic-a": private.public_key()}


def test_a_name_has_one_key_and_a_key_has_one_name(tmp_path: Path) -> None:
    server, key = tmp_path / "server", client(tmp_path, "clinic-a")
    write_keys(server, "127.0.0.1")
    for _ in range(2):  # to admit it twice changes nothing
        admit(server, key)
    other = client(tmp_path / "other", "clinic-a")
    before = contents(server)
    with pytest.raises(BadSetting, match="clinic-a has another key, SHA256:.*revoke"):
        admit(server, other)
    with pytest.raises(BadSetting, match="this key is admitted as clinic-a"):
        admit(server, key, "clinic-b")
    assert contents(server) == before
    revoke(server, "clinic-a")
    assert admitted_keys(server) == {}
    for name in ("clinic-a", "clinic-b"):
        with pytest.raises(BadSetting, match="was revoked"):
            admit(server, key, name)
    assert admit(server, other)[0] == "clinic-a"
    with pytest.raises(UnknownName, match="did you mean 'clinic-a'"):
        revoke(server, "clinic-x")


@pytest.mark.parametrize("name", ["../x", "", "a/b", ".hidden", "x" * 65, "a b", "a\nb"])
def test_names_that_would_be_other_files_are_refused(name: str, tmp_path: Path) -> None:
    write_keys(tmp_path / "server", "127.0.0.1")
    key = client(tmp_path, "good")
    for attempt in (lambda: write_identity(tmp_path / "bad", name), lambda: revoke(tmp_path / "server", name)):
        with pytest.raises(BadSetting, match="cannot be a client's name"):
            attempt()
    key.write_bytes(b" ".join([*key.read_bytes().split()[:2], name.encode()]))
    with pytest.raises(BadSetting, match="cannot be a client's name|no public key"):
        admit(tmp_path / "server", key, "" if name else "..")


def test_other_keys_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.pub"
    weak, other = ec.generate_private_key(ec.SECP256R1()), ed25519.Ed25519PrivateKey.generate()
    for content in (weak.public_key().public_bytes(*SSH), other.public_key().public_bytes(*SSH), b"", b"\xff\0"):
        file.write_bytes(content)
        with pytest.raises(BadSetting):
            read_public(file)
        with pytest.raises(BadSetting):
            read_private(file)


def test_the_commands_admit_and_revoke(tmp_path: Path, capsys: Any) -> None:
    server, own = str(tmp_path / "server"), str(tmp_path / "own")
    assert main(["deploy", "keys", server]) == 0
    assert main(["deploy", "identity", own, "--name", "clinic-a"]) == 0
    mark = fingerprint(read_private(tmp_path / "own" / "client.key").public_key())
    assert mark in capsys.readouterr().out
    assert main(["deploy", "admit", server]) == 2 and main(["deploy", "revoke", server]) == 2
    assert main(["deploy", "identity", str(tmp_path / "more")]) == 2
    assert main(["deploy", "admit", server, "--key", f"{own}/client.pub"]) == 0
    assert f"clinic-a is admitted with the key {mark}" in capsys.readouterr().out
    assert main(["deploy", "revoke", server, "--name", "clinic-a"]) == 0 and mark in capsys.readouterr().out
    assert main(["deploy", "admit", server, "--key", f"{own}/client.pub"]) == 2
    assert main(["deploy", "node", own]) == 2 and "--server" in capsys.readouterr().err
    assert main(["deploy", "node", own, "--server", "127.0.0.1:1"]) == 2 and "ca.crt" in capsys.readouterr().err
    assert main(["deploy", "server", str(tmp_path / "none")]) == 2 and "deploy keys" in capsys.readouterr().err
    assert main(["deploy", "server", server, "--listen", "8000"]) == 2 and "--listen" in capsys.readouterr().err


@pytest.mark.parametrize("host", ["", "ü.example.org", "x" * 65, "a b\n"])
def test_hosts_that_cannot_be_in_a_certificate_leave_nothing_behind(host: str, tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match="cannot be a server's address"):
        write_keys(tmp_path / "server", host)
    write_keys(tmp_path / "server", "127.0.0.1")


def test_a_revoked_key_that_is_put_back_is_no_clients(tmp_path: Path) -> None:
    """As from a backup of the folder, or by an admission that goes on at the same time."""
    server, key = tmp_path / "server", client(tmp_path, "clinic-a")
    write_keys(server, "127.0.0.1")
    admit(server, key)
    kept, before = (server / "clients" / "clinic-a.pub").read_bytes(), state_of(server)
    revoke(server, "clinic-a")
    assert state_of(server) != before  # a running server looks again
    (server / "clients" / "clinic-a.pub").write_bytes(kept)
    assert admitted_keys(server) == {}
    new = client(tmp_path / "new", "clinic-a")
    assert admit(server, new)[0] == "clinic-a" and admitted_keys(server).keys() == {"clinic-a"}


def test_changes_at_the_same_time_leave_one_key_for_a_name(tmp_path: Path) -> None:
    """Eight keys for one name, each admitted by a command of its own at once; and its key revoked as it is admitted again."""
    server = tmp_path / "server"
    write_keys(server, "127.0.0.1")
    files = [client(tmp_path / str(n), "clinic-a") for n in range(8)]
    for _ in range(5):
        with ThreadPoolExecutor(len(files)) as pool:
            done = [pool.submit(admit, server, file) for file in files]
        assert sum(one.exception() is None for one in done) == 1
        (held,) = [file for file, one in zip(files, done, strict=True) if one.exception() is None]
        with ThreadPoolExecutor(2) as pool:
            pool.submit(admit, server, held)
            assert pool.submit(revoke, server, "clinic-a").result()
        assert admitted_keys(server) == {}
        files.remove(held)


def test_names_that_differ_by_capitals_alone_are_refused(tmp_path: Path) -> None:
    server = tmp_path / "server"
    write_keys(server, "127.0.0.1")
    admit(server, client(tmp_path, "clinic-a"))
    other = client(tmp_path / "other", "Clinic-A")
    with pytest.raises(BadSetting, match="clinic-a is admitted, and Clinic-A differs from it by capitals alone"):
        admit(server, other)
    for name in (
        "сlinic-a",
        "clinic‐a",
        "clinic-а",
        "clínic-a",
        "clinic-a\u200b",
    ):  # letters of other alphabets, and none
        with pytest.raises(BadSetting, match="cannot be a client's name"):
            admit(server, other, name)


@pytest.mark.parametrize("name", ["client.key", "."])
def test_keys_that_others_can_read_or_replace_are_not_used(name: str, tmp_path: Path, capsys: Any) -> None:
    write_keys(tmp_path / "server", "127.0.0.1")
    own = client(tmp_path, "clinic-a").parent
    (own / "ca.crt").write_bytes((tmp_path / "server" / "ca.crt").read_bytes())
    (own / name).chmod(0o640 if name != "." else 0o770)
    assert main(["deploy", "node", str(own), "--server", "127.0.0.1:1"]) == 2
    said = capsys.readouterr().err
    assert (
        f"chmod {'600' if name != '.' else 'go-w'} {(own / name).resolve()}" in said
        and "others on this machine" in said
    )
    key = tmp_path / "server" / ("ca.key" if name != "." else "")
    key.chmod(0o604 if name != "." else 0o702)
    assert main(["deploy", "server", str(tmp_path / "server"), "--listen", "127.0.0.1:1"]) == 2
    assert f"chmod {'600' if name != '.' else 'go-w'} {key}" in capsys.readouterr().err
