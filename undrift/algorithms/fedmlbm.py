"""FedMLBM: FedMLB with momentum on the server.

A baseline of GradMA (Luo et al., CVPR 2023).
"""

from dataclasses import dataclass

from undrift.algorithms.fedavgm import ServerMomentum
from undrift.algorithms.fedmlb import Branched


@dataclass(frozen=True)
class FedMLBM(Branched, ServerMomentum):
    """Branched local losses; m_{t+1} = beta_1 m_t + d, x_{t+1} = x_t - eta_g m_{t+1}."""

    lr: float = 0.05  # with 0.1 the momentum carries the model past what it has learned, again and again
