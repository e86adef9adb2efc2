"""FedAvgSLM: averaged local momentum and server momentum.

Baseline of DOMO (Xu & Huang, AAAI 2022).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from undrift.algorithms.fedavglm import AveragedMomentum
from undrift.algorithms.fedavgm import ServerMomentum


@dataclass(frozen=True)
class FedAvgSLM(AveragedMomentum, ServerMomentum):
    """AveragedMomentum on the clients; the server's momentum is kept in gradient units, as in the thesis."""

    momentum_units: Literal["param", "grad"] = "grad"
