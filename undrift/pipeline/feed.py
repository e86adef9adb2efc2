"""The samples of batch n: an endless stream, the same in every process."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from undrift.core.errors import BadSetting
from undrift.core.streams import Purpose, fold, stream
from undrift.data.federation import Federation, Split
from undrift.simulate.evaluate import MOST_OUTPUTS

EVALUATION_BATCH = 1000  # samples

Fed = tuple[Tensor | None, Tensor | None]


class Feed:
    """Batches of equal size. Every pass shuffles all samples anew and leaves out a last short batch."""

    def __init__(self, data: Federation, batch: int, replicas: int, seed: int, dtype: torch.dtype) -> None:
        self.data, self.batch, self.replicas, self.seed, self.dtype = data, batch, replicas, seed, dtype
        self.per_pass = len(data.members) // (batch * replicas)
        if not self.per_pass:
            raise BadSetting(f"{len(data.members)} samples do not fill {replicas} x {batch}; lower batch or replicas")
        self.order: tuple[int, Tensor] = (-1, data.members)

    def rows(self, n: int, replica: int) -> Tensor:
        """[B] the training rows of a replica's batch n."""
        visit, place = divmod(n, self.per_pass)
        if visit != self.order[0]:
            members = self.data.members
            words = fold(stream(self.seed, Purpose.BATCHES, visit), torch.arange(len(members), device=members.device))
            self.order = visit, members[words.argsort(stable=True)]
        begin = (place * self.replicas + replica) * self.batch
        return self.order[1][begin : begin + self.batch]

    def take(self, n: int, replica: int = 0, inputs: bool = True, targets: bool = True) -> Fed:
        """Batch n, or the half of it that this process needs."""
        rows, data = self.rows(n, replica), self.data
        x = keys = None
        if inputs:
            if data.transform.draws:
                key = stream(self.seed, Purpose.AUGMENT, n, replica)
                keys = fold(key, torch.arange(len(rows), device=rows.device))
            x = data.transform(data.train.take(rows), self.dtype, keys)
        return x, self.targets(data.train, rows) if targets else None

    def evaluation_batches(self, validation: bool, inputs: bool = True, targets: bool = True) -> Iterator[Fed]:
        """The test samples in order, or those for validation."""
        split = self.data.train if validation else self.data.test
        rows = torch.from_numpy(self.data.validation) if validation else torch.arange(len(split))
        labels = math.prod(split.targets.shape[1:])  # where a model has outputs for each of them
        most = min(EVALUATION_BATCH, MOST_OUTPUTS // (labels * self.data.classes)) if labels > 1 else EVALUATION_BATCH
        for part in rows.to(self.data.members.device).split(max(1, most)):
            x = self.data.transform(split.take(part), self.dtype) if inputs else None
            yield x, self.targets(split, part) if targets else None

    def targets(self, split: Split, rows: Tensor) -> Tensor:
        targets = split.targets[rows]
        return targets.to(self.dtype) if targets.is_floating_point() else targets
