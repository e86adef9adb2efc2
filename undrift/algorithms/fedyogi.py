"""FedYogi: Yogi on the server, whose second moment grows no faster than additively.

Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar, McMahan: Adaptive Federated Optimization. ICLR 2021, Algorithm 2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from undrift.algorithms.base import LocalSGD
from undrift.algorithms.fedadam import AdaptiveServer


@dataclass(frozen=True)
class YogiServer(AdaptiveServer):
    """v_{t+1} = v_t - (1 - beta_2) d^2 sign(v_t - d^2)."""

    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        return v - (1 - self.beta2) * square * torch.sign(v - square)


@dataclass(frozen=True)
class FedYogi(LocalSGD, YogiServer):
    """Local SGD on the clients, Yogi on the server."""
