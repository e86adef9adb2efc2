"""GradMA-W: local gradients projected so that they hurt neither the last step nor the server's model and do not drift.

Luo, Li, Lan, Gao: GradMA: A Gradient-Memory-based Accelerated Federated Learning with Alleviated Catastrophic
Forgetting. CVPR 2023, Algorithms 2 (Worker_Update) and 7.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from undrift.algorithms.base import Average, GradientOracle, LocalData, State, Up, Vec, Worker
from undrift.algorithms.gradient_memory.cone3 import project_three_parts
from undrift.algorithms.gradient_memory.scope import Projected


@dataclass(frozen=True)
class ProjectedGradients(Worker, Projected):
    """g~ = QP(g_i(x_i^k), [g_i(x_i^{k-1}), g_i(x_t), x_i^k - x_t]), all gradients on one mini-batch.

    Differs: the paper writes full gradients, the authors' code and this one mini-batch; a client's first x_i^{-1} is the
    server's model (`prev_first=x0`: the initial one, as in the paper); `prev=global` always takes the server's model, as
    the authors' GradMA does; one QP for the whole vector, `qp_scope=tensor` for one per tensor as in the authors' code.
    """

    prev: Literal["last_local", "global"] = "last_local"
    prev_first: Literal["current", "x0"] = "current"

    class Companion(NamedTuple):
        x0: Vec  # [0] unless prev_first=x0

    class Down(NamedTuple):
        x: Vec
        x0: Vec

    class Client(NamedTuple):
        prev: Tensor  # x', the last local model, [0] where it is not kept

    class Work(NamedTuple):
        x: Tensor
        k: Tensor
        opt: State
        prev: Tensor  # x_i^{k-1}
        active: Tensor  # [..., 1] constraints that were active in the steps so far

    class Facts(NamedTuple):
        local_qp_active: Tensor  # constraints active in a step, on average

    def companion_init(self, x0: Tensor, clients: int) -> Companion:
        return self.Companion(x0 if self.prev_first == "x0" and self.prev == "last_local" else x0[..., :0])

    def client_init(self, down: Down, ids: Tensor, buffers: Tensor) -> Client:
        first = down.x0 if self.prev_first == "x0" else down.x
        return self.Client(first if self.prev == "last_local" else down.x[..., :0])

    def local_start(self, down: Down, client: Client, local: LocalData) -> Work:
        prev, zero = client.prev if self.prev == "last_local" else down.x, torch.zeros_like(down.x[..., :1])
        return self.Work(down.x, zero, self.rest(down.x), prev, zero)

    def local_step(self, down: Down, client: Client, work: Work, oracle: GradientOracle) -> Work:
        g, M1, M2 = oracle.grads(work.x, work.prev, down.x)
        M = [M1, M2, (work.x - down.x).expand_as(g)]
        projected, on = project_three_parts(g, M, self.segments(oracle.layout), self.rho)  # g~ = QP_l(g, M)
        active = on.flatten(-2).sum(-1, keepdim=True)
        return self.move(work, projected, oracle)._replace(prev=work.x, active=work.active + active)

    def local_end(self, down: Down, client: Client, work: Work) -> tuple[Up, Client]:
        return Up(down.x - work.x), self.Client(work.x if self.prev == "last_local" else client.prev)

    def local_facts(self, work: Work) -> Facts:
        return self.Facts(work.active / work.k)


@dataclass(frozen=True)
class GradMAW(ProjectedGradients, Average):
    """Projected local gradients and a weighted mean."""
