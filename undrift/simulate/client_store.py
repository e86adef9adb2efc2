"""Client states in a sparse file with a row for every client.

Rows are written in place, so after a kill the file may be ahead of the last checkpoint. An undo log holds the rows as they were
at that checkpoint, each synced before its row is first overwritten; resuming writes them back.
"""

from __future__ import annotations

import itertools
import math
import mmap
import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from undrift.core import ranks
from undrift.core.device import available_memory
from undrift.core.errors import BadRunFolder, BadSetting
from undrift.core.files import sync
from undrift.core.trees import leaves, map_leaves
from undrift.simulate.clients import ClientTable

T = TypeVar("T")
Ids = NDArray[np.int64]
Rows = NDArray[np.uint8]  # [S, row_bytes]

# A row begins with its mark: WRITTEN + the checksum of the rest. A place that was never written reads as zeros.
MARK = struct.Struct("<Q")
WRITTEN = 1 << 32
# The log begins with the round of the checkpoint that it leads back to. An entry is its head, the ids of rows that were
# not there yet, the ids of rows that were, and these rows.
BEGINNING = struct.Struct("<QI")  # round, its checksum
HEAD = struct.Struct("<QQII")  # rows not there, rows there, checksum of what follows, checksum of the head itself


class DiskTable:
    """Rows of client state by client id in the file `table`, with an undo log in the file `undo`."""

    table: BinaryIO
    undo: BinaryIO
    map: mmap.mmap  # of the table, only read: a write to a map of a full disk would be a signal and no error
    rows: Rows  # the map as [clients, row_bytes]

    def __init__(self, table: Path, undo: Path, clients: int, round: int) -> None:
        self.table_path, self.undo_path, self.clients = table, undo, clients
        self.round = round  # of the last checkpoint; 0: there is none
        self.row_bytes = 0  # 0: there is no table yet
        self.remembered: set[int] = set()  # clients whose rows at that checkpoint are in the log

    def read(self, ids: Tensor, fresh: T) -> T:
        """The states [S, ...] of clients ids [S]; `fresh` [S, ...] for those seen for the first time."""
        new = leaves(fresh)
        if not self.row_bytes or not new:
            return fresh
        if row_bytes(new) != self.row_bytes:
            raise self.damaged(f"its rows have {self.row_bytes} bytes, not {row_bytes(new)}")
        host_ids = ids.cpu().numpy()
        marks = marks_of(self.rows[host_ids, : MARK.size])
        places = np.flatnonzero(marks)
        if not len(places):
            return fresh
        rows = np.zeros((len(host_ids), self.row_bytes), np.uint8)
        rows[places] = self.take(host_ids[places])
        for place in places.tolist():
            if marks[place] != mark(int(host_ids[place]), rows[place]):
                raise self.damaged(f"the checksum of client {host_ids[place]} is wrong")
        known = torch.from_numpy(marks > 0).to(ids.device)
        ends = np.cumsum([MARK.size, *map(width, new)]).tolist()
        columns = iter([np.ascontiguousarray(rows[:, a:b]) for a, b in itertools.pairwise(ends)])

        def stored(new: Tensor) -> Tensor:
            old = torch.from_numpy(next(columns)).view(-1).view(new.dtype).view(new.shape).to(new.device)
            return torch.where(known.view(-1, *(1,) * (new.dim() - 1)), old, new)

        return map_leaves(stored, fresh)

    def write(self, ids: Tensor, state: object) -> None:
        new = leaves(state)
        if not new:
            return
        if not self.row_bytes:
            self.create(row_bytes(new))
        host_ids = ids.cpu().numpy()
        plain = [t.detach().cpu().contiguous().view(-1).view(torch.uint8).view(len(t), width(t)).numpy() for t in new]
        rows = np.concatenate([np.empty((len(host_ids), MARK.size), np.uint8), *plain], axis=1)
        for i, row in zip(host_ids.tolist(), rows, strict=True):
            MARK.pack_into(row, 0, mark(i, row))
        self.remember(np.array([i for i in host_ids.tolist() if i not in self.remembered], dtype=np.int64))
        self.put(host_ids, rows)
        self.advise("MADV_DONTNEED")  # what was read need not stay in this process; the kernel still caches it

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds: the table's shape. All its rows are on the disk when this returns."""
        if not self.row_bytes:
            return {}
        os.fsync(self.table.fileno())
        return {"clients.table": torch.tensor([self.clients, self.row_bytes])}

    def saved(self, round: int) -> None:
        """The checkpoint of that round is complete: from now on the log leads back to it."""
        self.round = round
        if self.row_bytes:
            self.begin_log()

    def restore(self, tensors: dict[str, Tensor], device: torch.device) -> None:
        """Bring the table back to the last checkpoint."""
        if "clients.table" not in tensors:
            return
        clients, row = tensors["clients.table"].tolist()
        try:
            size, log = self.table_path.stat().st_size, self.undo_path.open("rb")
        except OSError as error:
            raise self.damaged(f"{error.filename}: {error.strerror}") from error
        with log:
            if clients != self.clients or size != clients * row:
                raise self.damaged("its size is wrong")
            for _ in self.entries(log, row):  # all of the log is checked before anything is written
                pass
            self.open(row)
            log.seek(0)
            for absent, present, rows in self.entries(log, row):
                self.put(absent, np.zeros((len(absent), MARK.size), np.uint8))
                self.put(present, rows)
        os.fsync(self.table.fileno())  # before the log goes
        self.begin_log()

    def close(self) -> None:
        if self.row_bytes:
            self.table.close()
            self.undo.close()

    def create(self, row: int) -> None:
        """An empty table, in place of what a run without a checkpoint may have left."""
        with self.table_path.open("wb") as file:
            file.truncate(self.clients * row)
        self.undo_path.write_bytes(b"")
        sync(self.table_path)
        sync(self.table_path.parent)
        self.open(row)
        self.begin_log()

    def open(self, row: int) -> None:
        self.row_bytes = row
        self.table, self.undo = self.table_path.open("r+b"), self.undo_path.open("r+b")
        self.map = mmap.mmap(self.table.fileno(), 0, access=mmap.ACCESS_READ)
        self.advise("MADV_RANDOM")  # reading ahead in holes made a read fifty times slower
        self.rows = np.frombuffer(self.map, np.uint8).reshape(self.clients, row)

    def take(self, ids: Ids) -> Rows:
        """The rows of clients ids, which must have been written: of others the kernel would make pages of zeros."""
        for i in ids.tolist():  # each in one request, where it is on the disk and not in memory
            begin = i * self.row_bytes // mmap.PAGESIZE * mmap.PAGESIZE
            self.advise("MADV_WILLNEED", begin, (i + 1) * self.row_bytes - begin)
        return self.rows[ids]

    def advise(self, how: str, *where: int) -> None:
        """Tell the kernel how the map is used, on systems that listen."""
        if hasattr(mmap, how):
            self.map.madvise(getattr(mmap, how), *where)

    def put(self, ids: Ids, rows: Rows) -> None:
        """Write rows, or only the beginnings of rows, in the places of clients ids."""
        for i, row in zip(ids.tolist(), rows, strict=True):
            self.table.seek(i * self.row_bytes)
            self.table.write(row.data)
        self.table.flush()

    def begin_log(self) -> None:
        """Empty the log. A kill in between leaves it without its beginning, and that too means: nothing to undo."""
        self.remembered = set()
        self.undo.seek(0)
        self.undo.truncate()
        head = struct.pack("<Q", self.round)
        self.undo.write(head + struct.pack("<I", zlib.crc32(head)))
        self.undo.flush()
        os.fsync(self.undo.fileno())

    def remember(self, ids: Ids) -> None:
        """Put the present rows of clients ids into the log, on the disk, before they are overwritten."""
        if not len(ids):
            return
        there = marks_of(self.rows[ids, : MARK.size]) > 0
        absent, present = ids[~there], ids[there]
        names, rows = absent.tobytes() + present.tobytes(), self.take(present).data
        head = struct.pack("<QQI", len(absent), len(present), zlib.crc32(rows, zlib.crc32(names)))
        for part in (head, struct.pack("<I", zlib.crc32(head)), names, rows):
            self.undo.write(part)
        self.undo.flush()
        os.fsync(self.undo.fileno())
        self.remembered.update(ids.tolist())

    def entries(self, log: BinaryIO, row: int) -> Iterator[tuple[Ids, Ids, Rows]]:
        """The clients that had no row at the checkpoint, those that had one, and their rows, entry by entry.

        A last entry that is too short was cut off by a kill: its rows had not been overwritten yet. Anything else that
        does not fit is damage.
        """
        beginning = log.read(BEGINNING.size)
        if len(beginning) < BEGINNING.size:
            return
        round, check = BEGINNING.unpack(beginning)
        if check != zlib.crc32(beginning[:-4]) or round > self.round:
            raise self.damaged(f"{self.undo_path.name} does not begin at the checkpoint of round {self.round}")
        if round < self.round:  # a kill came between the checkpoint and begin_log
            return
        while len(head := log.read(HEAD.size)) == HEAD.size:
            absent, present, content, check = HEAD.unpack(head)
            if check != zlib.crc32(head[:-4]):
                raise self.damaged(f"the checksum of an entry of {self.undo_path.name} is wrong")
            size = 8 * (absent + present) + row * present
            body = log.read(size)
            if len(body) < size:
                return
            if content != zlib.crc32(body):
                raise self.damaged(f"the checksum of an entry of {self.undo_path.name} is wrong")
            ids = np.frombuffer(body, np.int64, absent + present)
            rows = np.frombuffer(body, np.uint8, row * present, offset=8 * (absent + present))
            yield ids[:absent], ids[absent:], rows.reshape(present, row)

    def damaged(self, how: str) -> BadRunFolder:
        return BadRunFolder(f"the client table {self.table_path} is damaged ({how}); start again with another --out")


def width(leaf: Tensor) -> int:
    """Bytes of one client's part of a leaf [S, ...]."""
    return math.prod(leaf.shape[1:]) * leaf.element_size()


def row_bytes(new: list[Tensor]) -> int:
    return MARK.size + sum(map(width, new))


def marks_of(rows: Rows) -> NDArray[np.uint64]:
    return np.ascontiguousarray(rows[:, : MARK.size]).view("<u8").ravel()


def mark(client: int, row: Rows) -> int:
    """What stands before a row that is whole, and is this client's."""
    return WRITTEN + zlib.crc32(row[MARK.size :].data, client)


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
        return DiskTable(path / "clients.table", path / "clients.undo", clients, t)
    return ClientTable()
