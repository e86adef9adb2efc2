"""Whole runs with the kernels for a GPU, without a GPU: in Triton's interpreter, replayed, and rehearsed before.

What asks for a GPU is told that there is one; all else is as in a run on a GPU. There, test_cuda does the same.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("with a GPU they are compiled, see test_cuda", allow_module_level=True)

import undrift
from undrift.algorithms import gradma_s
from undrift.algorithms.gradient_memory import cone
from undrift.algorithms.gradient_memory.memory import Memory
from undrift.kernels import chain, launch
from undrift.kernels import cone3_gpu as three
from undrift.kernels import cone_gpu as pivots
from undrift.kernels import consistency_gpu as spread
from undrift.kernels import conv_gpu as few_channels
from undrift.kernels import cross_entropy_gpu as cross_entropy
from undrift.kernels import dense_step_gpu as stepped
from undrift.kernels import gram_gpu as gram
from undrift.kernels import memory_gpu as slots
from undrift.kernels import pictures_gpu as pictures
from undrift.simulate import execute, graphs
from undrift.simulate.simulation import Simulation

SETTINGS = {
    "clients": 8,
    "cohort": 4,
    "batch": 5,
    "rounds": 3,
    "eval_every": 3,
    "partition": "iid",
    "execution": "stacked",
}


def pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels serve float32 tensors, wherever these are."""

    def single(x: Tensor, *rest: Any) -> bool:
        return x.dtype == torch.float32

    def narrow(x: Tensor, w: Tensor, padding: int) -> bool:
        return single(x) and few_channels.suits(x.shape, w.shape, padding) and few_channels.only_stacked()

    def let_in(self: Memory, clients: Tensor) -> tuple[Memory, Tensor]:
        counters = torch.stack([self.ids, self.age, self.uses, self.since])
        (ids, age, uses, since), place, evictions = slots.mem_red(clients, counters, self.evictions)
        return self._replace(ids=ids, age=age, uses=uses, since=since, evictions=evictions), place

    def project(p: Tensor, rows: Tensor, products: Tensor, rho: float, along: Tensor, counts: Tensor, _: Any) -> Any:
        return cone.Projection(*pivots.project(p, rows, products, along, rho, counts))

    for room, available in (
        (few_channels, narrow), (spread, single), (three, single), (gram, single), (cross_entropy, single),
        (pictures, lambda held: held.dim() == 4 and held.dtype == torch.uint8),
        (stepped, lambda entries, dtype, device: dtype == torch.float32), (pivots, lambda device, constraints: True),
    ):  # fmt: skip
        monkeypatch.setattr(room, "available", available)
    monkeypatch.setattr(Memory, "let_in", let_in)
    monkeypatch.setattr(gradma_s, "project", project)
    monkeypatch.setattr(chain.Dense, "serves", lambda *given: False)  # nothing is computed in C


def rehearse(monkeypatch: pytest.MonkeyPatch) -> collections.Counter[str]:
    """Rehearsals on a CPU too; how often each kernel is asked for in them."""
    asked: collections.Counter[str] = collections.Counter()

    class Asked:
        def ask(self, kernel: Any, *given: Any) -> None:
            asked[kernel.fn.__name__] += 1

    @contextlib.contextmanager
    def rehearsal(device: torch.device) -> Iterator[None]:
        with launch.joined(Asked()):  # type: ignore[arg-type]
            yield

    for room in (graphs, execute):
        monkeypatch.setattr(room, "rehearsal", rehearsal)
    return asked


def run(model: str, **settings: Any) -> dict[str, Tensor]:
    """The model after three rounds, replayed."""
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (80, 8, 8, 3), dtype=np.uint8)
    targets = random.integers(0, 2, (80, 4)).astype(np.float32) if model == "marks" else random.integers(0, 4, 80)
    data = undrift.Dataset("random", images, targets, images[:20], targets[:20], 4, (0.5,) * 3, (0.5,) * 3)
    torch.manual_seed(0)
    dense = [nn.Flatten(), nn.Linear(192, 9), nn.ReLU(), nn.Linear(9, 4)]
    layers = dense if model == "dense" else [nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(216, 4)]
    own = {"loss": nn.BCELoss()} if model == "marks" else {}
    module = nn.Sequential(*layers, *([nn.Sigmoid()] if own else []))
    return undrift.run(SETTINGS | settings, data=data, model=module, **own).model


@pytest.mark.parametrize(
    "model, settings, kernels",
    [
        ("narrow", {"algorithm": "fedavg", "steps": 2}, {"_forward", "_filters", "_spread"}),
        ("narrow", {"algorithm": "mime", "epochs": 1.0}, {"_forward", "_filters", "_spread"}),
        ("narrow", {"algorithm": "moon", "steps": 1}, {"_forward", "_filters", "_spread"}),
        ("narrow", {"algorithm": "fedsm", "steps": 1}, {"_forward", "_filters", "_spread"}),
        (
            "marks",  # a loss that ends the program where it is not given probabilities
            {"algorithm": "gradma", "steps": 2},
            {"_forward", "_filters", "_products", "_multipliers", "_combination", "_mem_red", "_pivots", "_add_rows"},
        ),
        ("dense", {"algorithm": "fedavg", "steps": 2}, {"_stepped", "_cross_entropy", "_spread"}),
        ("dense", {"algorithm": "gradma-s", "steps": 1}, {"_stepped", "_cross_entropy", "_mem_red", "_pivots", "_add_rows"}),
    ],
)  # fmt: skip
def test_a_run_with_the_kernels_for_a_gpu(
    model: str, settings: dict[str, Any], kernels: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Is the run without them, up to rounding; and rehearsing changes no bit of it."""
    made = Simulation.__init__

    def replaying(self: Simulation, *given: Any, **named: Any) -> None:
        made(self, *given, **named)
        self.replays = True

    monkeypatch.setattr(Simulation, "__init__", replaying)
    plain = run(model, **settings)
    pretend(monkeypatch)
    fast = run(model, **settings)
    asked = rehearse(monkeypatch)
    rehearsed = run(model, **settings)
    assert kernels <= asked.keys()
    for name, tensor in plain.items():
        torch.testing.assert_close(fast[name], tensor, rtol=1e-4, atol=1e-5)
        assert torch.equal(rehearsed[name], fast[name])
