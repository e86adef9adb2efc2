"""FedAdagrad: Adagrad on the server.

Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar, McMahan: Adaptive Federated Optimization. ICLR 2021, Algorithm 2.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from undrift.algorithms.base import LocalSGD
from undrift.algorithms.fedadam import AdaptiveServer


@dataclass(frozen=True)
class AdagradServer(AdaptiveServer):
    """v_{t+1} = v_t + d^2."""

    beta1: float = 0.0

    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        return v + square


@dataclass(frozen=True)
class FedAdagrad(LocalSGD, AdagradServer):
    """Local SGD on the clients, Adagrad on the server."""
