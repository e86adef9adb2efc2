"""Base optimisers: equal to PyTorch's, or to a second implementation, through whole rounds; with every worker part."""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.small import federation, path, simulation
from undrift.algorithms.checks import check_algorithm
from undrift.algorithms.fedavg import FedAvg
from undrift.algorithms.optimise import FILES, NAMES
from undrift.algorithms.optimise.muon import by_shape, orthogonal
from undrift.core.errors import BadSetting
from undrift.core.names import names
from undrift.data.federation import federate
from undrift.data.from_user import dataset_from
from undrift.jobs.registry import algorithm_class
from undrift.simulate.simulation import Simulation

ONE = (20,)  # one client, whose batches are all its samples
STEPS = 50
TORCH: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05, weight_decay=0.02),
    "momentum": lambda p: torch.optim.SGD(p, 0.05, momentum=0.8, weight_decay=0.02),
    "nesterov": lambda p: torch.optim.SGD(p, 0.05, momentum=0.8, nesterov=True, weight_decay=0.02),
    "adam": lambda p: torch.optim.Adam(p, 0.05, (0.8, 0.95), eps=1e-3, weight_decay=0.02),
    "adamw": lambda p: torch.optim.AdamW(p, 0.05, (0.8, 0.95), eps=1e-3, weight_decay=0.02),
}
SETTINGS: dict[str, Any] = dict(lr=0.05, momentum=0.8, momentum2=0.95, epsilon=1e-3, weight_decay=0.02)


def one_client(alg: Any, module: nn.Module | None = None, fed: Any = None, steps: int = STEPS) -> Simulation:
    return simulation(alg, module, fed or federation(ONE), cohort=1, steps=steps, batch=20)


def trained(
    module: nn.Module, optimizer: Any, inputs: Tensor, targets: Tensor, rates: list[float] | None = None
) -> Tensor:
    """The parameters after STEPS steps of a plain loop."""
    for k in range(STEPS):
        for group in optimizer.param_groups if rates else ():
            group["lr"] = rates[k]
        optimizer.zero_grad()
        F.cross_entropy(module(inputs), targets).backward()
        optimizer.step()
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


def samples(run: Simulation) -> tuple[Tensor, Tensor]:
    order = run.data.members[: run.data.sizes[0]]
    inputs = run.data.train.take(order)
    return inputs.double() if inputs.is_floating_point() else inputs, run.data.train.targets[order]


def test_there_is_a_file_for_each_name() -> None:
    assert set(NAMES) == {*TORCH, "muon"}


@pytest.mark.parametrize("name", TORCH)
def test_steps_are_pytorchs_also_over_rounds_that_keep_moments(name: str) -> None:
    run = one_client(FedAvg(optimizer=name, keep_moments=True, **SETTINGS), steps=STEPS // 2)
    module = copy.deepcopy(run.net.original)
    start = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
    expected = trained(module, TORCH[name](module.parameters()), *samples(run))
    assert (expected - start).norm() > 0.1
    assert (path(run, 2)[-1] - expected).norm() < 1e-10 * expected.norm()


def test_adamw_is_not_adam_with_decay() -> None:
    decayed, plain = (path(one_client(FedAvg(optimizer=n, **SETTINGS)), 1)[-1] for n in ("adamw", "adam"))
    assert (decayed - plain).norm() > 1e-3 * plain.norm()


def test_decoupled_decay_spares_biases_where_that_is_asked_for() -> None:
    run = one_client(FedAvg(optimizer="adamw", decay_biases=False, **SETTINGS))
    module = copy.deepcopy(run.net.original)
    biases = [p for p in module.parameters() if p.dim() == 1]
    groups = [
        {"params": [p for p in module.parameters() if p.dim() > 1]},
        {"params": biases, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, 0.05, (0.8, 0.95), eps=1e-3, weight_decay=0.02)
    expected = trained(module, optimizer, *samples(run))
    assert (path(run, 1)[-1] - expected).norm() < 1e-10 * expected.norm()


@pytest.mark.parametrize(("warm", "cosine"), [(5, 0), (0, 30), (10, 40)])
def test_the_rate_within_a_round_is_a_schedulers(warm: int, cosine: int) -> None:
    """Every round begins the schedule anew, and the rate of the round multiplies it."""
    run = one_client(FedAvg(optimizer="momentum", warm_steps=warm, cosine_steps=cosine, lr=0.05, momentum=0.8))

    def share(k: int) -> float:
        rise = min(1.0, (k + 1) / warm) if warm else 1.0
        return rise * (0.5 * (1 + math.cos(math.pi * min(1.0, max(0, k - warm) / cosine))) if cosine else 1.0)

    module = copy.deepcopy(run.net.original)
    shares, points = [share(k) for k in range(STEPS)], path(run, 2)
    for point in points:
        optimizer = torch.optim.SGD(module.parameters(), 1.0, momentum=0.8)
        expected = trained(module, optimizer, *samples(run), rates=[0.05 * s for s in shares])
        assert (point - expected).norm() < 1e-10 * expected.norm()
    assert min(shares) < 0.3


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("scaffold", {}),
        ("scaffold-m", {}),
        ("fedgamma", {}),
        ("fednova", {}),
        ("fedcm", {}),
        ("mofedsam", {}),
        ("domo", {}),
        ("domo-s", {}),
        ("fedavgm", {"momentum_units": "grad"}),
    ],
)
def test_methods_that_divide_by_the_rate_refuse_one_that_changes_within_a_round(
    name: str, fields: dict[str, Any]
) -> None:
    check_algorithm(algorithm_class(name)(**fields), 10, 2)
    for changing in ({"warm_steps": 2}, {"cosine_steps": 4}):
        with pytest.raises(BadSetting, match="must not change within a round"):
            check_algorithm(algorithm_class(name)(**fields, **changing), 10, 2)
    check_algorithm(algorithm_class("fedavg")(warm_steps=2), 10, 2)


class Words(nn.Module):
    """A table of words, a convolution, a tall and a wide matrix, and vectors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table = nn.Embedding(9, 6)
        self.conv = nn.Conv1d(6, 4, 3, padding=1)
        self.norm = nn.LayerNorm(4)
        self.wide, self.tall = nn.Linear(4 * 5, 7), nn.Linear(7, 20)
        self.head = nn.Linear(20, 3)

    def forward(self, words: Tensor) -> Tensor:
        h = self.norm(self.conv(self.table(words).mT).mT).relu().flatten(1)
        return self.head(self.tall(self.wide(h).tanh()).tanh())


def words() -> Any:
    random = np.random.default_rng(0)
    inputs, targets = random.integers(0, 9, (20, 5)), random.integers(0, 3, 20)
    return federate(dataset_from(([(inputs, targets)], (inputs, targets))), "sites", 1, 0, torch.device("cpu"))


class PlainMuon:
    """Muon as it is described, on a module's own tensors in float64."""

    def __init__(self, module: nn.Module, tables: list[str]) -> None:
        self.named = dict(module.named_parameters())
        self.matrices = [n for n, p in self.named.items() if p.dim() > 1 and n not in tables]
        self.b = {n: torch.zeros_like(self.named[n]) for n in self.matrices}
        rest = [p for n, p in self.named.items() if n not in self.matrices]
        self.adamw = torch.optim.AdamW(rest, 0.05, (0.8, 0.95), eps=1e-3, weight_decay=0.02)
        self.param_groups: list[Any] = []

    def zero_grad(self) -> None:
        for p in self.named.values():
            p.grad = None

    def step(self) -> None:
        self.adamw.step()
        for n in self.matrices:
            p = self.named[n]
            self.b[n] = 0.8 * self.b[n] + 0.2 * p.grad
            direction = (0.8 * self.b[n] + 0.2 * p.grad).reshape(len(p), -1)
            length = math.sqrt(float((direction**2).sum()))
            u, s, v = torch.linalg.svd(direction / length, full_matrices=False)
            for _ in range(5):  # the polynomial acts on the singular values alone
                s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
            long = 0.2 * math.sqrt(max(direction.shape))
            with torch.no_grad():
                p.mul_(1 - 0.05 * 0.02)
                p.sub_(0.05 * long * (u @ torch.diag(s) @ v).reshape(p.shape))


def test_muon_is_its_reference_over_fifty_steps() -> None:
    run = one_client(FedAvg(optimizer="muon", keep_moments=True, **SETTINGS), Words(), words(), STEPS // 2)
    module = copy.deepcopy(run.net.original)
    expected = trained(module, PlainMuon(module, ["table.weight"]), *samples(run))
    assert (path(run, 2)[-1] - expected).norm() < 1e-10 * expected.norm()
    assert by_shape(run.net.layout) == {(4, 18): [1], (7, 20): [5], (20, 7): [7], (3, 20): [9]}


def test_muon_is_pytorchs_within_bfloat16() -> None:
    """PyTorch iterates in bfloat16, with a relative rounding of 2^-8; the state of the two stays the same."""
    torch.manual_seed(0)
    matrix = nn.Parameter(torch.randn(12, 30, dtype=torch.float64))
    theirs = torch.optim.Muon([matrix], 0.1, 0.3, 0.9, adjust_lr_fn="match_rms_adamw")
    alg = FedAvg(optimizer="muon", lr=0.1, weight_decay=0.3, momentum=0.9)
    run = simulation(alg, nn.Linear(30, 12, bias=False))
    x, state = matrix.detach().reshape(-1).clone(), alg.rest(matrix.detach().reshape(-1))
    for _ in range(5):
        matrix.grad = torch.randn_like(matrix)
        before = matrix.detach().reshape(-1).clone()
        theirs.step()
        decayed = before - 0.1 * 0.3 * before
        x, state = FILES["muon"].step(alg, decayed, state, matrix.grad.reshape(-1), run.net.layout)
        step = x - decayed
        assert (matrix.detach().reshape(-1) - x).norm() < 0.03 * step.norm()
        assert 0.7 < step.norm() / (0.1 * 0.2 * math.sqrt(30 * 12)) < 1.2
    torch.testing.assert_close(theirs.state[matrix]["momentum_buffer"].reshape(-1), state.m)


def test_singular_values_come_near_one() -> None:
    torch.manual_seed(0)
    for shape in ((3, 8, 5), (3, 5, 8)):
        s = torch.linalg.svdvals(orthogonal(torch.randn(shape, dtype=torch.float64)))
        assert s.min() > 0.5 and s.max() < 1.3
    assert not orthogonal(torch.zeros(2, 3, 4)).any()


def fields(name: str, optimizer: str) -> dict[str, Any]:
    kind = algorithm_class(name)
    own = {f.name: f.default for f in dataclasses.fields(kind)}
    steady = name in ("scaffold", "scaffold-m", "fedgamma", "fednova", "fedcm", "mofedsam")
    given = dict(lr=0.02, optimizer=optimizer, keep_moments=name not in OWN_MOMENTS, weight_decay=0.1)
    return given | ({"slots": 0} if "slots" in own else {}) | ({} if steady else {"warm_steps": 2, "cosine_steps": 2})


OWN_MOMENTS = ("fedrep", "fednova")  # refuse moments of the round before
FIXED = ("domo", "domo-s", "fedavglm", "fedavglm-z", "fedavgslm", "fedavgslm-z")  # local momentum is the method


@pytest.mark.parametrize("name", [n for n in names("algorithms") if n not in FIXED])
def test_every_worker_part_steps_alike_alone_and_stacked(name: str) -> None:
    kind = algorithm_class(name)
    for n, optimizer in enumerate(("nesterov", "adamw", "muon")):
        alg = kind(**fields(name, optimizer))
        cohort = 1 if name == "centralized" else 4
        settings: dict[str, Any] = dict(cohort=cohort, batch=4, epochs=0.7, seed=n)
        stacked, alone = (simulation(alg, execution=e, **settings) for e in ("stacked", "debug"))
        points = path(stacked, 2)
        assert (path(alone, 2) - points).norm() <= 1e-12 * points.norm()
        for a, b in zip(alone.tensors().items(), stacked.tensors().items(), strict=True):
            torch.testing.assert_close(a[1], b[1], rtol=1e-9, atol=1e-12, msg=a[0])
