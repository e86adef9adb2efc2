"""The same task for every framework: four clients of unequal sizes, a small network, and who trains on what in each round.

Cohorts and batches are those that undrift draws, so that no random number can differ. Everything is float64.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from undrift.data.batches import Plan
from undrift.data.federation import federate
from undrift.data.from_user import dataset_from
from undrift.jobs.registry import algorithm_class
from undrift.models._blocks import Blocks
from undrift.oracle.net import Net
from undrift.simulate.settings import Settings
from undrift.simulate.simulation import Simulation

SIZES, FEATURES, HIDDEN, CLASSES = (6, 20, 9, 13), 5, 4, 3
CLIENTS, SOME = len(SIZES), 3  # all of them, or a cohort of three
ROUNDS, STEPS, BATCH, LR = 5, 3, 5, 0.1
MODEL, OWN = "the server's model", "the clients' own models"
Path = dict[str, Tensor]  # what is compared, by name: [ROUNDS, ...]
Batch = tuple[Tensor, Tensor]
Run = Callable[[], Path]


@functools.cache
def problem() -> list[Batch]:
    """Each client's samples; clients differ in their classes. Inputs are float32 numbers."""
    random = np.random.default_rng(0)
    clients = []
    for i, n in enumerate(SIZES):
        y = np.where(random.random(n) < 0.7, i % CLASSES, random.integers(0, CLASSES, n))
        x = random.normal(size=(n, FEATURES)) + 2 * np.eye(FEATURES)[y] + random.normal(size=FEATURES)
        clients.append((torch.from_numpy(x.astype(np.float32)).double(), torch.from_numpy(y)))
    return clients


def network(norm: int = 0) -> Blocks:
    """A body and a head; with a BatchNorm one (1) or two (2) levels inside the body, if asked."""
    torch.manual_seed(0)
    body: list[nn.Module] = [nn.Linear(FEATURES, HIDDEN, dtype=torch.float32), nn.Tanh()]
    if norm:
        layer: nn.Module = nn.BatchNorm1d(HIDDEN)
        body.insert(1, layer if norm == 1 else nn.Sequential(layer))
    return Blocks({"encoder": nn.Sequential(*body), "head": nn.Linear(HIDDEN, CLASSES, dtype=torch.float32)}).double()


BODY = sum(p.numel() for p in network()[0].parameters())  # the first entries of the vector


def vector(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()]).clone()


def put(module: nn.Module, x: Tensor) -> nn.Module:
    torch.nn.utils.vector_to_parameters(x.clone(), module.parameters())
    return module


def simulation(
    name: str,
    fields: dict[str, Any],
    everybody: bool,
    whole: bool,
    weights: str = "uniform",
    norm: int = 0,
    aggregate: str = "mean",
) -> Simulation:
    """undrift's run: three of the four clients a round or all, one pass in batches or STEPS steps of all samples."""
    clients = [(x.numpy(), y.numpy()) for x, y in problem()]
    data = federate(dataset_from((clients, clients[0])), "sites", CLIENTS, 0, torch.device("cpu"))
    plan = Plan(max(SIZES), STEPS, persistent=False) if whole else Plan(BATCH, epochs=1.0)
    settings = Settings(CLIENTS if everybody else SOME, plan, 0, weights, 10**6, "stacked", aggregate=aggregate)
    net = Net(network(norm), dtype=torch.float64)
    return Simulation(algorithm_class(name)(**({"lr": LR} | fields)), net, data, settings, {}, torch.device("cpu"))


class Course(NamedTuple):
    """Who takes part, and each one's samples in the order in which it takes them."""

    everybody: bool
    whole: bool  # STEPS steps of all samples, not one pass in batches
    rounds: list[dict[int, Batch]]

    @property
    def batch(self) -> int:
        return max(SIZES) if self.whole else BATCH

    @property
    def passes(self) -> int:
        return STEPS if self.whole else 1

    def steps(self, t: int, i: int) -> list[Batch]:
        """The batches of client i in round t."""
        x, y = self.rounds[t][i]
        return [*zip(x.split(self.batch), y.split(self.batch), strict=True)] * self.passes


@functools.cache
def course(everybody: bool = False, whole: bool = False) -> Course:
    run, rounds = simulation("fedavg", {}, everybody, whole), []
    x, y = (torch.cat(parts) for parts in zip(*problem(), strict=True))
    for t in range(ROUNDS):
        who = run.attendance(t)
        table = run.data.table(run.settings.plan, 0, t, who.ids, run.position[who.ids])
        shown = 1 if whole else None  # one batch of all samples, or all batches
        rows = [
            index[:shown][torch.arange(index.shape[1]) < torch.from_numpy(count)[:shown, None]]
            for index, count in zip(table.index, table.count, strict=True)
        ]
        rounds.append({int(i): (x[row], y[row]) for i, row in zip(who.ids, rows, strict=True)})
    return Course(everybody, whole, rounds)


def ours(
    name: str,
    fields: dict[str, Any],
    course: Course,
    weights: str = "uniform",
    own: Callable[[Any], Tensor] | None = None,
    shared: Callable[[Tensor], Tensor] = lambda x: x,
    kept: Callable[[Tensor], Tensor] = lambda x: x,
    norm: int = 0,
    aggregate: str = "mean",
) -> Path:
    """undrift's models after each round; `own` takes the clients' own ones from their states.

    `shared` and `kept` say which part of the server's model and of the own ones is compared.
    """
    run = simulation(name, fields, course.everybody, course.whole, weights, norm, aggregate)
    models, owns = [], []
    for _ in range(ROUNDS):
        run.round()
        models.append(shared(run.net.without_padding(run.state.x, "model")))
        if own is not None:
            owns.append(torch.stack([kept(run.net.without_padding(v, "model")) for v in own(run.serving()[2])]))
    return {MODEL: torch.stack(models)} | ({OWN: torch.stack(owns)} if owns else {})


# What may explain a difference is written here in the papers' letters, apart from undrift.
def gradient(x: Tensor, batch: Batch) -> Tensor:
    module = put(network(), x)
    loss = F.cross_entropy(module(batch[0]), batch[1])
    return torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(module.parameters()))])


def descend(
    x: Tensor, batches: list[Batch], term: Callable[[Tensor], Tensor | float] = lambda x: 0.0, lr: float = LR
) -> Tensor:
    """x after a plain step for each batch; `term` is added to the gradient."""
    for batch in batches:
        x = x - lr * (gradient(x, batch) + term(x))
    return x


State = dict[Any, Any]
Local = Callable[[State, Tensor, int, list[Batch]], Tensor]  # memory, x_t, client, batches -> x_i^K
Server = Callable[[State, int, Tensor, list[Tensor], list[int]], Tensor]  # memory, t, x_t, models, cohort -> x_{t+1}


def plain(memory: State, x: Tensor, i: int, batches: list[Batch]) -> Tensor:
    return descend(x, batches)


def average(memory: State, t: int, x: Tensor, models: list[Tensor], cohort: list[int]) -> Tensor:
    return torch.stack(models).mean(0)


def played(course: Course, local: Local = plain, server: Server = average) -> Path:
    """The path of a worker part and a server part; `memory` is kept between rounds."""
    memory: State = {}
    x, models = vector(network()), []
    for t, round in enumerate(course.rounds):
        cohort = sorted(round)
        x = server(memory, t, x, [local(memory, x, i, course.steps(t, i)) for i in cohort], cohort)
        models.append(x)
    return {MODEL: torch.stack(models)}


def torch_adam(lr: float = 0.1, b1: float = 0.9, b2: float = 0.99, eps: float = 1e-3) -> Server:
    """PyTorch's Adam on the server: m and v are corrected apart, and eps is added to the corrected root."""

    def step(memory: State, t: int, x: Tensor, models: list[Tensor], cohort: list[int]) -> Tensor:
        d, n = x - average(memory, t, x, models, cohort), t + 1
        memory["m"] = b1 * memory.get("m", 0.0) + (1 - b1) * d
        memory["v"] = b2 * memory.get("v", 0.0) + (1 - b2) * d * d
        return x - lr * memory["m"] / (1 - b1**n) / ((memory["v"] / (1 - b2**n)).sqrt() + eps)

    return step


def scaffold(
    sign: float = 1.0, share: float = 1.0, step: Callable[[Tensor, Tensor], Tensor] = lambda x, mean: mean
) -> tuple[Local, Server]:
    """SCAFFOLD, option II. What can be changed: the sign of what c_i learns, the share in c, and the server's step."""

    def local(memory: State, x: Tensor, i: int, batches: list[Batch]) -> Tensor:
        c, c_i = memory.get("c", torch.zeros_like(x)), memory.get(i, torch.zeros_like(x))
        y = descend(x, batches, lambda _: c - c_i)
        memory[i] = c_i - c + sign * (x - y) / (len(batches) * LR)
        memory["moved", i] = memory[i] - c_i
        return y

    def server(memory: State, t: int, x: Tensor, models: list[Tensor], cohort: list[int]) -> Tensor:
        memory["c"] = memory.get("c", 0.0) + share * sum(memory["moved", i] for i in cohort) / CLIENTS
        return step(x, average(memory, t, x, models, cohort))

    return local, server


class Row(NamedTuple):
    """A method of a framework beside ours."""

    method: str  # as the framework calls it
    theirs: Run
    ours: Run
    variants: dict[str, Run] = {}  # other published or documented forms that may explain a difference
    faults: dict[str, Run] = {}  # what no form of the paper has; each is shown in docs/audit.md
    line: str = ""  # of their code, where the difference comes from
    note: str = ""
    fails: bool = False  # whether it cannot be run as published


Rows = Iterator[Row]
