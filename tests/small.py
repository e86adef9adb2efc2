"""Small federations that many tests share."""

from __future__ import annotations

import math
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
import torch
from torch import nn

from undrift.core.run_files import ROUNDS, read_settings
from undrift.core.seals import Place, append_lines, read_lines, seal_toml
from undrift.data.batches import Plan
from undrift.data.dataset import Dataset
from undrift.data.federation import Federation, federate
from undrift.data.from_user import dataset_from
from undrift.oracle.net import Net
from undrift.simulate.evaluate import accuracy
from undrift.simulate.settings import Settings
from undrift.simulate.simulation import Simulation

CPU = torch.device("cpu")
ADAPTERS = ("ffa-lora", "rolora")  # need a model with adapters
DEEPER = ("moon", "moonm", "fedmlb", "fedmlbm", "fedper", "fedrep", "fedbabu")  # need layers before the last one
SIZES = (3, 20, 9, 33, 5, 14)  # unequal clients
QUICK = {"clients": 12, "cohort": 4, "steps": 2, "batch": 8, "model": "logreg", "eval_every": 3, "execution": "stacked"}


def data(sizes: tuple[int, ...] = SIZES, features: int = 5, classes: int = 3, seed: int = 0) -> Dataset:
    """Gaussian classes, each client with a shift of its own."""
    random = np.random.default_rng(seed)
    centres = random.normal(size=(classes, features))
    clients = []
    for n in sizes:
        y = random.integers(0, classes, n)
        clients.append((centres[y] + random.normal(size=(n, features)) + random.normal(size=features), y))
    y = random.integers(0, classes, 60)
    return dataset_from((clients, (centres[y] + random.normal(size=(60, features)), y)))


def federation(sizes: tuple[int, ...] = SIZES, **settings: Any) -> Federation:
    return federate(data(sizes, **settings), "sites", len(sizes), 0, CPU)


def tiny_mlp(seed: int = 0, features: int = 5, classes: int = 3) -> nn.Module:
    """Two layers, named like the factors of an adapter, so that methods for adapters train it, too."""
    torch.manual_seed(seed)
    layers = {"lora_A": nn.Linear(features, 4), "tanh": nn.Tanh(), "lora_B": nn.Linear(4, classes)}
    return nn.Sequential(OrderedDict(layers))


class Adapted(nn.Module):
    """A frozen layer with an adapter of rank 2, whose tensors are called as peft calls them; B begins as zero."""

    def __init__(self, wide: int, out: int) -> None:
        super().__init__()
        self.base_layer = nn.Linear(wide, out).requires_grad_(False)
        self.lora_A, self.lora_B = nn.Linear(wide, 2, bias=False), nn.Linear(2, out, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base_layer(x) + 2.0 * self.lora_B(self.lora_A(x))
        return out


def adapted(seed: int = 0, features: int = 5, classes: int = 3) -> nn.Module:
    """Two layers with adapters, and a head that is trained whole."""
    torch.manual_seed(seed)
    return nn.Sequential(Adapted(features, 4), nn.Tanh(), Adapted(4, 4), nn.Tanh(), nn.Linear(4, classes))


def adapted_logreg(shape: tuple[int, ...], classes: int) -> nn.Module:
    """A model for --model tests.small:adapted_logreg."""
    return nn.Sequential(nn.Flatten(), Adapted(math.prod(shape), classes))


def model_for(algorithm: str, usual: str) -> str:
    """The model to run an algorithm with."""
    return "tests.small:adapted_logreg" if algorithm in ADAPTERS else usual


def simulation(
    alg: Any,
    module: nn.Module | None = None,
    fed: Federation | None = None,
    *,
    cohort: int = 3,
    steps: int = 3,
    epochs: float = 0,
    batch: int = 8,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    **settings: Any,
) -> Simulation:
    plan = Plan(batch, 0 if epochs else steps, epochs, persistent=not epochs)
    chosen = Settings(cohort, plan, seed, **({"execution": "stacked"} | settings))
    fed = federation() if fed is None else fed
    net = Net(module or tiny_mlp(), dtype=dtype, pieces=fed.pieces, trains=alg.trains)
    for name, (_, outputs) in alg.networks(fed.clients).items():
        net.add_network(name, Net(tiny_mlp(1, classes=outputs), dtype=dtype))
    return Simulation(alg, net, fed, chosen, {"accuracy": accuracy}, CPU)


def path(run: Simulation, rounds: int) -> torch.Tensor:
    """The server's model after each round [rounds, P], without what pads it."""
    points = []
    for _ in range(rounds):
        run.round()
        points.append(run.net.without_padding(run.state.x, "model"))
    return torch.stack(points)


def timeless(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records of a run without how long its rounds took, and without checksums."""
    return [{k: v for k, v in r.items() if k not in ("seconds", "check")} for r in records]


def write_run(folder: Path, settings: dict[str, Any], records: list[dict[str, Any]], run: str = "byhand") -> None:
    """Write run.toml and rounds.jsonl of a run without a checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.toml").write_bytes(seal_toml(tomli_w.dumps(settings), run))
    with (folder / "rounds.jsonl").open("wb", buffering=0) as file:
        append_lines(file, Place(0, run), *records)


def read_rounds(folder: Path) -> list[dict[str, Any]]:
    """All rounds of a run's folder."""
    return list(read_lines(folder / ROUNDS, read_settings(folder)[1]))
