"""Rounds replayed from inputs laid out beforehand equal the engine's own, for every algorithm; here without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests import small
from undrift.core.names import names
from undrift.jobs.registry import algorithm_class
from undrift.round.record import RoundRecord
from undrift.simulate.simulation import Simulation


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
            assert found[name] == (
                value if value is None else pytest.approx(value, rel=1e-9, abs=1e-12, nan_ok=True)
            ), name


FIELDS = {"gradma-s": {"slots": 5}, "gradma": {"slots": 5}}


@pytest.mark.parametrize("name", names("algorithms"))
def test_replayed_rounds_equal_the_engines_own(name: str) -> None:
    alg = algorithm_class(name)(lr=0.2, weight_decay=0.01, **FIELDS.get(name, {}))
    agree(*together(alg, 7, eval_every=4, lr_decay=0.9))


def test_a_model_that_is_kept_is_not_the_next_one() -> None:
    """FedLESAM's companion is the server's last model: the tensor in whose place the next model is written."""
    alg = algorithm_class("fedlesam")(lr=0.2, before="server")
    agree(*together(alg, 4))


@pytest.mark.parametrize(
    "name", ["fedavg", "scaffold", "gradma-s", "gradma", "gradma-w", "fedmim", "mime", "mifa", "domo"]
)
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


def test_a_stretch_with_an_answer_that_is_not_finite_is_taken_back() -> None:
    """One client's samples are spoiled after some rounds: the engine drops it, and so does a replayed run."""
    runs = [small.simulation(algorithm_class("scaffold")(lr=0.2), eval_every=4, steps=2) for _ in range(2)]
    records: list[list[RoundRecord]] = [[], []]
    for run, made in zip(runs, records, strict=True):
        run.replays = run is runs[1]
        for until in (4, 12):
            while run.t < until:
                made += run.rounds(until - run.t)
            spoilt = run.data.members[run.data.start[1] : run.data.start[1] + run.data.sizes[1]]
            assert run.data.train.held is not None
            run.data.train.held[spoilt] = torch.nan
    assert sum(record.dropped for record in records[0]) > 0, "the case is of no use unless somebody is dropped"
    agree(runs[0], records[0], runs[1], records[1])


@pytest.mark.parametrize("most", [1, 2, 3, 12])
def test_only_a_round_with_such_an_answer_is_run_by_itself(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many rounds are asked for at a time: that depends on how fast the machine is."""
    alone, run = [], small.simulation(algorithm_class("fedavg")(lr=0.2), cohort=2, eval_every=100)
    real, run.replays = run.round, True
    spoilt = run.data.members[run.data.start[1] : run.data.start[1] + run.data.sizes[1]]
    assert run.data.train.held is not None
    run.data.train.held[spoilt] = torch.nan
    monkeypatch.setattr(run, "round", lambda last=False: (alone.append(run.t), real(last))[1])
    records: list[RoundRecord] = []
    while run.t < 12:
        records += run.rounds(min(most, 12 - run.t))
    assert alone == [n for n, record in enumerate(records) if record.dropped] and 0 < len(alone) < 8


def test_a_restored_run_goes_on_with_the_same_numbers() -> None:
    whole, first, second = (small.simulation(algorithm_class("feddyn")(), eval_every=3) for _ in range(3))
    for run, until in ((whole, 9), (first, 5)):
        run.replays = True
        while run.t < until:
            run.rounds(until - run.t)
    second.replays = True
    second.restore(first.tensors(), 5)
    while second.t < 9:
        second.rounds(9 - second.t)
    assert all(torch.equal(a, second.tensors()[name]) for name, a in whole.tensors().items())


def test_empty_places_do_not_spoil_a_stretch() -> None:
    """SCAFFOLD divides by the steps a client has made."""
    run = small.simulation(algorithm_class("scaffold")(lr=0.2), eval_every=9, sampling="bernoulli")
    run.replays = True
    assert len(run.rounds(6)) == 6, "the stretch was taken back"


def test_rounds_in_which_nobody_answers_for_a_long_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """One client is invited, and it nearly always fails: for more rounds in a row than are laid out together."""
    monkeypatch.setattr("undrift.simulate.replay.LONGEST", 32)
    one, first, other, second = together(
        algorithm_class("scaffold")(lr=0.2), 150, cohort=1, dropout_rate=0.97, eval_every=1000, seed=2
    )
    answers = [record.clients - record.dropped for record in first]
    silent = max(map(len, "".join(map(str, answers)).split("1")))
    assert sum(answers) and silent > 32, "as it should be for this test"
    agree(one, first, other, second)


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "gradma", "mime"])
def test_what_is_compiled_is_the_round_as_written(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The traced graphs, run as they are: with running statistics, and a first step in which clients share vectors."""
    monkeypatch.setattr("undrift.simulate.replay.PLAIN_STEPS", 1)
    traced: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda graph, **how: traced.append(graph) or graph)
    module = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    agree(
        *together(algorithm_class(name)(lr=0.2, **FIELDS.get(name, {})), 4, eval_every=3, module=module, compile=True)
    )
    assert traced
