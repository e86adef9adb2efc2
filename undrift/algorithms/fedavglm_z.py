"""FedAvgLM-Z: local momentum SGD whose buffer starts at zero in every round.

Xu: New Efficient and Privacy-Preserving Methods for Distributed Training. PhD thesis, chapter 4 (DOMO), baseline; see
also Xu & Huang: Coordinating Momenta for Cross-silo Federated Learning. AAAI 2022.
"""

from __future__ import annotations

from dataclasses import dataclass

from undrift.algorithms.base import Average, LocalSGD
from undrift.algorithms.checks import needs_fresh_momentum


@dataclass(frozen=True)
class ResetMomentum(LocalSGD):
    """b <- mu_l b + g_i(x_i^k), x_i^{k+1} = x_i^k - eta_l b: the base optimiser with `momentum` = mu_l."""

    optimizer: str = "momentum"

    def check(self, clients: int, cohort: int) -> None:
        super().check(clients, cohort)
        needs_fresh_momentum(self)


@dataclass(frozen=True)
class FedAvgLMZ(ResetMomentum, Average):
    """Local momentum that starts anew, and a weighted mean."""
