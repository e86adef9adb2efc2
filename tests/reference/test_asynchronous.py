"""Servers that do not wait, against a plain reference: the model, the time and the staleness agree after every server step."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from tests.reference import plain, plain_asynchronous
from tests.reference.test_algorithms import (
    CPU,
    EPOCHS,
    FALL,
    TOLERANCE,
    difference,
    federation,
    module,
)  # fmt: skip
from undrift.core.streams import Purpose, sample, stream
from undrift.data.batches import Plan
from undrift.jobs.registry import algorithm_class
from undrift.oracle.net import Net
from undrift.round.clock import Drawn
from undrift.round.timeline import Asynchronous
from undrift.round.who import chances
from undrift.simulate.settings import Settings
from undrift.simulate.simulation import Simulation

STEPS = 12


@dataclass(frozen=True)
class Case:
    """One configuration; `spread` is that of the clients' speeds."""

    algorithm: str
    name: str
    fields: dict[str, Any] = field(default_factory=dict)
    buffer: int = 1
    concurrent: int = 5
    spread: float = 1.0
    plan: Plan = Plan(batch=4, steps=3)
    weights: str = "uniform"
    data: str = "skewed"
    model: str = "tanh"
    dropout_rate: float = 0.0
    rates: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.algorithm}:{self.name}"

    def __hash__(self) -> int:
        return hash(str(self))


FRESH = Plan(batch=4, steps=3, persistent=False)
NORM: dict[str, Any] = dict(plan=Plan(batch=6, epochs=1), data="even", model="norm")
CASES = [
    Case("fedasync", "plain"),
    Case("fedasync", "hinge", dict(staleness="hinge", a=2.0, b=1.0, mixing_rate=0.9, server_lr=0.8)),
    Case("fedasync", "constant, as the paper counts", dict(staleness="constant", fresh=1, mu=0.7)),
    Case("fedasync", "as the paper counts, by size", dict(fresh=1, a=1.0), 3, weights="size", plan=EPOCHS),
    Case("fedasync", "batch norm", dict(mixing_rate=0.7), 2, **NORM),
    Case("fedasync", "falling rate", dict(mixing_rate=0.9), 2, rates=FALL),
    Case("fedbuff", "plain", {}, 2),
    Case("fedbuff", "by weights, by size", dict(divide_by="weights", a=1.5), 3, weights="size", plan=EPOCHS),
    Case("fedbuff", "momentum, falling rate", dict(beta1=0.6, momentum_units="grad", server_lr=0.7), 3, rates=FALL),
    Case("fedbuff", "batch norm", {}, 3, **NORM),
    Case("fedbuff", "new shuffles, some fail", dict(weight_decay=0.05), 2, 6, plan=FRESH, dropout_rate=0.3),
    Case("fedbuff", "everybody", {}, 2, 9, spread=2.0),
    Case("scaffold+fedbuff", "plain", dict(lr=0.1), 2),
    Case("fedavg", "no staleness", dict(server_lr=0.6), 2),
]


def simulation(case: Case, execution: str) -> Simulation:
    net = Net(module(case.model), dtype=torch.float64)
    data = federation(case.data)[0]
    clock = Drawn.of((case.spread, 0.5), data.clients, 0, 0.5, 1.0, 0.02)
    settings = Settings(
        case.buffer, case.plan, 0, case.weights, 100, execution, dropout_rate=case.dropout_rate, clock=clock,
        concurrent=case.concurrent, **case.rates,
    )  # fmt: skip
    return Simulation(algorithm_class(case.algorithm)(**case.fields), net, data, settings, {}, CPU)


def world(case: Case) -> plain_asynchronous.World:
    """What both sides share, asked of the package one client at a time."""
    run = simulation(case, "stacked")
    assert isinstance(run.timeline, Asynchronous)
    clock, traffic, data = run.timeline.clock, run.timeline.traffic, run.data

    def seconds(client: int, version: int, steps: int) -> float:
        return float(clock.seconds(np.array([client]), version, np.array([steps]), traffic)[0])

    def choose(version: int, draw: int, idle: list[int], places: int) -> list[int]:
        key = stream(0, Purpose.COHORT, *((version, draw) if draw else (version,)))
        return [idle[j] for j in sample(key, len(idle), places)]

    def batches(client: int, version: int, taken: int) -> list[list[int]]:
        table = data.table(case.plan, 0, version, np.array([client]), np.array([taken]))
        return [table.index[0, k, : table.count[0, k]].tolist() for k in range(table.steps[0])]

    def fails(client: int, version: int) -> bool:
        chance = chances(stream(0, Purpose.FAILURE, version), torch.tensor([client]))
        return bool(chance < case.dropout_rate)

    return plain_asynchronous.World(seconds, choose, batches, fails, case.concurrent, case.buffer)


@cache
def expected(case: Case) -> list[plain_asynchronous.Past]:
    data, inputs, targets = federation(case.data)
    problem = plain.Problem(module(case.model), inputs, targets, data.sizes.tolist())
    side = plain_asynchronous.ALGORITHMS[case.algorithm](problem, case.weights, **case.fields, **case.rates)
    return side.flow(world(case), STEPS)


def first_disagreement(case: Case, execution: str) -> str:
    """Run the package beside the reference until they part."""
    run = simulation(case, execution)
    for past in expected(case):
        record = run.round()
        gap = difference(run.model(), past.model)
        if gap > TOLERANCE:
            return f"step {record.round}: the model differs by {gap:.3g}"
        told = record.more["virtual_seconds"], record.more["staleness_max"], record.more["staleness_mean"]
        wanted = past.now, max(past.staleness), float(np.mean(past.staleness))
        if told != pytest.approx(wanted, rel=1e-12):
            return f"step {record.round}: recorded {told}, not {wanted}"
        assert run.timeline is not None and run.held.keys() == run.timeline.rounds_in_use()
    return ""


@pytest.mark.parametrize("execution", ["stacked", "pool"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_model_agrees_with_the_reference_after_every_server_step(case: Case, execution: str) -> None:
    assert first_disagreement(case, execution) == ""


def test_the_cases_reach_what_they_are_for() -> None:
    """Stale answers beyond the hinge, answers of one buffer that began with different models, and clients that fail."""
    for case in CASES:
        staleness = [missed for past in expected(case) for missed in past.staleness]
        assert max(staleness) >= (3 if case.buffer < 3 else 1), f"{case}: {staleness}"
    mixed = [past for case in CASES if case.rates for past in expected(case) if len(set(past.staleness)) > 1]
    assert len(mixed) >= 5
    (hinge,) = (case for case in CASES if case.name == "hinge")
    assert {missed > 1 for past in expected(hinge) for missed in past.staleness} == {True, False}
