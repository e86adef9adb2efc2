"""Where a pipeline stands in its schedule."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from undrift.pipeline.schedule import Schedule, Work


@dataclass
class Clock:
    """Timestamps since the queues were last empty; batches keep one numbering from the very beginning."""

    schedule: Schedule
    t: int = 0
    fed: int = 0  # batches since the queues were last empty
    first: int = 0  # the number of the first of them

    def work(self, k: int) -> Work:
        """What block k does now, by the batches' own numbers."""
        forward, backward = self.schedule.work(k, self.t, self.fed)
        return Work(
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
        return {"clock": torch.tensor([self.t, self.fed, self.first])}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        self.t, self.fed, self.first = tensors["clock"].tolist()
