"""Schedules: the thesis' timelines, what follows from queue lengths, and what is refused."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch

from tests.reference.timeline import check
from undrift.core.errors import BadSetting
from undrift.pipeline import Schedule
from undrift.pipeline.schedule import BlockWork, broken_rule, nearest

GOLDEN = Path(__file__).parents[1] / "golden" / "schedules"
# queue lengths: q, F, B as the thesis' rules give them, worked out by hand
THESIS = {
    "1,1,0;4,2,0": ((0, 1, 1), (0, 1, 2), (4, 3, 2)),
    "2,2,0;6,3,0": ((0, 1, 1), (0, 2, 4), (6, 5, 4)),
    "3,3,0;10,5,0": ((0, 2, 2), (0, 3, 6), (10, 8, 6)),
    "1,1,1,0;6,4,2,0": ((0, 1, 1, 1), (0, 1, 2, 3), (6, 5, 4, 3)),
    "2,2,2,0;9,6,3,0": ((0, 1, 1, 1), (0, 2, 4, 6), (9, 8, 7, 6)),
    "3,3,3,0;15,10,5,0": ((0, 2, 2, 2), (0, 3, 6, 9), (15, 13, 11, 9)),
}
OTHERS = {"fr-3": "0,0,0;2,1,0", "bp-3": "0,0,0;0,0,0"}
STORED = {f"dsp-{text.replace(',', '-').replace(';', '-')}": text for text in THESIS} | OTHERS


@pytest.mark.parametrize("text", THESIS)
def test_what_follows_from_the_thesis_queue_lengths(text: str) -> None:
    schedule = Schedule.parse(text)
    assert (schedule.q, schedule.forward_lag, schedule.backward_lag) == THESIS[text]
    assert not schedule.in_order
    assert str(schedule) == text


@pytest.mark.parametrize("name", STORED)
def test_stored_tables(name: str) -> None:
    schedule = Schedule.parse(STORED[name])
    rows = [["t", *(f"block{k}" for k in range(schedule.blocks))]]
    rows += [[str(t), *map(str, row)] for t, row in enumerate(schedule.table(8))]
    assert (GOLDEN / f"{name}.csv").read_text() == "".join(",".join(row) + "\n" for row in rows)


def test_nothing_else_is_stored() -> None:
    assert {path.stem for path in GOLDEN.glob("*.csv")} == set(STORED)


def test_the_timeline_of_figure_2() -> None:
    """DSP(1,1,0;4,2,0): F and B of blocks 0, 1, 2, copied from the thesis' figure; the last block does both at once."""
    rows = ["0---- ", "1-0-- ", "2-1-00", "3-2011", "403122", "514233"]  # one character a cell: F0 B0 F1 B1 F2 B2
    table = Schedule.parse("1,1,0;4,2,0").table(20)
    for t, row in enumerate(rows):
        cells = [None if cell in "- " else int(cell) for cell in row]
        assert [number for work in table[t] for number in work] == cells, t
    assert table[10] == [BlockWork(10, 6), BlockWork(9, 7), BlockWork(8, 8)]
    assert table[20] == [BlockWork(None, 16), BlockWork(19, 17), BlockWork(18, 18)]
    assert table[23] == [BlockWork(None, 19), BlockWork(None, None), BlockWork(None, None)]
    assert len(table) == 24


@pytest.mark.parametrize("text", [*STORED.values(), "0;0", "0;3", "1,0;2,0", "1,1,0;5,3,1", "0,0;3,1"])
@pytest.mark.parametrize("batches", [1, 2, 7, 20])
def test_tables_play_through(text: str, batches: int) -> None:
    schedule = Schedule.parse(text)
    table = schedule.table(batches)
    check(table, batches, schedule)
    assert len(table) == batches + schedule.m[0]
    for k in range(schedule.blocks):
        for t, row in enumerate(table):
            forward, backward = row[k]
            if forward is not None and backward is not None:
                assert forward - backward == schedule.m[k], t
        assert [row[k].backward for row in table if row[k].backward is not None] == list(range(batches))


def test_named_schedules() -> None:
    assert str(Schedule.fr(4)) == "0,0,0,0;3,2,1,0"
    assert Schedule.fr(4).q == (0, 1, 1, 1)
    assert str(Schedule.shortest(3)) == "1,1,0;4,2,0"
    assert str(Schedule.shortest(4)) == "1,1,1,0;6,4,2,0"
    assert str(Schedule.bp(1)) == "0;0"


def test_a_changed_table_is_refused() -> None:
    """Any exchange of two neighbouring cells' work, or a missing cell, is noticed."""
    schedule = Schedule.parse("1,1,0;4,2,0")
    for t in range(8):
        for k in range(3):
            table = schedule.table(6)
            if table[t][k] == BlockWork(None, None):
                continue
            table[t][k] = BlockWork(None, None)
            with pytest.raises(BadSetting):
                check(table, 6, schedule)
            table = schedule.table(6)
            table[t][k], table[t + 1][k] = table[t + 1][k], table[t][k]
            with pytest.raises(BadSetting):
                check(table, 6, schedule)
    early = schedule.table(6)
    early[1] = [
        BlockWork(1, None),
        BlockWork(0, None),
        BlockWork(0, 0),
    ]  # too early for block 2
    with pytest.raises(BadSetting, match="timestamp 1, block 2: batch 0 is forwarded, but is not the next one here"):
        check(early, 6, schedule)


@pytest.mark.parametrize(
    ("text", "rule", "near"),
    [
        ("1,1,0;3,2,0", r"q_1 = m_0 - p_0 - m_1 must be at least 1, but 3 - 1 - 2 = 0", "1,1,0;4,2,0"),
        ("1,1,0;4,1,0", r"q_2 = .* 1 - 1 - 0 = 0", "1,1,0;4,2,0"),
        ("1,0,0;4,2,0", r"p_1 must be at least 1", "1,1,0;4,2,0"),
        ("1,1,1;4,2,0", r"its p must be 0, not 1", "1,1,0;4,2,0"),
        ("1,1;4,2,0", r"2 output queues p and 3 input queues m", "1,1,0;4,2,0"),
        ("1,1,0;-4,2,0", r"may be negative", "1,1,0;4,2,0"),
        ("1,1,1,0;9,6,8,0", r"q_2", "1,1,1,0;9,6,3,0"),
        ("0,0,0;1,1,2", r"q_2 .* at least 0", "1,1,0;4,2,0"),
        ("0,0,0;0,1,0", r"q_1", "0,0,0;0,0,0"),
        ("0,0,0;2,3,0", r"q_1", "0,0,0;3,3,0"),
        ("1,1,0;150,149,0", r"q_1", "1,1,0;151,149,0"),
        ("9999,0;1,0", r"q_1", "1,0;2,0"),
        ("1,0;-1000000000,0", r"negative", "0,0;0,0"),
    ],
)
def test_impossible_queue_lengths_are_refused_with_the_rule_and_the_nearest(text: str, rule: str, near: str) -> None:
    with pytest.raises(BadSetting, match=rule) as refused:
        Schedule.parse(text)
    found = str(refused.value).rpartition("nearest: ")[2]
    assert str(Schedule.parse(found)) == found, "what is suggested is accepted"
    assert lengths_apart(text, found) <= lengths_apart(text, near)


def test_of_equally_near_lengths_the_longest_are_suggested() -> None:
    assert nearest((0, 0, 0), (2, 3, 0)) == "0,0,0;3,3,0"
    assert nearest((1, 1, 0), (150, 149, 0)) == "1,1,0;151,149,0"
    assert nearest((1, 0, 0), (4, 2, 0)) == "1,1,0;4,2,0", "and before that those where no block waits"


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_the_nearest_lengths_are_as_near_as_any(blocks: int) -> None:
    """All entries from 0 to 4, against all valid lengths; none needs a longer p, nor an m above 4 + (4 + 1) (K - 1)."""
    small = list(product(range(5), repeat=blocks - 1))
    given = [(*p, 0, *m) for p in small for m in product(range(5), repeat=blocks)]
    longer = product(small, product(range(5 * blocks), repeat=blocks))
    valid = [(*p, 0, *m) for p, m in longer if not broken_rule((*p, 0), m)]
    apart = torch.cdist(torch.tensor(given).double(), torch.tensor(valid).double(), p=1).amin(1).tolist()
    for lengths, least in zip(given, apart, strict=True):
        found = Schedule.parse(nearest(lengths[:blocks], lengths[blocks:]))
        changes = sum(abs(a - b) for a, b in zip(lengths, found.p + found.m, strict=True))
        assert changes == least, (lengths, str(found))


def lengths_apart(one: str, two: str) -> int:
    """The sum of the changes; p first, then m, the shorter filled with ones."""

    def numbers(text: str) -> list[int]:
        p, m = ([int(n) for n in part.split(",")] for part in text.split(";"))
        return [*p, *[1] * (len(m) - len(p)), *m]

    return sum(abs(a - b) for a, b in zip(numbers(one), numbers(two), strict=True))


@pytest.mark.parametrize("text", ["", "1,1,0", "1;2;3", "a,0;2,0", "1,,0;2,1,0"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(BadSetting, match=r"such as 1,1,0;4,2,0"):
        Schedule.parse(text)


def test_half_a_place_is_refused() -> None:
    with pytest.raises(BadSetting, match="whole numbers, not 2.5"):
        Schedule((0, 0), (2.5, 0))  # type: ignore[arg-type]


def test_the_rules_agree_with_playing_the_table() -> None:
    """For all small queue lengths of three blocks: valid and decoupled means that the table plays without an order."""
    for numbers in range(3**2 * 6**2):
        p0, p1, m0, m1 = numbers % 3, numbers // 3 % 3, numbers // 9 % 6, numbers // 54
        valid = not broken_rule((p0, p1, 0), (m0, m1, 0))
        decoupled = p0 >= 1 and p1 >= 1 and m0 - p0 - m1 >= 1 and m1 - p1 >= 1
        in_order = p0 == p1 == 0 and m0 >= m1
        assert valid == (decoupled or in_order), (p0, p1, m0, m1)
