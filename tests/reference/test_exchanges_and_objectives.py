"""Mime, MimeLite, SCAFFOLD I, MOON and FedMLB against their plain references, and their exact relations.

Nine unequal clients, four of them in a round; each case runs stacked and on the pool.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.reference import plain, signs
from tests.reference import plain_exchanges_and_objectives as others
from tests.reference.test_algorithms import (
    CPU,
    EVEN,
    FALL,
    ROUNDS,
    SIZES,
    TOLERANCE,
    Case,
    difference,
    disagreement,
    federation,
    schedule,
)
from undrift.core.errors import BadSetting
from undrift.data.batches import Plan
from undrift.data.federation import federate
from undrift.data.load import load_dataset
from undrift.jobs.registry import algorithm_class
from undrift.oracle.net import Net
from undrift.simulate.settings import Settings
from undrift.simulate.simulation import Simulation
from undrift.simulate.work import LocalWhole, LocalWork

CLASSES: dict[str, type[Any]] = {name: algorithm_class(name) for name in (*others.ALGORITHMS, "fedavg")}
REFERENCES: dict[str, type[plain.FedAvg]] = others.ALGORITHMS | {"fedavg": plain.FedAvg}
EPOCHS = Plan(batch=4, epochs=2)
NORM: dict[str, Any] = dict(plan=Plan(batch=9, epochs=2), data="even", model="norm")
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
                name, "batch norm, decay", dict(mu=5.0) | DECAY | more, Plan(batch=9, epochs=1), "size", data="even",
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
    Case("fedntd", "plain", dict(beta=2.0), EPOCHS),
    Case("fedntd", "batch norm, by size", dict(beta=3.0, temperature=0.7, lr=0.2), weights="size", **NORM, **FALL),
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
    if kind == "dropout":
        return nn.Sequential(nn.Linear(5, 4), nn.Dropout(0.5), nn.Tanh(), nn.Linear(4, 3)).double()
    if kind == "relu":  # zero inputs, as in padding, and some samples have features of nothing but zeros
        return nn.Sequential(nn.Sequential(nn.Linear(5, 3, bias=False), nn.ReLU()), nn.Linear(3, 3)).double()
    first, second = nn.Sequential(nn.Linear(5, 4), nn.Tanh()), nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    return nn.Sequential(first, second, nn.Linear(3, 3)).double()


def simulation(case: Case, execution: str = "stacked") -> Simulation:
    algorithm = CLASSES[case.algorithm](**case.fields)
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
    ends = data.sizes.cumsum().tolist()
    rows = [data.members[end - n : end].tolist() for n, end in zip(data.sizes.tolist(), ends, strict=True)]
    whole = {"batch": case.plan.batch, "rows": rows} if issubclass(kind, others.Whole) else {}
    rates = dict(lr_decay=case.lr_decay, lr_drops=case.lr_drops, lr_drop=case.lr_drop)
    return kind(problem, case.weights, **case.fields, **whole, **rates)


@cache
def expected(case: Case) -> tuple[plain.FedAvg, list[plain.After]]:
    side = reference(case)
    return side, side.run(schedule(simulation(case)), ROUNDS)


def first_disagreement(case: Case, execution: str) -> str:
    run = simulation(case, execution)
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


def test_the_cases_reach_what_they_are_for() -> None:
    """Unequal steps, clients that come back, clients that are dropped, terms that matter, samples without features."""
    for case in CASES:
        rounds = expected(case)[1]
        if case.data == "bad":
            assert any(after.dropped for after in rounds), f"{case}: nobody was dropped"
            continue
        if case.algorithm not in ("moon", "fedmlb"):
            continue
        invited = schedule(simulation(case))
        first, second = (invited(t, [0] * 9) for t in (0, 1))
        assert len({len(batches) for batches in first.batches.values()}) >= 2, f"{case}: equal steps"
        if case.algorithm == "moon":
            assert set(first.sampled) & set(second.sampled), f"{case}: nobody comes back at once"
            without = models(Case("moon", "", case.fields | {"mu": 0.0}, *settings(case)))
            assert difference(without[-1], rounds[-1].model) > 1e-4, f"{case}: mu does not matter"
    hidden = module("relu")[0](federation("skewed")[1])
    assert bool((hidden == 0).all(1).any())


def settings(case: Case) -> tuple[Any, ...]:
    """What a case has after its fields, for another algorithm in the same federation."""
    return (
        case.plan, case.weights, case.seed, case.data, case.model, case.chunk, case.cohort, case.lr_decay,
        case.lr_drops, case.lr_drop,
    )  # fmt: skip


# Exact relations.
PLAIN = (EPOCHS, "size", 0, "skewed", "blocks", 0, 4, 0.7)
NORMED = (Plan(batch=9, epochs=2), "size", 0, "even", "norm", 0, 4, 0.7)
FULL = Plan(batch=max(EVEN), steps=1)


@pytest.mark.parametrize("ema", [True, False])
@pytest.mark.parametrize("around", [PLAIN, NORMED], ids=["blocks", "norm"])
def test_r7_mimelite_without_beta_is_fedavg(around: tuple[Any, ...], ema: bool) -> None:
    assert (
        apart(Case("mimelite", "", dict(beta=0.0, ema=ema, **DECAY), *around), Case("fedavg", "", DECAY, *around))
        <= 1e-14
    )


@pytest.mark.parametrize("weights", ["uniform", "size"])
@pytest.mark.parametrize("ema", [True, False])
@pytest.mark.parametrize("model", ["blocks", "norm"])
@pytest.mark.parametrize("algorithm", ["mimelite", "mime"])
def test_r7_one_full_batch_step_follows_the_new_momentum(algorithm: str, model: str, ema: bool, weights: str) -> None:
    case = Case(algorithm, "", dict(beta=0.6, ema=ema, lr=0.3), FULL, weights, 0, "even", model, lr_decay=0.7)
    run = simulation(case)
    for t in range(ROUNDS):
        before = run.state.x
        run.round()
        torch.testing.assert_close(run.state.x, before - 0.3 * 0.7**t * run.state.companion.m, rtol=0, atol=1e-14)


@pytest.mark.parametrize("ema", [True, False])
def test_r7_mime_is_mimelite_for_identical_clients_with_full_batches(
    ema: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, inputs, targets = federation("even")
    same = data.members[24:36].repeat(data.clients)
    alike = replace(data, members=same, sizes=np.full(9, 12), start=np.arange(9) * 12)
    monkeypatch.setattr(f"{__name__}.federation", lambda kind: (alike, inputs, targets))
    around = (Plan(batch=12, steps=4), "uniform", 0, "even", "norm")
    fields = dict(beta=0.6, ema=ema, lr=0.2, weight_decay=0.05)
    assert apart(Case("mime", "", fields, *around), Case("mimelite", "", fields, *around)) <= 1e-12
    assert apart(Case("mime", "", fields, *around), Case("fedavg", "", dict(lr=0.2, weight_decay=0.05), *around)) > 1e-3


@pytest.mark.parametrize("around", [PLAIN, NORMED], ids=["blocks", "norm"])
def test_r9_moon_without_mu_is_fedavg(around: tuple[Any, ...]) -> None:
    assert apart(Case("moon", "", dict(mu=0.0, **DECAY), *around), Case("fedavg", "", DECAY, *around)) <= 1e-14


@pytest.mark.parametrize("execution", ["stacked", "pool"])
@pytest.mark.parametrize("around", [PLAIN, NORMED], ids=["blocks", "norm"])
def test_r9_the_first_participation_of_everybody_is_fedavg(around: tuple[Any, ...], execution: str) -> None:
    moon = replace(Case("moon", "", dict(mu=100.0, temperature=0.1, lr=0.02), *around), cohort=9)
    run, plainly = simulation(moon, execution), simulation(replace(moon, algorithm="fedavg", fields=dict(lr=0.02)))
    run.round(), plainly.round()
    assert difference(run.model(), plainly.model()) <= 1e-12
    run.round(), plainly.round()
    assert difference(run.model(), plainly.model()) > 1e-3


@pytest.mark.parametrize("around", [PLAIN, NORMED], ids=["blocks", "norm"])
def test_r10_fedmlb_without_branches_is_fedavg(around: tuple[Any, ...]) -> None:
    alone = dict(lambda1=1.0, lambda2=0.0, lambda3=0.0, temperature=0.5)
    assert apart(Case("fedmlb", "", DECAY | alone, *around), Case("fedavg", "", DECAY, *around)) <= 1e-14


@pytest.mark.parametrize("execution", ["stacked", "pool"])
@pytest.mark.parametrize("model", ["blocks", "norm"])
def test_r10_the_first_step_scales_the_gradient_of_every_block(model: str, execution: str) -> None:
    """By l1 + l2 (M - j + 1) / M for block j <= M, and by l1 for the classifier."""
    l1, l2 = 0.7, 0.4
    around = (Plan(batch=9, steps=1), "size", 0, "even", model)
    case = Case("fedmlb", "", dict(lambda1=l1, lambda2=l2, lambda3=5.0, temperature=0.3), *around)
    run, plainly = simulation(case, execution), simulation(Case("fedavg", "", {}, *around))
    run.round(), plainly.round()
    start, found, gradient = module(model).state_dict(), run.model(), plainly.model()
    factor = {"0": l1 + l2, "1": l1 + l2 / 2, "2": l1}
    for name, _ in module(model).named_parameters():
        wanted = factor[name.partition(".")[0]] * (start[name] - gradient[name])
        torch.testing.assert_close(start[name] - found[name], wanted, rtol=0, atol=1e-14)


@pytest.mark.parametrize("around", [PLAIN, NORMED], ids=["blocks", "norm"])
@pytest.mark.parametrize("algorithm", ["moon", "fedmlb"])
def test_r2_without_server_momentum_it_is_the_method_itself(algorithm: str, around: tuple[Any, ...]) -> None:
    still = Case(f"{algorithm}m", "", dict(beta1=0.0, **DECAY), *around)
    assert apart(still, Case(algorithm, "", DECAY, *around)) <= 1e-14


@pytest.mark.parametrize("execution", ["stacked", "pool"])
@pytest.mark.parametrize("weights", ["uniform", "size"])
def test_r5_scaffold_1_keeps_full_gradients_and_their_mean_over_everybody(weights: str, execution: str) -> None:
    case = Case("scaffold", "", dict(option=1, **DECAY), EPOCHS, weights, **FALL)
    run, side = simulation(case, execution), reference(case)
    own: dict[int, torch.Tensor] = {}
    for _ in range(ROUNDS):
        x_t, ids = run.model(), run.sampling.invite(run.t)[0].tolist()
        run.round()
        for i in ids:  # the clients' samples, client after client
            rows = list(range(sum(SIZES[:i]), sum(SIZES[: i + 1])))
            found = others.gradient_at(module(case.model), x_t, side.problem, rows)
            own[i] = run.net.layout.join(found, torch.zeros((), dtype=torch.float64))
    for i, c in own.items():
        torch.testing.assert_close(run.clients.columns[0][run.clients.row[i]], c, rtol=0, atol=1e-14)
    torch.testing.assert_close(run.state.companion.c, sum(own.values()) / len(SIZES), rtol=0, atol=1e-14)


# What a round costs.
@pytest.mark.parametrize("execution", ["stacked", "pool"])
@pytest.mark.parametrize(
    ("algorithm", "fields", "down", "up", "a_step", "full"),
    [
        ("mime", {}, 3, 2, 2, 1), ("mimelite", {}, 2, 2, 1, 1), ("scaffold", {"option": 1}, 2, 2, 1, 1),
        ("scaffold", {"option": 2}, 2, 2, 1, 0), ("moon", {}, 1, 1, 1, 0), ("moonm", {}, 1, 1, 1, 0),
        ("fedmlb", {}, 1, 1, 1, 0), ("fedmlbm", {}, 1, 1, 1, 0),
    ],
)  # fmt: skip
def test_bytes_and_gradients_of_a_round(
    algorithm: str, fields: dict[str, Any], down: int, up: int, a_step: int, full: int, execution: str
) -> None:
    for model, plan in (("blocks", EPOCHS), ("norm", Plan(batch=9, epochs=2)), ("blocks", FULL)):
        case = Case(algorithm, "", fields, plan, data="even", model=model)
        run = simulation(case, execution)
        values = 8 * sum(p.numel() for p in module(model).parameters())
        statistics = 8 * sum(b.numel() for b in module(model).buffers())
        for _ in range(2):
            ids = run.sampling.invite(run.t)[0].tolist()
            record = run.round()
            passes = [-(-EVEN[i] // plan.batch) for i in ids]
            steps = [plan.steps or 2 * p for p in passes]
            assert record.gradients == a_step * sum(steps) + full * sum(passes)
            assert record.bytes_down == 4 * (down * values + statistics)
            assert record.bytes_up == 4 * (up * values + statistics)


# The whole of a client's data.
def whole(case: Case, clients: slice | int) -> tuple[Simulation, LocalWhole]:
    run, ids = simulation(case), torch.arange(len(SIZES))
    table = run.data.table(case.plan, case.seed, 0, ids.numpy(), np.zeros(len(SIZES), np.int64))
    work = LocalWork(run.net, run.data, case.seed, 0, ids, table, case.plan.batch)
    return run, LocalWhole.of(work, clients, run.state.buffers)


@pytest.mark.parametrize("batch", [24, 1000, 7])
@pytest.mark.parametrize("model", ["blocks", "norm", "dropout"])
def test_full_gradients_are_those_of_all_local_samples(model: str, batch: int) -> None:
    """In batches of seven only without BatchNorm, whose statistics are a batch's."""
    if model == "norm" and batch == 7:
        return
    case = Case("mimelite", "", {}, Plan(batch=batch, epochs=1), data="even", model=model)
    run, everybody = whole(case, slice(0, 9))
    found = everybody.full_grad(run.state.x[None])
    side = reference(case)
    for i in range(9):
        rows = side.option["rows"][i]
        assert len(rows) == EVEN[i]
        wanted = others.gradient_at(module(model), side.x, side.problem, rows)
        assert difference(run.net.layout.split(found[i]), wanted) <= 1e-12
        assert difference(run.net.layout.split(whole(case, i)[1].full_grad(run.state.x)), wanted) <= 1e-12


@pytest.mark.parametrize("colour", [0.0, 0.5])
def test_full_gradients_see_the_clients_colours(colour: float) -> None:
    """A client's colour is its data, not augmentation: one full-batch step must follow the full gradient."""
    data = federate(load_dataset("digits"), "iid", 30, 0, CPU, colour=colour)
    net = Net(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), dtype=torch.float64)
    chosen = Settings(4, Plan(batch=200, steps=1), execution="stacked")
    run = Simulation(CLASSES["mimelite"](beta=0.0), net, data, chosen, {}, CPU)
    before = run.state.x
    run.round()
    torch.testing.assert_close(run.state.x, before - 0.1 * run.state.companion.m, rtol=0, atol=1e-12)


@pytest.mark.parametrize("execution", ["stacked", "pool"])
@pytest.mark.parametrize("steps", [2, 1])
def test_mime_drops_only_the_client_whose_full_gradient_is_not_finite(steps: int, execution: str) -> None:
    """In two steps it also trains on its bad sample; in one step its own update may be finite."""
    plan = Plan(batch=4, steps=steps)
    case = Case("mime", f"bad sample, {steps}", dict(beta=0.5), plan, data="bad", cohort=6, model="blocks")
    run = simulation(case, execution)
    for after in expected(case)[1]:
        record = run.round()
        assert record.dropped == len(after.dropped)
        assert difference(run.model(), after.model) <= TOLERANCE


# What these methods ask of a model.
class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.b(torch.tanh(self.a(x)))
        return out


@pytest.mark.parametrize("execution", ["stacked", "pool", "auto"])
@pytest.mark.parametrize("algorithm", ["moon", "moonm", "fedmlb", "fedmlbm"])
def test_a_model_without_blocks_is_refused(algorithm: str, execution: str) -> None:
    for model in (Own(), nn.Sequential(nn.Linear(5, 3))):
        chosen = Settings(4, EPOCHS, execution=execution)
        with pytest.raises(BadSetting, match=rf"nn\.Sequential .*classifier .*, not {type(model).__name__}"):
            Simulation(
                CLASSES[algorithm](), Net(model, dtype=torch.float64), federation("skewed")[0], chosen, {}, CPU
            ).round()


# Resuming.
@pytest.mark.parametrize("execution", ["stacked", "pool"])
@pytest.mark.parametrize("algorithm", ["moon", "mime"])
def test_a_run_that_is_resumed_is_the_same_run(algorithm: str, execution: str) -> None:
    case = Case(algorithm, "", dict(lr=0.2), weights="size", cohort=5, **NORM, **FALL)
    through, first = simulation(case, execution), simulation(case, execution)
    for _ in range(ROUNDS):
        through.round()
    for _ in range(2):
        first.round()
    kept = {name: t.clone() for name, t in first.tensors().items()}
    first.round()  # what it does later must not reach what was kept
    second = simulation(case, execution)
    second.restore(kept, 2)
    for _ in range(ROUNDS - 2):
        second.round()
    wanted, found = through.tensors(), second.tensors()
    assert wanted.keys() == found.keys()
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)


# A wrong sign in the parts of the engine that serve only these methods is noticed, as in test_mutation.
ENGINE = {  # of a file: functions, and the algorithms whose cases must notice
    "simulate/work": (("LocalWhole.full_grad",), ["mime", "mimelite"]),
    "oracle/oracle": (("Oracle.grads", "View.still_features"), ["mime", "moon"]),
    "oracle/net": (("Net.onward",), ["fedmlb"]),
}


@pytest.mark.parametrize("file", ENGINE)
def test_a_flipped_sign_of_the_engine_is_noticed(file: str) -> None:
    functions, algorithms = ENGINE[file]
    of = [
        site
        for site in signs.sites(file)
        if site.function in functions
        and not site.expression.endswith((".unsqueeze(-1)", ".unsqueeze(-2)", ".shape[-1]"))  # a dimension, not a sign
    ]
    probes = [
        signs.Probe(f"{case}, {execution}", "", {}, partial(first_disagreement, case, execution))
        for name in algorithms
        for case in CASES
        if case.algorithm == name
        for execution in ("stacked", "pool")
    ]
    assert {site.function for site in of} == set(functions)
    verdict = signs.judge(file, of, probes)
    assert not verdict.spoilt
    assert not verdict.unnoticed
