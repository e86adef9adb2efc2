"""Local: every client trains alone, from a common start; the lower bound of what a federation should reach.

Xu: New Efficient and Privacy-Preserving Methods for Distributed Training. PhD thesis, University of Pittsburgh, 2023, chapter 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from undrift.algorithms.base import Average, Cohort, Down, GradientOracle, LocalData, Nothing, State, Worker
from undrift.algorithms.personal import Served, stand_still


@dataclass(frozen=True)
class Alone(Worker):
    """v_i <- v_i - eta_l g_i(v_i), and nothing is sent: the server's model stays at x_0."""

    keep_moments: bool = True

    personalises: ClassVar[bool] = True
    sends_updates: ClassVar[bool] = False

    class Client(NamedTuple):
        v: Tensor  # the client's model
        statistics: Tensor  # its BatchNorm statistics

    class Work(NamedTuple):
        x: Tensor  # v_i
        k: Tensor
        opt: State
        buffers: Tensor

    def bytes_down(self, down: Down, invited: int, returning: int, clients: int) -> int:
        return 0  # the common start is drawn from the seed

    def buffers_down(self, invited: int, returning: int) -> int:
        return 0

    @property
    def buffers_up(self) -> bool:
        return False

    def client_init(self, down: Down, ids: Tensor, buffers: Tensor) -> Client:
        return self.Client(down.x, buffers)

    def local_start(self, down: Down, client: Client, local: LocalData) -> Work:
        return super().local_start(Down(client.v), client, local)._replace(buffers=client.statistics)

    def local_step(self, down: Down, client: Client, work: Work, oracle: GradientOracle) -> Work:
        oracle.buffers = work.buffers  # the client's, not the server's
        return self.move(work, oracle.grad(work.x), oracle)._replace(buffers=oracle.buffers)

    def local_end(self, down: Down, client: Client, work: Work) -> tuple[State, Client]:
        return Nothing(), self.Client(work.x, work.buffers)

    def gather(self, companion: State, up: State, cohort: Cohort) -> tuple[Tensor, State]:
        return stand_still(cohort), companion

    def serves(self, down: Down, client: Client, local: LocalData) -> Served:
        return Served(client.v, client.statistics)


@dataclass(frozen=True)
class Local(Alone, Average):
    """Clients that train alone, and a server that does nothing."""
