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
from undrift.cone import gram, project
from undrift.errors import BadSetting, UnknownName
from undrift.layout import Layout


class Memory(NamedTuple):
    """D[i] for up to m clients, as D[i] = beta_2^age rows[i]: the scale apart, so that an old direction never underflows."""

    rows: Tensor  # [m, P]
    ids: Tensor  # [m] whose row it is, -1: free
    age: Tensor  # [m] rounds since the row was written
    uses: Tensor  # [m] c(i), how often the client took part since it was let in
    since: Tensor  # [m] when it was let in, a running number
    products: Tensor  # [T, m, m] the rows' Gram matrix, one for each tensor of the model or one for all
    evictions: Tensor  # [] so far


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
        active: Tensor  # constraints active in the last programme
        failed: Tensor  # programmes so far that had no solution (non-finite input, no convergence)

    def server_init(self, x0: Tensor, clients: int, layout: Layout) -> State:
        slots = min(self.slots, clients)
        number = torch.zeros(slots, dtype=torch.int64, device=x0.device)
        parts = len(layout.names) if self.qp_scope == "tensor" else 1
        memory = Memory(
            x0.new_zeros(slots, len(x0)),
            number - 1,
            number,
            number,
            number,
            x0.new_zeros(parts, slots, slots),
            number.sum(),
        )
        return self.State(torch.zeros_like(x0), memory, number.sum(), number.sum())

    def server_step(self, server: State, x: Tensor, d: Tensor, up: Any, cohort: Cohort) -> tuple[Tensor, State]:
        m = self.beta1 * server.m + d
        if not len(server.memory.ids):
            return x - self.server_lr * m, server._replace(m=m)
        segments = cohort.layout.segments if self.qp_scope == "tensor" else [slice(0, len(x))]
        memory, place = self.mem_red(server.memory, cohort)
        memory = self.remember(memory, place, up.d, segments)
        known = (memory.ids >= 0) & ((memory.age == 0) | (self.beta2 > 0))  # beta_2 = 0 wipes whoever was absent
        projected, active, failed = [], server.active * 0, server.failed
        for segment, products in zip(segments, memory.products, strict=True):  # m~ = QP(m, D)
            qp = project(m[segment], memory.rows[known][:, segment], products[known][:, known], self.rho)
            projected.append(qp.u)
            active, failed = active + (qp.z > 0).sum(), failed + (not qp.solved)
        m = torch.cat(projected)
        return x - self.server_lr * m, self.State(m, memory, active, failed)

    def mem_red(self, memory: Memory, cohort: Cohort) -> tuple[Memory, Tensor]:
        """Algorithm 3: every client of the cohort gets a row; the least used one outside the cohort makes room."""
        ids, age, uses, since = (t.tolist() for t in (memory.ids, memory.age, memory.uses, memory.since))
        present, evictions = set(cohort.ids.tolist()), 0
        turn = cohort.drawn.argsort() if self.order == "sampling" else torch.arange(cohort.size)
        place = [0] * cohort.size
        for s in turn.tolist():
            client = int(cohort.ids[s])
            if client not in ids:
                if -1 in ids:
                    row = ids.index(-1)
                else:
                    row = min((r for r in range(len(ids)) if ids[r] not in present), key=lambda r: (uses[r], since[r]))
                    evictions += 1
                ids[row], uses[row], age[row], since[row] = (
                    client,
                    0,
                    -1,
                    max(since) + 1,
                )  # age -1: nothing remembered yet
            place[s] = ids.index(client)
            uses[place[s]] += 1
        like = memory.ids
        kept = memory._replace(
            ids=like.new_tensor(ids),
            age=like.new_tensor(age),
            uses=like.new_tensor(uses),
            since=like.new_tensor(since),
            evictions=memory.evictions + evictions,
        )
        return kept, like.new_tensor(place)

    def remember(self, memory: Memory, place: Tensor, updates: Tensor, segments: list[slice]) -> Memory:
        """Equation (7): D[i] <- d_i for a new client, beta_2 D[i] + d_i for a known one, beta_2 D[i] for an absent one."""
        age = memory.age[place].unsqueeze(-1)
        scale = torch.where(age < 0, 0.0, self.beta2 ** (age + 1).to(updates.dtype)).to(updates.dtype)
        rows = memory.rows.index_copy(0, place, scale * memory.rows[place] + updates)
        # Only the cohort's rows and columns of the Gram matrix change: S m d operations, not m m d.
        new = torch.stack([gram(rows[place][:, part], rows[:, part]) for part in segments])
        products = memory.products.index_copy(1, place, new).index_copy(2, place, new.transpose(1, 2))
        return memory._replace(rows=rows, age=(memory.age + 1).index_fill(0, place, 0), products=products)

    def facts(self, server: State) -> dict[str, Tensor]:
        return {"qp_active": server.active, "qp_failed": server.failed, "evictions": server.memory.evictions}

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
