"""FedNova: every client's update is divided by how far its own number of local steps can carry it.

Wang, Liu, Liang, Joshi, Poor: Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization. NeurIPS 2020.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from undrift.algorithms.base import Average, Cohort, Down, LocalSGD, Nothing, State, Vec, Work
from undrift.core.errors import BadSetting
from undrift.core.vec import mean

BUFFERED = ("momentum", "nesterov")  # optimisers whose buffer keeps every gradient, a little less in each step


@dataclass(frozen=True)
class NormalizedUpdates(LocalSGD):
    """d = tau_eff sum_i w_i d_i / tau_i with tau_i = |a_i|_1, a_i the weights of a client's gradients in d_i / eta_l.

    Differs: tau_eff = sum_i w_i tau_i as in the authors' code, so that equal tau_i give FedAvg also with local momentum; with
    Adam and Muon tau_i is K_i. The paper's variant with a proximal term is left out.
    """

    sends_updates: ClassVar[bool] = False
    steady_rate: ClassVar[bool] = True  # d_i is divided by the number of steps

    class Up(NamedTuple):
        d: Vec  # d_i / tau_i

    def reach(self, steps: Tensor) -> Tensor:
        """tau_i = |a_i|_1 of clients that took so many steps [..., 1]."""
        if self.optimizer not in BUFFERED:
            return steps
        mu, rest = self.momentum, 1 - self.momentum
        heavy = (steps - mu * (1 - mu**steps) / rest) / rest  # sum_k (1 - mu^k) / (1 - mu), k = 1 .. K_i
        return steps + mu * heavy if self.optimizer == "nesterov" else heavy

    def local_end(self, down: Down, client: Nothing, work: Work) -> tuple[Up, Nothing]:
        return self.Up((down.x - work.x) / self.reach(work.k)), client

    def gather(self, companion: State, up: Up, cohort: Cohort) -> tuple[Tensor, State]:
        tau_eff = mean(self.reach(cohort.steps), cohort.weight)
        return tau_eff * mean(up.d, cohort.weight), companion

    def check(self, clients: int, cohort: int) -> None:
        super().check(clients, cohort)
        if self.keep_moments and self.optimizer in BUFFERED:
            raise BadSetting(f"{type(self).__name__} knows tau_i only of new buffers; leave keep_moments at false")


@dataclass(frozen=True)
class FedNova(NormalizedUpdates, Average):
    """Normalised updates and x_{t+1} = x_t - eta_g d."""
