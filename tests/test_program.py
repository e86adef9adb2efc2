"""Rounds replayed from inputs laid out beforehand equal the engine's own, for every algorithm; here without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests import small
from undrift.registry import algorithm_class, names
from undrift.round import RoundRecord
from undrift.simulate.engine import Simulation


def together(
    alg: Any, rounds: int, **settings: Any
) -> tuple[Simulation, list[RoundRecord], Simulation, list[RoundRecord]]:
    """The same run twice: round by round, and replayed."""
    plain, replayed = (small.simulation(alg, **settings) for _ in range(2))
    replayed.replays = True
    records: list[RoundRecord] = []
    while len(records) < rounds:
        records += replayed.rounds(rounds - len(records), last=True)
    return plain, [plain.round(last=n + 1 == rounds) for n in range(rounds)], replayed, records


def agree(plain: Simulation, one: list[RoundRecord], replayed: Simulation, two: list[RoundRecord]) -> None:
    assert replayed.replay is not None and replayed.replay.program.graphs, "nothing was replayed"
    mine, other = plain.tensors(), replayed.tensors()
    assert mine.keys() == other.keys()
    for name, tensor in mine.items():
        torch.testing.assert_close(other[name], tensor, rtol=1e-10, atol=1e-12)
    for a, b in zip(one, two, strict=True):
        expected, found = ({n: v for n, v in r.as_dict().items() if n != "seconds"} for r in (a, b))
        assert expected.keys() == found.keys()
        for name, value in expected.items():
            assert found[name] == (value if value is None else pytest.approx(value, rel=1e-9, abs=1e-12)), name


FIELDS = {"gradma-s": {"slots": 5}, "gradma": {"slots": 5}}


@pytest.mark.parametrize("name", names("algorithms"))
def test_replayed_rounds_equal_the_engines_own(name: str) -> None:
    alg = algorithm_class(name)(lr=0.2, weight_decay=0.01, **FIELDS.get(name, {}))
    agree(*together(alg, 7, eval_every=4, lr_decay=0.9))


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "gradma-s", "gradma", "fedmim", "mime", "mifa", "domo"])
@pytest.mark.parametrize(
    "settings",
    [
        {"epochs": 1.5},
        {"sampling": "bernoulli"},
        {"dropout_rate": 0.3, "weights": "size"},
        {"slow": (0.5, 0.4), "weights": "size"},
        {"steps": 20},
        {"batch": 1},
    ],
    ids=str,
)
def test_ragged_rounds(name: str, settings: dict[str, Any]) -> None:
    alg = algorithm_class(name)(lr=0.2, **({"slots": 6} if name in FIELDS else {}))
    agree(*together(alg, 6, eval_every=5, **settings))
