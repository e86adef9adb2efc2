"""The settings that both sides of GradMA share: the margin of the constraints, and the scope of a quadratic programme."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from undrift.algorithms.checks import Checked, at_least
from undrift.core.layout import Layout


@dataclass(frozen=True)
class Projected(Checked):
    """A part that projects directions on a cone: one QP for the whole vector, or one for each parameter tensor."""

    rho: float = 0.0  # margin of the constraints
    qp_scope: Literal["global", "tensor"] = "global"

    varies: ClassVar[tuple[str, ...]] = ("rho",)

    def segments(self, layout: Layout) -> list[slice]:
        """The part of the vector that each programme projects."""
        return layout.segments if self.qp_scope == "tensor" else [slice(0, layout.size)]

    def check(self, clients: int, cohort: int) -> None:
        super().check(clients, cohort)
        at_least(self, 0.0, "rho")
