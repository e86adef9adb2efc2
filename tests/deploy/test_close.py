"""After the last round: clients are sent the replies to it, and then have on their disks what the simulator says they have."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.deploy.test_federation import FEDERATED, NAMES, Federation, Make, maker, normalised
from tests.small import path, simulation
from undrift.core.trees import named_leaves, unstack
from undrift.deploy.client import CLOSE
from undrift.jobs.registry import algorithm_class
from undrift.simulate.simulation import Simulation

STATELESS = "per-fedavg"  # its personal model is made from the server's whenever it is needed
PERSONAL = [name for name in FEDERATED if algorithm_class(name).personalises and name != STATELESS]
REPLYING = ["softpull", "fedsm", "fedsm-extra"]
States = dict[str, dict[str, Tensor]]


def on_disk(root: Path) -> States:
    """What each client has: its newest state, and of two from one round the one with the reply."""
    found = {}
    for name in NAMES:
        files = sorted(root.glob(f"{name}/*/{name}/*.safetensors"), key=lambda f: (f.stem.split("-")[1], f.name))
        if files:
            found[name] = load_file(files[-1])
    return found


def simulated(run: Simulation) -> States:
    states = unstack(run.serving()[2], run.data.clients)
    return {str(id): dict(named_leaves("client", states[id])) for id in sorted(run.clients.row)}  # type: ignore[union-attr]


def same(found: States, expected: States) -> None:
    assert found.keys() == expected.keys() and found
    for name, state in expected.items():
        assert found[name].keys() == state.keys()
        for leaf, tensor in state.items():
            torch.testing.assert_close(found[name][leaf], tensor, rtol=1e-9, atol=1e-12)


def run_to_end(make: Make, rounds: int) -> Simulation:
    run = make()
    path(run, rounds)
    return run


@pytest.mark.parametrize("name", PERSONAL)
def test_clients_end_with_the_simulators_personal_states(name: str, tmp_path: Path) -> None:
    """Also those who were not in the last round."""
    make = maker(name, cohort=3)
    federation, alone = Federation(tmp_path, make), run_to_end(make, 4)
    federation.path(4)
    before = on_disk(tmp_path)
    federation.deployment.close()
    same(on_disk(tmp_path), simulated(alone))
    closing = [v for v in federation.visits if v.exchange == CLOSE]
    if name in REPLYING:
        assert {v.client for v in closing} == on_disk(tmp_path).keys() and all(v.bytes_down > 0 for v in closing)
        with pytest.raises(AssertionError):  # without the last reply they had something else
            same(before, simulated(alone))
    assert federation.run.t == 4 and federation.record.round == 4


@pytest.mark.parametrize("module", [None, normalised])
@pytest.mark.parametrize("name", ["softpull", "fedsm"])
def test_statistics_and_moments_too(name: str, module: Callable[[], nn.Module] | None, tmp_path: Path) -> None:
    alg = algorithm_class(name)(lr=0.1, optimizer="momentum", keep_moments=True)

    def make() -> Simulation:
        return simulation(alg, None if module is None else module(), cohort=4)

    federation = Federation(tmp_path, make)
    federation.path(3)
    federation.deployment.close()
    same(on_disk(tmp_path), simulated(run_to_end(make, 3)))


@pytest.mark.parametrize(("name", "optimizer"), [("gradma-w", "nesterov"), ("fedavg", "adamw"), ("softpull", "muon")])
def test_every_base_optimisers_moments_too(name: str, optimizer: str, tmp_path: Path) -> None:
    fields = dict(lr=0.1, optimizer=optimizer, keep_moments=True, weight_decay=0.1, warm_steps=2, cosine_steps=3)

    def make() -> Simulation:
        return simulation(algorithm_class(name)(**fields), cohort=4)

    federation, alone = Federation(tmp_path, make), run_to_end(make, 3)
    federation.path(3)
    federation.deployment.close()
    same(on_disk(tmp_path), simulated(alone))
    torch.testing.assert_close(federation.run.state.x, alone.state.x, rtol=1e-9, atol=1e-12)


def test_who_is_away_keeps_what_it_had_and_gets_it_when_the_run_is_resumed(tmp_path: Path) -> None:
    make = maker("softpull", cohort=6)
    first, expected = Federation(tmp_path, make), simulated(run_to_end(make, 3))
    first.path(3)
    kept, before = {n: v.clone() for n, v in first.deployment.tensors().items()}, on_disk(tmp_path)
    first.post.away = {"2", "5"}
    first.deployment.close()
    found = on_disk(tmp_path)
    same({n: found[n] for n in ("2", "5")}, {n: before[n] for n in ("2", "5")})
    same({n: v for n, v in found.items() if n not in ("2", "5")}, {n: expected[n] for n in ("0", "1", "3", "4")})
    assert sum("keeps what it had, without the last reply: not connected" in line for line in first.said) == 2

    second = Federation(tmp_path, make)  # the server is started again
    second.deployment.restore(kept, 3)
    got = {(v.client, v.round) for v in first.visits if v.exchange == CLOSE and v.outcome == "answered"}
    second.deployment.close(got)
    same(on_disk(tmp_path), expected)
    assert [v.client for v in second.visits] == ["2", "5"]  # the others were not sent it again
    second.deployment.close(got | {(v.client, v.round) for v in second.visits})
    assert len(second.visits) == 2


@pytest.mark.parametrize("name", REPLYING)
def test_a_run_that_goes_on_after_its_end_is_as_if_it_had_not_ended(name: str, tmp_path: Path) -> None:
    make = maker(name, cohort=4)
    federation = Federation(tmp_path, make)
    federation.path(2)
    for _ in range(2):  # also told twice
        federation.deployment.close()
    alone = make()
    expected = path(alone, 4)
    torch.testing.assert_close(federation.path(2)[-1], expected[-1], rtol=1e-9, atol=1e-12)
    federation.deployment.close()
    same(on_disk(tmp_path), simulated(alone))
    for name in on_disk(tmp_path):
        assert len(list(tmp_path.glob(f"{name}/*/{name}/final-*"))) == 1


def test_methods_without_replies_are_not_bothered(tmp_path: Path) -> None:
    federation = Federation(tmp_path, maker("scaffold", cohort=4))
    federation.path(2)
    federation.deployment.close()
    assert {v.exchange for v in federation.visits} == {"train"} and not list(tmp_path.rglob("final-*"))


def test_a_client_that_lost_its_state_says_so(tmp_path: Path) -> None:
    federation = Federation(tmp_path, maker("softpull", cohort=6))
    federation.path(1)
    next(tmp_path.glob("3/*/3/after-*")).unlink()
    federation.deployment.close()
    (line,) = [line for line in federation.said if "without the last reply" in line]
    assert "3 keeps what it had" in line and "is not here" in line


def test_the_apps_send_the_last_reply_and_record_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Away at the end, back when the run is resumed; the record of rounds stays as it was."""
    pytest.importorskip("flwr")
    from flwr.app import Context, RecordDict

    from tests.deploy.test_flower import Nodes, TaskIdentity, planned
    from undrift.data.load import load_dataset
    from undrift.deploy.flower import server_app
    from undrift.jobs.run import build_simulation

    monkeypatch.setattr("undrift.deploy.flower.PAUSE", 0.0)
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    out = tmp_path / "out"

    def serve(plan: Any, leaves: bool) -> None:
        nodes = Nodes(3, plan.flat(), tmp_path)
        told = nodes.send_and_receive

        def sent(messages: Any, *, timeout: float | None = None) -> Any:
            messages = list(messages)
            closing = any("facts" in m.content and m.content["facts"]["exchange"] == CLOSE for m in messages)
            return told([m for m in messages if not (leaves and closing and m.metadata.dst_node_id == 7919)])

        nodes.send_and_receive = sent  # type: ignore[method-assign, assignment]
        server_app()(nodes, Context(1, 1, {}, RecordDict(), plan.flat()))  # type: ignore[arg-type]

    plan = planned(out, algorithm="softpull", cohort=3, rounds=2)
    serve(plan, leaves=True)
    rounds = (out / "rounds.jsonl").read_text()
    assert not list(tmp_path.glob("2/*/2/final-*"))
    for _ in range(2):
        serve(planned(out, algorithm="softpull", cohort=3, rounds=2, resume=True), leaves=False)
    assert (out / "rounds.jsonl").read_text() == rounds
    visits = [json.loads(line) for line in (out / "clients.jsonl").read_text().splitlines()]
    closing = [(v["client"], v["outcome"]) for v in visits if v["exchange"] == CLOSE]
    answered = [("0", "answered"), ("1", "answered")]
    assert closing == [*answered, ("2", "no answer in time"), ("2", "answered")]
    assert all(v["bytes_down"] > 0 and v["round"] == 2 for v in visits if v["exchange"] == CLOSE)
    run = build_simulation(plan.run, plan.alg, load_dataset("digits"), plan.run.model, torch.device("cpu"))
    path(run, 2)
    same(on_disk(tmp_path), simulated(run))
