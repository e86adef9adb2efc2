"""The common suite: every file in algorithms/ goes through it by being there."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from tests.small import SIZES, path, simulation
from undrift.algorithms.base import Cohort
from undrift.algorithms.fedavg import FedAvg
from undrift.algorithms.personal import Served
from undrift.core.errors import UnknownName
from undrift.core.layout import Layout
from undrift.core.names import names
from undrift.core.papers import BIBLIOGRAPHY, bibliography, papers_of
from undrift.core.trees import leaves, map_leaves, nbytes
from undrift.dataparallel.methods import FILES as METHODS
from undrift.jobs.registry import algorithm_class
from undrift.jobs.shipped import PAPERS
from undrift.oracle.oracle import NoData, Objective
from undrift.pipeline.engines import METHODS as PIPELINE
from undrift.round.aggregate import NAMES as RULES
from undrift.round.clients import train

ALGORITHMS = names("algorithms")
GOLDEN = Path(__file__).parents[1] / "golden"

# Settings at which a method is FedAvg, the federation it takes, and for how many rounds; None: there are none.
NEUTRAL: dict[str, tuple[dict[str, Any], dict[str, Any], int] | None] = {
    "domo": ({"beta": 0.0, "momentum": 0.0, "beta1": 0.0}, {}, 4),
    "domo-s": ({"beta": 0.0, "momentum": 0.0, "beta1": 0.0}, {}, 4),
    "dp-ftrl": ({"beta1": 0.0, "tree": 1}, {}, 4),
    "fedadagrad": None,  # a normalised step is never d itself
    "fedadam": None,
    "fedavg": ({}, {}, 4),
    "fedavglm": ({"momentum": 0.0}, {}, 4),
    "fedavglm-z": ({"momentum": 0.0}, {}, 4),
    "fedavgm": ({"beta1": 0.0}, {}, 4),
    "fedavgslm": ({"momentum": 0.0, "beta1": 0.0}, {}, 4),
    "fedavgslm-z": ({"momentum": 0.0, "beta1": 0.0}, {}, 4),
    "fedcm": ({"alpha": 1.0}, {}, 4),
    "feddyn": None,  # alpha must be positive
    "fedmim": ({"alpha": (0.0,), "beta": (0.0,)}, {}, 4),
    "fedprox": ({"mu": 0.0}, {}, 4),
    "fedproxm": ({"mu": 0.0, "beta1": 0.0}, {}, 4),
    "fedsam": ({"radius": 0.0}, {}, 4),
    "fedyogi": None,
    "gradma": ({"prev": "global", "beta1": 0.0, "slots": 0}, {"steps": 1}, 4),
    "gradma-s": ({"beta1": 0.0, "slots": 0}, {}, 4),
    "gradma-w": ({"prev": "global"}, {"steps": 1}, 4),
    "fedmlb": ({"lambda2": 0.0, "lambda3": 0.0}, {}, 4),
    "fedmlbm": ({"lambda2": 0.0, "lambda3": 0.0, "beta1": 0.0}, {}, 4),
    "mifa": ({}, {"cohort": 6}, 4),
    "mifam": ({"beta1": 0.0}, {"cohort": 6}, 4),
    "mime": ({"beta": 0.0}, {"steps": 1, "batch": 100, "cohort": 1}, 4),  # then c is the client's own gradient
    "mimelite": ({"beta": 0.0}, {}, 4),
    "mofedsam": ({"radius": 0.0, "alpha": 1.0}, {}, 4),
    "moon": ({"mu": 0.0}, {}, 4),
    "moonm": ({"mu": 0.0, "beta1": 0.0}, {}, 4),
    "scaffold": ({}, {}, 1),  # the control variates are zero in the first round
    "local": None,  # the server's model stays
    "centralized": None,  # trains on other batches
    "ft": ({}, {}, 4),
    "softpull": ({"lam": 1 / 6}, {"cohort": 6}, 4),
    "apfl": ({}, {}, 4),
    "per-fedavg": ({"alpha": 0.0, "split": False}, {}, 4),
    "pfedme": ({"lam": 1.0, "lr": 1.0, "inner_lr": 0.1, "inner_steps": 1, "reset": True}, {}, 4),
    "fedsm": ({}, {}, 4),
    "fedsm-extra": ({}, {}, 4),
    "ensemble": ({}, {}, 4),
    "fednova": ({}, {}, 4),  # all take as many steps
    "fedexp": ({"eps": 1e9}, {}, 4),
    "fedacg": ({"lam": 0.0, "beta": 0.0}, {}, 4),
    "diloco": ({"beta1": 0.0, "server_lr": 1.0, "optimizer": "sgd"}, {}, 4),
    "streaming-diloco": (
        {"fragments": 1, "delay": 0, "alpha": 0.0, "beta": 0.0, "server_lr": 1.0, "optimizer": "sgd"},
        {},
        4,
    ),
    "sparseloco": ({"ratio": 1.0, "bits": 0, "optimizer": "sgd"}, {}, 4),
    "fedvarp": ({}, {"cohort": 6}, 4),
    "scaffold-m": ({"beta": 1.0}, {}, 1),
    "fedlesam": ({"radius": 0.0}, {}, 4),
    "fedgamma": ({"radius": 0.0}, {}, 1),
    "fedspeed": None,  # the proximal term must be there
    "fedsmoo": None,
    "fedntd": ({"beta": 0.0}, {}, 4),
    "ditto": ({}, {}, 4),
    "fedper": None,  # the server's head stays
    "fedrep": None,
    "fedbabu": None,
    "fedbn": ({}, {}, 4),  # without normalisation
    "ffa-lora": None,  # trains a part of the model, see test_adapters.py
    "rolora": None,
    "fedasync": ({"mu": 0.0, "mixing_rate": 1.0}, {}, 4),  # nobody is stale
    "fedbuff": ({}, {}, 4),
}
# Methods whose server's model is FedAvg's for all settings; what they leave the clients is tested in reference/test_personal.py.
# FedNova's steps are equal here, FedExP's clients agree, FedBN's model has no normalisation, and nobody is stale for FedBuff.
FEDAVG_INSIDE = (
    "fedavg", "ft", "apfl", "fedsm", "fedsm-extra", "ensemble", "ditto", "fednova", "fedexp", "fedbn", "fedbuff",
)  # fmt: skip
GENTLE: dict[str, dict[str, Any]] = {
    "fedavgslm": {"lr": 0.002},  # momentum on both sides, kept between rounds: 100 times the rate
    "pfedme": {"lam": 2.0},
}
# Models sent down and up by each client of a round, and gradients in each local step, as the method's page says.
COSTS = {
    "domo": ("inferred", 1, 1),
    "domo-s": ("inferred", 1, 1),
    "dp-ftrl": (1, 1, 1),
    "fedadagrad": (1, 1, 1),
    "fedadam": (1, 1, 1),
    "fedavg": (1, 1, 1),
    "fedavglm": (2, 2, 1),
    "fedavglm-z": (1, 1, 1),
    "fedavgm": (1, 1, 1),
    "fedavgslm": (2, 2, 1),
    "fedavgslm-z": (1, 1, 1),
    "fedcm": (2, 1, 1),
    "feddyn": (1, 1, 1),
    "fedmim": ("broadcast", 1, 1),
    "fedprox": (1, 1, 1),
    "fedproxm": (1, 1, 1),
    "fedsam": (1, 1, 2),
    "fedyogi": (1, 1, 1),
    "gradma": (1, 1, 3),
    "gradma-s": (1, 1, 1),
    "gradma-w": (1, 1, 3),
    "fedmlb": (1, 1, 1),
    "fedmlbm": (1, 1, 1),
    "mifa": (1, 1, 1),
    "mifam": (1, 1, 1),
    "mime": (3, 2, 2),
    "mimelite": (2, 2, 1),
    "mofedsam": (2, 1, 2),
    "moon": (1, 1, 1),
    "moonm": (1, 1, 1),
    "scaffold": (2, 2, 1),
    "local": (0, 0, 1),
    "centralized": (1, 1, 1),
    "ft": (1, 1, 1),
    "softpull": ("inferred", 1, 1),
    "apfl": (1, 1, 2),
    "per-fedavg": (1, 1, 2),
    "pfedme": (1, 1, 5),
    "fedsm": ("selector", 2, 3),
    "fedsm-extra": (2, 2, 2),
    "ensemble": (2, 2, 2),
    "fednova": (1, 1, 1),
    "fedexp": (1, 1, 1),
    "fedacg": (1, 1, 1),
    "diloco": (1, 1, 1),
    "streaming-diloco": ("fragment", None, 1),
    "sparseloco": (1, None, 1),
    "fedvarp": (1, 1, 1),
    "scaffold-m": (2, 2, 1),
    "fedlesam": (1, 1, 1),
    "fedgamma": (2, 2, 2),
    "fedspeed": (1, 1, 2),
    "fedsmoo": (2, 2, 2),
    "fedntd": (1, 1, 1),
    "ditto": (1, 1, 2),
    "fedper": (1, 1, 1),
    "fedrep": (1, 1, 1),
    "fedbabu": (1, 1, 1),
    "fedbn": (1, 1, 1),
    "ffa-lora": (1, 1, 1),  # its model has no A
    "rolora": (1, "factor", 1),
    "fedasync": (1, 1, 1),
    "fedbuff": (1, 1, 1),
}
# Bytes that a client sends instead: a fragment; a place, four levels and a byte for the bins of one entry of 40.
SENT_UP = {"streaming-diloco": 10 * 8, "sparseloco": 2 + 4 * 8 + 1}


def make(name: str, **fields: Any) -> Any:
    return algorithm_class(name)(**({"lr": 0.1} | fields))


class Quadratic:
    """f_i(x) = (x - c_i)' diag(h_i) (x - c_i) / 2 for clients [...], the same at every step but for the k-th shift."""

    def __init__(self, h: Tensor, c: Tensor, k: int) -> None:
        self.h, self.c, self.k, self.calls = h, c, k, 0
        self.lead = h.shape[:-1]
        self.buffers = h.new_zeros(*self.lead, 0)
        self.layout = Problem.layout
        self.loss = h.new_zeros(*self.lead, 1)

    def grad(self, x: Tensor, objective: Objective | None = None, *others: Tensor, track: bool = True) -> Tensor:
        self.calls += 1
        return self.h * (x - self.c) + 0.1 * self.k

    def grads(self, *points: Tensor) -> list[Tensor]:
        return [self.grad(x) for x in points]

    def step(self, x: Tensor, rate: float | Tensor) -> Tensor:
        return x - rate * self.grad(x)

    @property
    def samples(self) -> Tensor:
        return self.h.new_full((*self.lead, 1), 2.0 + self.k)

    def at(self, buffers: Tensor) -> Quadratic:
        return self

    def other(self, name: str, buffers: Tensor) -> Quadratic:
        return Quadratic(self.h[..., :3] + 0.2, self.c[..., :3], self.k)

    def parts(self, count: int) -> list[Quadratic]:
        return [Quadratic(self.h, self.c, self.k + j) for j in range(count)]


class Problem:
    """Five clients with quadratics in four dimensions; the third takes a step less."""

    S, P, K = 5, 4, 3
    layout: ClassVar[Layout] = Layout(("lora_A.weight", "lora_B.weight"), (torch.Size([3]), torch.Size([1])))

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(0)
        self.h = torch.rand(self.S, self.P, dtype=torch.float64, generator=random) + 0.5
        self.c = torch.randn(self.S, self.P, dtype=torch.float64, generator=random)
        self.x = torch.randn(self.P, dtype=torch.float64, generator=random)
        self.live = torch.ones(self.K, self.S, 1, dtype=torch.bool)
        self.live[-1, 2] = False

    def part(self, alg: Any, down: Any, client: Any, take: Any) -> Any:
        """The client part for those clients that `take` picks out of [S, ...]."""
        steps = ((Quadratic(take(self.h), take(self.c), k), take(self.live[k])) for k in range(self.K))
        none = torch.zeros(0, dtype=torch.float64)
        return train(alg, down, client, none, steps, NoData(none, self.layout))  # type: ignore[arg-type]

    def states(self, alg: Any) -> tuple[Any, Any]:
        """What goes down and what the clients [S] keep, neither of them all zeros."""
        companion = map_leaves(lambda t: t + 0.3, self.companion(alg))
        even = torch.full((self.S, 1), 1 / self.S, dtype=torch.float64)
        down = alg.broadcast(self.x, companion, self.cohort(even))
        fresh = alg.client_init(
            map_leaves(lambda t: t.unsqueeze(-2), down), torch.arange(self.S), self.x.new_zeros(1, 0)
        )
        return down, map_leaves(
            lambda t: t.expand(self.S, t.shape[-1]) + 0.2 * torch.arange(1.0, 6.0).unsqueeze(-1).double(), fresh
        )

    def companion(self, alg: Any) -> Any:
        none = self.x[:0]
        starts = {"model": Served(self.x, none), "selector": Served(0.5 * self.x[:3], none)}
        return alg.companion_networks(alg.companion_init(self.x, self.S), starts)

    def cohort(self, weight: Tensor) -> Cohort:
        steps = self.live.sum(0).double().expand(*weight.shape[:-2], self.S, 1)
        return Cohort(torch.arange(self.S), torch.arange(self.S), weight, steps, 0.1, 10, self.layout)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_leading_shapes_agree(name: str) -> None:
    """One client [P], a cohort [S, P] and two stacked runs [2, S, P] compute the same; the third catches `dim=0` slips."""
    alg, problem = make(name), Problem()
    down, client = problem.states(alg)
    shared = map_leaves(lambda t: t.unsqueeze(-2), down)
    cohort = problem.part(alg, shared, client, lambda t: t)
    for s in range(problem.S):
        alone = problem.part(alg, down, map_leaves(lambda t, s=s: t[s], client), lambda t, s=s: t[s])
        for one, many in zip(leaves(alone), leaves(cohort), strict=True):
            torch.testing.assert_close(one, many[s], rtol=1e-14, atol=1e-14)

    double = lambda t: torch.stack([t, t.flip(-2)]) if t.dim() > 1 else torch.stack([t, t])  # noqa: E731
    twice = problem.part(alg, map_leaves(lambda t: torch.stack([t, t]), shared), map_leaves(double, client), double)
    for many, runs in zip(leaves(cohort), leaves(twice), strict=True):
        torch.testing.assert_close(runs[0], many, rtol=1e-14, atol=1e-14)
        torch.testing.assert_close(runs[1], many.flip(0), rtol=1e-14, atol=1e-14)

    weight = torch.rand(problem.S, 1, dtype=torch.float64)
    weight = weight / weight.sum()
    companion = problem.companion(alg)
    d, after = alg.gather(companion, cohort.up, problem.cohort(weight))
    stacked = problem.cohort(double(weight))._replace(steps=double(problem.cohort(weight).steps))
    d2, after2 = alg.gather(map_leaves(lambda t: torch.stack([t, t]), companion), twice.up, stacked)
    for one, runs in zip((d, *leaves(after)), (d2, *leaves(after2)), strict=True):
        for run in runs[:1] if one.dim() > 1 else runs:  # rows by client are in another order in the second run
            torch.testing.assert_close(run, one, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_inputs_are_untouched(name: str) -> None:
    alg, problem = make(name), Problem()
    down, client = problem.states(alg)
    shared = map_leaves(lambda t: t.unsqueeze(-2), down)
    server = alg.server_init(problem.x, problem.S, problem.layout)
    companion = problem.companion(alg)
    cohort = problem.cohort(torch.full((problem.S, 1), 1 / problem.S, dtype=torch.float64))
    before = [t.clone() for t in leaves((down, client, companion, problem.x))]
    x = problem.x
    for _ in range(2):  # the second time the server's state is no longer the first one
        answers = problem.part(alg, shared, client, lambda t: t)
        sent = [t.clone() for t in leaves(answers.up)]
        d, after = alg.gather(companion, answers.up, cohort)
        in_place = hasattr(getattr(server, "memory", None), "rows")  # all but a memory's rows, which it writes into
        watched = server._replace(memory=server.memory._replace(rows=d)) if in_place else server
        held = [t.clone() for t in leaves((watched, d))]
        new, moved = alg.server_step(server, x, d, answers.up, cohort)
        assert all(torch.equal(a, b) for a, b in zip(held, leaves((watched, d)), strict=True))
        after = alg.companion_step(after, answers.up, cohort, x, new)
        alg.receive(answers.client, alg.reply(after, answers.up, answers.buffers, cohort))
        assert all(torch.equal(a, b) for a, b in zip(sent, leaves(answers.up), strict=True))
        x, server = new, moved
    assert all(torch.equal(a, b) for a, b in zip(before, leaves((down, client, companion, problem.x)), strict=True))


@pytest.mark.parametrize("name", [n for n in ALGORITHMS if NEUTRAL[n] is not None])
def test_equals_fedavg_at_neutral_settings(name: str) -> None:
    fields, federation, rounds = NEUTRAL[name] or ({}, {}, 0)
    neutral, fedavg = simulation(make(name, **fields), **federation), simulation(FedAvg(lr=0.1), **federation)
    torch.testing.assert_close(path(neutral, rounds), path(fedavg, rounds), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", [n for n in ALGORITHMS if n not in FEDAVG_INSIDE])
def test_differs_from_fedavg_at_its_defaults(name: str) -> None:
    ours, fedavg = path(simulation(make(name)), 4), path(simulation(FedAvg(lr=0.1)), 4)
    if name == "ffa-lora":  # the places of B, under another A
        fedavg = fedavg[:, -ours.shape[1] :]
    assert (ours[-1] - fedavg[-1]).norm() > 1e-6 * fedavg[-1].norm()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_descends(name: str) -> None:
    run = simulation(make(name, **GENTLE.get(name, {})), cohort=6, eval_every=1)
    losses = [run.round().train_loss for _ in range(30)]
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_restoring_in_the_middle_changes_nothing(name: str) -> None:
    whole, first, second = (simulation(make(name, momentum=0.5)) for _ in range(3))
    for _ in range(7):
        whole.round()
    for _ in range(3):
        first.round()
    second.restore({k: v.clone() for k, v in first.tensors().items()}, first.t)
    for _ in range(4):
        record = second.round()
    kept = second.tensors()
    assert record.round == 7 and kept.keys() == whole.tensors().keys()
    assert all(torch.equal(kept[k], v) for k, v in whole.tensors().items())


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("execution", ["stacked", "pool"])
def test_bytes_and_gradients_are_as_its_page_says(name: str, execution: str) -> None:
    down, up, gradients = COSTS[name]
    cohort = 1 if name == "centralized" else 4
    run = simulation(make(name), cohort=cohort, steps=3, execution=execution)
    model, before = nbytes(run.net.without_padding(run.state.x, "model")), set()
    chooser = (
        nbytes(run.net.without_padding(run.alg.selector(run.state.companion).x, "selector")) if name == "fedsm" else 0
    )
    for _ in range(3):
        ids = set(run.sampling.invite(run.t)[0].tolist())
        record = run.round()
        if down == "broadcast":  # x to everybody
            models = 6
        elif down == "inferred":  # one model, and another one to those who missed the round before
            models = 4 + (len(ids - before) if before else 0)
        elif down == "fragment":
            models = 0
        else:
            models = cohort * (2 if down == "selector" else int(down))
        sent_down, sent_up = models * model + cohort * chooser, cohort * chooser
        if down == "fragment":  # a quarter of 39 numbers and a count; to those who missed the round before all
            missed = len(ids - before) if before else 0
            sent_down = cohort * (10 * 8 + 8) + missed * (model - 10 * 8)
        if name in SENT_UP:
            sent_up = cohort * SENT_UP[name]
        elif up == "factor":  # B, A, B
            sent_up += cohort * nbytes(run.state.x[: 15 if record.round % 2 else 24])
        else:
            sent_up += cohort * int(up) * model
        assert (record.bytes_down, record.bytes_up) == (sent_down, sent_up)
        # Mime and MimeLite take one more pass over the local data, in batches of eight.
        whole = sum(-(-SIZES[i] // 8) for i in ids) if name.startswith("mime") else 0
        assert record.gradients == cohort * 3 * gradients + whole
        before = ids


@pytest.mark.parametrize("name", ALGORITHMS)
def test_golden(name: str) -> None:
    """The first three rounds in float64 are those of the last deliberate change (`make golden`)."""
    points = path(simulation(make(name), cohort=4), 3)
    found = [[float(p.sum()), float(p.norm()), float(p[7])] for p in points]
    file = GOLDEN / f"{name}.json"
    if os.environ.get("UNDRIFT_WRITE_GOLDEN"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(found) + "\n")
    expected = torch.tensor(json.loads(file.read_text()), dtype=torch.float64)
    torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), expected, rtol=1e-10, atol=1e-12)


def test_every_file_registers_one_algorithm_with_a_paper() -> None:
    assert set(NEUTRAL) == set(COSTS) == set(ALGORITHMS)
    for name in ALGORITHMS:
        assert papers_of(name), f"{name} needs a BibTeX entry in algorithms/papers.bib"


def test_the_bibliography_names_what_there_is_and_each_paper_once() -> None:
    tables = {file.stem.partition("-")[0] for file in PAPERS.glob("*.toml")}  # whose pages of the site cite a paper
    assert set(bibliography()) == {*ALGORITHMS, *METHODS, *PIPELINE, *RULES, *tables}
    entries = {entry for name in bibliography() for entry in papers_of(name)}
    assert len({entry.partition(",")[0] for entry in entries}) == len(entries) == BIBLIOGRAPHY.read_text().count("\n@")
    assert [entry.partition(",")[0] for entry in papers_of("gradma-w+gradma-s")] == ["@inproceedings{luo2023gradma"]
    with pytest.raises(UnknownName, match="did you mean 'gradma-s'"):
        papers_of("gradma_s")
