"""The position of a pipeline in its schedule."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from undrift.core.errors import BadSetting
from undrift.pipeline.schedule import BlockWork, Schedule, format_queues


@dataclass
class Clock:
    """Timestamps since the queues were last empty; batch numbers count from the very beginning."""

    schedule: Schedule
    t: int = 0
    fed: int = 0  # batches since then
    first: int = 0  # the number of the first of them
    rows: dict[int, int] = field(default_factory=dict)  # samples in each batch under way, where known

    def work(self, k: int) -> BlockWork:
        """The work of block k now, by batch number."""
        batches = self.schedule.work(k, self.t, self.fed)
        return BlockWork(*(None if n is None else self.first + n for n in batches))

    def feed(self, *parts: Tensor | None) -> int:
        """The number of a new batch, with what is known of its samples."""
        n = self.first + self.fed
        self.rows = {older: rows for older, rows in self.rows.items() if older >= self.oldest}
        for part in parts:
            if part is not None:
                self.rows[n] = len(part)
        self.fed += 1
        return n

    @property
    def oldest(self) -> int:
        """The first batch that has not passed all blocks."""
        return self.first + max(0, self.t - self.schedule.backward_lag[0])

    @property
    def idle(self) -> bool:
        """Whether every batch has passed all blocks."""
        return self.t >= self.fed + (self.schedule.m[0] if self.fed else 0)

    def restart(self) -> None:
        """Begin the schedule anew with empty queues."""
        self.first, self.t, self.fed = self.first + self.fed, 0, 0

    def tensors(self) -> dict[str, Tensor]:
        queues = torch.tensor([self.schedule.p, self.schedule.m])
        found = {"clock": torch.tensor([self.t, self.fed, self.first]), "queues": queues}
        rows = {n: count for n, count in self.rows.items() if n >= self.oldest}
        return found | ({"rows": torch.tensor([*rows.items()])} if len({*rows.values()}) > 1 else {})

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Load `tensors`, and refuse those of other queues, whose batches are in other places."""
        if "clock" not in tensors:
            raise BadSetting("this is no state of a pipeline; give what state_dict() returned")
        own = [list(self.schedule.p), list(self.schedule.m)]
        stored = tensors["queues"].tolist() if "queues" in tensors else own  # absent in older states
        if stored != own:
            p, m = (tuple(lengths) for lengths in stored)
            raise BadSetting(
                f"the state is of {len(m)} blocks with the queue lengths {format_queues(p, m)}, and this pipeline has "
                f"{self.schedule.blocks} with {self.schedule}; build it with those of the state"
            )
        self.t, self.fed, self.first = tensors["clock"].tolist()
        self.rows = dict(tensors["rows"].tolist()) if "rows" in tensors else {}
