"""GradMA-S: server momentum projected against a memory of the clients' updates.

Luo, Li, Lan, Gao: GradMA: A Gradient-Memory-based Accelerated Federated Learning with Alleviated Catastrophic
Forgetting. CVPR 2023, Algorithms 3 (Server_Update), 4 (mem_red) and 8.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from undrift.algorithms.base import Cohort, LocalSGD, Server, Up
from undrift.algorithms.checks import below_one
from undrift.algorithms.gradient_memory.cone import project_parts
from undrift.algorithms.gradient_memory.memory import Memory
from undrift.algorithms.gradient_memory.scope import Projected
from undrift.core.errors import BadSetting
from undrift.core.layout import Layout


@dataclass(frozen=True)
class ServerMemory(Server, Projected):
    """m = beta_1 m~ + d is projected on the cone of directions that hurt no remembered client.

    Differs: the paper's sets of counters are keyed by client; mem_red runs on the clients that answered, in the order of
    their ids, `order=sampling` as in the authors' code; one QP for the whole vector as in the paper, `qp_scope=tensor` for
    one per parameter tensor as in the authors' code; the QP is solved exactly.
    """

    beta1: float = 0.5  # momentum
    beta2: float = 0.5  # how fast the memory fades
    slots: int = 100  # m, clients remembered; 0: none, which is FedAvgM
    order: Literal["id", "sampling"] = "id"

    needs_single_updates: ClassVar[bool] = True
    varies: ClassVar[tuple[str, ...]] = ("beta1", "beta2")
    one_run: ClassVar[bool] = True

    class State(NamedTuple):
        m: Tensor  # m~, the projected momentum
        memory: Memory  # D; its `ids` are buf, and new_buf those of them whose `age` is below 0
        active: Tensor  # [T, m] the last programme's active constraints, where the next one starts
        failed: Tensor  # programmes so far that had no solution (non-finite input, no convergence)

    def server_init(self, x0: Tensor, clients: int, layout: Layout) -> State:
        parts = len(self.segments(layout))
        memory = Memory.empty(min(self.slots, clients), x0, parts)
        active = torch.zeros(parts, len(memory.ids), dtype=torch.bool)
        return self.State(torch.zeros_like(x0), memory, active, memory.evictions)

    def server_step(self, server: State, x: Tensor, d: Tensor, up: Up, cohort: Cohort) -> tuple[Tensor, State]:
        m = self.beta1 * server.m + d  # Algorithm 3, line 1
        if not len(server.memory.ids):
            return x - self.server_lr * m, server._replace(m=m)
        turn = cohort.drawn.argsort() if self.order == "sampling" else slice(None)
        segments = self.segments(cohort.layout)
        memory, place = server.memory.let_in(cohort.ids[turn])  # Algorithm 4: buf, new_buf <- mem_red
        # Lines 2-8, equation (7): D[i] <- d_i in new_buf, beta_2 D[i] + d_i in the cohort, beta_2 D[i] elsewhere in buf
        memory, along = memory.remember(place, up.d[turn], self.beta2, segments, m)
        D = memory.constrains(self.beta2)
        # Line 9: m~ = QP_g(m, D)
        qp = project_parts(m, memory.rows, segments, memory.products, along, D, server.active, self.rho)
        failed = server.failed + (~qp.solved).sum()
        return x - self.server_lr * qp.u, self.State(qp.u, memory, qp.z > 0, failed)  # x <- x - eta_g m~

    def facts(self, server: State) -> dict[str, Tensor]:
        return {"qp_active": server.active.sum(), "qp_failed": server.failed, "evictions": server.memory.evictions}

    def check(self, clients: int, cohort: int) -> None:
        super().check(clients, cohort)
        below_one(self, "beta1", "beta2")
        if self.slots != 0 and not cohort <= self.slots:
            raise BadSetting(f"slots must be 0 or at least the cohort's {cohort} clients, not {self.slots}")


@dataclass(frozen=True)
class GradMAS(LocalSGD, ServerMemory):
    """Local SGD on the clients; momentum, memory and projection on the server."""
