"""Servers of real clients that do not wait: they make the simulator's steps, and the simulator makes theirs from their trace."""

from __future__ import annotations

import dataclasses
import heapq
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import undrift
from tests.deploy.test_federation import NAMES, Direct, Make, array, same, with_array
from tests.small import path, simulation
from undrift.cli import main
from undrift.core.errors import BadData, BadRunFolder, BadSetting
from undrift.deploy.asynchronous import Arriving
from undrift.deploy.messages import Letter
from undrift.deploy.remote import Remote, Visit
from undrift.deploy.server import Deployment
from undrift.deploy.settings import Plan
from undrift.jobs.registry import algorithm_class
from undrift.round.clock import Drawn
from undrift.round.timeline import Arrival, Asynchronous, Recorded


class Late(Direct):
    """Carries letters to clients in this process; their answers come when a clock says so."""

    def __init__(self, make: Make, root: Path) -> None:
        super().__init__(make, root)
        timeline = make().timeline
        assert isinstance(timeline, Asynchronous)
        self.clock, self.traffic, self.now = timeline.clock, timeline.traffic, 0.0
        self.mail: list[tuple[float, int, str, Letter | str]] = []
        self.count = 0

    def send(self, letters: Mapping[str, Letter]) -> None:
        for name, letter in letters.items():
            id, steps = letter.fact("id", int), np.array([3])
            (took,) = self.clock.seconds(np.array([id]), letter.fact("round", int), steps, self.traffic)
            answer = "not connected" if name in self.away else self.ask(name, letter)
            heapq.heappush(self.mail, (self.now + float(took), self.count, name, answer))
            self.count += 1

    def receive(self) -> list[tuple[str, Letter | str]]:
        self.now, found = self.mail[0][0], []
        while self.mail and self.mail[0][0] == self.now:
            found.append(heapq.heappop(self.mail)[2:])
        return found


class Federation:
    """A deployment that does not wait, whose clients are called directly."""

    def __init__(self, root: Path, make: Make, concurrent: int, least: int = 1) -> None:
        self.said: list[str] = []
        self.visits: list[Visit] = []
        self.arrivals: list[Arrival] = []
        self.post, self.run = Late(make, root), make()
        self.remote = Remote(self.post, NAMES, "a1", least, self.said.append)
        self.arriving = Arriving(self.remote, self.post, concurrent, least, self.arrivals.extend)
        self.deployment = Deployment(self.run, self.remote, self.visits.extend, arriving=self.arriving)

    def path(self, rounds: int) -> Tensor:
        points = []
        for _ in range(rounds):
            self.record = self.deployment.rounds(1)[0]
            points.append(self.run.net.without_padding(self.run.state.x, "model"))
        return torch.stack(points)


def maker(name: str, cohort: int, concurrent: int, spread: float = 1.0, **settings: Any) -> Make:
    clock = Drawn.of((spread, 0.0), len(NAMES), 0, 1.0, 8.0, 0.1)
    alg = algorithm_class(name)(lr=0.1, momentum=0.9)
    return lambda: simulation(alg, cohort=cohort, clock=clock, concurrent=concurrent, **settings)


def replayed(make: Make, arrivals: list[Arrival], rounds: int) -> Tensor:
    run = make()
    run.timeline = Recorded(arrivals)
    return path(run, rounds)


@pytest.mark.parametrize(
    ("name", "cohort", "settings"),
    [
        ("fedbuff", 2, {"weights": "size"}),
        ("fedasync", 1, {}),
        ("scaffold+fedbuff", 2, {"lr_decay": 0.9}),
        ("fedprox+fedavgm", 3, {}),
    ],
)
def test_a_server_that_does_not_wait_makes_the_simulators_steps(
    name: str, cohort: int, settings: dict[str, Any], tmp_path: Path
) -> None:
    """From clients of the same speeds; and the simulator makes the server's, from the trace of arrivals alone."""
    make = maker(name, cohort, 4, **settings)
    federation = Federation(tmp_path, make, 4)
    found = federation.path(8)
    same(found, path(make(), 8))
    same(found, replayed(make, federation.arrivals, 8))
    assert max(a.round - 1 - a.version for a in federation.arrivals) >= (2 if cohort < 3 else 1)
    assert (
        federation.record.more["staleness_max"] >= 0
        and federation.run.held.keys() == federation.arriving.rounds_in_use()
    )
    assert federation.record.gradients == 3 * cohort and federation.record.more["refused"] == 0


def test_lost_and_damaged_answers_are_not_in_the_trace(tmp_path: Path) -> None:
    make = maker("fedbuff", 2, 4)
    federation = Federation(tmp_path, make, 4)
    federation.post.away = {"1"}
    federation.post.spoil = {"3": lambda answer: Letter(answer.facts | {"loss": float("nan")}, answer.arrays)}
    found = federation.path(6)
    assert {a.client for a in federation.arrivals}.isdisjoint({1, 3}) and len(federation.arrivals) == 12
    same(found, replayed(make, federation.arrivals, 6))
    outcomes = {v.client: v.outcome for v in federation.visits}
    assert outcomes["1"] == "not connected" and outcomes["3"].startswith("refused")


def test_a_ruinous_update_is_said_where_nobody_waits_too(tmp_path: Path) -> None:
    federation = Federation(tmp_path, maker("fedbuff", 4, 6), 6)
    federation.post.spoil = {"3": lambda answer: with_array(answer, -100.0 * array(answer))}
    federation.path(4)
    assert any(": 3 sent vectors " in line and "times longer than most" in line for line in federation.said)


def test_a_round_that_nobody_can_end_changes_nothing(tmp_path: Path) -> None:
    federation = Federation(tmp_path, maker("fedbuff", 2, 4), 4, least=2)
    federation.post.away = set(NAMES) - {"2"}
    before = federation.run.state.x.clone()
    federation.path(2)
    assert torch.equal(federation.run.state.x, before) and not federation.arrivals
    assert any("fewer than 2 clients answered" in line for line in federation.said)
    federation.post.away = set()
    federation.path(2)
    assert not torch.equal(federation.run.state.x, before) and len(federation.arrivals) == 4


def test_a_server_that_was_started_again_asks_anew(tmp_path: Path) -> None:
    """What was at work is lost; what was used is in the trace, also across the restart."""
    make = maker("scaffold+fedbuff", 2, 4)
    first, second = Federation(tmp_path, make, 4), Federation(tmp_path, make, 4)
    first.path(3)
    second.deployment.restore({k: v.clone() for k, v in first.deployment.tensors().items()}, 3)
    found = second.path(3)
    same(found, replayed(make, first.arrivals + second.arrivals, 6)[3:])


def test_what_needs_clients_together_is_refused() -> None:
    given = {"clients": 3, "cohort": 2, "algorithm": "fedbuff", "asynchronous": True}
    for setting, says in (
        ({"own_test": 0.2}, "own_test needs clients that are there together"),
        ({"secure_bound": 16.0}, "secure_bound needs clients that are there together"),
        ({"clock": "lognormal:1"}, "clock is for simulations"),
    ):
        with pytest.raises(BadSetting, match=says):
            Plan.of(given | setting)


# Flower's apps, called directly.
def test_the_apps_of_a_run_that_does_not_wait_and_its_replay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("flwr")
    from flwr.app import Context, Message, RecordDict
    from flwr.supercore.task_identity import TaskIdentity

    from tests.deploy.test_flower import Nodes, planned
    from undrift.deploy.flower import server_app

    class Slow(Nodes):
        """Nodes whose answers lie for a while until they can be pulled."""

        def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
            self.pulled = getattr(self, "pulled", {})
            ready = []
            for id in message_ids:
                self.pulled[id] = self.pulled.get(id, 0) + 1
                trained = [a for a in self.mail.get(id, []) if a.metadata.message_type == "train"]
                who = next((str(answer.metadata.src_node_id) for answer in trained), "")
                if self.pulled[id] > {str(7919 * n): 4 * n - 4 for n in (1, 2, 3)}.get(who, 0):
                    ready.append(id)
            return super().pull_messages(ready)

    monkeypatch.setattr("undrift.deploy.flower.PAUSE", 0.0)
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    out = tmp_path / "out"
    plan = planned(out, algorithm="fedbuff", asynchronous=True, cohort=1, rounds=8, lr=0.2)
    server_app()(Slow(3, plan.flat(), tmp_path), Context(1, 1, {}, RecordDict(), plan.flat()))
    check_replay(plan, tmp_path / "replayed", 1e-9)
    lines = (out / "arrivals.jsonl").read_text().splitlines()
    assert max(json.loads(line)["round"] - 1 - json.loads(line)["version"] for line in lines) >= 2
    (out / "arrivals.jsonl").write_text("\n".join([*lines[:3], lines[3].replace('"client": ', '"client": 1'), ""]))
    with pytest.raises(BadRunFolder, match="damaged in line 4"):
        undrift.run(settings_of(plan), clock=str(out))


def test_the_seconds_of_a_real_federation_are_a_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """A deployed run that waits: the simulator gives its clients the seconds that they said, from the folder or from a trace."""
    pytest.importorskip("flwr")
    from flwr.supercore.task_identity import TaskIdentity

    from tests.deploy.test_flower import planned, serve

    monkeypatch.setattr("undrift.deploy.flower.PAUSE", 0.0)
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    plan = planned(tmp_path / "out", algorithm="fedavg", cohort=3)
    serve(plan, tmp_path)
    visits = [json.loads(line) for line in (tmp_path / "out" / "clients.jsonl").read_text().splitlines()]
    slowest = [max(v["seconds"] for v in visits if v["round"] == t) for t in (1, 2, 3)]
    trace = tmp_path / "phones.csv"
    main(["deploy", "trace", str(tmp_path / "out"), "--to", str(trace)])
    assert "9 answers are written" in capsys.readouterr().out
    for clock in (tmp_path / "out", trace):
        result = undrift.run(settings_of(plan), clock=str(clock))
        assert [r["network_seconds"] for r in result.records] == pytest.approx(slowest, rel=1e-12)
    with pytest.raises(BadSetting, match="holds no deployed run|no folder of a deployed run"):
        undrift.run(settings_of(plan), clock=str(tmp_path))
    with pytest.raises(BadData, match="client 3 has never answered"):
        undrift.run(settings_of(plan) | {"clients": 4}, clock=str(tmp_path / "out"))


@pytest.mark.system
def test_real_processes_that_do_not_wait_and_their_replay(tmp_path: Path) -> None:
    """TLS, keys, three SuperNodes and a SuperLink; the simulator comes to the same model from the trace of arrivals."""
    pytest.importorskip("flwr")
    from tests.deploy.test_processes import finish, planned
    from undrift.deploy.local import federation

    settings = {"algorithm": "fedbuff", "asynchronous": True, "clients": 3, "cohort": 1, "rounds": 8, "eval_every": 8}
    plan = planned(tmp_path / "out", **settings, dtype="float64", set={"lr": 0.2})
    with federation(3) as here:
        for client in range(3):
            here.start_client(client)
        finish(here, here.run(plan), plan)
    check_replay(plan, tmp_path / "replayed", 1e-6)
    told = [json.loads(line) for line in (tmp_path / "out" / "rounds.jsonl").read_text().splitlines()]
    assert max(record["staleness_max"] for record in told) >= 1


def settings_of(plan: Plan) -> dict[str, Any]:
    given = dataclasses.asdict(plan.run)
    return {n: v for n, v in given.items() if not (n in ("steps", "epochs") and not v)}


def check_replay(plan: Plan, out: Path, tolerance: float) -> None:
    """The simulator on the trace of arrivals comes to the model of the real run."""
    deployed = Path(plan.deploy.out)
    result = undrift.run(settings_of(plan), clock=str(deployed), out=out)
    real = load_file(deployed / "model.safetensors")
    for name, tensor in result.model.items():
        torch.testing.assert_close(real[name], tensor, rtol=tolerance, atol=1e-2 * tolerance)
    start = undrift.run(settings_of(plan) | {"rounds": 1}, clock=str(deployed)).model
    assert any((real[name] - tensor).abs().max() > 1e-3 for name, tensor in start.items())
    ages = [record["staleness_max"] for record in result.records]
    told = [json.loads(line)["staleness_max"] for line in (deployed / "rounds.jsonl").read_text().splitlines()]
    assert ages == told
