"""Where a pipeline stands in its schedule."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from undrift.core.errors import BadSetting
from undrift.pipeline.schedule import BlockWork, Schedule, written


@dataclass
class Clock:
    """Timestamps since the queues were last empty; batches keep one numbering from the very beginning."""

    schedule: Schedule
    t: int = 0
    fed: int = 0  # batches since the queues were last empty
    first: int = 0  # the number of the first of them

    def work(self, k: int) -> BlockWork:
        """What block k does now, by the batches' own numbers."""
        forward, backward = self.schedule.work(k, self.t, self.fed)
        return BlockWork(
            None if forward is None else self.first + forward, None if backward is None else self.first + backward
        )

    @property
    def idle(self) -> bool:
        """Whether every batch that was fed is through."""
        return self.t >= self.fed + (self.schedule.m[0] if self.fed else 0)

    def restart(self) -> None:
        """The queues are empty: the schedule begins anew."""
        self.first, self.t, self.fed = self.first + self.fed, 0, 0

    def tensors(self) -> dict[str, Tensor]:
        queues = torch.tensor([self.schedule.p, self.schedule.m])
        return {"clock": torch.tensor([self.t, self.fed, self.first]), "queues": queues}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Refuses a state of other queues: its batches are not where these would look for them."""
        if "clock" not in tensors:
            raise BadSetting("this is no state of a pipeline; give what state_dict() returned")
        own = [list(self.schedule.p), list(self.schedule.m)]
        stored = tensors["queues"].tolist() if "queues" in tensors else own  # an older state does not say
        if stored != own:
            p, m = (tuple(lengths) for lengths in stored)
            raise BadSetting(
                f"the state is of {len(m)} blocks with the queue lengths {written(p, m)}, and this pipeline has "
                f"{self.schedule.blocks} with {self.schedule}; build it with those of the state"
            )
        self.t, self.fed, self.first = tensors["clock"].tolist()
