"""Models and losses that cannot be right are refused, or warned of, before the first round."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import undrift
from tests.small import federation, simulation, tiny_mlp
from undrift.algorithms.fedavg import FedAvg
from undrift.core.errors import BadSetting
from undrift.oracle.losses import batch_loss
from undrift.oracle.net import Net


class Noisy(nn.Module):
    """Draws random numbers, of so small a size that no single answer looks odd; in training only, or in evaluation."""

    def __init__(self, size: float, training: bool) -> None:
        super().__init__()
        self.size, self.when, self.inner = size, training, tiny_mlp()

    def forward(self, x: Tensor) -> Tensor:
        noise = self.size * torch.randn_like(x) if self.training == self.when else torch.zeros_like(x)
        return self.inner(x + noise)  # type: ignore[no-any-return]


class Counting(nn.Module):
    """Every pass leaves something for the next one, whichever client's that is."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.shift = tiny_mlp(), nn.Buffer(torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.shift += 1e-6
        return self.inner(x + self.shift)  # type: ignore[no-any-return]


class Cached(nn.Module):
    """A buffer that is filled once is no state."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.shift = tiny_mlp(), nn.Buffer(torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        self.shift.copy_(torch.ones(5))
        return self.inner(x + self.shift)  # type: ignore[no-any-return]


@pytest.mark.parametrize("execution", ["auto", "stacked", "pool", "debug"])
@pytest.mark.parametrize("training", [True, False])
def test_a_model_with_a_little_noise_of_its_own_is_refused(training: bool, execution: str) -> None:
    with pytest.raises(BadSetting, match="two different answers on one batch"):
        simulation(FedAvg(), Noisy(1e-3, training), execution=execution).round()


@pytest.mark.parametrize("execution", ["auto", "pool", "debug"])
@pytest.mark.parametrize(
    "build, name",
    [
        (Counting, "shift"),
        (
            lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(5, 4)), nn.Linear(4, 3)),
            "0.parametrizations.weight.0._u",
        ),
    ],
)
def test_a_model_whose_clients_would_share_what_passes_leave_is_refused(
    build: Callable[[], nn.Module], name: str, execution: str
) -> None:
    with pytest.raises(BadSetting, match=f"writes its buffer {name} in every pass"):
        simulation(FedAvg(), build(), execution=execution).round()


def test_a_buffer_that_is_filled_once_is_no_state() -> None:
    simulation(FedAvg(), Cached(), execution="debug").round()


def losses(loss: Any, **more: Any) -> list[str]:
    """What is said of a loss."""
    fed = federation()
    settings: dict[str, Any] = {"clients": fed.clients, "cohort": 2, "rounds": 1, "steps": 1, "partition": "iid"} | more
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(40, 5)).astype(np.float32), draw.integers(0, 3, 40)
    if settings.pop("numbers", False):
        y = y.astype(np.float32)[:, None].repeat(3, 1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        undrift.run(settings, model=tiny_mlp(), data=(x, y, x[:9], y[:9]), loss=loss)
    return [str(warning.message) for warning in said if "single losses" in str(warning.message)]


WEIGHTS = torch.tensor([10.0, 1.0, 0.1])


def spread(outputs: Tensor, targets: Tensor) -> Tensor:
    """Compares samples with one another, and finds none in a batch of one."""
    return F.cross_entropy(outputs, targets) + (outputs - outputs.mean(0)).square().mean()


@pytest.mark.parametrize(
    "loss",
    [functools.partial(F.cross_entropy, weight=WEIGHTS), nn.CrossEntropyLoss(reduction="sum"), spread],
    ids=["class weights", "a sum", "a comparison"],
)
def test_a_loss_that_is_no_mean_over_samples_is_warned_of(loss: Any) -> None:
    assert len(losses(loss)) == 1


def marked(outputs: Tensor, targets: Tensor, real: Tensor | None) -> Tensor:
    each = F.cross_entropy(outputs, targets, reduction="none", weight=WEIGHTS)
    return each.mean() if real is None else (each * real).sum() / real.sum()


@pytest.mark.parametrize(
    "loss, more",
    [
        (F.cross_entropy, {}),
        (nn.CrossEntropyLoss(), {}),
        (nn.CrossEntropyLoss(label_smoothing=0.1), {}),
        (nn.CrossEntropyLoss(weight=WEIGHTS, reduction="none"), {}),
        (nn.MultiMarginLoss(reduction="none"), {}),
        (batch_loss(marked), {}),
        (nn.MSELoss(), {"numbers": True}),
        (nn.SmoothL1Loss(), {"numbers": True}),
    ],
)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_losses_that_are_means_are_not(loss: Any, more: dict[str, Any]) -> None:
    assert losses(loss, **more) == []


def test_a_loss_with_parameters_is_refused() -> None:
    class Tempered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.temperature = nn.Parameter(torch.ones(()))

        def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(outputs / self.temperature, targets)

    with pytest.raises(BadSetting, match="the loss has parameters, which would not be trained"):
        Net(tiny_mlp(), Tempered())
    Net(tiny_mlp(), Tempered().requires_grad_(False))


def test_targets_may_be_probabilities() -> None:
    """One-hot targets give the loss and the accuracy of their labels."""
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(4, 10, 5)).astype(np.float32), draw.integers(0, 3, (4, 10))
    settings = {"cohort": 2, "rounds": 3, "steps": 2, "eval_every": 1}

    def records(targets: Any) -> list[dict[str, Any]]:
        data = list(zip(x, targets, strict=True)), (x[0], targets[0])
        return undrift.run(settings, model=tiny_mlp(), data=data).records

    for ours, theirs in zip(records(np.eye(3, dtype=np.float32)[y]), records(y), strict=True):
        assert ours["accuracy"] == theirs["accuracy"] and ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)


class Idle(nn.Module):
    """One layer is never called, one is cut off from the gradient."""

    def __init__(self, head: bool) -> None:
        super().__init__()
        self.inner, self.first, self.last = tiny_mlp(), nn.Linear(5, 5), nn.Linear(5, 3)
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).detach()
        return self.inner(h) + self.last(h) if self.head else self.inner(h)  # type: ignore[no-any-return]


def said_of(module: nn.Module) -> list[str]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        simulation(FedAvg(), module).round()
    return [str(warning.message) for warning in said]


def test_parameters_that_are_not_trained_are_warned_of() -> None:
    (both,) = said_of(Idle(False))
    assert "do not depend on 4 of its parameters (first.weight, first.bias, last.weight, last.bias)" in both
    (one,) = said_of(Idle(True))
    assert "do not depend on 2 of its parameters (first.weight, first.bias)" in one
    frozen = Idle(True)
    frozen.first.requires_grad_(False)
    zero = tiny_mlp()
    nn.init.zeros_(zero[2].weight)  # type: ignore[index]  # its gradient is not zero, the one before it is
    for fine in (frozen, zero, tiny_mlp()):
        assert said_of(fine) == []


def test_probabilities_in_place_of_numbers_before_the_softmax_are_warned_of() -> None:
    (told,) = said_of(nn.Sequential(tiny_mlp(), nn.Softmax(1)))
    assert "leave the softmax out" in told
    assert (
        said_of(nn.Sequential(tiny_mlp(), nn.LogSoftmax(1))) == [] == said_of(nn.Sequential(tiny_mlp(), nn.Sigmoid()))
    )


def test_lazy_layers_are_refused() -> None:
    with pytest.raises(BadSetting, match="lazy layers without parameters yet"):
        Net(nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 3)))
