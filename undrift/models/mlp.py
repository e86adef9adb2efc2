"""Perceptron with three hidden layers of 200 ReLU units (after the 2NN of McMahan et al., AISTATS 2017)."""

from __future__ import annotations

import math

from torch import nn

from undrift.models._blocks import Blocks


def build(shape: tuple[int, ...], classes: int) -> nn.Module:
    blocks = {
        "hidden1": nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 200), nn.ReLU()),
        "hidden2": nn.Sequential(nn.Linear(200, 200), nn.ReLU()),
        "hidden3": nn.Sequential(nn.Linear(200, 200), nn.ReLU()),
        "head": nn.Linear(200, classes),
    }
    return Blocks(blocks)
