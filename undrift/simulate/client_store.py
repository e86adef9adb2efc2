"""Client states in a sparse file with a row for every client.

A checkpoint holds the checksum of every row. Rows are written in place, so after a kill the file may be ahead of the
checkpoint: an undo log beside the checkpoint holds rows as they were then, each synced before its row is first overwritten.
To go back to a checkpoint is to find, for every checksum, the row that fits: in the table, or in the logs written since.
"""

from __future__ import annotations

import itertools
import math
import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from undrift.core import ranks
from undrift.core.device import available_memory
from undrift.core.errors import BadRunFolder, BadSetting
from undrift.core.files import sync, write_all, writing
from undrift.core.run_files import CHECKPOINTS, TABLE, beside, round_of
from undrift.core.trees import leaves, map_leaves
from undrift.simulate.clients import ClientTable

T = TypeVar("T")
Ids = NDArray[np.int64]
Rows = NDArray[np.uint8]  # [S, row_bytes]

NAME = struct.Struct("<q")  # a record of the log is a client's id and its row
ABSENT = -1  # in place of a checksum: the client has no row


class Found(NamedTuple):
    """Where a client's row of a checkpoint was found in a log."""

    log: Path
    offset: int


class DiskTable:
    """Rows of client state by client id in a run's folder."""

    table: FileIO
    log: FileIO | None = None  # leads back to the last checkpoint; none before the first one

    def __init__(self, folder: Path, clients: int, round: int) -> None:
        self.folder, self.path, self.clients = folder, folder / TABLE, clients
        self.round = round  # the round of the last checkpoint; 0: there is none
        self.row_bytes = 0  # 0: there is no table yet
        self.sums = np.full(clients, ABSENT, np.int64)  # the checksum of every row
        self.pending = np.zeros(clients, bool)  # whose row of the last checkpoint is not in the log yet

    def read(self, ids: Tensor, fresh: T) -> T:
        """The states [S, ...] of clients ids [S]; `fresh` [S, ...] for those seen for the first time."""
        new = leaves(fresh)
        if not self.row_bytes or not row_bytes(new):
            return fresh
        if row_bytes(new) != self.row_bytes:
            raise damage_error(self.path, f"its rows have {self.row_bytes} bytes, not {row_bytes(new)}")
        host_ids = ids.cpu().numpy()
        there = self.sums[host_ids] != ABSENT
        if not there.any():
            return fresh
        rows = np.zeros((len(host_ids), self.row_bytes), np.uint8)
        rows[there] = self.take(host_ids[there])
        known = torch.from_numpy(there).to(ids.device)
        ends = np.cumsum([0, *map(width, new)]).tolist()
        columns = iter([np.ascontiguousarray(rows[:, a:b]) for a, b in itertools.pairwise(ends)])

        def take_stored(new: Tensor) -> Tensor:
            old = torch.from_numpy(next(columns)).view(-1).view(new.dtype).view(new.shape).to(new.device)
            return torch.where(known.view(-1, *(1,) * (new.dim() - 1)), old, new)

        return map_leaves(take_stored, fresh)

    def write(self, ids: Tensor, state: object) -> None:
        new = leaves(state)
        if not row_bytes(new):
            return
        host_ids = ids.cpu().numpy()
        plain = [t.detach().cpu().contiguous().view(-1).view(torch.uint8).view(len(t), width(t)).numpy() for t in new]
        rows = np.concatenate(plain, axis=1)
        with writing(self.path):
            if not self.row_bytes:
                self.create(row_bytes(new))
            self.remember(host_ids)
            self.put(host_ids, rows)
        self.sums[host_ids] = [checksum(i, row.data) for i, row in zip(host_ids.tolist(), rows, strict=True)]

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds: the table's shape, and the checksums of rows, which are on the disk when this returns."""
        if not self.row_bytes:
            return {}
        with writing(self.path):
            os.fsync(self.table.fileno())
        ids = np.flatnonzero(self.sums != ABSENT)
        shape = torch.tensor([self.clients, self.row_bytes])
        return {
            "clients.table": shape, "clients.rows": torch.from_numpy(ids),
            "clients.sums": torch.from_numpy(self.sums[ids]),
        }  # fmt: skip

    def after_checkpoint(self, round: int) -> None:
        """The checkpoint of that round is complete: from now on the log leads back to it."""
        self.round = round
        if self.row_bytes:
            with writing(self.path):
                self.begin_log()

    def restore(self, tensors: dict[str, Tensor], device: torch.device) -> None:
        """Bring the table back to the last checkpoint. All rows are checked before anything is written."""
        if "clients.table" not in tensors:
            return
        moved = find_rows(self.folder, self.round, tensors)
        clients, row = tensors["clients.table"].tolist()
        if clients != self.clients:
            raise damage_error(self.path, f"it has {clients} clients, not {self.clients}")
        self.sums[tensors["clients.rows"].numpy()] = tensors["clients.sums"].numpy()
        with writing(self.path):
            self.open(row)
            for client, found in moved.items():
                with found.log.open("rb") as log:
                    log.seek(found.offset)
                    self.put(np.array([client]), np.frombuffer(log.read(row), np.uint8)[None])
            os.fsync(self.table.fileno())  # before the log goes
            self.begin_log()

    def close(self) -> None:
        if self.row_bytes:
            self.table.close()
        if self.log is not None:
            self.log.close()

    def create(self, row: int) -> None:
        """An empty table, in place of what a run without a checkpoint may have left."""
        with self.path.open("wb") as file:
            file.truncate(self.clients * row)
        sync(self.path)
        sync(self.path.parent)
        self.open(row)

    def open(self, row: int) -> None:
        self.row_bytes = row
        self.table = self.path.open("r+b", buffering=0)
        if hasattr(os, "posix_fadvise"):  # reading ahead, perhaps in holes, only costs time
            os.posix_fadvise(self.table.fileno(), 0, 0, os.POSIX_FADV_RANDOM)

    def take(self, ids: Ids) -> Rows:
        """The rows of clients ids, which must have been written."""
        rows = np.empty((len(ids), self.row_bytes), np.uint8)
        for i, row in zip(ids.tolist(), rows, strict=True):
            self.table.seek(i * self.row_bytes)
            self.table.readinto(row.data)
            if checksum(i, row.data) != self.sums[i]:
                raise damage_error(self.path, f"the checksum of client {i} is wrong")
        return rows

    def put(self, ids: Ids, rows: Rows) -> None:
        """Write rows in the places of clients ids."""
        for i, row in zip(ids.tolist(), rows, strict=True):
            self.table.seek(i * self.row_bytes)
            write_all(self.table, row.data)

    def begin_log(self) -> None:
        """Begin an empty log. A kill before it is there leaves nothing to undo."""
        if self.log is not None:
            self.log.close()
        file = beside(self.folder / CHECKPOINTS, self.round, "undo")
        self.log = file.open("wb", buffering=0)
        sync(file.parent)
        self.pending = self.sums != ABSENT

    def remember(self, ids: Ids) -> None:
        """Put the rows of clients ids at the last checkpoint into the log, on the disk, before they are overwritten."""
        ids = ids[self.pending[ids]]
        if not len(ids) or self.log is None:
            return
        for i, row in zip(ids.tolist(), self.take(ids), strict=True):
            write_all(self.log, NAME.pack(i) + row.tobytes())
        os.fsync(self.log.fileno())
        self.pending[ids] = False


def find_rows(folder: Path, round: int, tensors: Mapping[str, Tensor]) -> dict[int, Found]:
    """Find all rows of a checkpoint; return where those are that the table no longer has, by client."""
    table, (clients, size) = folder / TABLE, tensors["clients.table"].tolist()
    sums = dict(zip(tensors["clients.rows"].tolist(), tensors["clients.sums"].tolist(), strict=True))
    try:
        logged: dict[int, Found] = {}
        for log in (folder / CHECKPOINTS).glob("round-*.undo"):
            if round_of(log) >= round:
                logged |= {i: Found(log, at) for i, at, row in records(log, size) if sums.get(i) == checksum(i, row)}
        moved = {}
        with table.open("rb") as file:
            if file.seek(0, os.SEEK_END) != clients * size:
                raise damage_error(table, "its size is wrong")
            for i, expected in sums.items():
                file.seek(i * size)
                if checksum(i, file.read(size)) == expected:
                    continue
                if i not in logged:
                    raise damage_error(table, f"the checksum of client {i} is wrong")
                moved[i] = logged[i]
    except OSError as error:
        raise damage_error(table, f"{error.filename}: {error.strerror}") from error
    return moved


def records(log: Path, size: int) -> Iterator[tuple[int, int, bytes]]:
    """The records of a log: client, place of its row, and row. A kill may have cut off the last one."""
    with log.open("rb") as file:
        while len(record := file.read(NAME.size + size)) == NAME.size + size:
            yield NAME.unpack_from(record)[0], file.tell() - size, record[NAME.size :]


def damage_error(table: Path, how: str) -> BadRunFolder:
    return BadRunFolder(f"the client table {table} is damaged ({how}); 'undrift verify {table.parent}' says more")


def width(leaf: Tensor) -> int:
    """Bytes of one client's part of a leaf [S, ...]."""
    return math.prod(leaf.shape[1:]) * leaf.element_size()


def row_bytes(new: list[Tensor]) -> int:
    return sum(map(width, new))


def checksum(client: int, row: bytes | memoryview) -> int:
    """The checksum of a row that is this client's."""
    return zlib.crc32(row, client)


def choose_table(
    kind: str, clients: int, row: int, device: torch.device, path: Path | None, tensors: Mapping[str, Tensor], t: int
) -> ClientTable | DiskTable:
    """Where clients' states are kept: where the checkpoint `tensors` of round t has them, or as `kind` says.

    `auto` takes the disk in a run on the CPU where a vector of `row` bytes for every client would fill half of the free memory.
    """
    if kind == "disk" and (path is None or ranks.count() > 1):
        why = "the run's folder; give out" if path is None else "a single process"
        raise BadSetting(f"client_state disk needs {why}, or use memory")
    if path is None or ranks.count() > 1 or kind == "memory" or "clients.ids" in tensors:
        return ClientTable()
    crowded = device.type == "cpu" and clients * row > 0.5 * available_memory(device)
    if crowded or kind == "disk" or "clients.table" in tensors:
        return DiskTable(path, clients, t)
    return ClientTable()
