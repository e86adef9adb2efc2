"""FedProxM: FedProx's clients with momentum on the server.

A baseline of GradMA (Luo et al., CVPR 2023): FedProx (Li et al., MLSys 2020) with the server of FedAvgM.
"""

from dataclasses import dataclass

from undrift.algorithms.fedavgm import ServerMomentum
from undrift.algorithms.fedprox import Proximal


@dataclass(frozen=True)
class FedProxM(Proximal, ServerMomentum):
    """Proximal local SGD; m_{t+1} = beta_1 m_t + d, x_{t+1} = x_t - eta_g m_{t+1}."""
