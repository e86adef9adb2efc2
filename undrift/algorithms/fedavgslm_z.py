"""FedAvgSLM-Z: local momentum that starts anew in every round, and server momentum.

Baseline of DOMO (Xu & Huang, AAAI 2022).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from undrift.algorithms.fedavglm_z import ResetMomentum
from undrift.algorithms.fedavgm import ServerMomentum


@dataclass(frozen=True)
class FedAvgSLMZ(ResetMomentum, ServerMomentum):
    """ResetMomentum on the clients; the server's momentum is kept in gradient units, as in the thesis."""

    momentum: float = 0.6  # twice 0.9 would be a hundred times the rate
    beta1: float = 0.6
    momentum_units: Literal["param", "grad"] = "grad"
