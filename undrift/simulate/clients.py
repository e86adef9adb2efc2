"""What clients keep between rounds, in a table that holds a row only for those that have taken part."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from undrift.core.trees import leaves, map_leaves

T = TypeVar("T")


class ClientTable:
    """Rows of client state by client id; the tensors double in size when they are full."""

    def __init__(self) -> None:
        self.row: dict[int, int] = {}
        self.columns: list[Tensor] = []  # one [capacity, ...] tensor for each leaf of the state
        self.everybody = False  # there is a row for everybody, see `spread`

    def read(self, ids: Tensor, fresh: T) -> T:
        """The states [S, ...] of clients ids [S]; `fresh` [S, ...] for those seen for the first time."""
        known = [self.row.get(i, -1) for i in ids.tolist()]
        if not self.columns or max(known) < 0:
            return fresh
        rows = torch.tensor(known, device=ids.device)
        columns = iter(self.columns)

        def take_stored(new: Tensor) -> Tensor:
            old = next(columns)[rows.clamp(min=0)]
            return torch.where((rows >= 0).view(-1, *(1,) * (new.dim() - 1)), old, new)

        return map_leaves(take_stored, fresh)

    def begin(self, state: object) -> None:
        """Columns for states like this one [S, ...], where there are none yet."""
        if not self.columns:
            self.columns = [t.new_zeros((0, *t.shape[1:])) for t in leaves(state)]

    def write(self, ids: Tensor, state: object) -> None:
        new = leaves(state)
        if not new:
            return
        known = [self.row.setdefault(i, i if self.everybody else len(self.row)) for i in ids.tolist()]
        rows = torch.tensor(known, device=ids.device)
        self.begin(state)
        if len(self.row) > len(self.columns[0]):
            capacity = max(len(self.row), 2 * len(self.columns[0]))
            self.columns = [torch.cat([c, c.new_zeros((capacity - len(c), *c.shape[1:]))]) for c in self.columns]
        for column, values in zip(self.columns, new, strict=True):
            column[rows] = values

    def spread(self, clients: int) -> None:
        """A row for everybody, at its id, and one more that is nobody's."""
        rows, ids = torch.tensor(list(self.row.values())), torch.tensor(list(self.row))
        for n, column in enumerate(self.columns):
            wide = column.new_zeros((clients + 1, *column.shape[1:]))
            if len(ids):
                wide[ids.to(column.device)] = column[rows.to(column.device)]
            self.columns[n] = wide
        self.row, self.everybody = {i: i for i in self.row}, True

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds: the ids of those who have a state, in rising order, and their rows."""
        if not self.row:
            return {}
        ids = sorted(self.row)
        rows = torch.tensor([self.row[i] for i in ids], device=self.columns[0].device)
        return {"clients.ids": torch.tensor(ids)} | {f"clients.{n}": c[rows] for n, c in enumerate(self.columns)}

    def restore(self, tensors: dict[str, Tensor], device: torch.device) -> None:
        self.row = {i: row for row, i in enumerate(tensors["clients.ids"].tolist())} if "clients.ids" in tensors else {}
        self.columns, self.everybody = [], False
        while f"clients.{len(self.columns)}" in tensors:
            self.columns.append(tensors[f"clients.{len(self.columns)}"].to(device).clone())

    def after_checkpoint(self, round: int) -> None:
        """A checkpoint is complete: only a table on disk has something to do."""

    def close(self) -> None:
        """The run is over, likewise."""
