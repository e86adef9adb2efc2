"""The gate of a federation: what clients need of Flower's SuperLink, and nothing else, for those with an admitted key.

The SuperLink serves its Fleet, Control and Runtime APIs on one port, and whoever reaches the Control API may run code on the
server and on all nodes. Therefore the SuperLink listens on loopback only, and the gate, which is published, passes on the
requests of the Fleet API. It looks at the key before it reads a request. Flower's own check of node and key comes after it.
"""

from __future__ import annotations

import base64
import binascii
import datetime
import json
import ssl
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

import httpx
from cryptography.exceptions import UnsupportedAlgorithm
from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_HEADER, TIMESTAMP_TOLERANCE
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message, verify_signature
from google.protobuf.message import DecodeError

from undrift.deploy.clients import admitted
from undrift.deploy.keys import Key, fingerprint

FLEET = "/v1/fleet/"
PUSH = f"{FLEET}push-messages"
# A node neither registers nor removes itself: the operator does.
ACTIONS = (
    "activate-node", "deactivate-node", "send-node-heartbeat", "pull-messages", "push-messages", "get-run", "get-fab",
    "push-object", "pull-object", "confirm-message-received",
)  # fmt: skip
OPEN = {("POST", f"{FLEET}{action}") for action in ACTIONS}
HELLO = "/undrift/hello"  # says to a client whether it may come in
MOST = 64 << 20  # bytes of a request; Flower cuts arrays into pieces of 5 MiB
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


class Gate:
    """An ASGI app before the SuperLink at `link`; `server` is the server's folder."""

    def __init__(self, server: Path, link: str, say: Callable[[str], None]) -> None:
        self.server, self.say, self.refused = server, say, set[tuple[str, str]]()
        trusted = ssl.create_default_context(cafile=str(server / "ca.crt"))
        self.link = httpx.AsyncClient(base_url=link, verify=trusted, timeout=60.0, trust_env=False)
        self.read_clients()

    def read_clients(self) -> None:
        """Learn which keys are admitted now."""
        clients = admitted(self.server)
        self.clients = {public_key_to_bytes(key): (name, key) for name, key in clients.items()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        try:
            status, kept, body = await self.answer(scope["method"], scope["path"], headers, receive)
        except TurnedAway as refusal:
            status, kept = refusal.status, {"content-type": "application/json"}
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
        body = await read_body(receive)
        if path == PUSH:
            check_sender(body, name)
        kept = {n: v for n, v in headers.items() if n in PASSED or n.startswith("flwr-")}
        try:
            reply = await self.link.post(path, content=body, headers=kept)
        except httpx.TransportError as error:
            raise TurnedAway(503, "the SuperLink does not answer") from error
        kept = {n: v for n, v in reply.headers.items() if n == "content-type" or n.startswith("flwr-")}
        return reply.status_code, kept, reply.content

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


async def read_body(receive: Receive) -> bytes:
    body, more = bytearray(), True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise TurnedAway(400, "it went away in the middle of a request")
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > MOST:
            raise TurnedAway(413, f"its request has more than {MOST} bytes")
    return bytes(body)


def check_sender(body: bytes, name: str) -> None:
    """Refuse messages in another node's name: Flower checks the key of the request's node, not of its messages' nodes."""
    try:
        request = PushMessagesRequest.FromString(body)
    except DecodeError as error:
        raise TurnedAway(400, f"{name} sends what is no message") from error
    if any(message.metadata.src_node_id != request.node.node_id for message in request.messages_list):
        raise TurnedAway(403, f"{name} sends a message in the name of another node")
