"""The compressed optimizers inside frameworks: DDP put around the model later, and evaluation and checkpoints as theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import undrift
from tests.dataparallel.cases import learn, network, refused, samples, vector
from undrift.core.errors import BadRunFolder, BadSetting

SETTINGS: dict[str, Any] = dict(lr=0.1, momentum=0.9, ratio=7)


class Around(nn.Module):
    """What a framework may put between DDP and the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.model(x)
        return out


def wrapped_later(rank: int) -> dict[str, torch.Tensor]:
    """DEF on the raw module, DDP around it later, with or without a layer in between; and DDP first, which is known to work."""
    found = {}
    for name in ("first", "later", "around"):
        model = network()
        ddp = DistributedDataParallel(model) if name == "first" else None
        optimizer = undrift.DEF(model if ddp is None else ddp, **SETTINGS)
        ddp = ddp or DistributedDataParallel(model if name == "later" else Around(model))
        for t in range(4):
            learn(ddp, optimizer, t, rank)
        found[name] = vector(model)
    return found


def refusals(rank: int) -> dict[str, str]:
    """Gradients that are averaged already are not taken for a rank's own."""
    model = network()
    optimizer = undrift.DEF(model.parameters(), **SETTINGS)  # knows no module
    ddp = DistributedDataParallel(model)
    same = network()
    plain = undrift.DEF(same, **SETTINGS)
    return {
        "averaged": refused(lambda: learn(ddp, optimizer, 0, rank)),
        "same samples": refused(lambda: learn(same, plain, 0, 0)),
    }


def checkpoints(rank: int, folder: Path) -> dict[str, Any]:
    """eval(), a checkpoint of rank 0 alone, train(); and what two ranks make of the checkpoint."""
    model = network()
    optimizer = undrift.DEF(model, **SETTINGS)
    for t in range(5):
        learn(model, optimizer, t, rank)
    z = vector(model)
    with optimizer.evaluating("def"):
        y = vector(model)
    optimizer.eval()
    optimizer.eval()  # also twice
    found: dict[str, Any] = {"eval is y": torch.equal(vector(model), y), "z is not y": float((z - y).norm())}
    found["step"] = refused(optimizer.step)
    found["evaluating"] = refused(lambda: optimizer.evaluating().__enter__())
    if rank == 0:
        torch.save(optimizer.state_dict(), folder / "saved.pt")
    errors = optimizer.workers.all_rows(optimizer.vectors.e).mean(0)
    optimizer.train()
    optimizer.train()
    found["train is z"] = torch.equal(vector(model), z)
    learn(model, optimizer, 5, rank)
    dist.barrier()
    again = network(1)
    resumed = undrift.DEF(again, **SETTINGS)
    resumed.load_state_dict(torch.load(folder / "saved.pt"))
    with resumed.evaluating("def"):
        found["resumed y"] = float((vector(again) - y).norm())
    found["errors"] = float((resumed.vectors.e - errors).norm()), float(errors.norm())
    learn(again, resumed, 5, rank)
    found["step after"] = resumed.t
    if rank == 0:
        torch.save(optimizer.state_dict(), folder / "alone.pt")
    dist.barrier()
    try:
        resumed.load_state_dict(torch.load(folder / "alone.pt"))
        found["alone"] = ""
    except BadRunFolder as error:
        found["alone"] = str(error)
    return found


def on_rank(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    found = {"wrapped": wrapped_later(rank), "refused": refusals(rank), "checkpoints": checkpoints(rank, folder)}
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("guests")
    torch.multiprocessing.spawn(on_rank, (folder,), nprocs=2)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def test_a_ddp_that_comes_later_keeps_gradients_local(on_ranks: list[dict[str, Any]]) -> None:
    for found in on_ranks:
        for name in ("later", "around"):
            assert torch.equal(found["wrapped"][name], found["wrapped"]["first"]), name
    assert not torch.equal(on_ranks[0]["wrapped"]["first"], on_ranks[1]["wrapped"]["first"]), "x - lambda e_k"


def test_averaged_gradients_are_refused(on_ranks: list[dict[str, Any]]) -> None:
    for found in on_ranks:
        for line in found["refused"].values():
            assert "all ranks have the same gradients in the first step" in line and "DDP module" in line


def test_eval_and_train_and_checkpoints_of_one_rank(on_ranks: list[dict[str, Any]]) -> None:
    for each in on_ranks:
        found = each["checkpoints"]
        assert found["eval is y"] and found["z is not y"] > 1e-3 and found["train is z"]
        assert "call train()" in found["step"] and "eval()" in found["evaluating"]
        assert found["resumed y"] < 1e-12 and found["errors"][0] < 1e-12 < 1e-3 < found["errors"][1]
        assert found["step after"] == 6
    assert on_ranks[0]["checkpoints"]["alone"] == ""
    assert "call eval() on all ranks" in on_ranks[1]["checkpoints"]["alone"]


def test_one_process_has_eval_too() -> None:
    model = network()
    optimizer = undrift.SAEF(model, **SETTINGS)
    learn(model, optimizer, 0, 0)
    z, x = vector(model), optimizer.vectors.x.clone()
    optimizer.eval()
    assert torch.equal(vector(model), x) and not torch.equal(x, z)
    with pytest.raises(BadSetting, match="call train"):
        learn(model, optimizer, 1, 0)
    optimizer.train()
    assert torch.equal(vector(model), z)
    inputs, targets = samples(1, 0)
    F.cross_entropy(model(inputs), targets).backward()
    optimizer.step()
