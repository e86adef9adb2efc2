"""GradMA's NN for MNIST: two hidden layers of 200 and 100 units with batch norm (Luo et al., CVPR 2023)."""

from __future__ import annotations

import math

from torch import nn

from undrift.models._blocks import Blocks


def build(shape: tuple[int, ...], classes: int) -> nn.Module:
    blocks = {
        "hidden1": nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 200), nn.BatchNorm1d(200), nn.ReLU()),
        "hidden2": nn.Sequential(nn.Linear(200, 100), nn.BatchNorm1d(100), nn.ReLU()),
        "head": nn.Linear(100, classes),
    }
    return Blocks(blocks)
