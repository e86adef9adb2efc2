"""GradMA-S: server momentum projected against a memory of the clients' updates.

Luo, Li, Lan, Gao: GradMA: A Gradient-Memory-based Accelerated Federated Learning with Alleviated Catastrophic
Forgetting. CVPR 2023, Algorithms 3 (mem_red), 4 (Server_Update) and 8.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from undrift.algorithms.base import Cohort, LocalSGD, Server, at_least, below_one
from undrift.algorithms.gradient_memory.cone import project
from undrift.algorithms.gradient_memory.memory import Memory, leave_out
from undrift.core.errors import BadSetting, UnknownName
from undrift.core.layout import Layout


@dataclass(frozen=True)
class ServerMemory(Server):
    """m = beta_1 m~ + d is projected on the cone of directions that hurt no remembered client.

    Differs: the paper's sets of counters are keyed by client (spec E-6); mem_red runs on the clients that answered,
    in the order of their ids, `order=sampling` as in the authors' code; one QP for the whole vector as in the paper,
    `qp_scope=tensor` for one per parameter tensor as in the authors' code; the QP is solved exactly.
    """

    beta1: float = 0.5  # momentum
    beta2: float = 0.5  # how fast the memory fades
    slots: int = 100  # m, clients remembered; 0: none, which is FedAvgM
    rho: float = 0.0  # margin of the constraints
    qp_scope: str = "global"
    order: str = "id"

    needs_single_updates: ClassVar[bool] = True

    class State(NamedTuple):
        m: Tensor  # m~, the projected momentum
        memory: Memory
        active: Tensor  # [T, m] whose constraint was active in the last programme: there the next one begins
        failed: Tensor  # programmes so far that had no solution (non-finite input, no convergence)

    def server_init(self, x0: Tensor, clients: int, layout: Layout) -> State:
        parts = len(layout.names) if self.qp_scope == "tensor" else 1
        memory = Memory.empty(min(self.slots, clients), x0, parts)
        active = torch.zeros(parts, len(memory.ids), dtype=torch.bool)
        return self.State(torch.zeros_like(x0), memory, active, memory.evictions)

    def server_step(self, server: State, x: Tensor, d: Tensor, up: Any, cohort: Cohort) -> tuple[Tensor, State]:
        m = self.beta1 * server.m + d
        if not len(server.memory.ids):
            return x - self.server_lr * m, server._replace(m=m)
        segments = cohort.layout.segments if self.qp_scope == "tensor" else [slice(0, len(x))]
        ids, drawn, updates = cohort.ids, cohort.drawn, up.d
        if cohort.there is not None:
            ids, drawn, updates = leave_out(cohort.there, ids, drawn, updates)
        if self.order == "sampling":
            turn = drawn.argsort()
            ids, updates = ids[turn], updates[turn]
        memory, place = server.memory.let_in(ids)  # mem_red
        memory, along = memory.remember(place, updates, self.beta2, segments, m)
        D = memory.constrains(self.beta2)
        projected, active, failed = [], [], server.failed
        for part, products, a, start in zip(segments, memory.products, along, server.active, strict=True):
            qp = project(m[part], memory.rows[:, part], products, self.rho, a, D, start)  # m~ = QP(m, D)
            projected.append(qp.u)
            active.append(qp.z > 0)
            failed = failed + ~qp.solved
        m = torch.cat(projected)
        return x - self.server_lr * m, self.State(m, memory, torch.stack(active), failed)

    def facts(self, server: State) -> dict[str, Tensor]:
        return {"qp_active": server.active.sum(), "qp_failed": server.failed, "evictions": server.memory.evictions}

    def check_server(self, clients: int, cohort: int) -> None:
        super().check_server(clients, cohort)
        below_one(self, "beta1", "beta2")
        at_least(self, 0.0, "rho")
        if self.slots != 0 and not cohort <= self.slots:
            raise BadSetting(f"slots must be 0 or at least the cohort's {cohort} clients, not {self.slots}")
        for field, allowed in (("qp_scope", ("global", "tensor")), ("order", ("id", "sampling"))):
            if getattr(self, field) not in allowed:
                raise UnknownName(field, getattr(self, field), allowed)


@dataclass(frozen=True)
class GradMAS(LocalSGD, ServerMemory):
    """Local SGD on the clients; momentum, memory and projection on the server."""

    paper: ClassVar[str] = """@inproceedings{luo2023gradma,
  title     = {{GradMA}: A Gradient-Memory-based Accelerated Federated Learning with Alleviated Catastrophic Forgetting},
  author    = {Luo, Kangyang and Li, Xiang and Lan, Yunshi and Gao, Ming},
  booktitle = {CVPR},
  year      = {2023}
}"""
