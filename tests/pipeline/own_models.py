"""Models for `undrift pipe` in tests: one whose last layer fails, or ends its process, at a batch that the environment names."""

from __future__ import annotations

import os
import signal

import torch
from torch import Tensor, nn


class Mortal(nn.Module):
    """Passes everything on, until the forward in training whose number is FAIL_AT."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def forward(self, h: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled():
            self.seen += 1
            if str(self.seen) == os.environ.get("FAIL_AT"):
                if os.environ.get("FAIL_HOW") == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise RuntimeError("the layer gave up")
        return h * 1.0


def build(shape: tuple[int, ...], classes: int) -> nn.Module:
    inputs = int(torch.Size(shape).numel())
    hidden = [nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1)) for _ in range(2)]
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, 32), nn.ReLU(), *hidden, nn.Linear(32, classes), Mortal())
