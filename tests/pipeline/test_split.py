"""Cutting a model into blocks, by hand and by measurement."""

from __future__ import annotations

import copy
import itertools
import time

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from undrift.core.errors import BadSetting
from undrift.models import resnet20
from undrift.pipeline import DSP
from undrift.pipeline.split import (
    ModelPart,
    balance_model,
    cut_model,
    layer_times,
    layers_of,
    min_max_cuts,
    shared_parameters,
)


def whole_state(part: ModelPart) -> dict[str, Tensor]:
    """The part's state under the whole model's names."""
    return {part.whole_name(name): tensor for name, tensor in part.module.state_dict().items()}


def test_min_max_cuts_are_as_good_as_trying_all() -> None:
    draw = np.random.default_rng(0)
    for _ in range(60):
        size, blocks = int(draw.integers(4, 9)), int(draw.integers(1, 5))
        lower = draw.integers(1, 20, size).astype(float).tolist()
        last = [cost * 0.7 for cost in lower]

        def slowest(cuts: tuple[int, ...] | list[int], lower: list[float] = lower, last: list[float] = last) -> float:
            borders = [0, *cuts, len(lower)]
            pieces = list(itertools.pairwise(borders))
            return max(sum((last if b == len(lower) and len(pieces) > 1 else lower)[a:b]) for a, b in pieces)

        found = min_max_cuts(lower, last, blocks)
        assert len(found) == blocks - 1
        best = min(slowest(cuts) for cuts in itertools.combinations(range(1, size), blocks - 1))
        assert slowest(found) == pytest.approx(best)


def test_a_cut_network_is_the_network() -> None:
    torch.manual_seed(0)
    model = resnet20.build((3, 8, 8), 10).double()
    names = [name for name, _ in layers_of(model)]
    assert names[0] == "stem.0" and names[-1] == "head" and "stage2.0" in names
    cut = cut_model(model, cuts=["stage1.2", "stage3"])
    assert [part.layers[0] for part in cut] == ["stem.0", "stage1.2", "stage3.0"]
    h = inputs = torch.randn(4, 3, 8, 8, dtype=torch.float64)
    for part in cut:
        h = part.module(h)
    assert torch.equal(h, model(inputs))
    named = {name: tensor for part in cut for name, tensor in whole_state(part).items()}
    state = model.state_dict()
    assert list(named) == list(state)
    assert all(torch.equal(named[name], state[name]) for name in state)


class Slow(nn.Module):
    """A layer that takes its time."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, h: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return h * 1.0


def test_the_balance_follows_the_layers_times() -> None:
    """Times far apart, so that a busy machine cannot matter: one layer takes 40 ms of 60.

    It gets a block for itself, or goes into the last one where the others replay.
    """
    model = nn.Sequential(nn.Linear(4, 4), Slow(0.01), Slow(0.04), Slow(0.01), nn.BatchNorm1d(4), nn.Linear(4, 2))
    before = copy.deepcopy(model.state_dict())
    batch = torch.randn(8, 4), torch.randint(2, (8,))
    found = balance_model(model, 3, *batch, F.cross_entropy, replays=False, times=3)
    assert found.cuts == (2, 3)
    assert found.names == ("0", "2", "3")
    assert found.seconds[1] > 0.04
    assert 0.0 < found.share < 0.75
    replaying = balance_model(model, 3, *batch, F.cross_entropy, times=3)
    assert replaying.cuts == (1, 2)
    assert replaying.seconds[1] > 0.02  # its forward twice
    said = str(found)
    assert "block 1: from 2, " in said and "balance" in said
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before), "timing leaves the model as it was"
    assert all(p.grad is None for p in model.parameters())
    forward, backward, _ = layer_times(list(model), torch.randn(8, 4), torch.randint(2, (8,)), F.cross_entropy, 2)
    assert len(forward) == len(backward) == 6 and min(forward) > 0


def test_updates_count_for_the_balance() -> None:
    """A table of four million numbers, of which a batch reads two: its forward is short, its update long."""
    model = nn.Sequential(nn.Embedding(1_000_000, 4), nn.Flatten(), nn.Linear(8, 2))
    forward, _, update = layer_times(list(model), torch.randint(9, (1, 2)), torch.zeros(1).long(), F.cross_entropy, 3)
    assert update[0] > forward[0]
    assert update[0] > 20 * update[1]


def test_dsp_keeps_what_it_measured() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Slow(0.001), Slow(0.04), nn.Linear(4, 2))
    batch = torch.randn(8, 4), torch.randint(2, (8,))

    def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    timed, by_hand = DSP(model, blocks=2, sample=batch, optimizer=sgd), DSP(model, cuts=[2], optimizer=sgd)
    assert timed.balance is not None and by_hand.balance is None
    assert timed.balance.names == tuple(part.layers[0] for part in timed.parts) == ("0", "2")
    assert str(timed.balance).startswith("block 0: from 0, ")


def test_a_list_of_modules_is_a_list_of_blocks() -> None:
    cut = cut_model([nn.Linear(2, 3), nn.Sequential(nn.ReLU(), nn.Linear(3, 1))])
    assert [part.layers for part in cut] == [("0",), ("1",)]
    assert list(whole_state(cut[1])) == ["1.1.weight", "1.1.bias"]
    with pytest.raises(BadSetting, match="cut already"):
        cut_model([nn.Linear(2, 3)], cuts=[1])


def test_what_cannot_be_cut_is_refused() -> None:
    with pytest.raises(BadSetting, match=r"an nn.Sequential, not Linear"):
        cut_model(nn.Linear(2, 2), cuts=[1])
    shared = nn.Linear(3, 3)
    with pytest.raises(BadSetting, match="layer 2 shares a tensor"):
        cut_model(nn.Sequential(nn.ReLU(), shared, shared), cuts=[1, 2])
    assert shared_parameters(cut_model(nn.Sequential(shared, nn.ReLU(), shared), cuts=[1])) == [*shared.parameters()]
    assert len(cut_model(nn.Sequential(shared, nn.ReLU(), shared, nn.ReLU()), cuts=[3])) == 2
    with pytest.raises(BadSetting, match="2 layers cannot be cut into 3"):
        balance_model(
            nn.Sequential(nn.Linear(2, 2), nn.ReLU()), 3, torch.zeros(1, 2), torch.zeros(1).long(), F.cross_entropy
        )
