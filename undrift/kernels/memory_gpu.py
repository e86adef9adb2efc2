"""GradMA's mem_red on a GPU, without waiting for the host: it assigns rows of the server's memory to clients."""

from __future__ import annotations

import torch
from torch import Tensor

from undrift.algorithms.gradient_memory.memory import Memory, mem_red
from undrift.core.forms import faster
from undrift.kernels import devices
from undrift.kernels.launch import allocate, launch, tl, triton


@faster(mem_red, when=lambda memory, clients: devices.gpu(memory.ids.device))
def mem_red_gpu(memory: Memory, clients: Tensor) -> tuple[Memory, Tensor]:
    counters = torch.stack([memory.ids, memory.age, memory.uses, memory.since])
    counters, place, evictions = torch.ops.undrift.mem_red(clients, counters, memory.evictions)
    ids, age, uses, since = counters.unbind()
    return memory._replace(ids=ids, age=age, uses=uses, since=since, evictions=evictions), place


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _mem_red(  # type: ignore[no-untyped-def]
        clients, before, after, place, evictions, evicted, count, m, SIZE: tl.constexpr
    ):
        """`before` and `after` [4, m] hold ids, age, uses, since."""
        i = tl.arange(0, SIZE)
        real = i < m
        ids = tl.load(before + i, mask=real, other=-2)
        age = tl.load(before + m + i, mask=real, other=0)
        uses = tl.load(before + 2 * m + i, mask=real, other=0)
        since = tl.load(before + 3 * m + i, mask=real, other=0)
        present = i < 0  # rows that belong to the cohort
        for s in range(0, count):
            present = present | (ids == tl.load(clients + s))
        newest = tl.max(since, 0)
        total = tl.load(evictions)
        for s in range(0, count):
            client = tl.load(clients + s)
            own = tl.min(tl.where(ids == client, i, SIZE), 0)
            free = tl.min(tl.where(ids == -1, i, SIZE), 0)
            # argmin c(j) over clients outside the cohort; of equals the oldest entry
            key = tl.where(real & (present == 0), uses * (1 << 32) + since, 1 << 62)
            least = tl.min(tl.where(key == tl.min(key, 0), i, SIZE), 0)
            row = tl.where(own < SIZE, own, tl.where(free < SIZE, free, least))
            new = (i == row) & (own == SIZE)
            newest += (own == SIZE).to(tl.int64)
            total += ((own == SIZE) & (free == SIZE)).to(tl.int64)
            ids = tl.where(new, client, ids)
            age = tl.where(new, -1, age)
            since = tl.where(new, newest, since)
            uses = tl.where(new, 0, uses) + (i == row).to(tl.int64)
            present = present | (i == row)
            tl.store(place + s, row.to(tl.int64))
        tl.store(after + i, ids, mask=real)
        tl.store(after + m + i, age, mask=real)
        tl.store(after + 2 * m + i, uses, mask=real)
        tl.store(after + 3 * m + i, since, mask=real)
        tl.store(evicted, total)

    @torch.library.custom_op("undrift::mem_red", mutates_args=())
    def _op(clients: Tensor, counters: Tensor, evictions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The counters [4, m] after the assignment, the rows [S] of clients [S], and the evictions so far."""
        after, place, evicted = (
            allocate(counters, *counters.shape),
            allocate(clients, len(clients)),
            allocate(evictions),
        )
        m = counters.shape[1]
        launch(
            _mem_red, (1,), clients.contiguous(), counters.contiguous(), after, place, evictions, evicted, len(clients), m,
            SIZE=triton.next_power_of_2(m),
        )  # fmt: skip
        return after, place, evicted

    @_op.register_fake
    def _(clients: Tensor, counters: Tensor, evictions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return torch.empty_like(counters), torch.empty_like(clients), torch.empty_like(evictions)
