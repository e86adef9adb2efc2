"""Logistic regression: one linear layer on the flattened input (Cox, 1958)."""

from __future__ import annotations

import math

from torch import nn

from undrift.models._blocks import Blocks


def build(shape: tuple[int, ...], classes: int) -> nn.Module:
    return Blocks({"head": nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), classes))})
