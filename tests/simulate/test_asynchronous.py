"""Virtual time: servers that do not wait, rounds that wait for the slowest client or for the first ones, traces, and resuming."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import undrift
from tests.small import QUICK, path, simulation, timeless
from undrift.algorithms.fedadam import FedAdam
from undrift.algorithms.fedasync import FedAsync
from undrift.algorithms.fedavg import FedAvg
from undrift.algorithms.fedavgm import FedAvgM
from undrift.algorithms.fedbuff import FedBuff
from undrift.algorithms.fedprox import FedProx
from undrift.algorithms.scaffold import Scaffold
from undrift.core.errors import BadData, BadSetting
from undrift.jobs.config import from_mapping
from undrift.jobs.registry import algorithm_class
from undrift.round.clock import Drawn, Traffic, read_trace, write_trace
from undrift.round.timeline import Asynchronous, Synchronous
from undrift.simulate.simulation import Simulation

ONE = Traffic(0, 1)


def clock(spread: float, clients: int = 6, link: float = 0.0) -> Drawn:
    return Drawn.of((spread, link), clients, 0, 1.0, 8.0, 0.1)


def asynchronous(alg: Any, cohort: int, concurrent: int, spread: float = 1.0, **settings: Any) -> Simulation:
    return simulation(alg, cohort=cohort, clock=clock(spread), concurrent=concurrent, **settings)


# Exact relations.
@pytest.mark.parametrize("spread", [0.0, 1.5])
@pytest.mark.parametrize(
    ("buffered", "waiting"),
    [
        (FedBuff(lr=0.1), FedAvg(lr=0.1)),
        (FedBuff(lr=0.1, beta1=0.7, divide_by="weights"), FedAvgM(lr=0.1, beta1=0.7)),
        (FedAsync(lr=0.1, mu=0.5, mixing_rate=1.0), FedProx(lr=0.1, mu=0.5)),
        (FedAsync(lr=0.1, mu=0.5, mixing_rate=0.3, staleness="hinge"), FedProx(lr=0.1, mu=0.5, server_lr=0.3)),
        (Scaffold(lr=0.1), Scaffold(lr=0.1)),
        (FedAdam(lr=0.1), FedAdam(lr=0.1)),
    ],
    ids=str,
)
def test_where_all_come_together_it_is_the_method_that_waits(buffered: Any, waiting: Any, spread: float) -> None:
    """As many at work as the buffer takes: equally fast, or everybody there is, whatever each one's speed."""
    size = 6 if spread else 3
    found = path(asynchronous(buffered, size, size, spread), 5)
    torch.testing.assert_close(found, path(simulation(waiting, cohort=size), 5), rtol=1e-12, atol=1e-12)


def test_without_weights_for_age_a_buffer_is_a_mean_whatever_arrives() -> None:
    plain, flat = FedAvg(lr=0.1), FedBuff(lr=0.1, a=0.0)
    assert torch.equal(path(asynchronous(plain, 2, 5), 8), path(asynchronous(flat, 2, 5), 8))
    aged = path(asynchronous(FedBuff(lr=0.1), 2, 5), 8)
    assert (aged[-1] - path(asynchronous(flat, 2, 5), 8)[-1]).norm() > 1e-6


# The virtual clock.
def test_ages_and_times_follow_from_the_speeds() -> None:
    """Two clients, one three times as slow: the slow one's first answer has missed two steps of the fast one."""

    class Fixed:
        def seconds(self, ids: Any, version: int, steps: Any, traffic: Traffic) -> Any:
            return np.where(ids == 0, 1.0, 3.5)

    run = simulation(FedBuff(lr=0.1), cohort=1, clock=Fixed(), concurrent=6)
    run.timeline = Asynchronous(Fixed(), ONE, 6)
    records = [run.round() for _ in range(5)]
    assert [r.more["virtual_seconds"] for r in records] == [1.0, 2.0, 3.0, 3.5, 3.5]
    assert [r.more["staleness_max"] for r in records] == [0, 0, 0, 3, 4]
    assert [r.more["network_seconds"] for r in records] == [1.0, 1.0, 1.0, 0.5, 0.0]


def test_a_round_lasts_until_its_slowest_client_has_answered_or_the_first_ones_have() -> None:
    waits = simulation(FedAvg(lr=0.1), cohort=3, clock=clock(1.0))
    plain = simulation(FedAvg(lr=0.1), cohort=3)
    more = simulation(FedAvg(lr=0.1), cohort=3, clock=clock(1.0), over_select=2)
    for t in range(4):
        record, early = waits.round(), more.round()
        plain.round()
        assert isinstance(waits.timeline, Synchronous) and isinstance(more.timeline, Synchronous)
        ids = waits.timeline.last.ids
        took = waits.timeline.clock.seconds(ids, t, waits.timeline.last.steps, waits.timeline.traffic)
        assert record.more["network_seconds"] == pytest.approx(took.max(), rel=1e-12)
        everybody = more.sampling._replace(cohort=5).round(t)
        all_five = more.timeline.clock.seconds(everybody.ids, t, everybody.steps, more.timeline.traffic)
        assert early.more["network_seconds"] == pytest.approx(np.sort(all_five)[2], rel=1e-12)
        assert (early.clients, early.dropped) == (5, 2)
    assert torch.equal(waits.state.x, plain.state.x)  # a clock changes no model
    assert waits.timeline.now > more.timeline.now


def test_traffic_is_what_the_messages_of_a_round_are() -> None:
    """The clock's seconds are those of the simulated network, where nothing is computed and all links are alike."""
    for alg in (FedAvg(lr=0.1), Scaffold(lr=0.1), algorithm_class("mime")(lr=0.1)):
        drawn = Drawn.of((0.0, 0.0), 6, 0, 0.0, 8.0, 0.25)
        timed, plain = simulation(alg, clock=drawn), simulation(alg, bandwidth=8.0, latency=0.25)
        assert timed.round().more["network_seconds"] == pytest.approx(plain.round().more["network_seconds"], rel=1e-12)


def test_speeds_have_the_spread_that_is_asked_for() -> None:
    drawn = Drawn.of((0.5, 0.2), 20_000, 3, 1.0, 1.0, 0.0)
    assert np.log(drawn.speed).std() == pytest.approx(0.5, rel=0.03)
    assert np.log(drawn.link).std() == pytest.approx(0.2, rel=0.03)
    assert abs(np.corrcoef(np.log(drawn.speed), np.log(drawn.link))[0, 1]) < 0.03
    assert np.median(drawn.speed) == pytest.approx(1.0, rel=0.03)


# The engine.
def test_what_began_with_different_models_is_computed_together_as_apart() -> None:
    for alg in (FedBuff(lr=0.1), Scaffold(lr=0.1), FedAsync(lr=0.1)):
        ways = [path(asynchronous(alg, 3, 6, execution=how), 8) for how in ("stacked", "pool", "debug")]
        for way in ways[1:]:
            torch.testing.assert_close(way, ways[0], rtol=1e-11, atol=1e-12)
    chunks = path(asynchronous(FedBuff(lr=0.1), 3, 6, chunk=2), 8)
    torch.testing.assert_close(chunks, path(asynchronous(FedBuff(lr=0.1), 3, 6), 8), rtol=1e-11, atol=1e-12)


def test_old_models_are_kept_as_long_as_somebody_trains_from_them() -> None:
    run = asynchronous(FedBuff(lr=0.1), 1, 4, 2.0)
    for _ in range(20):
        run.round()
        assert isinstance(run.timeline, Asynchronous)
        begun = {start.version for start in (*run.timeline.working, *run.timeline.waiting)}
        assert run.held.keys() == begun and len(begun) <= 4
    assert min(run.held) < 15, "nobody is slow"


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("fedbuff", {"asynchronous": True, "concurrent": 8, "cohort": 2}),
        ("fedasync", {"asynchronous": True, "cohort": 1, "execution": "pool", "dropout_rate": 0.2}),
        ("scaffold+fedbuff", {"asynchronous": True, "cohort": 3, "lr_decay": 0.9, "client_state": "disk"}),
        ("fedavg", {"clock": "lognormal:1", "over_select": 2}),
    ],
)
def test_resume_is_bitwise_on_the_virtual_clock(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    class Killed(Exception):
        pass

    def kill(record: dict[str, Any], rounds: int) -> None:
        if record["round"] == 8:
            raise Killed

    chosen = QUICK | {"algorithm": name, "rounds": 14, "checkpoint_every": 3, "clock": "lognormal:1"} | settings
    whole = undrift.run(chosen, out=tmp_path / "whole")
    with pytest.raises(Killed):
        undrift.run(chosen, out=tmp_path / "cut", progress=kill)
    cut = undrift.run(out=tmp_path / "cut", resume=True)
    records = [
        [json.loads(line) for line in (tmp_path / run / "rounds.jsonl").read_text().splitlines()]
        for run in ("whole", "cut")
    ]
    assert timeless(records[0]) == timeless(records[1])
    assert all(torch.equal(cut.model[name], value) for name, value in whole.model.items())
    assert "virtual_seconds" in cut.records[-1]


# What is refused.
@pytest.mark.parametrize(
    ("name", "settings", "says"),
    [
        ("mime", {}, "measures something with a whole cohort"),
        ("gradma-s", {}, "looks at each client's answer"),
        ("fedexp", {}, "looks at each client's answer"),
        ("domo", {}, "only clients of the last rounds can read"),
        ("fedmim", {}, "only clients of the last rounds can read"),
        ("softpull", {}, "looks at each client's answer"),
        ("fedbabu", {"model": "mlp"}, "asynchronous: FedBABU"),
        ("centralized", {}, "asynchronous: Centralized"),
        ("fedbuff", {"compress": "topk:4"}, "compress is for rounds"),
        ("fedbuff", {"aggregate": "median"}, "aggregate is for rounds"),
        ("fedbuff", {"sampling": "bernoulli"}, "sampling is for rounds"),
        ("fedbuff", {"over_select": 2, "clock": "lognormal:1"}, "over_select is for rounds that wait"),
        ("fedbuff", {"concurrent": 13}, "at most the 12 clients"),
        ("fedbuff", {"clock": "lognormal:-1"}, "clock takes"),
        ("fedbuff", {"clock": "nowhere.csv"}, "cannot read the trace"),
    ],
)
def test_what_cannot_go_without_waiting_is_refused(name: str, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(BadSetting, match=says):
        undrift.run(QUICK | {"algorithm": name, "rounds": 1, "asynchronous": True} | settings)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"over_select": 2}, "give --clock"),
        ({"concurrent": 4}, "give --asynchronous"),
        ({"step_seconds": 2.0}, "give --clock lognormal"),
        ({"over_select": 9, "clock": "lognormal:1"}, "more than 12 clients"),
    ],
)
def test_settings_of_virtual_time_that_do_nothing_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(BadSetting, match=says):
        undrift.run(QUICK | {"rounds": 1} | settings)


def test_staleness_that_cannot_be_is_said() -> None:
    def said(**settings: Any) -> str:
        return " ".join(from_mapping(QUICK | settings).remarks())

    assert "give --asynchronous" in said(algorithm="fedbuff") and "give --asynchronous" in said(
        algorithm="fedavg+fedasync"
    )
    assert "give --cohort 1" in said(algorithm="fedasync", asynchronous=True)
    assert not said(algorithm="fedasync", asynchronous=True, cohort=1) + said(algorithm="fedbuff", asynchronous=True)
    assert not said(algorithm="fedavg", clock="lognormal:1")


# Traces.
def test_a_trace_says_how_long_each_answer_takes(tmp_path: Path) -> None:
    file = tmp_path / "phones.csv"
    write_trace(file, [(0, 1.0), (1, 2.0), (0, 3.0), (2, 0.5)])
    trace = read_trace(file, 3)
    took = [trace.seconds(np.arange(3), t, np.ones(3, np.int64), ONE).tolist() for t in range(3)]
    assert took == [[1.0, 2.0, 0.5], [3.0, 2.0, 0.5], [1.0, 2.0, 0.5]]
    by_hand = tmp_path / "by-hand.csv"
    by_hand.write_text("client,seconds\n" + "".join(f"{client},{1 + client % 3}\n" for client in range(12)))
    result = undrift.run(QUICK | {"rounds": 3, "clock": str(by_hand)})
    assert {r["network_seconds"] for r in result.records} <= {1.0, 2.0, 3.0}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda text: text.replace("1,2.0", "1,2.5"), "checksum is wrong"),
        (lambda text: text[: len(text) // 2], "checksum is wrong"),
        (lambda text: text.partition("\n")[2].replace("client,seconds", "seconds"), "line 1 must be"),
        (lambda text: text.partition("\n")[2][:-1], "last line has no end"),
        (lambda text: text.partition("\n")[2].replace("1,2.0", "1,fast"), "damaged in line 3"),
        (lambda text: text.partition("\n")[2].replace("1,2.0", "1,-2.0"), "damaged in line 3"),
        (lambda text: text.partition("\n")[2].replace("1,2.0", "1,nan"), "damaged in line 3"),
        (lambda text: text.partition("\n")[2].replace("1,2.0", "7,2.0"), "no client from 0 to 2"),
        (lambda text: text.partition("\n")[2].replace("1,2.0", "0,2.0"), "no line for client 1"),
        (lambda text: "\x00\xff", "is no trace"),
    ],
)
def test_a_damaged_trace_is_refused(change: Any, says: str, tmp_path: Path) -> None:
    file = tmp_path / "phones.csv"
    write_trace(file, [(0, 1.0), (1, 2.0), (2, 0.5)])
    file.write_bytes(change(file.read_text()).encode("latin-1"))
    with pytest.raises(BadData, match=says):
        read_trace(file, 3)
