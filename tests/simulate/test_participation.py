"""Who takes part, how long they train, at which rate, and how long the messages would take."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import undrift
from tests.small import SIZES, path, simulation
from undrift.algorithms.fedavg import FedAvg
from undrift.algorithms.gradma_s import GradMAS
from undrift.algorithms.scaffold import Scaffold
from undrift.core.errors import BadSetting


def test_bernoulli_cohorts_have_the_right_mean_and_are_never_empty() -> None:
    run = simulation(FedAvg(), cohort=2, sampling="bernoulli")
    sizes, hits = [], torch.zeros(len(SIZES))
    for run.t in range(1500):
        ids, _ = run.sampling.invite(run.t)
        assert len(ids) and (ids[1:] > ids[:-1]).all()
        sizes.append(len(ids))
        hits[ids] += 1
    assert len(set(sizes)) > 3
    # mean 6 * 1/3 = 2, a little more because the empty cohort (probability (2/3)^6 = 0.088) is drawn again: 2 / 0.912
    assert abs(sum(sizes) / len(sizes) - 2 / (1 - (2 / 3) ** 6)) < 0.12
    assert (hits / len(sizes) - 1 / 3 / (1 - (2 / 3) ** 6)).abs().max() < 0.06


def test_bernoulli_cohorts_need_room_for_everybody_in_the_memory() -> None:
    with pytest.raises(BadSetting, match="slots must be 0 or at least"):
        simulation(GradMAS(slots=3), cohort=2, sampling="bernoulli")
    points = path(simulation(GradMAS(slots=6), cohort=2, sampling="bernoulli"), 6)
    assert torch.isfinite(points).all()


def test_clients_that_fail_are_counted_and_leave_no_trace() -> None:
    run = simulation(Scaffold(), cohort=6, dropout_rate=0.5)
    dropped = []
    for _ in range(8):
        before = dict(run.clients.row)
        record = run.round()
        dropped.append(record.dropped)
        assert record.clients == 6 and len(run.clients.row) <= len(before) + 6 - record.dropped
        assert record.bytes_up == (6 - record.dropped) * record.bytes_down // 6
        assert record.gradients == 3 * (6 - record.dropped)
    assert 0 < sum(dropped) / 48 < 1 and len(set(dropped)) > 2


def test_a_round_that_nobody_answers_changes_nothing() -> None:
    run = simulation(Scaffold(), cohort=1, dropout_rate=0.9)
    run.round()
    for _ in range(10):
        before = {n: t.clone() for n, t in run.tensors().items()}
        record = run.round()
        if record.dropped:
            assert all(torch.equal(before[n], t) for n, t in run.tensors().items())
            return
    raise AssertionError("with a rate of 0.9 somebody must have failed")


def test_slow_clients_make_a_share_of_their_steps() -> None:
    whole = simulation(FedAvg(), cohort=6, steps=4)
    half = simulation(FedAvg(), cohort=6, steps=4, slow=(1.0, 0.5))
    some = simulation(FedAvg(), cohort=6, steps=4, slow=(0.5, 0.25))
    assert whole.round().gradients == 24
    assert half.round().gradients == 12
    counts = {some.round().gradients for _ in range(6)}
    assert counts <= {6 * 4 - 3 * n for n in range(7)} and len(counts) > 1
    short = simulation(FedAvg(), cohort=6, steps=2)
    short.round()
    torch.testing.assert_close(half.state.x, short.state.x, rtol=1e-12, atol=1e-12)  # the first two batches of four


def test_schedules_of_the_rate() -> None:
    """FedAvg with decay equals FedAvg whose rate is set by hand in every round."""
    decayed = simulation(FedAvg(lr=0.2), lr_decay=0.9, lr_drops=(2,), lr_drop=0.5)
    rates = [0.2, 0.2 * 0.9, 0.2 * 0.81 * 0.5, 0.2 * 0.729 * 0.5]
    by_hand = simulation(FedAvg(lr=0.2))
    for rate in rates:
        by_hand.whole = FedAvg(lr=rate)  # type: ignore[assignment]
        by_hand.round()
        decayed.round()
        torch.testing.assert_close(decayed.state.x, by_hand.state.x, rtol=1e-13, atol=1e-13)


def test_simulated_seconds_of_the_network() -> None:
    settings: dict[str, Any] = {"clients": 10, "cohort": 4, "rounds": 1, "model": "logreg", "execution": "stacked"}
    plain = undrift.run(settings).records[0]
    assert "network_seconds" not in plain
    one = undrift.run(settings, bandwidth=8.0, latency=0.25).records[0]
    each = (one["bytes_down"] + one["bytes_up"]) / 4  # bytes of one client; 8 Mbit/s is a megabyte a second
    assert one["network_seconds"] == pytest.approx(2 * 0.25 + each / 1e6)
    two = undrift.run(settings, algorithm="mime", bandwidth=8.0, latency=0.25).records[0]
    assert two["network_seconds"] == pytest.approx(4 * 0.25 + (two["bytes_down"] + two["bytes_up"]) / 4 / 1e6)


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ({"dropout_rate": 1.0}, "dropout_rate must lie"),
        ({"slow": "0.5"}, "slow takes"),
        ({"slow": "2,0.5"}, "slow takes"),
        ({"lr_decay": 0.0}, "lr_decay must be"),
        ({"lr_drops": "x"}, "lr_drops takes"),
        ({"lr_drops": "0"}, "lr_drops takes different rounds, counted from 1"),
        ({"lr_drops": "-3"}, "lr_drops takes different rounds, counted from 1"),
        ({"lr_drops": "60,60"}, "lr_drops takes different rounds, counted from 1"),
        ({"sampling": "poisson"}, "sampling"),
        ({"bandwidth": -1.0}, "bandwidth must be"),
    ],
)
def test_impossible_settings_are_refused(setting: dict[str, Any], says: str) -> None:
    with pytest.raises(undrift.UndriftError, match=says):
        undrift.run(setting, rounds=1)
