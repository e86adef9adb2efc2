"""DEF around AdamW: two real ranks and simulated workers against plain references, PyTorch's AdamW and local models of it."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import undrift
from tests.dataparallel.cases import gradient, learn, network, samples, vector
from tests.reference import dp as plain
from undrift.compress import make_compressor
from undrift.core.errors import BadSetting
from undrift.dataparallel import adamw
from undrift.dataparallel.command import run_parallel
from undrift.dataparallel.def_ import GroupRates
from undrift.dataparallel.def_adamw import DetachedAdamW
from undrift.dataparallel.workers import SimulatedWorkers

LR, BETAS, EPS, DECAY, STEPS = 0.02, (0.8, 0.95), 1e-3, 0.05, 50
GIVEN: dict[str, Any] = dict(lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, seed=3, compressor="rbgs")
SIZES = [p.numel() for p in network().parameters()]
WHOLE = slice(0, sum(SIZES))
CASES: dict[str, dict[str, Any]] = {
    "0.3": dict(ratio=7, lam=0.3),
    "0": dict(ratio=7, lam=0.0),
    "1": dict(ratio=7, lam=1.0),
    "topk": dict(ratio=7, lam=0.6, compressor="topk"),
    "leader": dict(ratio=7, lam=0.6, compressor="leader"),
    "tensor": dict(ratio=7, lam=0.6, block="tensor"),
    "all": dict(ratio=1, lam=0.6),
}
bare = functools.partial(gradient, decay=0.0)


def apart(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm().clamp(min=1e-300))


def mask_of(settings: dict[str, Any]) -> plain.Mask:
    parts = SIZES if settings.get("block") == "tensor" else [sum(SIZES)]
    if settings.get("compressor") in ("topk", "leader"):
        return (plain.top_mask if settings["compressor"] == "topk" else plain.leader_mask)(parts, settings["ratio"])
    return plain.block_mask(parts, settings["ratio"], GIVEN["seed"])


def reference(case: str, workers: int) -> tuple[Tensor, Tensor]:
    settings = CASES[case]
    found = plain.error_feedback_adamw(
        settings["lam"], vector(network()), bare, mask_of(settings), workers, STEPS, LR, BETAS, EPS, DECAY
    )
    return torch.stack(found[0]), torch.stack(found[1])


def walked(settings: dict[str, Any], rank: int) -> dict[str, Tensor]:
    """The paths of x and of y on this rank."""
    model = network()
    optimizer = undrift.DEFAdamW(model, **GIVEN | settings)
    xs, ys = [], []
    for t in range(STEPS):
        learn(model, optimizer, t, rank)
        xs.append(optimizer.vectors.x.clone())
        with optimizer.evaluating("def"):
            ys.append(vector(model))
    return {"x": torch.stack(xs), "y": torch.stack(ys)}


def grouped(rank: int) -> dict[str, Tensor]:
    """Two groups with rates of their own, a schedule, and a stop half way, where a new optimizer goes on."""

    def made() -> tuple[nn.Module, Any]:
        model = network()
        first, last = list(model[0].parameters()), list(model[2].parameters())  # type: ignore[index]
        groups = [{"params": first}, {"params": last, "lr": 0.01, "weight_decay": 0.0, "betas": (0.5, 0.9)}]
        return model, undrift.DEFAdamW(model, **GIVEN, ratio=7, lam=0.6, params=groups)

    (model, optimizer), (other, again) = made(), made()
    for t in range(10):
        learn(model, optimizer, t, rank)
        if t == 4:
            again.load_state_dict(optimizer.state_dict())
        if t > 4:
            learn(other, again, t, rank)
    return {"whole": vector(model), "resumed": vector(other), "v": optimizer.vectors.v, "again": again.vectors.v}


def on_rank(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    found: dict[str, Any] = {case: walked(settings, rank) for case, settings in CASES.items()}
    torch.save(found | {"grouped": grouped(rank)}, folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("adamw")
    torch.multiprocessing.spawn(on_rank, (folder,), nprocs=2)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("case", CASES)
def test_real_ranks_equal_the_reference(on_ranks: list[dict[str, Any]], case: str) -> None:
    x, y = reference(case, 2)
    for each in on_ranks:
        assert torch.equal(each[case]["x"], on_ranks[0][case]["x"]), "x has the same bits on all ranks"
        assert apart(each[case]["x"], x) < 1e-10 and apart(each[case]["y"], y) < 1e-10
    assert apart(x[-1], x[0]) > 0.1, "something was learnt"
    assert case == "all" or apart(x[-1], y[-1]) > 1e-3, "something was dropped"


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("case", CASES)
def test_simulated_workers_are_real_ranks(on_ranks: list[dict[str, Any]], case: str, workers: int) -> None:
    settings, together = CASES[case], SimulatedWorkers(workers)
    method = DetachedAdamW(settings["lam"])
    how = settings.get("compressor", "rbgs"), settings.get("block", "flat"), settings["ratio"], GIVEN["seed"]
    made = make_compressor(*how, SIZES)
    state = method.start(vector(network()), together)
    z, expected = state.x.expand(workers, -1).clone(), reference(case, workers)[0]
    for t in range(STEPS):
        g = torch.stack([bare(t, k, z[k]) for k in range(workers)])
        method.step(state, g, [GroupRates(WHOLE, LR, *BETAS, EPS, DECAY)], t, made, together)
        method.point(state, z)
        assert workers > 2 or torch.equal(state.x, on_ranks[0][case]["x"][t]), t
        assert apart(state.x, expected[t]) < 1e-10


def test_lambda_one_is_partial_synchronisation_of_models_that_pytorch_trains(on_ranks: list[dict[str, Any]]) -> None:
    means = plain.local_adamw(vector(network()), bare, mask_of(CASES["1"]), 2, STEPS, LR, BETAS, EPS, DECAY)
    assert apart(on_ranks[0]["1"]["y"], torch.stack(means)) < 1e-10
    assert apart(on_ranks[0]["0.3"]["y"], torch.stack(means)) > 1e-3


def test_nothing_dropped_is_the_mean_of_pytorchs_steps(on_ranks: list[dict[str, Any]]) -> None:
    everything = plain.block_mask([sum(SIZES)], 1, 0)
    means = plain.local_adamw(vector(network()), bare, everything, 2, STEPS, LR, BETAS, EPS, DECAY)
    assert apart(on_ranks[0]["all"]["x"], torch.stack(means)) < 1e-10


def test_a_checkpoint_has_the_second_moments(on_ranks: list[dict[str, Any]]) -> None:
    for each in on_ranks:
        found = each["grouped"]
        assert torch.equal(found["whole"], found["resumed"]) and torch.equal(found["v"], found["again"])
    assert not torch.equal(on_ranks[0]["grouped"]["v"], on_ranks[1]["grouped"]["v"])


@pytest.mark.parametrize(
    ("settings", "which"),
    [
        (dict(ratio=1, lam=0.3), "x"),
        (dict(ratio=7, lam=1.0), "y"),
        (dict(ratio=7, lam=1.0, compressor="topk"), "y"),
        (dict(ratio=7, lam=1.0, block="shuffle"), "y"),
    ],
)
def test_one_worker_is_pytorchs_adamw(settings: dict[str, Any], which: str) -> None:
    """If nothing is dropped; and y if lambda is 1, whatever is dropped."""
    other = network()
    theirs = torch.optim.AdamW(other.parameters(), LR, BETAS, EPS, DECAY)
    found = walked(settings, 0)[which]
    for t in range(STEPS):
        learn(other, theirs, t, 0)
        assert apart(found[t], vector(other)) < 1e-10
    changed = walked(settings | dict(lam=0.5), 0)[which]
    assert settings["ratio"] == 1 or apart(changed, found) > 1e-4


def test_the_uncompressed_method_is_pytorchs_on_the_mean_gradient() -> None:
    together, state = SimulatedWorkers(3), adamw.METHOD.start(vector(network()), SimulatedWorkers(3))
    weight = vector(network()).requires_grad_()
    theirs = torch.optim.AdamW([weight], LR, BETAS, EPS, DECAY)
    made = make_compressor("rbgs", "flat", 1, 0, SIZES)
    for t in range(STEPS):
        g = torch.stack([bare(t, k, state.x) for k in range(3)])
        weight.grad = g.mean(0)
        theirs.step()
        adamw.METHOD.step(state, g, [GroupRates(WHOLE, LR, *BETAS, EPS, DECAY)], t, made, together)
        assert apart(state.x, weight.detach()) < 1e-10
    assert together.sent == STEPS * 2 * 2 * 8 * sum(SIZES)


def test_weights_without_a_gradient_stay_as_they_are() -> None:
    model = nn.ModuleDict({"used": nn.Linear(5, 3), "idle": nn.Linear(5, 3)}).double()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = undrift.DEFAdamW(model, **GIVEN, ratio=2, lam=0.6)
    for t in range(3):
        optimizer.zero_grad()
        inputs, targets = samples(t, 0)
        nn.functional.cross_entropy(model["used"](inputs), targets).backward()
        optimizer.step()
    assert {n for n, p in model.named_parameters() if not torch.equal(p, before[n])} == {"used.weight", "used.bias"}


def test_the_command_runs_both_and_a_run_can_be_resumed(tmp_path: Path) -> None:
    common: dict[str, Any] = dict(workers=2, batch=8, steps=10, lr=0.01, weight_decay=0.01, ratio=4, momentum2=0.95)
    for method in ("adamw", "def-adamw"):
        whole = run_parallel(method=method, rounds=4, **common)
        losses = [r["train_loss"] for r in whole.records]
        assert losses[-1] < 0.8 * losses[0], method
        run_parallel(method=method, rounds=2, out=tmp_path / method, **common)
        again = run_parallel(out=tmp_path / method, resume=True, rounds=4)
        assert all(torch.equal(t, whole.model[name]) for name, t in again.model.items())
        assert again.records[-1]["x_loss" if method == "def-adamw" else "loss"] > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(betas=(0.9, 1.0)), "betas must be two numbers"),
        (dict(betas=(0.9,)), "betas must be two numbers"),
        (dict(eps=-1.0), "eps must be a number of at least 0"),
        (dict(lam=2.0), r"lam must lie in \[0, 1\]"),
    ],
)
def test_mistakes_are_explained(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(BadSetting, match=message):
        undrift.DEFAdamW(network(), **settings)
    with pytest.raises(BadSetting, match="needs momenta of less than 1"):
        run_parallel(method="def-adamw", momentum=1.0)
