"""Local: every client trains alone, from a common start; the lower end of what a federation should reach.

Xu: New Efficient and Privacy-Preserving Methods for Distributed Training. PhD thesis, University of Pittsburgh, 2023, chapter 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from undrift.algorithms.base import Average, Cohort, Served, Worker, standing_still
from undrift.oracle.oracle import GradientOracle, LocalData


@dataclass(frozen=True)
class Alone(Worker):
    """v_i <- v_i - eta_l g_i(v_i), and nothing is sent: the server's model stays at x_0."""

    keep_moments: bool = True

    personalises: ClassVar[bool] = True
    sends_updates: ClassVar[bool] = False

    class Client(NamedTuple):
        v: Tensor  # the client's own model
        statistics: Tensor  # and its BatchNorm statistics

    class Up(NamedTuple):
        """Nothing."""

    class Work(NamedTuple):
        x: Tensor  # v_i
        k: Tensor
        opt: Any
        buffers: Tensor

    def bytes_down(self, down: Any, invited: int, returning: int, clients: int) -> int:
        return 0  # the common start is drawn from the seed

    @property
    def buffers_down(self) -> bool:
        return False

    @property
    def buffers_up(self) -> bool:
        return False

    def client_init(self, down: Any, ids: Tensor, buffers: Tensor) -> Any:
        return self.Client(down.x, buffers)

    def local_start(self, down: Any, client: Any) -> Work:
        return self.Work(client.v, torch.zeros_like(client.v[..., :1]), self.rest(client.v), client.statistics)

    def local_step(self, down: Any, client: Any, work: Work, oracle: GradientOracle) -> Any:
        oracle.buffers = work.buffers  # its own, not the server's
        return self.move(work, oracle.grad(work.x), oracle)

    def local_end(self, down: Any, client: Any, work: Work) -> tuple[Any, Any]:
        return self.Up(), self.Client(work.x, work.buffers)

    def gather(self, companion: Any, up: Any, cohort: Cohort) -> tuple[Tensor, Any]:
        return standing_still(cohort), companion

    def serves(self, down: Any, client: Any, local: LocalData) -> Served:
        return Served(client.v, client.statistics)


@dataclass(frozen=True)
class Local(Alone, Average):
    """Clients that train alone, and a server that does nothing."""

    paper: ClassVar[str] = """@phdthesis{xu2023distributed,
  title  = {New Efficient and Privacy-Preserving Methods for Distributed Training},
  author = {Xu, An},
  school = {University of Pittsburgh},
  year   = {2023}
}"""
