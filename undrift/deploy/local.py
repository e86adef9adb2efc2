"""`undrift deploy local`: a server and SuperNodes on this machine, over TLS with keys of their own.

All processes are ended again, even after Ctrl-C. Flower's processes start others, some of them detached; they are recognised
by FLWR_HOME and a mark in their environment.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from undrift.core import stopping
from undrift.core.errors import BadSetting, UndriftError
from undrift.core.files import make_private
from undrift.deploy import superlink
from undrift.deploy.app import write_app
from undrift.deploy.clients import admit
from undrift.deploy.flower import UNBOUND
from undrift.deploy.join import fork_words, node_config, node_words, write_programs
from undrift.deploy.keys import LOOPBACK, write_certificate, write_identity, write_keys
from undrift.deploy.link import MEMORY, READY, flower_environment
from undrift.deploy.ports import free_port
from undrift.deploy.settings import REFUSED, Plan
from undrift.jobs.folder import RunFolder

MARK = "UNDRIFT_DEPLOY_PART"  # in a process's environment: the part that it belongs to
# The process that forks (seven words), and a SuperNode, again and again.
# For a minute after a node was killed, the SuperLink turns it away: it tries again.
AGAIN = (
    '"$1" "$2" "$3" "$4" "$5" "$6" "$7" & forks=$!; shift 7; '
    "trap 'kill $! $forks; wait; exit' TERM; while :; do \"$@\" & wait $!; sleep 3; done"
)
PATIENCE = 900.0  # seconds until the server must answer; on a busy machine it takes minutes
GRACE = 5.0  # seconds that a process has to end by itself
Within = Callable[[str], list[str]]  # words before the command of a part, such as those that start it in a namespace


class Failed(UndriftError):
    """One of the federation's processes failed."""

    ends_with_log = True


class LocalFederation:
    """The processes of a federation on loopback. Use it as `with federation(...)`."""

    def __init__(self, home: Path, names: Sequence[str], secure: bool, host: str, within: Within) -> None:
        self.home, self.names, self.secure, self.host, self.within = home, names, secure, host, within
        self.app, self.port = home / "app", free_port()
        self.started: dict[str, subprocess.Popen[bytes]] = {}
        self.files: list[Path] = []  # the clients' files, if they have any
        self.environment = flower_environment(home) | ({} if secure else {UNBOUND: "1"})

    def start(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        """Start a process whose output goes to its log."""
        more = MEMORY if name == "superlink" else {}
        with (self.home / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [*self.within(name), *command], stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                env=self.environment | more | {MARK: name}, cwd=self.home, start_new_session=True, umask=0o077,
            )  # fmt: skip
        self.started[name] = process
        return process

    def folder(self, client: int) -> Path:
        """The folder with a client's key."""
        return self.home / "nodes" / self.names[client]

    def open(self) -> None:
        """Make the keys that are not there yet, admit the clients' keys and start the server."""
        for old in self.home.glob("state.db*"):  # left by an earlier federation, whose nodes are gone
            old.unlink()
        if self.secure:
            if (self.home / "ca.key").exists():
                write_certificate(self.home, "server", self.host)
            else:
                write_keys(self.home, self.host)
            for client, name in enumerate(self.names):
                if not (self.folder(client) / "client.key").exists():
                    write_identity(self.folder(client), name)
                shutil.copyfile(self.home / "ca.crt", self.folder(client) / "ca.crt")
                admit(self.home, self.folder(client) / "client.pub")
        self.start_server()

    def start_server(self) -> None:
        """Start the server, and wait until it answers; after a restart its database knows the clients."""
        if self.secure:
            ready = READY
            command = [sys.executable, "-m", "undrift", "deploy", "server", str(self.home)]
            command += ["--listen", f"{self.host}:{self.port}"]
        else:
            ready = "Uvicorn running"
            config = f'[superlink.federation]\naddress = "{self.host}:{self.port}"\ninsecure = true\n'
            make_private(self.home / "flwr")
            (self.home / "flwr" / "config.toml").write_text(config)
            command = [*superlink.COMMAND, "--insecure", "--host", self.host, "--port", str(self.port), "--database"]
            command += [str(self.home / "state.db"), "--disable-runtime-dependency-installation"]
        before = self.log("superlink").count(ready)
        link, until = self.start("superlink", *command), time.monotonic() + PATIENCE
        while self.log("superlink").count(ready) == before:
            if link.poll() is not None or time.monotonic() > until:
                raise Failed(f"the server did not start:\n{tail(self.log('superlink'))}")
            time.sleep(0.2)

    def start_client(self, client: int, folder: Path | None = None, name: str = "") -> subprocess.Popen[bytes]:
        """Start a client with its key, or with that in another folder; it says that it has its name, or another one."""
        states, file = self.home / "states" / str(client), self.files[client] if self.files else None
        config = node_config(name=name or self.names[client], state_dir=states, data=file)
        node = node_words(folder or self.folder(client), f"{self.host}:{self.port}", config)
        if not self.secure:
            node = ["flower-supernode", "--insecure", *node[5:]]
        programs = self.home / "bin" / str(client)
        write_programs(programs, "sent")
        within_path = f"PATH={programs}{os.pathsep}{self.environment['PATH']}"
        words = ["env", within_path, "sh", "-c", AGAIN, "sh", *fork_words(programs, "sent"), *node]
        return self.start(f"client-{client}", *words)

    def run(self, plan: Plan, changed: Mapping[str, str] = {}) -> subprocess.Popen[bytes]:
        """Start the run; its log is the server's output. `changed` replaces files of the app, by name."""
        shutil.rmtree(self.app, ignore_errors=True)
        write_app(self.app, plan, self.host, self.port)
        for file, text in changed.items():
            (self.app / "app" / file).write_text(text)
        return self.start("run", "flwr", "run", str(self.app), "federation", "--stream")

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
    clients: int | Sequence[str], secure: bool = True, home: Path | None = None, host: str = LOOPBACK,
    within: Within | None = None,
) -> Iterator[LocalFederation]:  # fmt: skip
    """Open a server for so many clients, or for clients with names, in a temporary folder, or in `home`, which is kept."""
    folder = Path(tempfile.mkdtemp(prefix="undrift-")) if home is None else home.resolve()
    make_private(folder)
    names = [str(client) for client in range(clients)] if isinstance(clients, int) else clients
    local = LocalFederation(folder, names, secure, host, within or (lambda name: []))
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
    folder = RunFolder(Path(plan.deploy.out))
    before = folder.last_checkpoint()  # by a run that is resumed
    with federation(plan.names, secure, home) as parts:
        parts.files = files
        for client in range(plan.run.clients):
            parts.start_client(client)
        process, shown, ended, stopped = parts.run(plan), 0, False, None
        while not ended:
            time.sleep(0.3)
            if stopping.stop_signal() and stopped is None:
                stopped = stopping.notice()
                parts.stop_run()
            # `flwr run` shows the run, and may end before it; then the run goes on unseen.
            ended = (process.poll() is not None or stopped is not None) and not parts.server_apps()
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
        if not folder.is_finished() or (folder.last_checkpoint() == before and f"written to {folder.path}" not in text):
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
