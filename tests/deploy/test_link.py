"""Strangers at the published port: connections that never come to a request, and headers without an end."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("flwr")

import uvicorn

from tests.patience import patient
from undrift.deploy import link
from undrift.deploy.link import Door, Line
from undrift.deploy.ports import free_port

HURRY = 0.4
GOOD = b"GET / HTTP/1.1\r\nhost: h\r\n\r\n"


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Where an app is served as the gate is; it takes four times as long to answer as a connection may be idle."""
    monkeypatch.setattr(link, "HURRY", HURRY)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(4 * HURRY)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    where = free_port()
    door = Door(uvicorn.Config(app, port=where, http=Line, lifespan="off", ws="none", log_level="error"))
    serving = threading.Thread(target=door.run)
    serving.start()
    while not door.started:
        time.sleep(0.01)
    yield where
    door.should_exit = True
    serving.join()


def heard(line: socket.socket) -> bytes:
    """All that comes until the other side closes."""
    line.settimeout(patient(30))
    with contextlib.suppress(ConnectionResetError):
        return b"".join(iter(lambda: line.recv(1 << 16), b""))
    return b""


def test_who_makes_no_request_is_cut_off(port: int) -> None:
    for words in (b"", b"GET / HTTP/1.1\r\nhost: h\r\n"):
        with socket.create_connection(("127.0.0.1", port)) as line:
            line.sendall(words)
            assert heard(line) == b""


def test_who_trickles_headers_is_cut_off(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as line, contextlib.suppress(OSError):
        for n in range(10**4):
            line.sendall(f"x{n}: 1\r\n".encode() if n else b"GET / HTTP/1.1\r\nhost: h\r\n")
            time.sleep(0.05)
        pytest.fail("it listened for minutes")


@pytest.mark.parametrize("words", [b"GET /", b"GET / HTTP/1.1\r\nx:", b"x\r\ny"])
def test_headers_without_an_end_are_not_kept(words: bytes, port: int) -> None:
    """httptools would take as many as there are."""
    with socket.create_connection(("127.0.0.1", port)) as line, contextlib.suppress(OSError):
        line.sendall(words)
        for _ in range(1000):
            line.sendall(b"a" * 10_000)
        pytest.fail("it took ten million bytes")


def test_a_slow_request_is_not_cut_off_and_neither_is_the_next_one(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as line:
        line.settimeout(patient(30))
        for _ in range(2):
            line.sendall(GOOD)
            answer = b""
            while not answer.endswith(b"ok"):
                answer += line.recv(1000)
            assert answer.startswith(b"HTTP/1.1 200")
