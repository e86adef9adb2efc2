"""FFA-LoRA: of every adapter B A the factor A stays as it was drawn, and B is trained and averaged.

Sun, Li, Li, Ding: Improving LoRA in Privacy-preserving Federated Learning. ICLR 2024.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from undrift.algorithms.base import Average, LocalSGD
from undrift.core.layout import check_adapters, factor


@dataclass(frozen=True)
class FrozenA(LocalSGD):
    """Clients train all but A, which like the frozen model is the same for all: the mean of B_i A is (mean of B_i) A."""

    def trains(self, names: tuple[str, ...]) -> Collection[str]:
        check_adapters(names)
        return [name for name in names if factor(name) != "A"]


@dataclass(frozen=True)
class FFALoRA(FrozenA, Average):
    """B_i^{k+1} = B_i^k - eta_l g_i(W_0 + B_i^k A);  B_{t+1} = B_t - eta_g d, d the weighted mean of B_t - B_i^K."""
