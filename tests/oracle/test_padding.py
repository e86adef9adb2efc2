"""Labels that do not count: means are PyTorch's, over the labels that do, and nothing without a label is NaN."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.small import CPU
from undrift.algorithms.base import Algorithm
from undrift.core.forms import plain_forms
from undrift.data.batches import Plan
from undrift.data.federation import Federation, federate
from undrift.data.from_user import dataset_from
from undrift.jobs.registry import algorithm_class
from undrift.kernels import register  # noqa: F401
from undrift.oracle.net import Net
from undrift.oracle.oracle import Batch, Oracle
from undrift.pipeline.block_scores import ScoreSums
from undrift.simulate.evaluate import accuracy
from undrift.simulate.settings import Settings
from undrift.simulate.simulation import Simulation
from undrift.simulate.work import LocalWhole

WORDS, CLASSES = 6, 4


class Reader(nn.Module):
    """A label for every word [B, WORDS, 5] of a text; outputs [B, CLASSES, WORDS]."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).transpose(1, 2)  # type: ignore[no-any-return]


def model(texts: bool) -> nn.Module:
    torch.manual_seed(0)
    return Reader() if texts else nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, CLASSES))


def samples(texts: bool, count: int, seed: int, ignored: int = -100) -> tuple[Tensor, Tensor]:
    """Texts of several lengths; the second one, or every fourth sample, has no label."""
    random = np.random.default_rng(seed)
    shape = (count, WORDS) if texts else (count,)
    y = random.integers(0, CLASSES, shape)
    y[y == ignored] = (ignored + 1) % CLASSES
    if texts:
        y[np.arange(WORDS) >= random.integers(1, WORDS + 1, (count, 1))] = ignored
    y[1::4] = ignored
    return torch.from_numpy(random.normal(size=(*shape, 5))), torch.from_numpy(y)


def federation(texts: bool, ignored: int = -100) -> Federation:
    """Five clients, of whom the last one has no label at all."""
    parts = [samples(texts, n, n, ignored) for n in (9, 17, 6, 12, 5)]
    parts[-1][1][:] = ignored
    return federate(dataset_from((parts, samples(texts, 40, 1, ignored))), "sites", 5, 0, CPU)


def run_of(
    alg: Algorithm, texts: bool, loss: Any = F.cross_entropy, ignored: int = -100, **settings: Any
) -> Simulation:
    net = Net(model(texts), loss, torch.float64)
    for name, (_, outputs) in alg.networks(5).items():
        inside = nn.Linear(5 * (WORDS if texts else 1), outputs)
        net.add_network(name, Net(nn.Sequential(nn.Flatten(), inside), dtype=torch.float64))
    how = Settings(5, Plan(batch=4, steps=3), 0, **({"execution": "stacked"} | settings))
    return Simulation(alg, net, federation(texts, ignored), how, {"accuracy": accuracy}, CPU)


@pytest.mark.parametrize("ignored", [-100, 2])
@pytest.mark.parametrize("texts", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("plain", [False, True])
def test_gradients_are_those_of_pytorch(
    plain: bool, padded: bool, dtype: torch.dtype, texts: bool, ignored: int
) -> None:
    """Also for a client alone, and beside places without a sample; a batch without a label has loss and gradient 0."""
    loss = F.cross_entropy if ignored == -100 else nn.CrossEntropyLoss(ignore_index=ignored)
    module = model(texts).to(dtype)
    net = Net(module, loss, dtype)
    x, buffers = net.start()
    parts = [samples(texts, 7, seed, ignored) for seed in range(3)]
    parts[2][1][:] = ignored
    inputs, targets = torch.stack([x for x, _ in parts]).to(dtype), torch.stack([y for _, y in parts])
    count = torch.tensor([5, 7, 6]) if padded else torch.full((3,), 7)
    real = (torch.arange(7) < count.unsqueeze(-1)).to(dtype) if padded else None
    with plain_forms(plain):
        stacked = Oracle(net, Batch(inputs, targets, real, torch.zeros(3, dtype=torch.int64)), buffers.expand(3, -1))
        gradients = stacked.grad(x.expand(3, -1))
        for i, n in enumerate(count.tolist()):
            own = Batch(inputs[i], targets[i], None if real is None else real[i], torch.zeros((), dtype=torch.int64))
            alone = Oracle(net, own, buffers)
            expected = F.cross_entropy(module(inputs[i, :n]), targets[i, :n], ignore_index=ignored)
            exact = torch.autograd.grad(expected, list(module.parameters()))
            vector = torch.cat([g.flatten() for g in exact])
            if i == 2:
                expected, vector = torch.zeros_like(expected), torch.zeros_like(vector)
            for g, value in ((alone.grad(x), alone.loss), (gradients[i], stacked.loss[i])):
                torch.testing.assert_close(g[: len(vector)], vector)
                torch.testing.assert_close(value[0], expected)


@pytest.mark.parametrize("texts", [False, True])
def test_the_whole_data_of_a_client_is_one_mean_over_its_labels(texts: bool) -> None:
    run = run_of(algorithm_class("fedavg")(), texts)
    work = run.work(run.attendance(0))
    found = LocalWhole.of(work, slice(0, 5), run.state.buffers).full_grad(run.state.x)
    module, data = run.net.original, run.data
    for i in range(4):
        rows = data.members[data.start[i] : data.start[i] + data.sizes[i]]
        assert data.train.held is not None
        loss = F.cross_entropy(module(data.train.held[rows].double()), data.train.targets[rows])
        exact = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(module.parameters()))])
        torch.testing.assert_close(found[i, : len(exact)], exact, rtol=1e-10, atol=1e-12)
    assert not bool(found[4].any())


@pytest.mark.parametrize("ignored", [-100, 2])
@pytest.mark.parametrize("texts", [False, True])
def test_scores_are_those_of_pytorch(texts: bool, ignored: int) -> None:
    loss = F.cross_entropy if ignored == -100 else nn.CrossEntropyLoss(ignore_index=ignored)
    run = run_of(algorithm_class("fedavg")(lr=0.1), texts, loss, ignored)
    record = run.round(last=True)
    assert record.dropped == 0 and np.isfinite(record.train_loss)
    module, data = model(texts).double(), run.data
    module.load_state_dict(run.model())
    assert data.test.held is not None and data.train.held is not None
    outputs, targets = module(data.test.held.double()).detach(), data.test.targets
    labelled = targets != ignored
    assert record.loss == pytest.approx(float(F.cross_entropy(outputs, targets, ignore_index=ignored)), rel=1e-12)
    assert record.accuracy == pytest.approx(float((outputs.argmax(1) == targets)[labelled].double().mean()), rel=1e-12)
    sums = ScoreSums(loss)
    for some in range(0, 40, 7):
        sums.add(outputs[some : some + 7], targets[some : some + 7])
    assert sums.means()["loss"] == pytest.approx(record.loss)
    if not texts:
        assert sums.means()["accuracy"] == pytest.approx(record.accuracy)


@pytest.mark.parametrize("texts", [False, True])
@pytest.mark.parametrize(
    "name", ["fedavg", "scaffold", "mime", "moon", "fedmlb", "apfl", "per-fedavg", "fedsm", "fedsm-extra", "ensemble"]
)
def test_methods_and_executions_agree(name: str, texts: bool) -> None:
    """Somebody without a label is a client like the others, and nothing that it sends is NaN."""
    if texts and name in ("moon", "fedmlb"):
        return  # their model is a chain of blocks
    fields = {"begin": 1} if name in ("fedsm-extra", "ensemble") else {"option": 1} if name == "scaffold" else {}
    runs = [run_of(algorithm_class(name)(lr=0.1, **fields), texts, execution=e) for e in ("stacked", "pool", "debug")]
    for _ in range(2):
        records = [run.round() for run in runs]
        assert all(record.dropped == 0 and np.isfinite(record.train_loss) for record in records)
        for run in runs[1:]:
            torch.testing.assert_close(run.state.x, runs[0].state.x, rtol=1e-9, atol=1e-11)
