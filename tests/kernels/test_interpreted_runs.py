"""Whole runs with the kernels for a GPU, without a GPU: in Triton's interpreter, replayed, and rehearsed before.

What asks for a GPU is told that there is one; all else is as in a run on a GPU. There, simulate/test_cuda does the same.
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
    pytest.skip("with a GPU they are compiled, see simulate/test_cuda", allow_module_level=True)

import undrift
from undrift.core.forms import plain_forms
from undrift.kernels import conv_stacked_gpu, devices, launch
from undrift.simulate import graphs
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
    """Every tensor lies on a GPU that has tensor cores and a cache that is always too small."""
    monkeypatch.setattr(devices, "gpu", lambda device: True)
    monkeypatch.setattr(devices, "cpu", lambda device: False)
    monkeypatch.setattr(devices, "tensor_cores", lambda device: True)
    monkeypatch.setattr(devices, "cache", lambda device: 0.0)


def rehearse(monkeypatch: pytest.MonkeyPatch) -> collections.Counter[str]:
    """Rehearsals on a CPU too; how often each kernel is asked for in them."""
    asked: collections.Counter[str] = collections.Counter()

    class Asked:
        def ask(self, kernel: Any, *given: Any) -> None:
            asked[kernel.fn.__name__] += 1

    @contextlib.contextmanager
    def rehearsal(device: torch.device) -> Iterator[None]:
        with launch.take_part(Asked()):  # type: ignore[arg-type]
            yield

    monkeypatch.setattr(graphs, "rehearsal", rehearsal)
    return asked


def run(model: str, **settings: Any) -> dict[str, Tensor]:
    """The model after three rounds, replayed."""
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (80, 8, 8, 3), dtype=np.uint8)
    targets = random.integers(0, 2, (80, 4)).astype(np.float32) if model == "marks" else random.integers(0, 4, 80)
    data = undrift.Dataset("random", images, targets, images[:20], targets[:20], 4, (0.5,) * 3, (0.5,) * 3)
    torch.manual_seed(0)
    dense = [nn.Flatten(), nn.Linear(192, 9), nn.ReLU(), nn.Linear(9, 4)]
    narrow = [nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(216, 4)]
    wide = [nn.Conv2d(3, 16, 3), nn.Conv2d(16, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 16, 1)]
    wide += [nn.GroupNorm(4, 16), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4)]
    layers = {"dense": dense, "wide": wide}.get(model, narrow)
    own = {"loss": nn.BCELoss()} if model == "marks" else {}
    module = nn.Sequential(*layers, *([nn.Sigmoid()] if own else []))
    return undrift.run(SETTINGS | settings, data=data, model=module, **own).model


@pytest.mark.parametrize(
    "model, settings, kernels",
    [
        ("narrow", {"algorithm": "fedavg", "steps": 2}, {"_forward", "_filters", "_spread"}),
        ("narrow", {"algorithm": "mime", "epochs": 1.0}, {"_forward", "_filters", "_spread"}),
        ("narrow", {"algorithm": "moon", "steps": 1}, {"_forward", "_filters", "_spread"}),
        (
            "wide",
            {"algorithm": "fedavg", "clients": 16, "cohort": 1, "batch": 3, "epochs": 1.0, "rounds": 1, "eval_every": 1},
            {"_turn", "_outputs", "_inputs", "_entries", "_gather", "_group_norm", "_group_norm_back", "_moments", "_sums"},
        ),
        ("narrow", {"algorithm": "fedsm", "steps": 1}, {"_forward", "_filters", "_spread"}),
        (
            "marks",  # a loss that ends the program where it is not given probabilities
            {"algorithm": "gradma", "steps": 2},
            {"_forward", "_filters", "_products", "_multipliers", "_combination", "_mem_red", "_pivots", "_add_rows"},
        ),
        ("dense", {"algorithm": "fedavg", "steps": 2}, {"_step", "_cross_entropy", "_spread"}),
        ("dense", {"algorithm": "gradma-s", "steps": 1}, {"_step", "_cross_entropy", "_mem_red", "_pivots", "_add_rows"}),
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
    with plain_forms():
        plain = run(model, **settings)
    pretend(monkeypatch)
    if model == "wide":
        monkeypatch.setattr(conv_stacked_gpu, "half_precision", lambda device: True)
        monkeypatch.setattr(conv_stacked_gpu, "HALF", torch.float32)  # the interpreter has no products in bfloat16
    fast = run(model, **settings)
    asked = rehearse(monkeypatch)
    rehearsed = run(model, **settings)
    assert kernels <= asked.keys()
    for name, tensor in plain.items():
        torch.testing.assert_close(fast[name], tensor, rtol=1e-4, atol=1e-5)
        assert torch.equal(rehearsed[name], fast[name])
