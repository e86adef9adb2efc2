"""Answers that never come whole, or are no messages: Flower's own grid before a SuperLink that has whatever clients have sent."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

pytest.importorskip("flwr")

from flwr.app import Message
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import ObjectTree, PullObjectResponse
from flwr.proto.node_pb2 import NodeInfo
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid.http_grid import HttpGrid

from tests.patience import patient
from undrift.deploy import messages, pull
from undrift.deploy.flower import GridPost, to_records
from undrift.deploy.messages import Letter, encode
from undrift.deploy.pull import PARTS, TURN, Pull

import torch  # isort: skip

Parts = dict[str, bytes]
NODES = {"0": 10, "1": 11, "2": 12}


def letter_of(node: int) -> Letter:
    return Letter({"round": 0}, {"d": encode(node + torch.arange(1000.0))})


LETTER = letter_of(1)


class Answer:
    """What lies at the SuperLink as the answer to a message: its parts, in the order of their arrival."""

    def __init__(self, message: Message) -> None:
        self.head, self.tree = message_to_proto(message), get_object_tree(message)
        self.head.metadata.message_id = self.tree.object_id
        self.parts = {id: part.deflate() for id, part in get_all_nested_objects(message).items()}
        self.unseen = 0  # how often a part is looked for before it is there; whose parts are "withheld" never are
        self.withheld: set[str] = set()

    def replace(self, root: bytes, *others: bytes) -> None:
        """Have another message, with other parts below it."""
        ids = [hashlib.sha256(part).hexdigest() for part in (*others, root)]
        self.parts = dict(zip(ids, (*others, root), strict=True))
        self.tree = ObjectTree(object_id=ids[-1], children=[ObjectTree(object_id=id) for id in ids[:-1]])
        self.head.metadata.message_id = ids[-1]


class Link(HttpGrid):
    """Flower's grid, whose SuperLink is here; `spoil` is what client 0 does to its honest answer."""

    def __init__(self, spoil: Callable[[Answer], None]) -> None:
        super().__init__(token="none")
        self.spoil, self.answers = spoil, dict[str, Answer]()
        self.up, self.confirmed = True, 0
        self._client: Any = self
        self.set_run(Run.create_empty(1))

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in messages:
            node = message.metadata.dst_node_id
            ids.append(f"m{node}")
            message.metadata.__dict__["_message_id"] = ids[-1]
            TaskIdentity.node_id = node
            answer = Answer(Message(to_records(letter_of(node)), reply_to=message))
            TaskIdentity.node_id = 1
            if node == NODES["0"]:
                self.spoil(answer)
            self.answers[ids[-1]] = answer
        return ids

    def GetNodes(self, request: Any) -> Any:
        if not self.up:
            raise httpx.ConnectError("down")
        return SimpleNamespace(nodes=[NodeInfo(node_id=node, name=name) for name, node in NODES.items()])

    def PullMessages(self, request: Any) -> Any:
        if not self.up:
            raise httpx.ConnectError("down")
        (id,) = request.message_ids
        found = [self.answers[id]] if id in self.answers and not getattr(self.answers[id], "told", False) else []
        for answer in found:
            answer.told = True  # type: ignore[attr-defined]
        return SimpleNamespace(messages_list=[a.head for a in found], message_object_trees=[a.tree for a in found])

    def PullObject(self, request: Any) -> Any:
        id = request.object_id  # equal parts of several answers are one
        holders = [a for a in self.answers.values() if id in a.parts]
        for answer in holders:
            answer.unseen -= 1
        there = any(a.unseen < 0 and id not in a.withheld for a in holders)
        content = holders[0].parts[id] if there else b""
        return PullObjectResponse(object_found=True, object_available=there, object_content=content)

    def ConfirmMessageReceived(self, request: Any) -> Any:
        self.confirmed += 1


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    monkeypatch.setattr("undrift.deploy.flower.PAUSE", 0.01)
    monkeypatch.setattr("undrift.deploy.flower.AT_ONCE", 0.2)
    monkeypatch.setattr(pull, "SOON", 0.01)
    pull.set_up()


def exchange(spoil: Callable[[Answer], None], timeout: float = 3.0) -> tuple[dict[str, Any], list[str]]:
    """What comes of an exchange with three clients, and in which order."""
    grid, said = Link(spoil), list[str]()
    post = GridPost(grid, patient(timeout), said.append)
    post.node = dict(NODES)
    found, order = dict[str, Any](), []
    for name, answer in post.exchange(dict.fromkeys(NODES, LETTER)):
        assert sum(getattr(thread, "takes", False) for thread in threading.enumerate()) <= 1
        found[name] = answer
        order.append(name)
    assert not post.pulls
    return found, order


def arrivals(spoil: Callable[[Answer], None], timeout: float = 3.0) -> tuple[dict[str, Any], list[str]]:
    """The same in a run that does not wait for a round."""
    grid, said = Link(spoil), list[str]()
    post = GridPost(grid, patient(timeout), said.append)
    post.node = dict(NODES)
    post.send(dict.fromkeys(NODES, LETTER))
    found, order = dict[str, Any](), []
    while came := post.receive():
        found |= dict(came)
        order += [name for name, _ in came]
    assert not post.pulls and not post.open
    return found, order


WAYS = pytest.mark.parametrize("way", [exchange, arrivals])
Ways = Callable[..., tuple[dict[str, Any], list[str]]]


def children_of(answer: Answer) -> list[str]:
    return [child.object_id for child in answer.tree.children]


def nothing_comes(answer: Answer) -> None:
    answer.withheld = {*answer.parts}


def one_part_is_missing(answer: Answer) -> None:
    answer.withheld = {next(iter(answer.parts))}


@WAYS
@pytest.mark.parametrize("spoil", [nothing_comes, one_part_is_missing])
def test_an_answer_that_never_comes_whole_keeps_nobody_waiting(spoil: Callable[[Answer], None], way: Ways) -> None:
    found, order = way(spoil)
    assert order == ["1", "2", "0"] and found["0"] == "no answer in time"
    assert all(isinstance(found[name], Letter) for name in ("1", "2"))
    assert TURN.acquire(timeout=5.0)
    TURN.release()


def garbage(answer: Answer) -> None:
    answer.replace(b"Message  7\0garbage")


def no_such_part(answer: Answer) -> None:
    (child,) = children_of(answer)
    root = answer.parts[answer.tree.object_id].replace(child.encode(), b"0" * 64)
    answer.replace(root)


def an_array_record(answer: Answer) -> None:
    answer.replace(b"ArrayRecord  2\0{}")


def another_type_inside(answer: Answer) -> None:
    (child,) = children_of(answer)
    inside = b"ArrayRecord  2\0{}"
    root = answer.parts[answer.tree.object_id].replace(child.encode(), hashlib.sha256(inside).hexdigest().encode())
    answer.replace(root, inside)


def a_long_chain(answer: Answer) -> None:
    parts, last = list[bytes](), b"RecordDict  2\0{}"
    for _ in range(3000):
        parts.append(last)
        last = b"RecordDict %s 2\0{}" % hashlib.sha256(last).hexdigest().encode()
    answer.replace(last, *parts)


def itself(answer: Answer) -> None:
    answer.head.metadata.message_id = answer.tree.object_id
    answer.parts[answer.tree.object_id] = b"RecordDict %s 2\0{}" % answer.tree.object_id.encode()


def no_text(answer: Answer) -> None:
    answer.replace(b"\xff\xfe\0")


@WAYS
@pytest.mark.parametrize(
    "spoil", [garbage, no_such_part, an_array_record, another_type_inside, a_long_chain, itself, no_text]
)
def test_what_is_no_message_is_that_clients_failure(spoil: Callable[[Answer], None], way: Ways) -> None:
    """In Flower's own hands each of these ends the server's app."""
    found, _ = way(spoil)
    assert found["0"].startswith("refused: it is no message"), found["0"]
    assert all(isinstance(found[name], Letter) for name in ("1", "2"))
    grid = Link(spoil)
    GridPost(grid, 1.0, print).grid.push_messages([Message(to_records(LETTER), NODES["0"], "train", ttl=9.0)])
    with pytest.raises(Exception):  # noqa: B017
        list(grid.pull_messages(["m10"])).pop().metadata  # noqa: B018


@WAYS
def test_an_answer_that_is_too_large_is_not_taken(monkeypatch: pytest.MonkeyPatch, way: Ways) -> None:
    monkeypatch.setattr(messages, "ALWAYS", 10_000)

    def large(answer: Answer) -> None:
        inside = [b"Array  60000\0" + bytes([n]) * 60_000 for n in range(5)]
        answer.replace(answer.parts[answer.tree.object_id], *inside)

    found, _ = way(large)
    most = messages.most_bytes(LETTER.nbytes)
    assert found["0"].startswith("refused: it has 6") and found["0"].endswith(f"at most {most} were expected")
    assert isinstance(found["1"], Letter)


def test_an_answer_in_very_many_parts_is_not_taken() -> None:
    def many(answer: Answer) -> None:
        answer.tree.children.extend([answer.tree.children[0]] * (PARTS + 1))

    found, _ = exchange(many)
    assert found["0"].startswith("refused: it has 1") and "parts; at most 20000" in found["0"]


@WAYS
def test_parts_that_come_late_are_waited_for(way: Ways) -> None:
    def late(answer: Answer) -> None:
        answer.unseen = 7

    found, _ = way(late, timeout=30.0)
    assert all(isinstance(answer, Letter) for answer in found.values())
    assert found == {name: letter_of(node) for name, node in NODES.items()}


def test_where_the_superlink_is_gone_nobody_is_blamed() -> None:
    grid = Link(lambda answer: None)
    with Pull(grid, "m10", 1000, time.monotonic() + 5) as replies:
        assert replies == []
    grid.up = False
    gone = Pull(grid, "m10", 1000, time.monotonic() + 5)
    gone.done.wait(5.0)
    with pytest.raises(httpx.ConnectError), gone:
        pass
    gone.join(5.0)
    assert not gone.is_alive()


def test_a_flower_that_pulls_in_another_way_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pull, "FUNCTION", "pull_other_things")
    with pytest.raises(SystemExit, match="pulls answers in another way"):
        pull.set_up()
