"""Mime, MimeLite, SCAFFOLD I, MOON and FedMLB against their plain references, and their exact relations.

Nine unequal clients, four of them in a round; each case runs stacked and on the pool.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.reference import plain, plain_more
from tests.reference.test_reference import (
    CPU, EVEN, FALL, ROUNDS, SIZES, TOLERANCE, Case, difference, disagreement, federation,
)  # fmt: skip
from undrift.data.batches import Plan
from undrift.net import Net
from undrift.registry import algorithm_class
from undrift.simulate.engine import Settings, Simulation

CLASSES: dict[str, type[Any]] = {name: algorithm_class(name) for name in (*plain_more.ALGORITHMS, "fedavg")}
REFERENCES: dict[str, type[plain.FedAvg]] = plain_more.ALGORITHMS | {"fedavg": plain.FedAvg}
EPOCHS = Plan(batch=4, epochs=2)
NORM: dict[str, Any] = dict(plan=Plan(batch=6, epochs=2), data="even", model="norm")
DECAY: dict[str, Any] = dict(lr=0.2, weight_decay=0.05, server_lr=0.8)

CASES = [
    *(
        case
        for name in ("mimelite", "mime")
        for case in (
            Case(name, "ema", dict(beta=0.7), EPOCHS),
            Case(name, "ema, decay, by size", dict(beta=0.6, **DECAY), EPOCHS, "size", **FALL),
            Case(name, "heavy ball", dict(beta=0.5, ema=False), EPOCHS),
            Case(name, "heavy ball, decay, by size", dict(beta=0.4, ema=False, **DECAY), EPOCHS, "size", **FALL),
            Case(name, "steps, momentum, clip", dict(beta=0.5, optimizer="momentum", momentum=0.5, clip=0.4), chunk=3),
            Case(name, "batch norm", dict(beta=0.5, lr=0.2), weights="size", **NORM, **FALL),
        )
    ),
    Case("scaffold", "option 1", dict(option=1), EPOCHS),
    Case("scaffold", "option 1, decay, by size", dict(option=1, **DECAY), EPOCHS, "size", **FALL),
    Case("scaffold", "option 1, server momentum", dict(option=1, beta1=0.6, server_lr=0.7), chunk=3),
    Case("scaffold", "option 1, batch norm", dict(option=1, weight_decay=0.05), weights="size", **NORM),
    *(
        case
        for name, more in (("moon", {}), ("moonm", dict(beta1=0.6)))
        for case in (
            Case(name, "plain", more, EPOCHS, model="blocks"),
            Case(
                name, "decay, by size", dict(mu=3.0, temperature=0.3) | DECAY | more, EPOCHS, "size", model="blocks",
                cohort=6, **FALL,
            ),
            Case(name, "batch norm", dict(mu=2.0, temperature=0.7, lr=0.2) | more, cohort=6, weights="size", **NORM),
            Case(
                name, "batch norm, decay", dict(mu=5.0) | DECAY | more, Plan(batch=6, epochs=1), "size", data="even",
                model="norm", cohort=6, chunk=4, **FALL,
            ),
            Case(name, "zero features", dict(mu=2.0, lr=0.2) | more, EPOCHS, model="relu", cohort=6),
        )
    ),
    *(
        case
        for name, more in (("fedmlb", {}), ("fedmlbm", dict(beta1=0.6)))
        for case in (
            Case(name, "plain", more, EPOCHS, model="blocks"),
            Case(
                name, "decay, by size",
                dict(lambda1=0.7, lambda2=0.4, lambda3=2.0, temperature=0.6) | DECAY | more,
                EPOCHS, "size", model="blocks", **FALL,
            ),
            Case(name, "batch norm", dict(lambda2=0.5, temperature=2.0, lr=0.2) | more, weights="size", **NORM),
            Case(
                name, "batch norm, decay", dict(lambda1=0.5, lambda3=3.0) | DECAY | more, chunk=3, **NORM, **FALL,
            ),
        )
    ),
    *(
        Case(name, "bad sample", {"option": 1} if name == "scaffold" else {}, Plan(batch=4, steps=1), data="bad",
             cohort=6, model="blocks")
        for name in ("mimelite", "scaffold", "moon", "moonm", "fedmlb", "fedmlbm")
    ),
]  # fmt: skip


# The two sides.
@cache
def module(kind: str) -> nn.Module:
    torch.manual_seed(5)
    if kind == "norm":
        first = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh())
        second = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None), nn.Tanh())
        return nn.Sequential(first, second, nn.Linear(4, 3)).double()
    if kind == "relu":  # zero inputs, as in padding, and some samples have features of nothing but zeros
        return nn.Sequential(nn.Sequential(nn.Linear(5, 3, bias=False), nn.ReLU()), nn.Linear(3, 3)).double()
    first, second = nn.Sequential(nn.Linear(5, 4), nn.Tanh()), nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    return nn.Sequential(first, second, nn.Linear(3, 3)).double()


def simulation(case: Case, execution: str = "stacked", kind: type[Any] | None = None) -> Simulation:
    algorithm = (kind or CLASSES[case.algorithm])(**case.fields)
    settings = Settings(
        case.cohort, case.plan, case.seed, case.weights, 100, execution, case.chunk,
        lr_decay=case.lr_decay, lr_drops=case.lr_drops, lr_drop=case.lr_drop,
    )  # fmt: skip
    return Simulation(
        algorithm, Net(module(case.model), dtype=torch.float64), federation(case.data)[0], settings, {}, CPU
    )


def reference(case: Case) -> plain.FedAvg:
    data, inputs, targets = federation(case.data)
    problem = plain.Problem(module(case.model), inputs, targets, data.sizes.tolist())
    kind = REFERENCES[case.algorithm]
    whole = {"batch": case.plan.batch} if issubclass(kind, plain_more.Whole) else {}
    rates = dict(lr_decay=case.lr_decay, lr_drops=case.lr_drops, lr_drop=case.lr_drop)
    return kind(problem, case.weights, **case.fields, **whole, **rates)


def schedule(case: Case) -> plain.Schedule:
    """The cohorts and batches of the package, one client at a time."""
    source, data = simulation(case), federation(case.data)[0]

    def invited(t: int, taken: list[int]) -> plain.Invited:
        source.t = t
        ids, place = source.draw()
        sampled = [int(ids[s]) for s in place.argsort()]
        batches = {}
        for i in sampled:
            table = data.table(case.plan, case.seed, t, np.array([i]), np.array([taken[i]]))
            batches[i] = [table.index[0, k, : table.count[0, k]].tolist() for k in range(table.steps[0])]
        return plain.Invited(sampled, batches)

    return invited


@cache
def expected(case: Case) -> tuple[plain.FedAvg, list[plain.After]]:
    side = reference(case)
    return side, side.run(schedule(case), ROUNDS)


def first_disagreement(case: Case, execution: str, kind: type[Any] | None = None) -> str:
    run = simulation(case, execution, kind)
    for after in expected(case)[1]:
        if wrong := disagreement(case, after, run, run.round()):
            return wrong
    return ""


def models(case: Case, rounds: int = ROUNDS) -> list[dict[str, torch.Tensor]]:
    """The package's global model after each round."""
    run, found = simulation(case), []
    for _ in range(rounds):
        run.round()
        found.append(run.model())
    return found


def apart(one: Case, other: Case, rounds: int = ROUNDS) -> float:
    """The largest difference of two cases' global models in any round."""
    pairs = zip(models(one, rounds), models(other, rounds), strict=True)
    return max(difference(a, b) for a, b in pairs)


# Against the reference.
@pytest.mark.parametrize("execution", ["stacked", "pool"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_global_model_agrees_with_the_reference_after_every_round(case: Case, execution: str) -> None:
    assert first_disagreement(case, execution) == ""
