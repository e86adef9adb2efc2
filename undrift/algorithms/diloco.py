"""DiLoCo: many local steps of AdamW, whose moments stay with each client, and Nesterov momentum on the server.

Douillard, Feng, Rusu, Chhaparia, Donchev, Kuncoro, Ranzato, Szlam, Shen: DiLoCo: Distributed Low-Communication Training of
Language Models. 2023, Algorithm 1."""

from __future__ import annotations

from dataclasses import dataclass

from undrift.algorithms.base import LocalSGD
from undrift.algorithms.fedavgm import ServerMomentum


@dataclass(frozen=True)
class DiLoCo(LocalSGD, ServerMomentum):
    """m_{t+1} = beta_1 m_t + d;  x_{t+1} = x_t - eta_g (d + beta_1 m_{t+1}), with AdamW on the clients."""

    lr: float = 0.002
    optimizer: str = "adamw"
    keep_moments: bool = True
    beta1: float = 0.9
    nesterov: bool = True
    server_lr: float = 0.7
