"""`undrift deploy server`: a SuperLink on loopback, the gate before it, and the admitted clients known to both.

While it runs, clients may be admitted and revoked and the certificate renewed: it looks at its folder every second.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import uvicorn
from flwr.proto.control_pb2 import ListNodesRequest, RegisterNodeRequest, UnregisterNodeRequest
from flwr.proto.node_pb2 import NodeInfo
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from undrift.core import stopping
from undrift.core.errors import BadSetting, UndriftError
from undrift.core.files import make_private
from undrift.deploy import superlink
from undrift.deploy.clients import ADMITTED, REVOKED, admitted_keys
from undrift.deploy.gate import Gate
from undrift.deploy.keys import LOOPBACK, refuse_open, write, write_certificate
from undrift.deploy.ports import free_port

READY = "clients may join at"  # in the line that says that all is up
LINK = "link"  # name of the SuperLink's own certificate, for loopback
LIFE = 3650  # days for which that is valid
PATIENCE = 600.0  # seconds until the SuperLink must answer; on a busy machine it takes minutes
LOOK = 1.0  # seconds between two looks at the folder
HURRY = 20.0  # seconds within which a connection must make a request
# glibc keeps what was freed for the thread that had it; each answer has a thread, so that this adds up to gigabytes.
MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20), "MALLOC_ARENA_MAX": "2"}
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}


def flower_environment(home: Path) -> dict[str, str]:
    """The environment of Flower's processes; their programs are those beside this Python."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return os.environ | QUIET | {"FLWR_HOME": str(home / "flwr"), "PYTHONUNBUFFERED": "1", "PATH": path}


def serve(server: Path, listen: str, say: Callable[[str], None]) -> None:
    """Serve until a signal comes; `listen` is the address for clients, such as 0.0.0.0:8000."""
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise BadSetting(f"--listen is an address and a port, such as 0.0.0.0:8000, not {listen!r}")
    server = server.resolve()
    for name in ("ca.crt", "ca.key", "server.crt", "server.key"):
        if not (server / name).exists():
            raise BadSetting(f"{server / name} is not there; make it with: undrift deploy keys {server} --host ADDRESS")
    refuse_open(server, "ca.key", "server.key")
    try:
        ssl.create_default_context(cafile=str(server / "ca.crt"))
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(server / "server.crt", server / "server.key")
    except (ssl.SSLError, ValueError) as error:
        raise BadSetting(
            f"ca.crt, or server.crt with server.key, in {server} cannot be used ({error}); the latter are made again by: "
            f"undrift deploy keys {server} --renew"
        ) from error
    os.umask(0o077)  # also for Flower's database and the run's folder
    make_private(server / ADMITTED)
    with alone(server) as lock, super_link(server, lock) as (process, address):
        trusted = (server / "ca.crt").read_bytes()
        with ControlHttpClient.from_server_address(address, False, trusted, interceptors=[]) as control:
            register(server, control, say)
            gate = Gate(server, f"https://{address}", say)
            config = uvicorn.Config(
                gate, host=host.strip("[]"), port=int(port), ssl_certfile=server / "server.crt",
                ssl_keyfile=str(server / "server.key"), lifespan="off", ws="none", access_log=False, http=Line,
                log_level="error", proxy_headers=False, server_header=False,
            )  # fmt: skip
            ready = f"{READY} {listen}; Flower's other APIs are on {address} alone"
            asyncio.run(attend(config, server, process, lambda: register(server, control, say), gate, say, ready))
            if process.poll() is not None:
                raise BadSetting(f"the SuperLink ended with code {process.returncode}; its last lines say why")


class Line(H11Protocol):
    """A connection that is cut where no request begins for long: whoever trickles headers would hold it for ever.

    h11 takes at most 64 KiB of them, and httptools, which uvicorn prefers, any number.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.idle: RequestResponseCycle | Line | None = (
            None  # the request after which it was idle; itself if it was not
        )
        self.loop.call_later(HURRY, self.look)

    def look(self) -> None:
        """Cut it if no request has begun since the last look, and none is being answered."""
        before, busy = self.idle, self.cycle is not None and not self.cycle.response_complete
        self.idle = self if busy else self.cycle
        if self.idle is before and not busy:
            self.transport.abort()
        elif not self.transport.is_closing():
            self.loop.call_later(HURRY, self.look)


class Door(uvicorn.Server):
    """A server that leaves signals to undrift."""

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return contextlib.nullcontext()


async def attend(
    config: uvicorn.Config, server: Path, process: subprocess.Popen[bytes], register: Callable[[], None], gate: Gate,
    say: Callable[[str], None], ready: str,
) -> None:  # fmt: skip
    """Run the gate, and look after the folder, until a signal comes or the SuperLink ends."""
    door = Door(config)
    serving = asyncio.create_task(door.serve())
    seen, said = state_of(server), False
    while not serving.done():
        if door.started and not said:
            say(ready)
            said = True
        if process.poll() is not None or stopping.stop_signal():
            door.should_exit = True
        if (now := state_of(server)) != seen:
            try:
                assert config.ssl is not None
                config.ssl.load_cert_chain(server / "server.crt", server / "server.key")
                gate.read_clients()
                await asyncio.to_thread(register)
                seen = now
            except (UndriftError, httpx.HTTPError, ssl.SSLError, OSError) as error:  # perhaps half written
                say(f"the change in {server} is not taken up yet: {error}")
        await asyncio.wait([serving], timeout=LOOK)
    if stopping.stop_signal():
        raise stopping.notice()
    with contextlib.suppress(SystemExit):  # uvicorn could not bind
        serving.result()
    if not said:
        raise BadSetting(f"{config.host}:{config.port} cannot be listened on; give another --listen")


def state_of(server: Path) -> tuple[tuple[str, int], ...]:
    """What is in the folder that may change while the server runs."""
    keys = (file for folder in (ADMITTED, REVOKED) for file in sorted((server / folder).glob("[!.]*.pub")))
    files = [server / "server.crt", server / "server.key", *keys]
    return tuple((str(file), file.stat().st_mtime_ns) for file in files if file.exists())


def register(server: Path, control: ControlHttpClient, say: Callable[[str], None]) -> None:
    """Make the SuperLink know the admitted keys, each under its name, and no others."""
    wanted = {public_key_to_bytes(key): name for name, key in admitted_keys(server).items()}
    listed = control.ListNodes(ListNodesRequest()).nodes_info
    known: dict[bytes, NodeInfo] = {info.public_key: info for info in listed if info.status != "unregistered"}
    for key, info in known.items():
        if wanted.get(key) != info.name:
            control.UnregisterNode(UnregisterNodeRequest(node_id=info.node_id))
            say(f"{info.name or info.node_id} is no client any more")
    for key, name in wanted.items():
        if key not in known:
            control.RegisterNode(RegisterNodeRequest(public_key=key, name=name))
            say(f"{name} is a client now")


@contextlib.contextmanager
def alone(server: Path) -> Iterator[int]:
    """Hold the folder's lock; the SuperLink holds it too, and keeps it as long as it lives."""
    lock = os.open(server / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise BadSetting(f"another server, or its SuperLink, is running in {server}; end it first") from error
    try:
        yield lock
    finally:
        os.close(lock)


@contextlib.contextmanager
def super_link(server: Path, lock: int) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Start a SuperLink on loopback that only admitted keys may join, and end it again."""
    address, environment = f"{LOOPBACK}:{free_port()}", flower_environment(server)
    write_certificate(server, LINK, LOOPBACK, LIFE)
    make_private(server / "flwr")
    known = f'address = "{address}"\nroot-certificates = "{server / "ca.crt"}"\n'
    config = f'[superlink]\ndefault = "federation"\n\n[superlink.federation]\n{known}'
    write(server / "flwr" / "config.toml", config.encode())
    files = {"ca-certfile": "ca.crt", "certfile": f"{LINK}.crt", "keyfile": f"{LINK}.key"}
    security = [word for flag, file in files.items() for word in (f"--ssl-{flag}", str(server / file))]
    process = subprocess.Popen(
        [*superlink.COMMAND, *security, "--enable-supernode-auth", "--host", LOOPBACK, "--port", address.split(":")[1],
         "--database", str(server / "state.db"), "--disable-runtime-dependency-installation"],
        env=environment | MEMORY, stdin=subprocess.DEVNULL, pass_fds=[lock],
    )  # fmt: skip
    try:
        wait_for(process, address, server / "ca.crt")
        yield process, address
    finally:
        process.terminate()
        try:
            process.wait(10.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_for(process: subprocess.Popen[bytes], address: str, authority: Path) -> None:
    trusted, until = ssl.create_default_context(cafile=str(authority)), time.monotonic() + PATIENCE
    while True:
        with contextlib.suppress(httpx.TransportError):
            httpx.get(f"https://{address}/", verify=trusted, timeout=5.0, trust_env=False)
            return
        if process.poll() is not None or time.monotonic() > until:
            raise BadSetting("the SuperLink did not start; its last lines say why")
        time.sleep(0.2)
