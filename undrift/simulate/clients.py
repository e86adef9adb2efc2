"""What clients keep between rounds, in a table that holds a row only for those that have taken part."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from undrift.vec import leaves, map_leaves

T = TypeVar("T")


class ClientTable:
    """Rows of client state by client id; the tensors double in size when they are full."""

    def __init__(self) -> None:
        self.row: dict[int, int] = {}
        self.columns: list[Tensor] = []  # one [capacity, ...] tensor for each leaf of the state

    def read(self, ids: Tensor, fresh: T) -> T:
        """The states [S, ...] of clients ids [S]; `fresh` [S, ...] for those seen for the first time."""
        known = [self.row.get(i, -1) for i in ids.tolist()]
        if not self.columns or max(known) < 0:
            return fresh
        rows = torch.tensor(known, device=ids.device)
        columns = iter(self.columns)

        def stored(new: Tensor) -> Tensor:
            old = next(columns)[rows.clamp(min=0)]
            return torch.where((rows >= 0).view(-1, *(1,) * (new.dim() - 1)), old, new)

        return map_leaves(stored, fresh)

    def write(self, ids: Tensor, state: object) -> None:
        new = leaves(state)
        if not new:
            return
        rows = torch.tensor([self.row.setdefault(i, len(self.row)) for i in ids.tolist()], device=ids.device)
        if not self.columns:
            self.columns = [t.new_zeros((0, *t.shape[1:])) for t in new]
        if len(self.row) > len(self.columns[0]):
            capacity = max(len(self.row), 2 * len(self.columns[0]))
            self.columns = [torch.cat([c, c.new_zeros((capacity - len(c), *c.shape[1:]))]) for c in self.columns]
        for column, values in zip(self.columns, new, strict=True):
            column[rows] = values

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds: the ids in row order, and the rows in use."""
        if not self.columns:
            return {}
        used = {f"clients.{n}": column[: len(self.row)] for n, column in enumerate(self.columns)}
        return {"clients.ids": torch.tensor(list(self.row)), **used}

    def restore(self, tensors: dict[str, Tensor], device: torch.device) -> None:
        self.row = {i: row for row, i in enumerate(tensors["clients.ids"].tolist())} if "clients.ids" in tensors else {}
        self.columns = []
        while f"clients.{len(self.columns)}" in tensors:
            self.columns.append(tensors[f"clients.{len(self.columns)}"].to(device).clone())

    def saved(self, round: int) -> None:
        """A checkpoint is complete: only a table on disk has something to do."""

    def close(self) -> None:
        """The run is over, likewise."""
