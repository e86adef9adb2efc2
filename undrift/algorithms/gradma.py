"""GradMA: gradient memory on both sides, GradMA-W's clients with GradMA-S's server.

Luo, Li, Lan, Gao: GradMA: A Gradient-Memory-based Accelerated Federated Learning with Alleviated Catastrophic
Forgetting. CVPR 2023, Algorithm 1.
"""

from dataclasses import dataclass

from undrift.algorithms.gradma_s import ServerMemory
from undrift.algorithms.gradma_w import ProjectedGradients


@dataclass(frozen=True)
class GradMA(ProjectedGradients, ServerMemory):
    """Projected local gradients; momentum, memory and projection on the server."""
