"""The gate turns away everything but the requests of nodes with an admitted key."""

from __future__ import annotations

import asyncio
import base64
import datetime
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

import httpx
from flwr.common.constant import TIMESTAMP_HEADER
from flwr.proto.fleet_pb2 import PullMessagesResponse, PushMessagesRequest
from flwr.proto.message_pb2 import (
    Message,
    Metadata,
    ObjectTree,
    PullObjectRequest,
    PullObjectResponse,
    PushObjectRequest,
)
from flwr.proto.node_pb2 import Node
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message
from flwr.supercore.routers import health
from flwr.supercore.routers.runtime import responses_router
from flwr.supercore.routers.runtime.router import router as runtime_router
from flwr.superlink.routers.control import router as control_router
from flwr.superlink.routers.fleet.router import router as fleet_router

from undrift.core.errors import BadSetting
from undrift.deploy import gate as gates
from undrift.deploy import join
from undrift.deploy.clients import admit, revoke
from undrift.deploy.gate import HELLO, OPEN, PULL, PULL_PART, PUSH, PUSH_PART, Exchange, Gate, signed_headers
from undrift.deploy.keys import Key, new_key, read_private, write_identity, write_keys


class Guarded:
    """A gate, and what it passes on to a SuperLink that says yes to everything, or has a `reply`."""

    def __init__(self, root: Path) -> None:
        self.server, self.said, self.passed, self.reply = root / "server", list[str](), list[httpx.Request](), b""
        write_keys(self.server, "127.0.0.1")
        write_identity(root / "a", "clinic-a")
        admit(self.server, root / "a" / "client.pub")
        self.key = read_private(root / "a" / "client.key")
        self.gate = Gate(self.server, "https://127.0.0.1:1", self.said.append)
        self.gate.link = httpx.AsyncClient(transport=httpx.MockTransport(self.yes), base_url="https://127.0.0.1:1")

    def yes(self, request: httpx.Request) -> httpx.Response:
        self.passed.append(request)
        return httpx.Response(200, content=self.reply, headers={"location": "/elsewhere", "flwr-x": "1"})

    def ask(self, method: str, path: str, headers: dict[str, str], body: bytes = b"") -> httpx.Response:
        """Ask with exactly this path: httpx would tidy it."""
        scope = {"type": "http", "method": method, "path": path, "client": ("192.0.2.9", 5)}
        raw = [(n.lower().encode("latin-1"), v.encode("latin-1")) for n, v in headers.items()]
        sent: list[Any] = []

        async def receive() -> dict[str, Any]:
            self.read = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        self.read = False
        asyncio.run(self.gate(scope | {"headers": raw}, receive, send))
        return httpx.Response(sent[0]["status"], headers=sent[0]["headers"], content=sent[1]["body"])


@pytest.fixture
def guarded(tmp_path: Path) -> Guarded:
    return Guarded(tmp_path)


def routes() -> set[tuple[str, str]]:
    """All that a SuperLink serves."""
    parts = health.router, control_router, fleet_router, runtime_router, responses_router
    found = {(method, route.path) for part in parts for route in part.routes for method in route.methods}  # type: ignore[attr-defined]
    return found | {("GET", path) for path in ("/docs", "/openapi.json", "/")}


def test_nothing_but_the_fleet_api_is_passed_on_even_with_an_admitted_key(guarded: Guarded) -> None:
    there = routes()
    guarded.gate.exchanges["clinic-a", 0] = Exchange()  # a letter that may be answered
    assert there > OPEN and len(there) > 60 and ("POST", "/v1/control/start-run") in there
    for method, path in sorted(there):
        reply = guarded.ask(method, path, signed_headers(guarded.key))
        assert (reply.status_code, len(guarded.passed)) == ((200, 1) if (method, path) in OPEN else (404, 0)), path
        guarded.passed.clear()
    assert not {p for m, p in OPEN if "register" in p}


@pytest.mark.parametrize(
    "path",
    [
        "/v1/fleet/../control/start-run", "/v1/fleet/pull-messages/../../control/start-run", "//v1/control/start-run",
        "/v1/fleet/%2e%2e/control/start-run", "/V1/FLEET/pull-messages", "/v1/fleet/pull-messages/", "/v1/fleet/",
        "https://127.0.0.1/v1/control/start-run", "/v1/fleet/pull-messages\n/v1/control", "", "*",
    ],
)  # fmt: skip
def test_tricks_with_paths_are_turned_away(path: str, guarded: Guarded) -> None:
    assert guarded.ask("POST", path, signed_headers(guarded.key)).status_code == 404 and not guarded.passed


def test_only_what_is_needed_of_the_headers_goes_through(guarded: Guarded) -> None:
    given = {"cookie": "x", "x-forwarded-for": "127.0.0.1", "authorization": "Bearer x", "host": "evil", "flwr-y": "2"}
    reply = guarded.ask("POST", PULL, signed_headers(guarded.key) | given | {"transfer-encoding": "chunked"})
    (request,) = guarded.passed
    assert not {"cookie", "x-forwarded-for", "authorization", "transfer-encoding"} & request.headers.keys()
    assert request.headers["host"] == "127.0.0.1:1" and request.headers["flwr-y"] == "2"
    assert "location" not in reply.headers and reply.headers["flwr-x"] == "1"


def forged(key: Key, **change: str) -> dict[str, str]:
    names = {"public": FLEET_HTTP_PUBLIC_KEY_HEADER, "signature": FLEET_HTTP_SIGNATURE_HEADER, "time": TIMESTAMP_HEADER}
    return signed_headers(key) | {names[part]: value for part, value in change.items()}


def shifted(key: Key, seconds: float) -> dict[str, str]:
    """What a node sends whose clock is so many seconds ahead."""
    stamp = (datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=seconds)).isoformat()
    return forged(key, time=stamp, signature=base64.b64encode(sign_message(key, stamp.encode())).decode())


BAD: dict[str, tuple[Callable[[Key], dict[str, str]], str]] = {
    "nothing": (lambda key: {}, "not admitted"),
    "own key": (lambda key: signed_headers(new_key()), "not admitted"),
    "another's key": (
        lambda key: forged(new_key(), public=base64.b64encode(public_key_to_bytes(key.public_key())).decode()),
        "shows the key of clinic-a, SHA256:.* and cannot sign",
    ),
    "old signature": (lambda key: forged(key, time="2020-01-01T00:00:00+00:00"), "cannot sign"),
    "old": (lambda key: shifted(key, -400), "the clock of clinic-a is 400 s behind"),
    "ahead": (lambda key: shifted(key, 20), "the clock of clinic-a is 20 s ahead"),
    "no zone": (lambda key: forged(key, time="2026-01-01T00:00:00"), "cannot be read"),
    "no time": (lambda key: forged(key, time="\x1b[2J"), "cannot be read"),
    "no base64": (lambda key: forged(key, signature="é"), "not admitted"),
}


@pytest.mark.parametrize("what", BAD)
def test_who_cannot_show_an_admitted_key_is_turned_away_before_its_request_is_read(what: str, guarded: Guarded) -> None:
    make, reason = BAD[what]
    for _ in range(3):
        reply = guarded.ask("POST", PULL, make(guarded.key), b"x" * 100)
        assert reply.status_code == 401 and not guarded.passed and not guarded.read
    (line,) = guarded.said  # and said once
    assert re.search(f"192.0.2.9 is turned away: .*{reason}", line)


def test_a_revoked_key_is_turned_away_from_the_next_request_on(guarded: Guarded) -> None:
    assert guarded.ask("GET", HELLO, signed_headers(guarded.key)).json() == {"client": "clinic-a"}
    revoke(guarded.server, "clinic-a")
    guarded.gate.read_clients()
    assert guarded.ask("GET", HELLO, signed_headers(guarded.key)).status_code == 401


def test_nobody_sends_in_the_name_of_another_node(guarded: Guarded) -> None:
    def request(*senders: int) -> bytes:
        messages = [Message(metadata=Metadata(src_node_id=sender)) for sender in senders]
        return PushMessagesRequest(node=Node(node_id=7), messages_list=messages).SerializeToString()

    guarded.gate.exchanges["clinic-a", 0] = Exchange()
    for body, status in ((request(7), 200), (request(8), 403), (request(7, 8), 403), (b"\xff\xff", 400)):
        assert guarded.ask("POST", PUSH, signed_headers(guarded.key), body).status_code == status
    assert len(guarded.passed) == 1 and "clinic-a sends a message in the name of another node" in guarded.said[0]


def test_what_is_too_long_is_not_kept(guarded: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "MOST", 10)
    assert guarded.ask("POST", PULL, signed_headers(guarded.key), b"x" * 11).status_code == 413 and not guarded.passed


def test_an_answer_is_no_larger_than_a_letter_can_need(guarded: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever sends more fills the server's disk; a part that is taken twice counts once, and each letter counts anew."""
    monkeypatch.setattr("undrift.deploy.messages.ALWAYS", 1000)

    def ask(path: str, request: Any, reply: Any = None) -> int:
        guarded.reply = b"" if reply is None else reply.SerializeToString()
        return guarded.ask("POST", path, signed_headers(guarded.key), request.SerializeToString()).status_code

    def push(size: int, run: int = 3) -> int:
        return ask(PUSH_PART, PushObjectRequest(run_id=run, object_content=bytes(size)))

    assert push(10) == 403 and not guarded.passed  # nobody has asked for it
    letter = PullMessagesResponse(messages_list=[Message(metadata=Metadata(run_id=3))])
    for _ in range(2):
        assert ask(PULL, PushMessagesRequest(), letter) == 200
        for _ in range(3):
            part = PullObjectResponse(object_content=bytes(500), object_found=True)
            assert ask(PULL_PART, PullObjectRequest(run_id=3, object_id="a"), part) == 200
        assert [push(2400), push(2400), push(300)] == [200, 200, 413]
        assert push(10, run=4) == 403 and push(10**5) == 413
    assert "clinic-a sends more than 5000 bytes in answer to a letter of 500" in " ".join(guarded.said)


def test_an_answer_is_announced_with_about_as_many_parts_as_its_letter(guarded: Guarded) -> None:
    """The SuperLink writes a row for each part, and meanwhile nobody else's answer."""

    def announce(parts: int, run: int = 3) -> int:
        tree = ObjectTree(object_id="a" * 64, children=[ObjectTree(object_id=f"{n:064}") for n in range(parts)])
        messages = [Message(metadata=Metadata(src_node_id=7, run_id=run))]
        request = PushMessagesRequest(node=Node(node_id=7), messages_list=messages, message_object_trees=[tree])
        return guarded.ask("POST", PUSH, signed_headers(guarded.key), request.SerializeToString()).status_code

    assert announce(10) == 403 and not guarded.passed
    guarded.gate.exchanges["clinic-a", 3] = Exchange()
    assert [announce(1000), announce(3000), announce(10, run=4)] == [200, 413, 403]
    guarded.gate.exchanges["clinic-a", 3] = Exchange(parts={str(n) for n in range(200)})
    assert announce(3000) == 200


def test_what_a_client_sends_at_a_time_is_bounded(guarded: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many requests that never end, and many large ones: the others are served all the same, and nothing is left behind."""
    monkeypatch.setattr(gates, "AT_A_TIME", 3)
    monkeypatch.setattr(gates, "MOST", 100)
    head = [(n.lower().encode(), v.encode()) for n, v in signed_headers(guarded.key).items()]

    async def attack() -> list[int]:
        ended, found = asyncio.Event(), list[int]()

        async def ask(size: int) -> None:
            sent, parts = list[Any](), iter([bytes(size)])

            async def receive() -> dict[str, Any]:
                for part in parts:
                    return {"type": "http.request", "body": part, "more_body": True}
                await ended.wait()
                return {"type": "http.request", "body": b"", "more_body": False}

            async def send(message: Any) -> None:
                sent.append(message)

            scope = {"type": "http", "method": "POST", "path": PUSH, "headers": head, "client": ("192.0.2.9", 5)}
            await guarded.gate(scope, receive, send)
            found.append(sent[0]["status"])

        for sizes in ((10,) * 5, (40, 40, 40)):
            ended.clear()
            asks = [asyncio.create_task(ask(size)) for size in sizes]
            await asyncio.sleep(0.05)
            ended.set()
            await asyncio.gather(*asks)
        return found

    found = asyncio.run(attack())
    assert found[:5] == [429, 429, 400, 400, 400] and found[5:] == [413, 400, 400]  # 400: what came was no message
    assert not guarded.gate.requests and not guarded.gate.held and not guarded.passed


def test_strangers_cannot_fill_the_log(guarded: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "REFUSALS", 5)
    for n in range(20):
        guarded.gate.log(f"192.0.2.{n}", "its key is not admitted")
    assert len(guarded.said) == len(guarded.gate.refused) == 5


def test_a_node_that_may_not_come_in_ends_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that is off, a key that is not admitted, one that was admitted under another name."""
    guarded, ca = Guarded(tmp_path), tmp_path / "server" / "ca.crt"

    def get(url: str, headers: dict[str, str], **rest: Any) -> httpx.Response:
        return guarded.ask("GET", httpx.URL(url).path, headers)

    monkeypatch.setattr(join.httpx, "get", get)
    assert join.greet("h:1", ca, guarded.key, "clinic-a") == ""
    for key, name, reason in (
        (guarded.key, "clinic-b", "admitted as 'clinic-a', and not as 'clinic-b'"),
        (new_key(), "clinic-a", "the server turns clinic-a away: its key is not admitted"),
    ):
        with pytest.raises(BadSetting, match=reason):
            join.greet("h:1", ca, key, name)
    monkeypatch.setattr(join, "signed_headers", lambda key: shifted(key, 20))
    with pytest.raises(BadSetting, match="the clock of clinic-a is 20 s ahead of the server's"):
        join.greet("h:1", ca, guarded.key, "clinic-a")
    monkeypatch.setattr(join.httpx, "get", lambda *a, **k: httpx.Response(502))
    assert "502" in join.greet("h:1", ca, guarded.key, "clinic-a")
