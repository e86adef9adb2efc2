"""The clients' table on disk: equal to the one in memory, brought back to its checkpoint from any moment, sparse, checked."""

from __future__ import annotations

import copy
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import undrift
from tests.small import CPU, QUICK, data, timeless, tiny_mlp
from undrift.core.errors import BadRunFolder, BadSetting
from undrift.simulate import client_store
from undrift.simulate.client_store import DiskTable
from undrift.simulate.clients import ClientTable

KEEPING = ("scaffold", "feddyn", "moon", "gradma-w", "mifa")  # algorithms whose clients keep something
CLIENTS = 12


class Kept(NamedTuple):
    v: Tensor  # [S, 3]
    count: Tensor  # [S, 1]
    nothing: Tensor  # [S, 0]


def kept(ids: list[int], value: float) -> Kept:
    v = torch.arange(3.0).expand(len(ids), 3) + torch.tensor(ids)[:, None] + value
    return Kept(v, torch.full((len(ids), 1), int(value), dtype=torch.int64), torch.zeros(len(ids), 0))


def everybody(table: ClientTable | DiskTable) -> Kept:
    """The state of all clients, -1 where they have none."""
    ids = torch.arange(CLIENTS)
    return table.read(ids, Kept(torch.full((CLIENTS, 3), -1.0), torch.full((CLIENTS, 1), -1), torch.zeros(CLIENTS, 0)))


def same(a: Any, b: Any) -> bool:
    return all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True))


def disk(folder: Path, round: int = 0) -> DiskTable:
    (folder / "checkpoint").mkdir(exist_ok=True)
    return DiskTable(folder, CLIENTS, round)


def again(folder: Path, tensors: dict[str, Tensor], round: int) -> Kept:
    """What a new process finds that goes on from a checkpoint."""
    table = disk(folder, round)
    try:
        table.restore(tensors, CPU)
        return everybody(table)
    finally:
        table.close()


# Equal to the table in memory


@pytest.mark.parametrize("name", KEEPING)
def test_a_run_on_disk_is_the_run_in_memory_bit_for_bit(name: str, tmp_path: Path) -> None:
    chosen = QUICK | {"model": "mlp", "rounds": 8, "algorithm": name, "checkpoint_every": 3}
    memory = undrift.run(chosen, out=tmp_path / "memory", client_state="memory")
    on_disk = undrift.run(chosen, out=tmp_path / "disk", client_state="disk")
    assert timeless(on_disk.records) == timeless(memory.records)
    assert all(torch.equal(on_disk.model[n], t) for n, t in memory.model.items())
    assert (tmp_path / "disk/clients.table").stat().st_size > 12 * sum(t.nbytes for t in memory.model.values())
    assert not (tmp_path / "memory/clients.table").exists()
    files = [next((tmp_path / f / "checkpoint").glob("*.safetensors")).stat().st_size for f in ("disk", "memory")]
    assert files[1] > files[0] + 4 * sum(t.nbytes for t in memory.model.values())  # the rows are not copied there


IDS = st.lists(st.integers(0, CLIENTS - 1), min_size=1, max_size=5, unique=True)
MOVES = st.lists(st.one_of(IDS, st.sampled_from(["checkpoint", "kill"])), max_size=12)


@settings(deadline=None, max_examples=80)
@given(MOVES)
def test_any_sequence_of_writes_checkpoints_and_kills(
    tmp_path_factory: pytest.TempPathFactory, moves: list[Any]
) -> None:
    folder = tmp_path_factory.mktemp("moves")
    table, plain, round = disk(folder), ClientTable(), 0
    checkpoint: tuple[dict[str, Tensor], ClientTable] = {}, ClientTable()
    for value, move in enumerate(moves):
        if move == "checkpoint":
            round += 1
            checkpoint = table.tensors(), copy.deepcopy(plain)
            table.after_checkpoint(round)
        elif move == "kill":
            table.close()
            table, plain = disk(folder, round), copy.deepcopy(checkpoint[1])
            table.restore(checkpoint[0], CPU)
        else:
            table.write(torch.tensor(move), kept(move, value))
            plain.write(torch.tensor(move), kept(move, value))
        assert same(everybody(table), everybody(plain))
    table.close()


# Killed at any moment


def test_resume_from_every_moment_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder as it is around every sync and rename and in the middle of every row is a folder to go on from."""
    own = {"model": tiny_mlp(), "data": data(), "algorithm": "scaffold", "out": tmp_path / "run"}
    moments: list[Path] = []

    def moment() -> None:
        moments.append(tmp_path / f"moment{len(moments)}")
        shutil.copytree(tmp_path / "run", moments[-1])

    def observed(call: Any) -> Any:
        def around(*arguments: Any) -> None:
            moment()
            call(*arguments)
            moment()

        return around

    def row_by_row(self: DiskTable, ids: Any, rows: Any) -> None:
        for i in range(len(ids)):
            put(self, ids[i : i + 1], rows[i : i + 1, : rows.shape[1] // 2])
            moment()
            put(self, ids[i : i + 1], rows[i : i + 1])
            moment()

    put = DiskTable.put
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", observed(os.fsync))
        patched.setattr(os, "replace", observed(os.replace))
        patched.setattr(DiskTable, "put", row_by_row)
        whole = undrift.run(
            **own, client_state="disk", rounds=4, cohort=2, steps=1, checkpoint_every=2, execution="stacked"
        )
    table = (tmp_path / "run/clients.table").read_bytes()
    ahead = 0
    for place in moments:
        if not (place / "run.toml").exists():
            continue  # the run has not begun
        ahead += any(log.stat().st_size for log in place.glob("checkpoint/*.undo"))
        resumed = undrift.run(**(own | {"out": place}), resume=True)
        assert timeless(resumed.records) == timeless(whole.records)
        assert all(torch.equal(resumed.model[n], t) for n, t in whole.model.items())
        assert (place / "clients.table").read_bytes() == table
    assert ahead > 10 and len(moments) > 50


TABLE, LOG = "clients.table", "checkpoint/round-000007.undo"


def interrupted(folder: Path) -> tuple[dict[str, Tensor], Kept, bytes]:
    """A table whose last checkpoint is that of round 7: its state then, and the log before the last write."""
    table = disk(folder)
    table.write(torch.tensor([1, 2, 3]), kept([1, 2, 3], 10))
    tensors = table.tensors()
    table.after_checkpoint(7)
    then = everybody(table)
    table.write(torch.tensor([3, 4]), kept([3, 4], 20))
    log = (folder / LOG).read_bytes()
    table.write(torch.tensor([2, 3, 5]), kept([2, 3, 5], 30))
    assert not same(everybody(table), then)
    table.close()
    return tensors, then, log


def test_a_last_record_that_was_cut_off_is_ignored_and_anything_else_undone(tmp_path: Path) -> None:
    tensors, then, before = interrupted(tmp_path)
    whole, rows = ((tmp_path / name).read_bytes() for name in (LOG, TABLE))
    assert same(again(tmp_path, tensors, 7), then) and (tmp_path / LOG).stat().st_size == 0
    first = disk(tmp_path, 7)
    first.restore(tensors, CPU)
    first.write(torch.tensor([3, 4]), kept([3, 4], 20))  # all but the last write
    first.close()
    assert (tmp_path / LOG).read_bytes() == before
    written = (tmp_path / TABLE).read_bytes()
    assert written != rows
    for length in range(len(before), len(whole)):
        (tmp_path / TABLE).write_bytes(written)
        (tmp_path / LOG).write_bytes(whole[:length])
        assert same(again(tmp_path, tensors, 7), then)


def test_a_log_that_was_not_begun_has_nothing_to_undo(tmp_path: Path) -> None:
    """A kill between a checkpoint and the beginning of its log; the log of the checkpoint before is still there."""
    interrupted(tmp_path)
    table = disk(tmp_path, 7)
    table.write(torch.tensor([1, 2]), kept([1, 2], 40))
    now, tensors = everybody(table), table.tensors()
    table.close()
    assert (tmp_path / LOG).stat().st_size and same(again(tmp_path, tensors, 9), now)


def test_the_table_goes_back_to_the_checkpoint_before_the_last_one(tmp_path: Path) -> None:
    table, then, tensors = disk(tmp_path), [], []
    for round in range(1, 5):
        table.write(torch.tensor([round, round + 1, 9]), kept([round, round + 1, 9], round))
        then.append(everybody(table))
        tensors.append(table.tensors())
        table.after_checkpoint(round)
    table.write(torch.tensor([1, 4, 5, 9]), kept([1, 4, 5, 9], 50))
    table.close()
    (tmp_path / "checkpoint/round-000001.undo").unlink()
    (tmp_path / "checkpoint/round-000002.undo").unlink()
    shutil.copytree(tmp_path, tmp_path / "copy")
    assert same(again(tmp_path / "copy", tensors[3], 4), then[3])
    assert same(again(tmp_path, tensors[2], 3), then[2])
    assert same(again(tmp_path, tensors[2], 3), then[2])  # what was given up is still beside it, and harmless
    with pytest.raises(BadRunFolder, match="is wrong"):
        again(tmp_path, tensors[1], 2)


# Damage


def test_no_damage_of_log_or_table_changes_what_is_restored(tmp_path: Path) -> None:
    """Any byte that matters is noticed before anything is written."""
    tensors, then, _ = interrupted(tmp_path)
    files = {name: (tmp_path / name).read_bytes() for name in (LOG, TABLE)}
    refused = 0
    for name, whole in files.items():
        harmed = [whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :] for at in range(len(whole))]
        for content in [*harmed, *(whole[:length] for length in range(len(whole)))]:
            for other, bytes_ in files.items():
                (tmp_path / other).write_bytes(content if other == name else bytes_)
            try:
                assert same(again(tmp_path, tensors, 7), then)
            except BadRunFolder:
                refused += 1
                assert (tmp_path / name).read_bytes() == content
    row = len(files[TABLE]) // CLIENTS
    assert refused == 2 * len(files[LOG]) + row + len(files[TABLE])  # client 1's row, and every length


def test_every_damaged_byte_of_a_row_is_noticed_when_it_is_read(tmp_path: Path) -> None:
    tensors, then, _ = interrupted(tmp_path)
    table = disk(tmp_path, 7)
    table.restore(tensors, CPU)
    whole = (tmp_path / TABLE).read_bytes()
    row = len(whole) // CLIENTS
    harmed = [whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :] for at in range(2 * row, 3 * row)]
    for content in (*harmed, whole[: 2 * row] + whole[row : 2 * row] + whole[3 * row :]):  # also another client's row
        (tmp_path / TABLE).write_bytes(content)
        with pytest.raises(BadRunFolder, match="checksum of client 2 is wrong"):
            everybody(table)
    (tmp_path / TABLE).write_bytes(whole)
    assert same(everybody(table), then)
    table.close()


@pytest.mark.parametrize("harm", ["no table", "short table", "no undo", "another run's"])
def test_a_run_whose_table_is_damaged_is_refused(harm: str, tmp_path: Path) -> None:
    settings = QUICK | {"rounds": 5, "checkpoint_every": 3, "algorithm": "scaffold", "client_state": "disk"}

    class Killed(Exception):
        pass

    def kill(record: dict[str, Any], rounds: int) -> None:
        if record["round"] == 5:
            raise Killed

    with pytest.raises(Killed):
        undrift.run(settings, out=tmp_path / "run", progress=kill)
    table = tmp_path / "run/clients.table"
    if harm == "no table":
        table.unlink()
    elif harm == "short table":
        os.truncate(table, table.stat().st_size - 1)
    elif harm == "no undo":
        (tmp_path / "run/checkpoint/round-000003.undo").unlink()
    else:
        undrift.run(settings | {"rounds": 3, "seed": 1}, out=tmp_path / "other")
        shutil.copy(tmp_path / "other/clients.table", table)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(BadRunFolder, match="the client table .* is damaged"):
        undrift.run(out=tmp_path / "run", resume=True)
    assert before == {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}


# Where it is kept, and how much of it


def test_only_rows_that_were_written_take_blocks(tmp_path: Path) -> None:
    clients, row = 50_000, 20_000
    table = DiskTable(tmp_path, clients, 0)
    ids = torch.from_numpy(np.random.default_rng(0).choice(clients, 60, replace=False))
    for part in ids.split(20):
        table.write(part, Kept(torch.ones(20, row // 4), torch.ones(20, 1), torch.zeros(20, 0)))
    table.tensors()
    found = os.stat(tmp_path / "clients.table")
    table.close()
    assert found.st_size >= clients * row
    assert 60 * row <= 512 * found.st_blocks < 60 * (row + 3 * 4096)


def test_the_log_holds_a_row_once_between_checkpoints(tmp_path: Path) -> None:
    table = disk(tmp_path)
    sizes = []
    for value in range(6):
        if value == 3:
            table.after_checkpoint(3)
        table.write(torch.tensor([1, 2]), kept([1, 2], value))
        sizes.append(sum(log.stat().st_size for log in tmp_path.glob("checkpoint/*.undo")))
    table.close()
    assert sizes[0] == sizes[1] == sizes[2] == 0 < sizes[3] == sizes[4] == sizes[5]


def test_auto_takes_the_disk_where_memory_would_fill_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = QUICK | {"rounds": 2, "algorithm": "scaffold"}  # 12 clients of 656 numbers, six of them to pad
    for free, expected in ((12 * 656 * 4 * 2 + 100, False), (12 * 656 * 4 * 2 - 100, True)):
        monkeypatch.setattr(client_store, "available_memory", lambda device, free=free: free)
        undrift.run(chosen, out=tmp_path / str(free))
        assert (tmp_path / str(free) / "clients.table").exists() is expected
    monkeypatch.setattr(client_store, "available_memory", lambda device: 10**12)
    undrift.run(out=tmp_path / str(free), resume=True, rounds=4)  # it stays where it is
    straight = undrift.run(chosen | {"rounds": 4})
    resumed = undrift.run(out=tmp_path / str(free), resume=True)
    assert [r["train_loss"] for r in resumed.records] == [r["train_loss"] for r in straight.records]
    with pytest.raises(BadRunFolder, match="its client_state is auto, not memory"):
        undrift.run(out=tmp_path / str(free), resume=True, client_state="memory")


def test_what_needs_no_table_gets_none(tmp_path: Path) -> None:
    undrift.run(QUICK | {"rounds": 2}, out=tmp_path, client_state="disk")
    undrift.run(out=tmp_path, resume=True, rounds=3)
    assert not list(tmp_path.glob("clients.*"))
    with pytest.raises(BadSetting, match="client_state disk needs the run's folder"):
        undrift.run(QUICK | {"rounds": 2}, client_state="disk")
