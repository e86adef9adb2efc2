"""FedAvg: local SGD and a weighted mean.

McMahan, Moore, Ramage, Hampson, Aguera y Arcas: Communication-Efficient Learning of Deep Networks from Decentralized
Data. AISTATS 2017.
"""

from dataclasses import dataclass

from undrift.algorithms.base import Average, LocalSGD


@dataclass(frozen=True)
class FedAvg(LocalSGD, Average):
    """x_i^{k+1} = x_i^k - eta_l g_i(x_i^k);  x_{t+1} = x_t - eta_g d, d the weighted mean of d_i = x_t - x_i^K."""
