"""What many models say of the clients' samples, asked together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from undrift.oracle import oracle as oracles
from undrift.oracle.net import Net
from undrift.oracle.oracle import Batch, Oracle, View

M, S, B = 7, 3, 4


def network(kind: str) -> Net:
    torch.manual_seed(0)
    if kind == "dense":
        layers: list[nn.Module] = [nn.Flatten(), nn.Linear(50, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)]
    else:
        layers = [nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(27, 3)]
    return Net(nn.Sequential(*layers), dtype=torch.float64)


def problem(net: Net, lead: tuple[int, ...]) -> tuple[Oracle, Tensor, Tensor, Tensor]:
    """An oracle for clients [*lead] with padded samples, the server's x, and shared models with their own statistics."""
    torch.manual_seed(1)
    x0, buffers = net.start()
    runs = (*lead[:-1], 1) if lead else ()
    inputs, targets = torch.randn(*lead, B, 2, 5, 5, dtype=torch.float64), torch.randint(0, 3, (*lead, B))
    real = (torch.arange(B) < B - 1).double().expand(*lead, B)
    batch = Batch(inputs, targets, real, torch.zeros(lead, dtype=torch.int64))
    x = x0 + torch.randn(*runs, len(x0), dtype=torch.float64)
    models = x0 + torch.randn(*runs, M, len(x0), dtype=torch.float64)
    statistics = buffers + torch.rand(*runs, M, len(buffers), dtype=torch.float64)
    return Oracle(net, batch, buffers.expand(*lead, -1)), x, models, statistics


def both(model: View, h: Tensor, targets: Tensor) -> Tensor:
    """The losses and the outputs."""
    return torch.cat([model.losses(h, targets), h.flatten(1)], -1)


@pytest.mark.parametrize("kind", ["dense", "convolution"])
@pytest.mark.parametrize("lead", [(), (S,), (2, S)])
@pytest.mark.parametrize("asked", [1, 200, 1 << 25])
def test_answers_are_those_of_each_model_alone(
    kind: str, lead: tuple[int, ...], asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oracles, "ASKED", asked)
    net = network(kind)
    oracle, x, models, statistics = problem(net, lead)
    found = oracle.answers(both, x, models, statistics)
    assert found.shape == (*lead, B, (M + 1) * (1 + 3)) and not found.requires_grad
    runs = lead[:-1]
    for at in torch.cartesian_prod(*map(torch.arange, lead)).view(-1, len(lead)).tolist() if lead else [[]]:
        own = (*at[: len(runs)], 0) if lead else ()
        inputs, targets = oracle.batch.inputs[tuple(at)], oracle.batch.targets[tuple(at)]
        vectors = [(x[own], oracle.buffers[tuple(at)]), *zip(models[own], statistics[own], strict=True)]
        h = torch.stack([net(v, q, inputs, None)[0] for v, q in vectors], 1)
        losses = torch.stack([net.sample_losses(h[:, k], targets) for k in range(M + 1)], 1)
        torch.testing.assert_close(found[tuple(at)], torch.cat([losses, h.flatten(1)], 1), rtol=1e-10, atol=1e-12)


def test_stacked_clients_ask_all_models_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in one for each model: a hundred of them would be as many times the operations."""
    net = network("dense")
    oracle, x, models, statistics = problem(net, (S,))
    passes: list[int] = []
    call = Net.__call__

    def counted(self: Net, x: Tensor, buffers: Tensor, inputs: Tensor, *others: Any) -> Any:
        passes.append(len(inputs))
        return call(self, x, buffers, inputs, *others)

    monkeypatch.setattr(Net, "__call__", counted)
    oracle.answers(both, x, models, statistics)
    assert passes == [B, S * B]  # x with each client's statistics, and everything else for all samples at once
