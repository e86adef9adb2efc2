"""One of three real clients is hostile: what it can do to a federation of real processes, with and without a rule."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from tests.deploy.altered import altered
from tests.deploy.test_processes import finish, lent, planned, records
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
        finish(here, here.run(plan, {"client_app.py": altered(train=HOSTILE)}), plan)
        said, found = here.log("run"), records(plan)
    assert "round 1: 1 does not count: refused: up.d is not a .npy file" in said
    assert [r["dropped"] for r in found][:2] == [1, 0]
    assert "round 2: 1 sent vectors" in said and "round 4: 1 sent vectors" in said
    if rule == "mean":
        assert "nothing guards against it: see --aggregate" in said and found[2]["accuracy"] < 0.3
    else:
        assert "aggregate=median guards against it" in said and found[-1]["accuracy"] > 0.7
