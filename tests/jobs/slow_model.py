"""A model whose forward in training takes SLOW seconds."""

from __future__ import annotations

import os
import time

import torch
from torch import Tensor, nn


class Slow(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            time.sleep(float(os.environ["SLOW"]))
        return x


def build(shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Sequential(Slow(), nn.Flatten(), nn.Linear(int(torch.Size(shape).numel()), classes))
