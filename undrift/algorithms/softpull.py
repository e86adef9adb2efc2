"""SoftPull: every client has its own model, which the server pulls towards the others after each round.

Xu, Li, Guo, Yang, Roth, Hatamizadeh, Zhao, Xu, Huang, Xu: Closing the Generalization Gap of Cross-silo Federated Medical
Image Segmentation. CVPR 2022, equation (11).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from undrift.algorithms.base import Average, Cohort, Down, Vec
from undrift.algorithms.local import Alone
from undrift.algorithms.pulled import Pulled, pull
from undrift.core.trees import nbytes
from undrift.core.vec import mean


@dataclass(frozen=True)
class SoftlyPulled(Pulled, Alone):
    """The clients train alone; between rounds the server pulls. x is the mean of all models, for new clients."""

    uploads_apart: ClassVar[bool] = True

    class Companion(NamedTuple):
        x: Vec  # the server's model, from which the direction starts

    class Up(NamedTuple):
        v: Vec

    def companion_init(self, x0: Tensor, clients: int) -> Companion:
        return self.Companion(x0)

    def bytes_down(self, down: Down, invited: int, returning: int, clients: int) -> int:
        return (invited - returning) * nbytes(down)  # the others have their models

    def local_end(self, down: Down, client: Alone.Client, work: Alone.Work) -> tuple[Up, Alone.Client]:
        return self.Up(work.x), self.Client(work.x, work.buffers)

    def gather(self, companion: Companion, up: Up, cohort: Cohort) -> tuple[Tensor, Companion]:
        return companion.x - mean(up.v, cohort.uniform), companion

    def companion_step(self, companion: Companion, up: Up, cohort: Cohort, x_old: Tensor, x_new: Tensor) -> Companion:
        return self.Companion(x_new)

    @property
    def buffers_up(self) -> bool:
        return True

    def reply(self, companion: Companion, up: Up, buffers: Tensor, cohort: Cohort) -> Pulled.Pull:
        return self.Pull(pull(up.v, self.lam, cohort), pull(buffers, self.lam, cohort))

    def receive(self, client: Alone.Client, reply: Pulled.Pull) -> Alone.Client:
        return self.Client(*reply)


@dataclass(frozen=True)
class SoftPull(SoftlyPulled, Average):
    """Personal models, pulled towards each other."""
