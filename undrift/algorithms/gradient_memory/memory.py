"""The server's memory of the clients' updates: GradMA's D, with mem_red's rule for whom to remember.

Luo, Li, Lan, Gao: GradMA, CVPR 2023, Algorithm 4 and equation (7). The paper's sets of counters are keyed by client.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from undrift.algorithms.gradient_memory.cone import grams
from undrift.core.forms import plain
from undrift.core.vec import place_with


class Memory(NamedTuple):
    """D[i] = beta_2^age rows[i] for up to m clients; the separate scale keeps old directions from underflowing.

    The rows may be hundreds of megabytes, so `remember` overwrites them: use only the memory that it returns.
    """

    rows: Tensor  # [m, P]
    ids: Tensor  # [m] the row's client, -1: free
    age: Tensor  # [m] rounds since the row was written, -1: never
    uses: Tensor  # [m] c(i), rounds with this client since it was let in
    since: Tensor  # [m] running number of its entry
    products: Tensor  # [T, m, m] Gram matrices of the rows in float64, one per segment
    evictions: Tensor  # [] so far

    @classmethod
    def empty(cls, m: int, x0: Tensor, parts: int) -> Memory:
        """Room for m updates like x0 [P], compared in `parts` parts."""
        none = torch.zeros(m, dtype=torch.int64)
        products = x0.new_zeros(parts, m, m, dtype=torch.float64)
        return cls(x0.new_zeros(m, len(x0)), none - 1, none, none, none, products, none.sum())

    def let_in(self, clients: Tensor) -> tuple[Memory, Tensor]:
        """Every client [S] gets a row, by mem_red; also their rows [S]."""
        return mem_red(self, clients)

    def remember(
        self, place: Tensor, updates: Tensor, beta2: float, segments: list[slice], m: Tensor
    ) -> tuple[Memory, Tensor]:
        """D[i] <- d_i for a new client, beta_2 D[i] + d_i for a known one, beta_2 D[i] for an absent one.

        Also the products [T, m] of the vector m with the rows.
        """
        age, at = self.age[place].unsqueeze(-1), place_with(place, updates)
        scale = torch.where(age < 0, 0.0, beta2 ** (age + 1).to(updates.dtype)).to(updates)
        # D[i] <- scale D[i] + d_i. Only the cohort's rows and columns of the Gram matrix change: S m d operations, not m m d.
        new = renew_products(self.rows, at, scale, updates, m, segments)
        new, along = new[:, :-1].to(self.products), new[:, -1]
        products = self.products.index_copy(1, at, new).index_copy(2, at, new.transpose(1, 2))
        age = (self.age + 1).index_fill(0, place, 0)
        return self._replace(age=age, products=products), along

    def constrains(self, beta2: float) -> Tensor:
        """[m] the rows that constrain. Their length does not matter, but beta_2 = 0 wipes those of absent clients."""
        return (self.ids >= 0) & ((self.age == 0) | (beta2 > 0))


@plain(by_value=True)
def mem_red(memory: Memory, clients: Tensor) -> tuple[Memory, Tensor]:
    """Give every client [S] a row, in the order given, if necessary that of the least used absent client. Also their rows [S]."""
    ids, age, uses, since = (t.tolist() for t in (memory.ids, memory.age, memory.uses, memory.since))
    invited, evictions, newest = clients.tolist(), 0, max(since)
    place, stay = {id: row for row, id in enumerate(ids) if id >= 0}, {*clients.tolist()}
    free = iter([row for row, id in enumerate(ids) if id < 0])
    # argmin c(j) over those not in the cohort, the earliest let in first: who is next does not change while others come
    leaving = iter(sorted((row for id, row in place.items() if id not in stay), key=lambda r: (uses[r], since[r])))
    for i in invited:
        if i not in place:
            row = next(free, None)
            if row is None:
                row, evictions = next(leaving), evictions + 1
            newest += 1
            place[i], ids[row], age[row], uses[row], since[row] = row, i, -1, 0, newest
        uses[place[i]] += 1
    as_tensor = memory.ids.new_tensor
    kept = memory._replace(ids=as_tensor(ids), age=as_tensor(age), uses=as_tensor(uses), since=as_tensor(since))
    return kept._replace(evictions=memory.evictions + evictions), as_tensor([place[i] for i in invited])


@plain(in_place=True)
def renew_products(
    rows: Tensor, at: Tensor, scale: Tensor, updates: Tensor, m: Tensor, segments: list[slice]
) -> Tensor:
    """rows[at] <- scale rows[at] + updates, in place, for rows [m, P].

    Then the products [T, S + 1, m] of rows[at] and the vector m with all rows, segment by segment.
    """
    rows.index_copy_(0, at, scale * rows[at] + updates)
    return grams(torch.cat([rows.index_select(0, at), m[None]]), rows, segments).double()
