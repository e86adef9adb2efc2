"""MIFAM: MIFA with momentum on the server.

A baseline of GradMA (Luo et al., CVPR 2023, Algorithm 6).
"""

from dataclasses import dataclass

from undrift.algorithms.fedavgm import ServerMomentum
from undrift.algorithms.mifa import LastUpdates


@dataclass(frozen=True)
class MIFAM(LastUpdates, ServerMomentum):
    """m_{t+1} = beta_1 m_t + D;  x_{t+1} = x_t - eta_g m_{t+1}."""

    beta1: float = 0.5  # with 0.9, updates that are many rounds old are followed too far
