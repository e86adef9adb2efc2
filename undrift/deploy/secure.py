"""A client's part in secure aggregation: four letters for one sum.

1. The client draws keys and a seed, and sends its public keys.
2. It gets everybody's public keys, splits its mask key and its seed among them, and sends each share sealed for one of them.
3. It gets the shares that the others sealed for it, and the task. It sends its numbers under masks.
4. It hears who has sent numbers. Of those it opens its share of the seed, of those that have left the share of the mask key.

Each letter comes in a process of its own, so that what must be remembered is in a file. The client goes from one letter to the
next and never back, also where two letters come at the same time, and it never opens both shares of anybody: whoever has both
can take that client's masks off.

Masks are those of a run's settings and of a task. A server that gives clients different ones, so that the numbers of all but one
are known beforehand, gets a sum whose masks stay (Pasquini, Francati, Ateniese: Eluding Secure Aggregation in Federated Learning
via Model Inconsistency. CCS 2022).
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from undrift.core.files import make_private, one_at_a_time, replacing
from undrift.core.trees import State, leaves
from undrift.deploy import masks
from undrift.deploy.masks import KEY, LEAST, SEALED, Secrets
from undrift.deploy.messages import Encoded, Letter, Refused, pack, unpack
from undrift.oracle.net import Net

KEYS, SHARES, UNMASK = "-keys", "-shares", "-unmask"  # the exchanges around one whose answers are added up
MOST = 10_000  # clients of one sum
REQUEST = "request."  # begins the names of a task's arrays


class Public(NamedTuple):
    """1, up: the keys of one client."""

    keys: Tensor  # uint8 [64]
    settings: Tensor  # uint8 [32], a hash of the run's settings as this client has them


class Peers(NamedTuple):
    """2, down: who has sent keys."""

    ids: Tensor  # int64 [n], in rising order
    keys: Tensor  # uint8 [n, 64]


class Shares(NamedTuple):
    """2, up: the client's shares, each sealed for one of the others."""

    sealed: Tensor  # uint8 [n, 64]; the client's own row is empty
    mark: Tensor  # uint8 [32], a hash of its seed


class Task(NamedTuple):
    """3, down: who has sent shares, what they sealed for this client, and what it is to do."""

    ids: Tensor  # int64 [m]
    sealed: Tensor  # uint8 [m, 64]
    request: State


class Masked(NamedTuple):
    """3, up: the client's numbers under masks."""

    numbers: Tensor  # int32 [E], mod 2^32


class Left(NamedTuple):
    """4, down: who has sent numbers."""

    ids: Tensor  # int64 [k]


class Opened(NamedTuple):
    """4, up: shares of the seeds of those, and of the mask keys of the others."""

    seeds: Tensor  # uint8 [k, 16]
    keys: Tensor  # uint8 [m - k, 32]


def octets(*rows: bytes) -> Tensor:
    """Rows of bytes [n, size]."""
    return torch.from_numpy(np.frombuffer(b"".join(rows), np.uint8).reshape(len(rows), -1).copy())


def row_bytes(rows: Tensor) -> list[bytes]:
    return [bytes(row.tolist()) for row in rows]


def empty(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    """The form of an array, without memory."""
    return torch.empty(*shape, dtype=dtype, device="meta")


def ids_of(tensor: Tensor) -> list[int]:
    """Ids that must rise."""
    ids: list[int] = tensor.tolist()
    if any(a >= b for a, b in itertools.pairwise(ids)):
        raise Refused("the ids of the clients do not rise")
    return ids


def context_of(letter: Letter, exchange: str) -> str:
    """What keys are for: this run, this round, this sum."""
    return f"{letter.fact('run', str)} {letter.fact('round', int)} {exchange}"


def task_context(context: str, settings: bytes, arrays: Mapping[str, Encoded]) -> str:
    """What masks are for: this sum, these settings and this task."""
    digest = hashlib.sha256(settings)
    for name in sorted(name for name in arrays if name.startswith(REQUEST)):
        digest.update(f"{name} {len(arrays[name].data)} ".encode() + arrays[name].data)
    return f"{context} {digest.hexdigest()}"


def flat(net: Net, sent: State, more: list[float]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """All numbers of an upload, without padding, and some more."""
    parts = [leaf.detach().cpu().double().flatten() for leaf in leaves(net.without_padding(sent))]
    return torch.cat([*parts, torch.tensor(more, dtype=torch.float64)]).numpy()


class Summand:
    """One client's part in the sums of a run."""

    def __init__(
        self, folder: Path, net: Net, device: torch.device, bound: float, least: int, settings: str = ""
    ) -> None:
        """`least` is the fewest clients with whom this one will be added up, `settings` are those of the run."""
        self.settings = hash_settings(settings)
        self.file, self.net, self.device, self.bound = folder / "sum.json", net, device, bound
        self.least = max(LEAST, least)

    def answer(self, letter: Letter, exchange: str, step: str) -> dict[str, Encoded]:
        """Answer a letter around the exchange whose answers are added up."""
        steps: dict[str, Callable[[Letter, str], Any]] = {KEYS: self.begin, SHARES: self.share, UNMASK: self.open}
        with self.alone():
            return pack(steps[step](letter, context_of(letter, exchange)), self.net)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Let one letter at a time go to the next step: each has a process of its own."""
        make_private(self.file.parent)
        with one_at_a_time(self.file.with_suffix(".lock")):
            yield

    def read(self, letter: Letter, form: Any) -> Any:
        return unpack(letter.arrays, form, self.net, self.device)

    def begin(self, letter: Letter, context: str) -> Public:
        own = masks.draw_secrets()
        self.keep({"context": context, "at": KEYS, "own": [secret.hex() for secret in own]})
        return Public(octets(masks.public_keys(own))[0], octets(self.settings)[0])

    def share(self, letter: Letter, context: str) -> Shares:
        held, n = self.recall(context, KEYS), count_of(letter)
        peers = self.read(letter, Peers(empty(n, dtype=torch.int64), empty(n, 2 * KEY)))
        ids, keys, id = ids_of(peers.ids), row_bytes(peers.keys), letter.fact("id", int)
        own = secrets_of(held)
        if n < self.least or id not in ids or keys[ids.index(id)] != masks.public_keys(own) or len({*keys}) < n:
            raise Refused(f"a sum needs the keys of {self.least} clients, all different, this one's among them")
        place, least = ids.index(id), masks.threshold(n)
        shares = [a + b for a, b in zip(*(masks.split(s, least, n) for s in (own.mask, own.seed)), strict=True)]
        sealed = [
            bytes(SEALED) if other == place else masks.seal(self.way(own, keys[other], context, place, other), share)
            for other, share in enumerate(shares)
        ]
        self.keep(held | {"at": SHARES, "ids": ids, "keys": [k.hex() for k in keys], "share": shares[place].hex()})
        return Shares(octets(*sealed), octets(masks.mark_of(own.seed, context))[0])

    def take(self, letter: Letter, exchange: str, form: State) -> State:
        """Read the task, and remember the shares that come with it."""
        with self.alone():
            held, m = self.recall(context_of(letter, exchange), SHARES), count_of(letter)
            task = self.read(letter, Task(empty(m, dtype=torch.int64), empty(m, SEALED), form))
            ids = ids_of(task.ids)
            enough = max(masks.threshold(len(held["ids"])), self.least)
            if not {*ids} <= {*held["ids"]} or letter.fact("id", int) not in ids or m < enough:
                raise Refused(f"a sum needs the shares of {enough} clients that gave keys, this one's among them")
            self.keep(held | {"at": "", "with": ids, "sealed": [sealed.hex() for sealed in row_bytes(task.sealed)]})
        return task.request

    def mask(self, letter: Letter, exchange: str, sent: State, more: list[float]) -> dict[str, Encoded]:
        """The client's numbers under masks; numbers for the record (`more`) are cut to the bound, and it says if they were."""
        with self.alone():
            held = self.recall(context := context_of(letter, exchange), "")
            ids, id, own = held["ids"], letter.fact("id", int), secrets_of(held)
            told = [min(max(number, -self.bound), self.bound) for number in more]
            values = flat(self.net, sent, [*told, *([self.bound * (told != more)] if more else [])])
            numbers = masks.to_fixed(values, self.bound, len(ids))
            peers = {ids.index(other): bytes.fromhex(held["keys"][ids.index(other)]) for other in held["with"]}
            place = ids.index(id)
            others = {p: key for p, key in peers.items() if p != place}
            masks.mask(numbers, own, place, others, task_context(context, self.settings, letter.arrays))
            self.keep(held | {"at": UNMASK})
        return pack(Masked(torch.from_numpy(numbers.view(np.int32))), self.net)

    def open(self, letter: Letter, context: str) -> Opened:
        held, k = self.recall(context, UNMASK), count_of(letter)
        left = ids_of(self.read(letter, Left(empty(k, dtype=torch.int64))).ids)
        ids, id, own = held["ids"], letter.fact("id", int), secrets_of(held)
        enough = max(masks.threshold(len(ids)), self.least)
        if not {*left} <= {*held["with"]} or id not in left or k < enough:
            raise Refused(f"a sum needs the numbers of {enough} clients that gave shares, this one's among them")
        self.file.unlink(missing_ok=True)  # once, whatever becomes of the answer
        place, seeds, keys = ids.index(id), list[bytes](), list[bytes]()
        for other, sealed in zip(held["with"], held["sealed"], strict=True):
            at, share = ids.index(other), bytes.fromhex(held["share"])
            if other != id:
                way = self.way(own, bytes.fromhex(held["keys"][at]), context, at, place)
                share = masks.unseal(way, bytes.fromhex(sealed))
            (seeds if other in left else keys).append(share[KEY:] if other in left else share[:KEY])
        return Opened(octets(*seeds), octets(*keys) if keys else torch.zeros(0, KEY, dtype=torch.uint8))

    def way(self, own: Secrets, other: bytes, context: str, sender: int, receiver: int) -> bytes:
        """The key for shares from one client to another."""
        return masks.agree(own.cipher, other[:KEY], f"share {context} {sender} {receiver}")

    def recall(self, context: str, at: str) -> dict[str, Any]:
        """What is remembered of this sum, if the letter is the one that comes next."""
        held: dict[str, Any] = json.loads(self.file.read_text()) if self.file.exists() else {}
        if (held.get("context"), held.get("at")) != (context, at):
            raise Refused("this letter is not the next one of a sum that has begun here")
        return held

    def keep(self, held: dict[str, Any]) -> None:
        with replacing(self.file) as temporary:
            temporary.touch(mode=0o600)
            temporary.write_text(json.dumps(held))


def hash_settings(settings: str) -> bytes:
    return hashlib.sha256(f"undrift settings {settings}".encode()).digest()


def count_of(letter: Letter) -> int:
    """How many clients a letter is about."""
    count = letter.fact("clients", int)
    if not LEAST <= count <= MOST:
        raise Refused(f"a sum is over {LEAST} to {MOST} clients, not {count}")
    return count


def secrets_of(held: dict[str, Any]) -> Secrets:
    return Secrets(*(bytes.fromhex(secret) for secret in held["own"]))
