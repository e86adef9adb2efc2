"""Attacks on a federation of real processes, by a stranger and by a client that was admitted; and keys that change as it runs."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import ssl
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

import httpx
import pytest

pytest.importorskip("flwr")

from flwr.app import Context, Message, RecordDict
from flwr.cli.build import build_fab_from_disk
from flwr.common.serde import message_to_proto
from flwr.proto.control_pb2 import ListNodesRequest, RegisterNodeRequest, StartRunRequest
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import ObjectTree
from flwr.proto.node_pb2 import Node
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree, iterate_object_tree
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents, pull_objects
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode import fleet_http_connection
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.fleet_http_connection import http_request_response
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from tests.deploy.altered import altered
from tests.deploy.test_processes import agree, finish, planned, records, until
from tests.patience import patient
from undrift.deploy.app import write_app
from undrift.deploy.clients import admit, revoke
from undrift.deploy.flower import client_app
from undrift.deploy.keys import new_key, read_private, renew, write_identity
from undrift.deploy.local import LocalFederation, descendants, federation
from undrift.deploy.ports import free_port
from undrift.deploy.settings import Plan

EVIL = """
from pathlib import Path
from flwr.{side}app import {Side}App

app = {Side}App()

{hook}
def act(*given):
    Path({mark!r}).write_text("the stranger was here")
    raise SystemExit
"""
HARM = """Path({mark!r} + "-" + name).write_text("the server was here")"""
SLOW = "time.sleep(12)"


def own_address() -> str:
    """An address of this machine that is not the loopback that the SuperLink listens on."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])
    return "127.0.0.2"


def link_address(here: LocalFederation) -> str:
    """Where the SuperLink itself listens."""
    config = (here.home / "flwr" / "config.toml").read_text()
    return next(line.split('"')[1] for line in config.splitlines() if line.startswith("address"))


def control(address: str, here: LocalFederation) -> ControlHttpClient:
    authority = (here.home / "ca.crt").read_bytes()
    return ControlHttpClient.from_server_address(address, False, authority, interceptors=[])


def known(here: LocalFederation) -> dict[str, int]:
    """The names and ids of the nodes that the SuperLink knows."""
    with control(link_address(here), here) as operator:
        listed = operator.ListNodes(ListNodesRequest()).nodes_info
    return {info.name: info.node_id for info in listed if info.status != "unregistered"}


def listening(here: LocalFederation) -> set[str]:
    """The IPv4 and IPv6 addresses, in hexadecimal, on which the server's processes listen."""
    sockets = set()
    for pid in descendants(here.home, "superlink"):
        for file in Path(f"/proc/{pid}/fd").glob("*"):
            with contextlib.suppress(OSError):
                sockets.add(os.readlink(file).removeprefix("socket:[").removesuffix("]"))
    rows = [line.split() for kind in ("tcp", "tcp6") for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]]
    return {row[1].split(":")[0] for row in rows if row[3] == "0A" and row[9] in sockets}


def try_control_api(address: str, here: LocalFederation) -> None:
    """What V1 did, without its processes: see nodes, register a key and start an app, with ca.crt alone."""
    requests = {
        "ListNodes": ListNodesRequest(),
        "RegisterNode": RegisterNodeRequest(public_key=public_key_to_bytes(new_key().public_key()), name="0"),
        "StartRun": StartRunRequest(),
    }
    with control(address, here) as stranger:
        for method, request in requests.items():
            with pytest.raises(httpx.HTTPStatusError, match="404"):
                getattr(stranger, method)(request)


def test_smoke_of_a_stranger_and_a_change_of_keys(tmp_path: Path) -> None:
    """One server without clients: the control API is not there, and keys come and go while it runs."""
    with federation([], home=tmp_path / "home") as here:
        address = f"{here.host}:{here.port}"
        try_control_api(address, here)
        assert listening(here) == {"0100007F"}  # here the gate too is on 127.0.0.1
        write_identity(tmp_path / "a", "a")
        shutil.copyfile(here.home / "ca.crt", tmp_path / "a" / "ca.crt")
        turned = subprocess.run(node_command(tmp_path / "a", address), capture_output=True, text=True, check=False)
        assert turned.returncode == 2 and "turns a away: its key is not admitted" in turned.stderr
        admit(here.home, tmp_path / "a" / "client.pub")
        until(lambda: "a" in known(here), here)
        before = ssl.get_server_certificate((here.host, here.port))
        renew(here.home)
        revoke(here.home, "a")
        until(lambda: "a" not in known(here), here)
        assert ssl.get_server_certificate((here.host, here.port)) != before
        loose = [f for f in here.home.rglob("*") if f.suffix != ".log" and stat.S_IMODE(f.stat().st_mode) & 0o077]
        assert (here.home / "state.db").exists() and loose == []


def node_command(folder: Path, address: str) -> list[str]:
    return [sys.executable, "-m", "undrift", "deploy", "node", str(folder), "--server", address]


@pytest.mark.system
def test_a_stranger_with_the_certificate_can_neither_run_code_nor_join(tmp_path: Path) -> None:
    """The same app runs when the operator starts it, over loopback."""
    mark, host = tmp_path / "mark", own_address()
    with federation(1, host=host) as here:
        here.start_client(0)
        app, home = tmp_path / "evil", tmp_path / "flwr"
        write_app(app, planned(tmp_path / "out", clients=1))
        for side, hook in (("server", "@app.main()"), ("client", "@app.query()")):
            text = EVIL.format(side=side, Side=side.title(), hook=hook, mark=f"{mark}-{side}")
            (app / "evil" / f"{side}_app.py").write_text(text)
        home.mkdir()
        (home / "config.toml").write_text(
            f'[superlink.victim]\naddress = "{host}:{here.port}"\nroot-certificates = "{here.home / "ca.crt"}"\n'
            f'[superlink.behind]\naddress = "{host}:{link_address(here).split(":")[1]}"\n'
            f'root-certificates = "{here.home / "ca.crt"}"\n'
        )
        write_identity(tmp_path / "own", "0")

        def flwr(*words: str, flwr_home: Path = home) -> subprocess.CompletedProcess[str]:
            environment = here.environment | {"FLWR_HOME": str(flwr_home)}
            return subprocess.run(
                ["flwr", *words], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
            )

        for victim in ("victim", "behind"):
            for words in (
                ["run", str(app), victim], ["supernode", "register", str(tmp_path / "own" / "client.pub"), victim],
                ["supernode", "list", victim], ["list", victim],
            ):  # fmt: skip
                done = flwr(*words)
                assert done.returncode != 0, f"{words}: {done.stdout}"
        assert known(here).keys() == {"0"}
        for how in (["--auth-supernode-private-key", str(tmp_path / "own" / "client.key")], []):
            node = ["flower-supernode", "--root-certificates", str(here.home / "ca.crt"), *how, "--superlink"]
            with (tmp_path / "joined.log").open("w") as log:  # not a pipe, which its children would hold
                subprocess.run(
                    [*node, f"{host}:{here.port}", "--port", str(free_port())], env=here.environment, cwd=tmp_path,
                    stdout=log, stderr=log, check=False, timeout=300,
                )  # fmt: skip
            assert "SuperNode ID" not in (tmp_path / "joined.log").read_text()  # which it would be told
        assert "is turned away: its key is not admitted" in here.log("superlink")
        assert known(here).keys() == {"0"} and not list(tmp_path.glob("mark*"))
        address = "".join(f"{int(part):02X}" for part in reversed(host.split(".")))
        assert listening(here) == {"0100007F", address}
        assert flwr("run", str(app), "federation", flwr_home=here.home / "flwr").returncode == 0
        until(lambda: Path(f"{mark}-server").exists(), here)  # what the stranger wanted to do


@pytest.mark.system
def test_a_client_that_says_another_name_does_not_take_its_place(tmp_path: Path) -> None:
    names = ["clinic-a", "clinic-b", "mallory"]
    plan = planned(tmp_path / "out", algorithm="scaffold", clients=3, rounds=2, names=",".join(names))
    with federation(names) as here:
        here.start_client(1)
        here.start_client(2, name="clinic-a")
        run = here.run(plan)
        line = "mallory is turned away: its key was registered for mallory, and it says that it is 'clinic-a'"
        until(lambda: line in here.log("run"), here)
        here.start_client(0)
        here.kill("client-2", signal.SIGTERM)
        here.start_client(2)  # under its own name, so that nobody is waited for
        finish(here, run, plan)
        assert here.log("run").count(line) == 1 and "had lost its state" not in here.log("run")
    assert [r["dropped"] for r in records(plan)] == [0, 0]
    agree(plan)


def fail(*given: object, **named: object) -> NoReturn:
    """In place of Flower's exit, which ends this process ten seconds later, whatever else it does: here that is pytest."""
    raise ConnectionError(f"Flower would have ended the process: {given}")


class Forger(threading.Thread):
    """An admitted client that answers honestly when it is asked who it is, and then in the name of another."""

    def __init__(self, here: LocalFederation, plan: Plan, name: str, victim: str, root: Path) -> None:
        super().__init__(daemon=True)
        self.here, self.plan, self.name_, self.victim, self.root = here, plan, name, victim, root
        self.key = read_private(here.folder(plan.names.index(name)) / "client.key")
        self.forged, self.ended, self.statuses = 0, False, list[int]()

    def run(self) -> None:
        fleet_http_connection.flwr_exit = fail
        address, authority = f"{self.here.host}:{self.here.port}", (self.here.home / "ca.crt").read_bytes()
        keys = self.key, self.key.public_key()
        with http_request_response(address, False, authority, keys) as connection:
            node, receive, send, _, _, pull_object, push_object, confirm = connection
            TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, node, 1
            while not self.ended:
                if (received := receive()) is None:
                    time.sleep(0.5)
                    continue
                empty, tree = received
                run, id = empty.metadata.run_id, empty.metadata.message_id
                TaskIdentity.run_id = run
                ids = [each.object_id for each in iterate_object_tree(tree)]
                contents = pull_objects(ids, pull_object_fn=lambda part, run=run: pull_object(run, part))
                confirm(run, id)
                message: Any = inflate_object_from_contents(id, contents)
                message.metadata.__dict__["_message_id"] = id
                config: Any = {"name": self.name_, "state-dir": str(self.root)}
                reply = client_app()(message, Context(run, node, config, RecordDict(), self.plan.flat()))  # type: ignore[arg-type]
                honest = Message(RecordDict(), reply_to=message)
                honest.metadata.__dict__ |= reply.metadata.__dict__
                if message.metadata.message_type == "train":
                    self.forged += 1
                    self.forge(reply, node)
                tree, parts = get_object_tree(reply), {i: o.deflate() for i, o in get_all_nested_objects(reply).items()}
                if message.metadata.message_type == "train":
                    tree, parts = self.spoil(tree, parts)
                honest.metadata.__dict__["_message_id"] = tree.object_id
                wanted, session = send(honest, tree, 0.1)
                for part, content in parts.items():
                    if part in wanted:
                        push_object(run, session, part, content)

    def spoil(self, tree: ObjectTree, parts: dict[str, bytes]) -> tuple[ObjectTree, dict[str, bytes]]:
        """The answer as it is sent: the tree of its parts, and the parts in the order in which they are sent."""
        return tree, parts

    def forge(self, reply: Message, node: int) -> None:
        """Write the victim's node and name into an answer; and try the same with what the SuperLink itself looks at."""
        victim = known(self.here)[self.victim]
        reply.metadata.__dict__["_src_node_id"] = victim
        reply.content["facts"]["client"] = self.victim
        authority = (self.here.home / "ca.crt").read_bytes()
        signer = NodeAuthHttpInterceptor(self.key, self.key.public_key())
        with FleetHttpClient.from_server_address(
            f"{self.here.host}:{self.here.port}", False, authority, [signer]
        ) as fleet:
            messages, trees = [message_to_proto(reply)], [get_object_tree(reply)]
            request = PushMessagesRequest(node=Node(node_id=node), messages_list=messages, message_object_trees=trees)
            try:
                fleet.PushMessages(request)
                self.statuses.append(200)
            except httpx.HTTPStatusError as error:
                self.statuses.append(error.response.status_code)


@pytest.mark.system
def test_answers_in_the_name_of_another_are_refused(tmp_path: Path) -> None:
    names = ["clinic-a", "mallory"]
    plan = planned(tmp_path / "out", clients=2, rounds=2, names=",".join(names))
    with federation(names) as here:
        forger = Forger(here, plan, "mallory", "clinic-a", tmp_path / "states")
        forger.start()
        here.start_client(0)
        try:
            finish(here, here.run(plan), plan)
        finally:
            forger.ended = True
            forger.join(30.0)
        said = here.log("run")
        assert said.count("mallory does not count: refused: the message says that another node wrote it") == 2, said
        assert "mallory sends a message in the name of another node" in here.log("superlink")
    assert forger.forged == 2 and forger.statuses == [403, 403]
    assert [(r["dropped"], r["refused"]) for r in records(plan)] == [(1, 1), (1, 1)]
    agree(plan, {(1, "1"), (2, "1")})


@pytest.mark.system
def test_clients_come_and_go_and_the_certificate_is_renewed_while_a_run_goes_on(tmp_path: Path) -> None:
    plan = planned(tmp_path / "out", clients=3, rounds=100, names="a,b,c", wait=5.0, timeout=120.0)
    with federation(["a", "b"]) as here:
        for client in range(2):
            here.start_client(client)
        until(lambda: here.log("superlink").count("Activated node_id") >= 2, here)
        here.run(plan)

        def answered(round: int, clients: set[str]) -> bool:
            file = Path(plan.deploy.out) / "clients.jsonl"
            lines = file.read_text().splitlines() if file.exists() else []
            visits = [json.loads(line) for line in lines]
            return any(
                {v["client"] for v in visits if v["round"] == t and v["outcome"] == "answered"} == clients
                for t in {v["round"] for v in visits if v["round"] >= round}
            )

        until(lambda: answered(1, {"a", "b"}), here)
        before = ssl.get_server_certificate((here.host, here.port))
        renew(here.home)
        until(lambda: ssl.get_server_certificate((here.host, here.port)) != before, here)
        here.names = ["a", "b", "c"]
        write_identity(here.folder(2), "c")
        shutil.copyfile(here.home / "ca.crt", here.folder(2) / "ca.crt")
        admit(here.home, here.folder(2) / "client.pub")
        until(lambda: "c is a client now" in here.log("superlink"), here)
        here.start_client(2)
        until(lambda: answered(2, {"a", "b", "c"}), here)
        revoke(here.home, "b")
        reached = len(records(plan))
        until(lambda: answered(reached + 1, {"a", "c"}), here)
        assert "b is no client any more" in here.log("superlink")
        here.kill("run")


CLOCK = """
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

int clock_gettime(clockid_t which, struct timespec *now) {
    int failed = syscall(SYS_clock_gettime, which, now);
    if (!failed && which == CLOCK_REALTIME) now->tv_sec += atol(getenv("SECONDS_AHEAD"));
    return failed;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec precise;
    int failed = clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec, now->tv_usec = precise.tv_nsec / 1000;
    return failed;
}

time_t time(time_t *kept) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (kept) *kept = now.tv_sec;
    return now.tv_sec;
}
"""


@pytest.mark.system
def test_a_node_whose_clock_is_off_ends_with_the_reason(tmp_path: Path) -> None:
    """The clock of the node's process is moved by a library that is loaded before all others."""
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    (tmp_path / "clock.c").write_text(CLOCK)
    library = tmp_path / "clock.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(tmp_path / "clock.c")], check=True)
    with federation(["a"]) as here:
        shutil.copytree(here.folder(0), tmp_path / "a")
        command = node_command(tmp_path / "a", f"{here.host}:{here.port}")
        year = 365 * 86400
        for ahead, reason in (
            (20, "the clock of a is 20 s ahead"),
            (-400, "the clock of a is 4"),
            (-2 * year, "clock is wrong"),
        ):
            environment = os.environ | {"LD_PRELOAD": str(library), "SECONDS_AHEAD": str(ahead)}
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
            assert done.returncode == 2 and reason in done.stderr, done.stderr + done.stdout
        # Within what is allowed, but further behind than clients have for an answer: it takes part.
        environment = os.environ | {"LD_PRELOAD": str(library), "SECONDS_AHEAD": "-200"}
        behind = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        plan = planned(tmp_path / "out", clients=1, rounds=2, names="a", timeout=min(180.0, patient(60)))
        try:
            until(lambda: "Activated node_id" in here.log("superlink"), here)
            finish(here, here.run(plan), plan)
        finally:
            behind.terminate()
            behind.wait(60)
    assert [r["dropped"] for r in records(plan)] == [0, 0]
    agree(plan)


@pytest.mark.system
def test_a_node_does_not_run_the_servers_code(tmp_path: Path) -> None:
    """The app that the server sends does harm where Flower's own SuperNode runs, and none under `undrift deploy node`."""
    plan = planned(tmp_path / "out", clients=2, rounds=1, names="careful,plain")
    with federation(["careful", "plain"]) as here:
        here.start("client-0", *node_command(here.folder(0), f"{here.host}:{here.port}"))
        here.start_client(1)
        evil = altered(query=HARM.format(mark=str(tmp_path / "mark")))
        finish(here, here.run(plan, {"client_app.py": evil}), plan)
        assert not list((here.folder(0) / "flwr").rglob("client_app.py"))  # it is not even unpacked
        here.kill("client-0", signal.SIGTERM)
    assert [path.name for path in tmp_path.glob("mark*")] == ["mark-plain"]
    assert [r["dropped"] for r in records(plan)] == [0]
    agree(plan)


@pytest.mark.system
def test_a_slow_node_joins_late_and_is_not_asked_over_and_over(tmp_path: Path) -> None:
    """It takes 12 seconds to say its name and is given 3 at first; then 6, 12 and so on."""
    plan = planned(tmp_path / "out", clients=1, rounds=1, join=3.0)
    with federation(1) as here:
        here.start_client(0)
        finish(here, here.run(plan, {"client_app.py": altered(query=SLOW)}), plan)
        assert here.log("client-0").count("Receiving: query") <= 6
    assert [r["dropped"] for r in records(plan)] == [0]


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern")  # an old name that Flower uses
def test_the_app_does_not_grow_whatever_comes_to_lie_in_its_folder(tmp_path: Path) -> None:
    app = tmp_path / "fed"
    write_app(app, planned(tmp_path / "out"))
    first = build_fab_from_disk(app)
    for n in range(5):  # as when FLWR_HOME, the server's folder and the run's are inside it
        place = app / "flwr" / "apps" / f"undrift.fed.{n}"
        shutil.copytree(app / "fed", place / "fed")
        (place / "more.json").write_bytes(os.urandom(1 << 20))
        (app / "secret.toml").write_text("key = 1")
        assert build_fab_from_disk(app) == first and len(first) < 10_000


@pytest.mark.system
@pytest.mark.filterwarnings("ignore:GitWildMatchPattern")
def test_the_commands_of_the_readme_can_be_repeated(tmp_path: Path) -> None:
    """Six crashes and resumes with `flwr run .`: every bundle is as small as the first."""
    app = tmp_path / "fed"
    write_app(app, planned(tmp_path / "out"))
    with federation(1) as here:
        assert f"FLWR_HOME=$(realpath ../{app.name}-server)/flwr" in (app / "README.md").read_text()
        for _ in range(6):
            done = subprocess.run(
                ["flwr", "run", ".", "federation"],
                env=here.environment,
                cwd=app,
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, done.stdout + done.stderr
        assert {file.name for file in app.iterdir()} == {"fed", "pyproject.toml", "README.md"}
        assert len({build_fab_from_disk(app) for _ in range(2)}) == 1
