"""One of three real clients is hostile: what it can do to a federation of real processes, with and without a rule."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from flwr.proto.message_pb2 import ObjectTree

from tests.deploy.altered import altered
from tests.deploy.test_attacks import Forger
from tests.deploy.test_processes import agree, finish, lent, planned, records, until
from tests.patience import patient
from undrift.deploy.local import LocalFederation, federation

HOSTILE = """
if name == "1":
    sent = arrays["up.d"]
    if round == 0:  # a header that Python's tokenizer does not survive
        data = sent.data[:8] + (11).to_bytes(2, "little") + b"{'descr': (" + sent.data[128:]
        arrays["up.d"] = Array(sent.dtype, sent.shape, sent.stype, data)
    else:
        arrays["up.d"] = Array(np.float32(-20.0 if round < 3 else 1e30) * sent.numpy())
"""


@pytest.fixture(scope="module")
def three() -> Iterator[LocalFederation]:
    with federation(3) as here:
        yield here


@pytest.mark.system
@pytest.mark.parametrize("rule", ["median", "mean"])
def test_a_rule_keeps_a_federation_learning(rule: str, three: LocalFederation, tmp_path: Path) -> None:
    """Round 1 a header, rounds 2 and 3 the update times -20, then times 1e30."""
    plan = planned(tmp_path / "out", clients=3, rounds=5, aggregate=rule, set={"lr": 0.5})
    with lent(three) as here:
        run = here.run(plan, {"client_app.py": altered(train=HOSTILE)})
        until(lambda: run.poll() is not None and not here.server_apps(), here)
        said, found = here.log("run"), records(plan)
    assert "round 1: 1 does not count: refused: up.d is not a .npy file" in said
    assert [r["dropped"] for r in found][:2] == [1, 0]
    assert "round 2: 1 sent vectors" in said and "round 4: 1 sent vectors" in said
    if rule == "mean":
        assert "nothing guards against it: see --aggregate" in said and found[2]["accuracy"] < 0.3
        assert "round 4: the loss on the test set is" in said and "the run has diverged and ends" in said
    else:
        assert "aggregate=median guards against it" in said and len(found) == 5 and found[-1]["accuracy"] > 0.7


class Saboteur(Forger):
    """Answers with a message that never comes whole, then with parts that are none of a message, then honestly."""

    def forge(self, reply: object, node: int) -> None:
        pass

    def spoil(self, tree: ObjectTree, parts: dict[str, bytes]) -> tuple[ObjectTree, dict[str, bytes]]:
        root = parts[tree.object_id]
        if self.forged == 1:  # announced, and kept back
            return tree, {}
        if self.forged == 2:  # the message is there, and a part of an array never
            return tree, {tree.object_id: root}
        if self.forged in (3, 4):
            old = tree.children[0].object_id
            bad = b"RecordDict  7\0garbage" if self.forged == 3 else b"ArrayRecord  2\0{}"
            new = hashlib.sha256(bad).hexdigest()
            root = root.replace(old.encode(), new.encode())
            whole = hashlib.sha256(root).hexdigest()
            return ObjectTree(object_id=whole, children=[ObjectTree(object_id=new)]), {new: bad, whole: root}
        if self.forged == 5:  # more than there is room for
            large = [b"Array  5000000\0" + bytes([n]) * 5_000_000 for n in range(8)]
            more = {hashlib.sha256(part).hexdigest(): part for part in large}
            children = [*tree.children, *(ObjectTree(object_id=id) for id in more)]
            return ObjectTree(object_id=tree.object_id, children=children), more | parts
        return tree, parts

    def run(self) -> None:
        while not self.ended:
            try:
                super().run()
            except Exception as error:
                self.failures = [*getattr(self, "failures", []), str(error)]


@pytest.mark.system
def test_answers_that_are_none_cost_nobody_else_anything(three: LocalFederation, tmp_path: Path) -> None:
    plan = planned(tmp_path / "out", clients=3, rounds=6, timeout=patient(20))
    with lent(three) as here:
        here.kill("client-2")
        hostile = Saboteur(here, plan, "2", "0", tmp_path / "states")
        hostile.start()
        try:
            finish(here, here.run(plan), plan)
        finally:
            hostile.ended = True
            hostile.join(30.0)
        said, gate = here.log("run"), here.log("superlink")
    assert isinstance(hostile, threading.Thread) and hostile.forged == 6
    for round, why in enumerate(("no answer in time", "no answer in time", "refused: it is no message", "refused", "")):
        assert f"round {round + 1}: 2 does not count: {why}" in said
    assert "2 sends more than" in gate and "in answer to a letter of" in gate
    assert [r["dropped"] for r in records(plan)] == [1, 1, 1, 1, 1, 0]
    agree(plan, {(t, "2") for t in range(1, 6)})
