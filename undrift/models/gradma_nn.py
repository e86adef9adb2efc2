"""GradMA's NN for MNIST: hidden layers of 200 and 100 units with batch norm, or gradma-nn(norm=none) (Luo et al., CVPR 2023)."""

from __future__ import annotations

import math

from torch import nn

from undrift.core.errors import UnknownName
from undrift.models._blocks import Blocks

NORMS = ("batch", "none")


def build(shape: tuple[int, ...], classes: int, norm: str = "batch") -> nn.Module:
    """The network; norm is batch, or none."""
    if norm not in NORMS:
        raise UnknownName("norm of gradma-nn", norm, NORMS)
    after = [[nn.BatchNorm1d(width)] if norm == "batch" else [] for width in (200, 100)]
    blocks = {
        "hidden1": nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 200), *after[0], nn.ReLU()),
        "hidden2": nn.Sequential(nn.Linear(200, 100), *after[1], nn.ReLU()),
        "head": nn.Linear(100, classes),
    }
    return Blocks(blocks)
