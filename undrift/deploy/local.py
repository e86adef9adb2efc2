"""`undrift deploy local`: a SuperLink and SuperNodes on this machine, over TLS with new keys.

All processes are ended again, even after Ctrl-C. Flower's processes start others, some of them detached; they are recognised
by FLWR_HOME and a mark in their environment.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from undrift.core import stopping
from undrift.core.errors import BadSetting, UndriftError
from undrift.deploy.app import write_app
from undrift.deploy.keys import write_keys
from undrift.deploy.settings import REFUSED, Plan
from undrift.jobs.folder import RunFolder

HOST = "127.0.0.1"
MARK = "UNDRIFT_DEPLOY_PART"  # in a process's environment: the part that it belongs to
AGAIN = 'trap \'kill $!; wait; exit\' TERM; while :; do "$0" "$@" & wait $!; sleep 3; done'
PATIENCE = 60.0  # seconds until the SuperLink must answer
GRACE = 5.0  # seconds that a process has to end by itself
Within = Callable[[str], list[str]]  # words before the command of a part, such as those that start it in a namespace


class Failed(UndriftError):
    """One of the federation's processes failed."""

    ends_with_log = True


class LocalFederation:
    """The processes of a federation on loopback. Use it as `with federation(...)`."""

    def __init__(self, home: Path, clients: int, secure: bool, host: str, within: Within) -> None:
        self.home, self.clients, self.secure, self.host, self.within = home, clients, secure, host, within
        self.keys, self.app, self.port = home / "keys", home / "app", free_port()
        self.started: dict[str, subprocess.Popen[bytes]] = {}
        self.names: list[str] = []  # the clients' names, if they are not numbers
        self.files: list[Path] = []  # the clients' files, if they have any
        self.environment = os.environ | {
            "FLWR_HOME": str(home / "flwr"), "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1",
            "PYTHONUNBUFFERED": "1", "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        }  # fmt: skip

    def start(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        """Start a process whose output goes to its log."""
        with (self.home / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [*self.within(name), *command], stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                env=self.environment | {MARK: name}, cwd=self.home, start_new_session=True,
            )  # fmt: skip
        self.started[name] = process
        return process

    def flwr(self, *arguments: str) -> str:
        """Run a `flwr` command and return its output."""
        done = subprocess.run(
            [*self.within("run"), "flwr", *arguments], env=self.environment, cwd=self.home, capture_output=True,
            text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise Failed(f"flwr {arguments[0]} failed: {done.stdout}{done.stderr}")
        return done.stdout + done.stderr

    def open(self) -> None:
        """Start the SuperLink and register the clients' keys."""
        known = ["insecure = true"]
        if self.secure:
            write_keys(self.keys, self.host, self.clients)
            known = [f'root-certificates = "{self.keys / "ca.crt"}"']
        for old in self.home.glob("state.db*"):  # left by an earlier federation, whose nodes are gone
            old.unlink()
        (self.home / "flwr").mkdir(exist_ok=True)
        config = ["[superlink]", 'default = "here"', "[superlink.here]", f'address = "{self.host}:{self.port}"', *known]
        (self.home / "flwr" / "config.toml").write_text("\n".join(config) + "\n")
        self.start_server()
        for client in range(self.clients) if self.secure else ():
            self.flwr("supernode", "register", str(self.keys / f"client-{client}.pub"), "here")

    def start_server(self) -> None:
        """Start the SuperLink, and wait until it answers; after a restart its database knows the clients."""
        security = ["--insecure"]
        if self.secure:
            files = {"ca-certfile": "ca.crt", "certfile": "server.crt", "keyfile": "server.key"}
            security = [word for flag, file in files.items() for word in (f"--ssl-{flag}", str(self.keys / file))]
            security.append("--enable-supernode-auth")
        ready, before = "Uvicorn running", self.log("superlink")
        link = self.start(
            "superlink", "flower-superlink", *security, "--host", self.host, "--port", str(self.port), "--database",
            str(self.home / "state.db"), "--disable-runtime-dependency-installation",
        )  # fmt: skip
        until = time.monotonic() + PATIENCE
        while self.log("superlink").count(ready) == before.count(ready):
            if link.poll() is not None or time.monotonic() > until:
                raise Failed(f"the SuperLink did not start:\n{tail(self.log('superlink'))}")
            time.sleep(0.2)

    def start_client(self, client: int, key: Path | None = None) -> subprocess.Popen[bytes]:
        """Start a client with its key, or with another one."""
        security = ["--insecure"]
        if self.secure:
            key = key or self.keys / f"client-{client}"
            security = ["--root-certificates", str(self.keys / "ca.crt"), "--auth-supernode-private-key", str(key)]
        who = f'name="{self.names[client]}"' if self.names else f"partition-id={client}"
        config = f'{who} state-dir="{self.home / "states" / str(client)}"'
        if self.files:
            config += f' data="{self.files[client]}"'
        node = (
            "flower-supernode", *security, "--superlink", f"{self.host}:{self.port}", "--port", str(free_port()),
            "--node-config", config,
        )  # fmt: skip
        # For a minute after a node was killed, the SuperLink turns it away: it tries again.
        return self.start(f"client-{client}", "sh", "-c", AGAIN, *node)

    def run(self, plan: Plan, changed: Mapping[str, str] = {}) -> subprocess.Popen[bytes]:
        """Start the run; its log is the server's output. `changed` replaces files of the app, by name."""
        shutil.rmtree(self.app, ignore_errors=True)
        write_app(self.app, plan, self.host, self.port)
        for file, text in changed.items():
            (self.app / "app" / file).write_text(text)
        return self.start("run", "flwr", "run", str(self.app), "here", "--stream")

    def server_apps(self) -> list[int]:
        """The processes in which the SuperLink runs the server's app."""
        return [pid for pid in descendants(self.home, "superlink") if b"flwr-serverapp" in command_line(pid)]

    def stop_run(self) -> None:
        """Ask the server's app to stop after its round."""
        for pid in self.server_apps():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    def log(self, name: str) -> str:
        file = self.home / f"{name}.log"
        return file.read_text(errors="replace") if file.exists() else ""

    def kill(self, name: str, how: signal.Signals = signal.SIGKILL) -> None:
        """End a process and its descendants."""
        process = self.started.pop(name)
        if how != signal.SIGKILL:
            process.send_signal(how)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
        for pid in {*descendants(self.home, name), *([process.pid] if process.poll() is None else [])}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()

    def close(self) -> None:
        for name in reversed(list(self.started)):
            self.kill(name, signal.SIGTERM)


@contextlib.contextmanager
def federation(
    clients: int, secure: bool = True, home: Path | None = None, host: str = HOST, within: Within | None = None
) -> Iterator[LocalFederation]:
    """Open a SuperLink in a temporary folder, or in `home`, which is kept."""
    folder = Path(tempfile.mkdtemp(prefix="undrift-")) if home is None else home.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    local = LocalFederation(folder, clients, secure, host, within or (lambda name: []))
    try:
        local.open()
        yield local
    finally:
        local.close()
        if home is None:
            shutil.rmtree(folder, ignore_errors=True)


def files_of(plan: Plan, folder: Path | None) -> list[Path]:
    """The clients' files NAME.npz in a folder; none if the clients share a data set."""
    if plan.site_files != (folder is not None):
        raise BadSetting("--data FOLDER, with NAME.npz for each client, goes with --dataset own, and only with it")
    files = [] if folder is None else [(folder / f"{name}.npz").resolve() for name in plan.names]
    for file in files:
        if not file.exists():
            raise BadSetting(f"{file} is not there; --data needs a file NAME.npz for each of {', '.join(plan.names)}")
    return files


def run_local(plan: Plan, secure: bool, home: Path | None, say: Callable[[str], None], data: Path | None) -> None:
    """Run everything on this machine, with a SuperNode for each client; `data` is the folder of their files, if any."""
    files = files_of(plan, data)
    test = plan.deploy.test and str(Path(plan.deploy.test).resolve())
    plan = replace(plan, deploy=replace(plan.deploy, out=str(Path(plan.deploy.out).resolve()), test=test))
    with federation(plan.run.clients, secure, home) as parts:
        parts.names, parts.files = plan.names if plan.deploy.names else [], files
        for client in range(plan.run.clients):
            parts.start_client(client)
        process, shown, ended, stopped = parts.run(plan), 0, False, None
        while not ended:
            time.sleep(0.3)
            if stopping.asked() and stopped is None:
                stopped = stopping.notice()
                parts.stop_run()
            ended = process.poll() is not None or (stopped is not None and not parts.server_apps())
            text = parts.log("run")
            for line in text[shown:].splitlines() if REFUSED not in text[:shown] else ():
                if line.startswith(REFUSED):  # Flower's traceback follows
                    break
                if not line.startswith(("INFO", "\x1b")) or "round" in line:
                    say(line)
            shown = len(text)
        if stopped is not None:
            raise stopped
        if refused := re.search(f"^{REFUSED}(.*)$", text, re.MULTILINE):
            raise Failed(refused[1])
        if not RunFolder(Path(plan.deploy.out)).finished():
            raise Failed(f"the run did not come to its end:\n{tail(text)}\n{tail(parts.log('superlink'))}")


def descendants(home: Path, name: str) -> list[int]:
    """The ids of the processes of this part of this federation; only on Linux."""
    marks = {f"FLWR_HOME={home / 'flwr'}".encode(), f"{MARK}={name}".encode()}
    pids = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if marks <= set((entry / "environ").read_bytes().split(b"\0")):
                pids.append(int(entry.name))
    return pids


def command_line(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def tail(text: str, lines: int = 20) -> str:
    return "\n".join(text.splitlines()[-lines:])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
