"""`undrift deploy node`: asks the server whether this client may come in, and runs a SuperNode for it.

A SuperNode that the server turns away ends without a reason and with exit code 0. So the server is asked before each start:
a clock that is off, a key that is not admitted and a certificate that does not fit end the node with a line that says so.
The SuperNode runs undrift's own client app only (`only.py`), in forks of one process (`fork.py`).
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import ssl
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import httpx
from flwr.supercore.constant import TASK_TYPE_TO_COMMAND, TaskType

from undrift.core import stopping
from undrift.core.errors import BadSetting
from undrift.core.files import make_private
from undrift.deploy import ask_fork
from undrift.deploy.gate import HELLO, signed_headers
from undrift.deploy.keys import Key, read_private, read_public, refuse_open
from undrift.deploy.link import flower_environment
from undrift.deploy.ports import free_port

PAUSE = 3.0  # seconds between two tries
GRACE = 5.0  # seconds that the SuperNode has to end by itself
NOTHING = "#!/bin/sh\nexit 1\n"
Kind = Literal["own", "sent"]  # which client app runs: undrift's own, whatever app was sent, or the one that was sent


def node_words(folder: Path, address: str, config: str) -> list[str]:
    """The command of a SuperNode with the key and the authority in a folder."""
    return [
        "flower-supernode", "--root-certificates", str(folder / "ca.crt"), "--auth-supernode-private-key",
        str(folder / "client.key"), "--superlink", address, "--port", str(free_port()), "--node-config", config,
    ]  # fmt: skip


def write_programs(folder: Path, kind: Kind) -> None:
    """Write the programs that a SuperNode may start; all but the client's do nothing."""
    make_private(folder)
    words = shlex.join([sys.executable, "-I", "-S", str(ask_fork.__file__), str(folder), kind])
    for task, command in TASK_TYPE_TO_COMMAND.items():
        own = f'#!/bin/sh\nexec {words} "$@"\n'
        (folder / command).write_text(own if task is TaskType.CLIENT_APP else NOTHING)
        (folder / command).chmod(0o700)


def fork_words(folder: Path, kind: Kind) -> list[str]:
    """The command of the process that runs these programs."""
    return [sys.executable, "-P", "-m", "undrift.deploy.fork", kind, "--serve", str(folder)]


def node_config(**values: str | Path | None) -> str:
    """The words of --node-config; those without a value are left out."""
    for value in values.values():
        if value and any(mark in str(value) for mark in "\"'\\"):
            raise BadSetting(f"{str(value)!r} must have no quotes and no backslashes; rename it")
    return " ".join(f'{name.replace("_", "-")}="{value}"' for name, value in values.items() if value)


def join(folder: Path, address: str, data: Path | None, allow: str, sums: int, say: Callable[[str], None]) -> None:
    """Run the client whose identity is in a folder, until a signal comes or the server says that it may not come in."""
    folder = folder.resolve()
    if not (folder / "ca.crt").exists():
        raise BadSetting(f"{folder / 'ca.crt'} is not there; it is the server's ca.crt, ask its operator for it")
    key, name = read_private(folder / "client.key"), read_public(folder / "client.pub")[1]
    refuse_open(folder, "client.key")
    os.umask(0o077)
    states, file = folder / "states", None if data is None else data.resolve()
    words = node_words(
        folder, address, node_config(name=name, state_dir=states, data=file, allow=allow, sums=str(sums or ""))
    )
    write_programs(folder / "bin", "own")
    environment = flower_environment(folder)
    environment["PATH"] = f"{folder / 'bin'}{os.pathsep}{environment['PATH']}"
    while True:
        while reason := greet(address, folder / "ca.crt", key, name):
            say(f"waiting for {address}: {reason}")
            rest()
        say(f"{name} may come in at {address}")
        process, forks = (
            subprocess.Popen(command, env=environment, cwd=folder, stdin=subprocess.DEVNULL)
            for command in (words, fork_words(folder / "bin", "own"))
        )
        try:
            while process.poll() is None:
                rest(0.5)
        finally:
            end(process)
            end(forks)
        say(f"the SuperNode ended with code {process.returncode}; it is started again")
        rest()


def greet(address: str, authority: Path, key: Key, name: str) -> str:
    """Ask the server whether this client may come in; raise BadSetting if not, or return why it cannot be asked."""
    try:
        trusted = ssl.create_default_context(cafile=str(authority))
        reply = httpx.get(
            f"https://{address}{HELLO}", headers=signed_headers(key), verify=trusted, timeout=30.0, trust_env=False
        )
    except (ssl.SSLError, ValueError, httpx.InvalidURL) as error:
        raise BadSetting(f"{authority} or {address} cannot be used: {error}") from error
    except httpx.TransportError as error:
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            raise BadSetting(
                f"the certificate of {address} does not fit {authority.name}, or this clock is wrong: {error}"
            ) from error
        return str(error) or type(error).__name__
    if reply.status_code == httpx.codes.UNAUTHORIZED:
        with contextlib.suppress(ValueError, TypeError, KeyError):
            raise BadSetting(f"the server turns {name} away: {json.loads(reply.text)['detail']}")
    if reply.status_code != httpx.codes.OK:
        return f"it answers with status {reply.status_code}"
    if (admitted := reply.json().get("client")) != name:
        raise BadSetting(f"this key was admitted as {admitted!r}, and not as {name!r}; ask the operator")
    return ""


def rest(seconds: float = PAUSE) -> None:
    """Wait a little; a signal ends the node."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if stopping.stop_signal():
            raise stopping.notice()
        time.sleep(0.1)


def end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
