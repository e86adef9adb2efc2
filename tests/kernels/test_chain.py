"""The gradient that is written out for chains of plain layers is the one that autograd finds."""

from __future__ import annotations

from types import MethodType

import pytest
import torch
from torch import Tensor, nn

from tests.small import CPU, federation, path, simulation
from undrift.algorithms.fedavg import FedAvg
from undrift.kernels.chain import Chain, chain_of, fitting_chain
from undrift.models import gradma_lenet5, gradma_nn, lenet5, logreg, mlp
from undrift.oracle.net import Net
from undrift.oracle.oracle import Batch, Oracle, task_loss
from undrift.simulate.here import Pool

WIDE = torch.float64


def dense() -> nn.Module:
    """A ReLU and a Flatten in odd places, a layer without bias."""
    return nn.Sequential(nn.ReLU(), nn.Linear(6, 5, bias=False), nn.Flatten(), nn.ReLU(), nn.Linear(5, 4))


def images() -> nn.Module:
    """Convolutions and pooling with every option that a chain knows."""
    return nn.Sequential(
        nn.MaxPool2d(2, ceil_mode=True),
        nn.Sequential(nn.Conv2d(2, 4, 3, stride=(1, 2), padding=1, dilation=(1, 2), groups=2, bias=False), nn.ReLU()),
        nn.MaxPool2d((3, 2), stride=2, padding=1),
        nn.Conv2d(4, 3, (2, 1)),
        nn.Flatten(),
        nn.Linear(12, 4),
    )


CHAINS = [
    (lambda: mlp.build((1, 4, 4), 10), (1, 4, 4)),
    (lambda: logreg.build((7,), 3), (7,)),
    (lambda: lenet5.build((1, 28, 28), 10), (1, 28, 28)),
    (dense, (6,)),
    (images, (2, 9, 11)),
]


def oracle(module: nn.Module, shape: tuple[int, ...], lead: tuple[int, ...], padded: bool) -> tuple[Oracle, Tensor]:
    """An oracle on random samples of clients `lead`, one label left out, and a point."""
    net = Net(module, dtype=WIDE)
    x0, buffers = net.start()
    real = (torch.rand(*lead, 6) > 0.4).to(WIDE) if padded else None
    targets = torch.randint(0, 3, (*lead, 6))
    targets[..., 1] = -100
    batch = Batch(torch.randn(*lead, 6, *shape, dtype=WIDE), targets, real, torch.zeros(lead, dtype=torch.int64))
    return Oracle(net, batch, buffers.expand(*lead, 0)), x0 + 0.1 * torch.randn(*lead, len(x0), dtype=WIDE)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("lead", [(), (3,), (2, 3)])
@pytest.mark.parametrize("build, shape", CHAINS)
def test_the_written_out_gradient_is_autograds(
    build: object, shape: tuple[int, ...], lead: tuple[int, ...], padded: bool
) -> None:
    torch.manual_seed(0)
    asked, x = oracle(build(), shape, lead, padded)  # type: ignore[operator]
    assert (fitting_chain(asked) is not None) == (not lead or chain_of(asked.net).stackable)  # type: ignore[union-attr]
    before = x.clone()
    g, loss = asked.grad(x), asked.loss
    plain = asked.grad(x, task_loss)
    torch.testing.assert_close(g, plain, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(loss, asked.loss, rtol=1e-12, atol=1e-13)
    assert g.abs().max() > 1e-3 and torch.equal(x, before) and not g.requires_grad
    assert asked.calls == 2


def test_a_relu_before_pooling_is_computed_after_it_with_the_same_bits() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(27, 4))
    chain, other = Chain.of(module), Chain.of(module)
    assert chain is not None and other is not None
    assert [type(layer).__name__ for layer in chain.layers[:3]] == ["Conv2d", "MaxPool2d", "ReLU"]
    other.layers[1:3] = reversed(other.layers[1:3])
    x, targets = torch.randn(chain.entries, dtype=WIDE), torch.randint(0, 4, (5,))
    inputs = torch.randint(-1, 2, (5, 2, 8, 8)).to(WIDE)  # many of the four are equal
    found, expected = (each.gradient(x, inputs, targets, None) for each in (chain, other))
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


NORMED = [
    (lambda: gradma_nn.build((1, 4, 4), 10), (1, 4, 4)),
    (lambda: gradma_lenet5.build((1, 28, 28), 10), (1, 28, 28)),
    (lambda: nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5, momentum=0.3), nn.Dropout(0.3), nn.Linear(5, 4)), (6,)),
    (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4, eps=0.1), nn.Dropout(0.2), nn.Flatten(), nn.Linear(64, 4)
        ),
        (2, 6, 6),
    ),
]


@pytest.mark.parametrize("dtype", [torch.float32, WIDE])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("lead", [(), (3,), (2, 3)])
@pytest.mark.parametrize("build, shape", NORMED)
def test_statistics_and_masks_are_those_of_the_plain_layers(
    build: object, shape: tuple[int, ...], lead: tuple[int, ...], padded: bool, dtype: torch.dtype
) -> None:
    """In PyTorch for a client alone without padding, in C for dense layers without dropout; else autograd serves."""
    torch.manual_seed(0)
    net = Net(build(), dtype=dtype)  # type: ignore[operator]
    x0, buffers = net.start()
    real = None if not padded else (torch.arange(6) < torch.randint(3, 7, (*lead, 1))).to(dtype)
    key = torch.randint(0, 1 << 40, lead)
    batch = Batch(torch.randn(*lead, 6, *shape, dtype=dtype), torch.randint(0, 3, (*lead, 6)), real, key)
    x, before = (
        x0 + 0.1 * torch.randn(*lead, len(x0), dtype=dtype),
        buffers + torch.rand(*lead, len(buffers), dtype=dtype),
    )

    def asked() -> Oracle:
        return Oracle(net, batch, before.clone())

    chain, ours, plain, stepped = chain_of(net), asked(), asked(), asked()
    assert chain is not None and not chain.pure
    if not lead and not padded:
        assert fitting_chain(ours) is chain
    g, expected, moved = ours.grad(x), plain.grad(x, task_loss), stepped.step(x, 0.1)
    close = dict(rtol=1e-9, atol=1e-11) if dtype is WIDE else dict(rtol=1e-3, atol=2e-5)
    torch.testing.assert_close(g, expected, **close)
    torch.testing.assert_close(moved, x - 0.1 * expected, **close)
    for mine in (ours, stepped):
        torch.testing.assert_close(mine.loss, plain.loss, **close)
        torch.testing.assert_close(mine.buffers, plain.buffers, **close)
    assert (ours.buffers - before).abs().max() > 0.1 and g.abs().max() > 1e-3
    untracked = asked()
    untracked.grad(x, track=False)
    assert torch.equal(untracked.buffers, before)


def test_a_batch_norm_without_samples_or_variance_is_left_to_autograd() -> None:
    net = Net(NORMED[3][0]())
    _, buffers = net.start()
    one = Batch(torch.randn(1, 2, 6, 6), torch.zeros(1, dtype=torch.int64), None, torch.tensor(0))
    assert fitting_chain(Oracle(net, one, buffers)) is None
    frozen = NORMED[3][0]()
    frozen[1].eval()
    assert chain_of(Net(frozen)) is None


def test_an_untracked_gradient_leaves_the_loss_alone() -> None:
    asked, x = oracle(dense(), (6,), (), False)
    asked.grad(x, track=False)
    assert float(asked.loss) == 0.0


class Own(nn.Linear):
    """Could do anything."""


def hooked() -> nn.Module:
    module = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 4))
    module[0].register_forward_hook(lambda layer, inputs, output: 2 * output)
    return module


def frozen() -> nn.Module:
    module = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 4))
    module[0].bias.requires_grad_(False)
    return module


def shared() -> nn.Module:
    layer = nn.Linear(6, 6)
    return nn.Sequential(layer, nn.ReLU(), layer)


def tied() -> nn.Module:
    module = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    module[1].weight = module[0].weight
    return module


def patched() -> nn.Module:
    """A layer whose `forward` was replaced in the object, as some packages do."""
    module = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 4))
    module[0].forward = MethodType(lambda layer, h: 3 * nn.Linear.forward(layer, h), module[0])
    return module


def scaled() -> nn.Module:
    """A container with a parameter of its own, which comes first in the vector."""
    module = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 4))
    module.register_parameter("scale", nn.Parameter(torch.ones(7)))
    return module


@pytest.mark.filterwarnings("ignore:the model's outputs do not depend")  # `scale` is nobody's
@pytest.mark.parametrize("build", [hooked, patched, scaled, lambda: nn.Sequential(scaled(), nn.Linear(4, 4))])
def test_what_looks_like_a_chain_is_computed_as_the_module_says(build: object) -> None:
    """Stacked or in a pool as in plain PyTorch, one client after another."""
    torch.manual_seed(0)
    module = build()  # type: ignore[operator]
    fed = federation((20,) * 4, features=6)
    runs = (simulation(FedAvg(), module, fed, cohort=2, execution=way) for way in ("debug", "stacked", "pool"))
    plain, *others = (path(run, 2) for run in runs)
    for other in others:
        torch.testing.assert_close(other, plain, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize(
    "build",
    [
        hooked,
        patched,
        scaled,
        frozen,
        shared,
        tied,
        lambda: nn.Sequential(Own(6, 4)),
        lambda: nn.Sequential(nn.Linear(6, 4), nn.Tanh()),
        lambda: nn.Sequential(nn.Linear(6, 4), nn.ReLU()),
        lambda: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 4)),
        lambda: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4, affine=False), nn.Linear(4, 4)),
        lambda: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm2d(4), nn.Linear(4, 4)),
        lambda: nn.Sequential(nn.Linear(6, 4), nn.Dropout1d(), nn.Linear(4, 4)),
        lambda: nn.Sequential(nn.Conv2d(2, 3, 2), nn.Linear(6, 4)),
        lambda: nn.Sequential(nn.Flatten(), nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(6, 4)),
        lambda: nn.Sequential(nn.Conv2d(2, 3, 2, padding="same"), nn.Flatten(), nn.Linear(6, 4)),
        lambda: nn.Sequential(nn.Conv2d(2, 3, 2, padding_mode="circular"), nn.Flatten(), nn.Linear(6, 4)),
        lambda: nn.Sequential(nn.Flatten(2), nn.Linear(6, 4)),
    ],
)
def test_what_is_no_chain(build: object) -> None:
    assert Chain.of(build()) is None  # type: ignore[operator]


def test_a_chain_is_not_used_on_other_samples_or_losses() -> None:
    """Linear on sequences, labels for every place, a loss of the user's."""
    asked, _ = oracle(dense(), (6,), (), False)
    assert fitting_chain(asked) is not None
    batch = asked.batch
    for other in (
        batch._replace(inputs=batch.inputs.unsqueeze(1)),
        batch._replace(inputs=batch.inputs.long()),
        batch._replace(targets=batch.targets.unsqueeze(-1)),
        batch._replace(targets=batch.targets.double()),
    ):
        assert fitting_chain(Oracle(asked.net, other, asked.buffers)) is None
    assert chain_of(Net(dense(), nn.CrossEntropyLoss(label_smoothing=0.1))) is None
    assert chain_of(Net(dense(), nn.CrossEntropyLoss())) is not None


@pytest.mark.parametrize("group", [1, 2, 3, 100])
@pytest.mark.parametrize("steps", [{"steps": 3}, {"epochs": 1.5}])
def test_a_pool_of_stacked_groups_gives_the_same_result(group: int, steps: dict[str, int]) -> None:
    """Whatever the size of its groups, with equal clients and with unequal ones."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    fed = federation((20,) * 7) if "steps" in steps else federation()
    size = fed.clients - 1
    stacked, pool = (simulation(FedAvg(), module, fed, cohort=size, execution=e, **steps) for e in ("stacked", "pool"))
    expected = path(stacked, 2)
    pool.execution = Pool(CPU, group)
    torch.testing.assert_close(path(pool, 2), expected, rtol=1e-11, atol=1e-13)
    assert pool.round().gradients == stacked.round().gradients


@pytest.mark.parametrize(
    "size, group, expected", [(10, 2, [2, 2, 2, 2, 1, 1]), (10, 3, [3, 3, 2, 2]), (3, 100, [2, 1]), (1, 4, [1])]
)
def test_groups_are_shared_out_evenly(size: int, group: int, expected: list[int]) -> None:
    """Two threads get as many clients each, and every client is in one group."""
    import numpy as np

    pool = Pool(CPU, group)
    pool.threads = 2
    parts = pool.parts(np.full((size, 5), 8))
    assert [part.stop - part.start for part in parts] == expected  # type: ignore[union-attr]
    assert [i for part in parts for i in range(size)[part]] == list(range(size))
    assert pool.parts(np.array([[8, 8], [8, 0], [8, 3]])) == [0, 2, 1]
