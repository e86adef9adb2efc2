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

    def begin(self, state: object) -> None:
        """Columns for states like this one [S, ...], where there are none yet."""
        if not self.columns:
            self.columns = [t.new_zeros((0, *t.shape[1:])) for t in leaves(state)]

    def write(self, ids: Tensor, state: object) -> None:
        new = leaves(state)
        if not new:
            return
        rows = torch.tensor([self.row.setdefault(i, len(self.row)) for i in ids.tolist()], device=ids.device)
        self.begin(state)
        if len(self.row) > len(self.columns[0]):
            self.reserve(max(len(self.row), 2 * len(self.columns[0])))
        for column, values in zip(self.columns, new, strict=True):
            column[rows] = values

    def assign(self, ids: list[int]) -> tuple[list[int], list[bool]]:
        """The rows of clients, new ones for those who have none, and who had one. There is room for them, see `reserve`."""
        known = [i in self.row for i in ids]
        return [self.row.setdefault(i, len(self.row)) for i in ids], known

    def forget(self, ids: list[int]) -> None:
        """Take back the rows that were assigned last."""
        for i in ids:
            del self.row[i]

    def reserve(self, rows: int) -> None:
        """Room for so many rows."""
        if self.columns and rows > len(self.columns[0]):
            self.columns = [torch.cat([c, c.new_zeros((rows - len(c), *c.shape[1:]))]) for c in self.columns]

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds: the ids in row order, and the rows in use."""
        if not self.row:
            return {}
        used = {f"clients.{n}": column[: len(self.row)] for n, column in enumerate(self.columns)}
        return {"clients.ids": torch.tensor(list(self.row)), **used}

    def restore(self, tensors: dict[str, Tensor], device: torch.device) -> None:
        self.row = {i: row for row, i in enumerate(tensors["clients.ids"].tolist())} if "clients.ids" in tensors else {}
        self.columns = []
        while f"clients.{len(self.columns)}" in tensors:
            self.columns.append(tensors[f"clients.{len(self.columns)}"].to(device).clone())
