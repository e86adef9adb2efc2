"""Exact relations of the newer methods to the others: float64, the same cohorts and mini-batches on both sides."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.small import SIZES, data, federation, path, simulation
from undrift.algorithms.base import Cohort, Down, Up, Work
from undrift.algorithms.fedexp import FedExP
from undrift.algorithms.fednova import FedNova
from undrift.algorithms.sparseloco import SparseLoCo
from undrift.core.errors import BadSetting
from undrift.core.layout import Layout
from undrift.data.federation import federate
from undrift.jobs.registry import algorithm_class
from undrift.simulate.personal_scores import personal_models

N = len(SIZES)
EXACT = {"rtol": 1e-10, "atol": 1e-12}
UNEQUAL: dict[str, Any] = dict(epochs=1, batch=4)  # K_i from 1 to 9
FALLING: dict[str, Any] = dict(epochs=1, batch=4, lr_decay=0.8, lr_drops=(2,), lr_drop=0.5)
MOMENTUM: dict[str, Any] = dict(optimizer="momentum", momentum=0.7)
NESTEROV: dict[str, Any] = dict(optimizer="nesterov", momentum=0.7)

KEPT: dict[str, Any] = dict(optimizer="adamw", keep_moments=True)


def walk(name: str, fields: dict[str, Any], settings: dict[str, Any], rounds: int = 4) -> Tensor:
    return path(simulation(algorithm_class(name)(**({"lr": 0.1} | fields)), **settings), rounds)


@pytest.mark.parametrize(
    ("name", "fields", "other", "others", "settings"),
    [
        ("fednova", MOMENTUM, "fedavg", MOMENTUM, {}),
        ("fednova", NESTEROV, "fedavg", NESTEROV, {}),
        ("fednova", {}, "fedavg", {}, {"steps": 1}),
        ("fedacg", {"lam": 0.0, "beta": 0.7}, "fedprox", {"mu": 0.7}, FALLING),
        ("fedvarp", {}, "fedavg", {}, FALLING | {"cohort": N}),
        ("scaffold-m", {"beta": 1.0}, "scaffold", {}, FALLING),
        ("fedgamma", {"radius": 0.0}, "scaffold", {}, FALLING),
        ("fedspeed", {"alpha": 0.0, "correct": "all", "lam": 4.0}, "feddyn", {"alpha": 0.25}, FALLING),
        ("fedspeed", {"radius": 0.0, "correct": "all", "lam": 4.0}, "feddyn", {"alpha": 0.25}, FALLING),
        ("fedspeed", {"correct": "all"}, "fedspeed", {}, UNEQUAL | {"cohort": N}),
        ("fedsmoo", {"radius": 0.0, "alpha": 0.3}, "feddyn", {"alpha": 0.3}, FALLING),
        ("fedlesam", {"before": "server"}, "fedlesam", {}, UNEQUAL | {"cohort": N}),
        ("fedbabu", {"begin": 0, "tunes": "all"}, "ft", {"begin": 0}, UNEQUAL),
        ("ditto", {"lam": 3.0}, "fedavg", {}, UNEQUAL),
        ("streaming-diloco", {"fragments": 1, "delay": 0, "alpha": 0.0}, "diloco", {}, FALLING),
        ("sparseloco", {"ratio": 1.0, "bits": 0, "beta": 0.3}, "fedavg", KEPT, FALLING),
    ],
)
def test_one_method_is_another(
    name: str, fields: dict[str, Any], other: str, others: dict[str, Any], settings: dict[str, Any]
) -> None:
    torch.testing.assert_close(walk(name, fields, settings), walk(other, others, settings), **EXACT)


@pytest.mark.parametrize(
    ("name", "fields", "other", "others", "settings"),
    [
        ("fednova", {}, "fedavg", {}, UNEQUAL),
        ("fednova", MOMENTUM, "fedavg", MOMENTUM, UNEQUAL),
        ("fednova", NESTEROV, "fednova", MOMENTUM, UNEQUAL),
        ("fedexp", {"eps": 1e-9, "lr": 0.3}, "fedavg", {"lr": 0.3}, UNEQUAL | {"cohort": N}),
        ("fedspeed", {"correct": "all"}, "fedspeed", {}, {}),
        ("fedsmoo", {"dual": "code"}, "fedsmoo", {}, {}),
        ("fedlesam", {"before": "server"}, "fedlesam", {}, {}),
        ("streaming-diloco", {"delay": 0}, "streaming-diloco", {"delay": 2}, {"cohort": N}),
        ("streaming-diloco", {"alpha": 0.0}, "streaming-diloco", {"alpha": 0.5}, {"cohort": N}),
        ("streaming-diloco", {"fragments": 1}, "streaming-diloco", {}, {"cohort": N}),
        ("sparseloco", {"bits": 0, "ratio": 4.0}, "sparseloco", {"ratio": 4.0}, {"cohort": N}),
    ],
)
def test_one_method_is_not_another(
    name: str, fields: dict[str, Any], other: str, others: dict[str, Any], settings: dict[str, Any]
) -> None:
    """Otherwise a relation would hold for nothing."""
    one, two = walk(name, fields, settings, 6), walk(other, others, settings, 6)
    assert (one[-1] - two[-1]).norm() > 1e-6 * two[-1].norm()


@pytest.mark.parametrize(
    ("name", "other", "others"),
    [
        ("fedvarp", "fedavg", {}),
        ("fedlesam", "fedavg", {}),
        ("fedgamma", "fedsam", {}),
        ("scaffold-m", "fedcm", {"alpha": 0.2}),
    ],
)
def test_the_first_round_is_anothers(name: str, other: str, others: dict[str, Any]) -> None:
    torch.testing.assert_close(walk(name, {}, {}, 1), walk(other, others, {}, 1), **EXACT)


def test_fednova_with_constant_gradients_goes_along_their_mean() -> None:
    """FedAvg's mean goes further towards the clients that take more steps."""
    g = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    steps = torch.tensor([[1.0], [9.0]], dtype=torch.float64)
    x, even = torch.zeros(2, dtype=torch.float64), torch.full((2, 1), 0.5, dtype=torch.float64)
    ids = torch.arange(2)
    cohort = Cohort(ids, ids, even, steps, 0.1, 2, Layout(("a",), (torch.Size([2]),)))
    alg = FedNova(lr=0.1)
    up, _ = alg.local_end(Down(x), (), Work(x - 0.1 * steps * g, steps, ()))  # type: ignore[arg-type]
    torch.testing.assert_close(alg.gather((), up, cohort)[0], 0.1 * 5 * g.mean(0), **EXACT)  # type: ignore[arg-type]


@pytest.mark.parametrize(("clients", "expected"), [(2, 1.0), (4, 2.0), (6, 3.0)])
def test_fedexp_with_orthogonal_updates(clients: int, expected: float) -> None:
    """|d|^2 is 1 / M of the updates' mean square: e = M / 2."""
    d, ids = torch.eye(clients, dtype=torch.float64), torch.arange(clients)
    even = torch.full((clients, 1), 1 / clients, dtype=torch.float64)
    layout = Layout(("a",), (torch.Size([clients]),))
    alg, x = FedExP(eps=1e-12), torch.zeros(clients, dtype=torch.float64)
    cohort = Cohort(ids, ids, even, even, 0.1, clients, layout)
    found, state = alg.server_step(alg.server_init(x, clients, layout), x, d.mean(0), Up(d), cohort)
    torch.testing.assert_close(found, -expected * d.mean(0), **EXACT)
    assert float(alg.facts(state)["extrapolation"]) == pytest.approx(expected)


def test_fedacg_with_one_client_and_one_step_is_nesterovs_momentum() -> None:
    """m <- lambda m + eta g(x - lambda m), x <- x - m: torch.optim.SGD(nesterov=True) walks the points x - lambda m."""
    settings: dict[str, Any] = dict(fed=federation((33,)), cohort=1, steps=1, batch=33)
    run = simulation(algorithm_class("fedacg")(lr=0.1, lam=0.6, beta=0.0), **settings)
    y, points = [run.state.x], [run.state.x]
    for _ in range(4):
        run.round()
        points.append(run.state.x)
        y.append(run.state.x - 0.6 * run.state.companion.m)
    b = torch.zeros_like(y[0])
    for t in range(4):
        plain = simulation(algorithm_class("fedavg")(lr=0.1), **settings)
        plain.state = plain.state._replace(x=y[t])
        plain.round()
        g = (y[t] - plain.state.x) / 0.1
        b = 0.6 * b + g
        torch.testing.assert_close(y[t + 1], y[t] - 0.1 * (g + 0.6 * b), **EXACT)
    assert (points[-1] - y[-1]).norm() > 1e-3


@pytest.mark.parametrize("name", ["scaffold-m", "fedgamma", "fedsmoo", "fedvarp"])
def test_what_the_server_keeps_is_the_mean_of_all_clients(name: str) -> None:
    run = simulation(algorithm_class(name)(lr=0.1), cohort=2, weights="size")
    for _ in range(6):
        run.round()
        rows = run.clients.columns[0][: len(run.clients.row)]
        torch.testing.assert_close(run.state.companion[0], rows.sum(0) / N, **EXACT)
    assert len(run.clients.row) > 2 and run.state.companion[0].norm() > 1e-3


def test_with_two_classes_nothing_is_distilled() -> None:
    fed = federate(data(classes=2), "sites", N, 0, torch.device("cpu"))
    two = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))
    ours, fedavg = (
        path(simulation(algorithm_class(name)(lr=0.1, **fields), two, fed), 3)
        for name, fields in (("fedntd", {"beta": 5.0}), ("fedavg", {}))
    )
    torch.testing.assert_close(ours, fedavg, **EXACT)
    assert (walk("fedntd", {"beta": 5.0}, {}) - walk("fedavg", {}, {})).norm() > 1e-3


def test_ditto_without_a_penalty_leaves_what_local_leaves() -> None:
    found = []
    for name, fields in (("ditto", {"lam": 0.0}), ("local", {})):
        run = simulation(algorithm_class(name)(lr=0.1, **fields), cohort=N)
        path(run, 3)
        found.append(torch.stack([served.x for served in personal_models(run)]))
    torch.testing.assert_close(*found, **EXACT)


@pytest.mark.parametrize("name", ["fedper", "fedrep", "fedbabu"])
def test_the_servers_head_never_changes_and_the_body_does(name: str) -> None:
    run = simulation(algorithm_class(name)(lr=0.1, weight_decay=0.1))
    start = {n: t.clone() for n, t in run.model().items()}
    path(run, 3)
    moved = {n.partition(".")[0]: not torch.equal(t, start[n]) for n, t in run.model().items()}
    assert moved == {"lora_A": True, "lora_B": False}
    own = [served.x for served in personal_models(run)]
    assert (torch.equal(own[0], own[1])) == (name == "fedbabu"), "heads differ, unless they have not been tuned yet"


def test_sparseloco_that_forgets_nothing_is_top_k_with_error_feedback() -> None:
    ours = walk("sparseloco", {"ratio": 5.0, "bits": 0, "beta": 1.0}, {"cohort": N})
    torch.testing.assert_close(ours, walk("fedavg", KEPT, {"cohort": N, "compress": "topk:5"}), **EXACT)
    assert not torch.allclose(ours, walk("sparseloco", {"ratio": 5.0, "bits": 0}, {"cohort": N}), rtol=1e-4)


def test_places_that_a_chunk_has_not_are_in_it() -> None:
    """A client may send any; the server must not fail."""
    alg = SparseLoCo(ratio=4.0)
    up = SparseLoCo.Up(torch.zeros(0), torch.zeros(1).byte(), torch.ones(4), torch.full((4,), 255).byte())
    assert alg.unpack(up, 8).tolist() == [0, 0, 0, 0, 0, 0, 0, 1]


def test_a_model_of_one_layer_has_no_last_one() -> None:
    with pytest.raises(BadSetting, match="single layer"):
        simulation(algorithm_class("fedper")(), nn.Sequential(nn.Linear(5, 3))).round()


def test_fedbn_keeps_normalisation_to_the_client() -> None:
    torch.manual_seed(0)
    normed = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3))
    run = simulation(algorithm_class("fedbn")(lr=0.1), normed, federation(tuple(max(n, 4) for n in SIZES)), cohort=N)
    start = {n: t.clone() for n, t in run.model().items()}
    path(run, 3)
    kept = {n: torch.equal(t, start[n]) for n, t in run.model().items() if not n.startswith("1.")}
    assert kept == {
        "0.weight": False,
        "0.bias": True,
        "3.weight": False,
        "3.bias": False,
    }  # BatchNorm undoes the first bias
    assert torch.equal(run.model()["1.weight"], start["1.weight"])
    own = [run.net.layout.split(served.x) for served in personal_models(run)]
    assert not torch.allclose(own[0]["1.weight"], own[1]["1.weight"])
    assert torch.equal(own[0]["0.weight"], own[1]["0.weight"])
