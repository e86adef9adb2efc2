"""The gate of a federation: what clients need of Flower's SuperLink, and nothing else, for those with an admitted key.

The SuperLink serves its Fleet, Control and Runtime APIs on one port, and whoever reaches the Control API may run code on the
server and on all nodes. Therefore the SuperLink listens on loopback only, and the gate, which is published, passes on the
requests of the Fleet API. It looks at the key before it reads a request. Flower's own check of node and key comes after it.
What one client may cost the others is bounded here too: its requests at a time, and the bytes of its answers.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import datetime
import json
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from cryptography.exceptions import UnsupportedAlgorithm
from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_HEADER, TIMESTAMP_TOLERANCE
from flwr.proto.fleet_pb2 import PullMessagesResponse, PushMessagesRequest
from flwr.proto.message_pb2 import PullObjectRequest, PullObjectResponse, PushObjectRequest
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message, verify_signature
from google.protobuf.message import DecodeError

from undrift.deploy.clients import admitted_keys
from undrift.deploy.keys import Key, fingerprint
from undrift.deploy.messages import most_bytes

FLEET = "/v1/fleet/"
PUSH, PULL = f"{FLEET}push-messages", f"{FLEET}pull-messages"
PUSH_PART, PULL_PART = f"{FLEET}push-object", f"{FLEET}pull-object"
# A node neither registers nor removes itself: the operator does.
ACTIONS = (
    "activate-node", "deactivate-node", "send-node-heartbeat", "pull-messages", "push-messages", "get-run", "get-fab",
    "push-object", "pull-object", "confirm-message-received",
)  # fmt: skip
OPEN = {("POST", f"{FLEET}{action}") for action in ACTIONS}
HELLO = "/undrift/hello"  # says to a client whether it may come in
MOST = 64 << 20  # bytes of all requests of a client at a time; Flower cuts arrays into pieces of 5 MiB
AT_A_TIME = 32  # requests of a client; a node makes a few
LIST, IN_LIST = (
    100_000,
    1000,
)  # most bytes of the announcement of an answer, and for each part of its letter; a part takes 70
REFUSALS = 1000  # most different refusals that are logged, so that nobody can fill the disk
PASSED = ("content-type", "accept")  # headers that are passed on, beside Flower's own
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class TurnedAway(Exception):
    """A request that is not passed on."""

    def __init__(self, status: int, reason: str) -> None:
        self.status = status
        super().__init__(reason)


def signed_headers(key: Key) -> dict[str, str]:
    """The headers by which Flower's nodes show that they hold a key."""
    now = datetime.datetime.now(datetime.UTC).isoformat()
    parts = public_key_to_bytes(key.public_key()), sign_message(key, now.encode("ascii"))
    public, signature = (base64.b64encode(part).decode("ascii") for part in parts)
    return {FLEET_HTTP_PUBLIC_KEY_HEADER: public, TIMESTAMP_HEADER: now, FLEET_HTTP_SIGNATURE_HEADER: signature}


@dataclass
class Exchange:
    """What a client was sent and has sent since the last letter of a run."""

    down: int = 0  # bytes
    up: int = 0
    parts: set[str] = field(default_factory=set)  # that it has taken


class Gate:
    """An ASGI app before the SuperLink at `link`; `server` is the server's folder."""

    def __init__(self, server: Path, link: str, say: Callable[[str], None]) -> None:
        self.server, self.say, self.refused = server, say, set[tuple[str, str]]()
        self.requests, self.held = Counter[str](), Counter[str]()  # by client, now: how many, and bytes of them
        self.exchanges: dict[tuple[str, int], Exchange] = {}  # by client and run
        trusted = ssl.create_default_context(cafile=str(server / "ca.crt"))
        self.link = httpx.AsyncClient(base_url=link, verify=trusted, timeout=60.0, trust_env=False)
        self.read_clients()

    def read_clients(self) -> None:
        """Learn which keys are admitted now."""
        clients = admitted_keys(self.server)
        self.clients = {public_key_to_bytes(key): (name, key) for name, key in clients.items()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        try:
            status, kept, body = await self.answer(scope["method"], scope["path"], headers, receive)
        except TurnedAway as refusal:
            status, kept = refusal.status, {"content-type": "application/json", "connection": "close"}
            body = json.dumps({"detail": str(refusal)}).encode()
            self.log(str((scope.get("client") or ("somebody",))[0]), str(refusal))
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in kept.items()]
        raw.append((b"content-length", str(len(body)).encode()))
        await send({"type": "http.response.start", "status": status, "headers": raw})
        await send({"type": "http.response.body", "body": body})

    def log(self, address: str, reason: str) -> None:
        if (address, reason) not in self.refused and len(self.refused) < REFUSALS:
            self.refused.add((address, reason))
            self.say(f"{address} is turned away: {reason}")

    async def answer(
        self, method: str, path: str, headers: dict[str, str], receive: Receive
    ) -> tuple[int, dict[str, str], bytes]:
        """Pass a request on, and return status, headers and body of the answer."""
        if (method, path) != ("GET", HELLO) and (method, path) not in OPEN:
            raise TurnedAway(404, "there is nothing here but Flower's Fleet API")
        name = self.caller(headers)
        if path == HELLO:
            return 200, {"content-type": "application/json"}, json.dumps({"client": name}).encode()
        with self.counting(name):
            body = await self.read_body(name, receive)
            if path == PUSH:
                self.check_answer(name, body)
            if path == PUSH_PART:
                self.count_up(name, body)
            kept = {n: v for n, v in headers.items() if n in PASSED or n.startswith("flwr-")}
            try:
                reply = await self.link.post(path, content=body, headers=kept)
            except httpx.TransportError as error:
                raise TurnedAway(503, "the SuperLink does not answer") from error
        if reply.status_code == httpx.codes.OK and path in (PULL, PULL_PART):
            self.count_down(name, path, body, reply.content)
        kept = {n: v for n, v in reply.headers.items() if n == "content-type" or n.startswith("flwr-")}
        return reply.status_code, kept, reply.content

    @contextlib.contextmanager
    def counting(self, name: str) -> Iterator[None]:
        """Count a client's request, as long as it lasts."""
        if self.requests[name] >= AT_A_TIME:
            raise TurnedAway(429, f"{name} makes more than {AT_A_TIME} requests at a time")
        self.requests[name] += 1
        try:
            yield
        finally:
            self.requests[name] -= 1
            if not self.requests[name]:
                del self.requests[name], self.held[name]

    async def read_body(self, name: str, receive: Receive) -> bytes:
        body, more = bytearray(), True
        try:
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise TurnedAway(400, "it went away in the middle of a request")
                part = message.get("body", b"")
                body += part
                self.held[name] += len(part)
                more = message.get("more_body", False)
                if self.held[name] > MOST:
                    raise TurnedAway(413, f"requests of {name} have more than {MOST} bytes")
        finally:
            self.held[name] -= len(body)
        return bytes(body)

    def check_answer(self, name: str, body: bytes) -> None:
        """Refuse messages in another node's name, and lists of parts so long that the SuperLink is busy with them for minutes.

        Flower checks the key of the request's node, but not of its messages' nodes.
        """
        request = read(PushMessagesRequest, body, name)
        if any(message.metadata.src_node_id != request.node.node_id for message in request.messages_list):
            raise TurnedAway(403, f"{name} sends a message in the name of another node")
        for message in request.messages_list:
            most = LIST + IN_LIST * len(self.exchange(name, message.metadata.run_id).parts)
            if len(body) > most:
                raise TurnedAway(413, f"{name} announces an answer with more than {most} bytes")

    def exchange(self, name: str, run: int) -> Exchange:
        """The client's exchange in a run."""
        if (name, run) not in self.exchanges:
            raise TurnedAway(403, f"{name} answers no letter")
        return self.exchanges[name, run]

    def count_up(self, name: str, body: bytes) -> None:
        """Refuse a part of an answer that is larger than any method needs, before it takes room on the server's disk."""
        exchange = self.exchange(name, read(PushObjectRequest, body, name).run_id)
        exchange.up += len(body)
        if exchange.up > (most := most_bytes(exchange.down)):
            raise TurnedAway(413, f"{name} sends more than {most} bytes in answer to a letter of {exchange.down}")

    def count_down(self, name: str, path: str, body: bytes, reply: bytes) -> None:
        """Take down what a client was sent, each part of a letter once."""
        if path == PULL:
            for message in read(PullMessagesResponse, reply, "the SuperLink").messages_list:
                self.exchanges[name, message.metadata.run_id] = Exchange()
            return
        asked = read(PullObjectRequest, body, name)
        exchange = self.exchanges.get((name, asked.run_id))
        if exchange is not None and asked.object_id not in exchange.parts:
            size = len(read(PullObjectResponse, reply, "the SuperLink").object_content)
            if size:  # it may not be there yet
                exchange.parts.add(asked.object_id)
                exchange.down += size

    def caller(self, headers: dict[str, str]) -> str:
        """The name of the client whose key has signed the request's time."""
        try:
            named = (FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER)
            public, signature = (base64.b64decode(headers[header], validate=True) for header in named)
            stamp = headers[TIMESTAMP_HEADER]
            name, key = self.clients[public]
        except (KeyError, ValueError, binascii.Error) as error:
            raise TurnedAway(401, "its key is not admitted") from error
        try:
            ahead = (datetime.datetime.fromisoformat(stamp) - datetime.datetime.now(datetime.UTC)).total_seconds()
            genuine = verify_signature(key, stamp.encode("ascii"), signature)
        except (ValueError, TypeError, OverflowError, UnsupportedAlgorithm) as error:
            raise TurnedAway(401, "its signature cannot be read") from error
        if not genuine:
            raise TurnedAway(401, f"it shows the key of {name}, {fingerprint(key)}, and cannot sign with it")
        if not -(TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE) < ahead < SYSTEM_TIME_TOLERANCE:
            way = "ahead of" if ahead > 0 else "behind"
            raise TurnedAway(401, f"the clock of {name} is {abs(ahead):.0f} s {way} the server's; set both by NTP")
        return name


def read(kind: Any, body: bytes, name: str) -> Any:
    """Read a message of Flower's."""
    try:
        return kind.FromString(body)
    except DecodeError as error:
        raise TurnedAway(400, f"{name} sends what is no message") from error
