"""Collectives of W workers: simulated ones stacked in one process, or the ranks of a process group."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import broadcast as copy_from

from undrift.core.errors import BadSetting, LostRank


class SimulatedWorkers:
    """Simulated workers: the first dimension of every vector [W, ...]."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.overlap = False
        self.lead: tuple[int, ...] = (count,)
        self.sent = 0  # bytes that all workers sent, as a ring would send them

    def mean(self, v: Tensor) -> Tensor:
        self.sent += ring_all_reduce(v[0], self.count)
        return v.sum(0) / self.count

    def mean_later(self, v: Tensor) -> Callable[[], Tensor]:
        mean = self.mean(v)
        return lambda: mean

    def all_rows(self, v: Tensor) -> Tensor:
        self.sent += ring_all_gather(v[0], self.count)
        return v

    def from_one(self, worker: int, choose: Callable[[Tensor], Tensor], v: Tensor) -> Tensor:
        chosen = choose(v[worker])
        self.sent += ring_copy(chosen, self.count)
        return chosen


class Ranks:
    """This process is one worker of a process group; without a group it is alone."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.has_group = dist.is_available() and dist.is_initialized()
        self.group = group
        self.count = dist.get_world_size(group) if self.has_group else 1
        self.rank = dist.get_rank(group) if self.has_group else 0
        self.overlap = self.count > 1
        self.lead: tuple[int, ...] = ()
        self.sent = 0  # bytes that all workers sent, as a ring sends them

    def mean(self, v: Tensor) -> Tensor:
        return self.mean_later(v)()

    def mean_later(self, v: Tensor) -> Callable[[], Tensor]:
        self.sent += ring_all_reduce(v, self.count)
        if not self.has_group:
            return lambda: v / self.count
        total = v.contiguous()
        request = self.run(lambda: dist.all_reduce(total, group=self.group, async_op=True))

        def finish() -> Tensor:
            self.run(request.wait)
            return total / self.count

        return finish

    def all_rows(self, v: Tensor) -> Tensor:
        self.sent += ring_all_gather(v, self.count)
        if not self.has_group:
            return v.unsqueeze(0)
        rows = [torch.empty_like(v) for _ in range(self.count)]
        self.run(lambda: dist.all_gather(rows, v.contiguous(), group=self.group))
        return torch.stack(rows)

    def from_one(self, worker: int, choose: Callable[[Tensor], Tensor], v: Tensor) -> Tensor:
        chosen = choose(v)  # all choose at the same time, and take over what the one has chosen
        self.sent += ring_copy(chosen, self.count)
        if self.has_group:
            self.run(lambda: copy_from(chosen, group=self.group, group_src=worker))
        return chosen

    def copy_from_first(self, v: Tensor) -> None:
        """Overwrite v with rank 0's values."""
        if self.has_group:
            self.run(lambda: copy_from(v, group=self.group, group_src=0))

    def run(self, collective: Callable[[], Any]) -> Any:
        """Run a collective of all ranks; its failure means that a rank is lost."""
        try:
            return collective()
        except RuntimeError as error:
            first = str(error).partition("\n")[0]
            raise LostRank(
                f"rank {self.rank} lost touch with the other {self.count - 1} ({first}); "
                "if one of them was ended, start all again from their last checkpoint"
            ) from error

    def everybody(self, value: Any) -> list[Any]:
        """The values of all ranks."""
        values: list[Any] = [None] * self.count
        self.run(lambda: dist.all_gather_object(values, value, group=self.group))
        return values

    def agree(self, facts: Mapping[str, object]) -> None:
        """Raise on every rank where one differs from rank 0: it would not fail later, it would train nonsense."""
        if not self.has_group:
            return
        first, *_ = everybody = self.everybody(dict(facts))
        for rank, other in enumerate(everybody):
            for name in {**first, **other}:
                if first.get(name) != other.get(name):
                    raise BadSetting(
                        f"the ranks disagree on {name}: it is {first.get(name, 'absent')} on rank 0 and "
                        f"{other.get(name, 'absent')} on rank {rank}; give all the same settings, model and checkpoint"
                    )


Workers = SimulatedWorkers | Ranks


def ring_all_reduce(v: Tensor, workers: int) -> int:
    """Bytes that all workers together send to sum a vector: 2 (W - 1) / W of it each."""
    return 2 * (workers - 1) * v.numel() * v.element_size()


def ring_all_gather(v: Tensor, workers: int) -> int:
    """Bytes that all workers together send so that each has every vector."""
    return workers * (workers - 1) * v.numel() * v.element_size()


def ring_copy(v: Tensor, workers: int) -> int:
    """Bytes that all workers together send so that each has the vector of one."""
    return (workers - 1) * v.numel() * v.element_size()
