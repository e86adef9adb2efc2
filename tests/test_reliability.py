"""The table of counts that `make system` prints."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tests.reliability import PAGE, replace_table, table
from tests.sample import FIRST, drawn

ROW = {"name": "kills", "tried": 3, "survived": 2, "lost": 1, "silent": 0}


def test_counts_of_one_name_are_added_and_replace_the_old_table() -> None:
    lines = table({"a": [ROW, ROW | {"name": "damages", "silent": None}], "b": [ROW]})
    assert lines[2:] == ["| damages | 3 | 2 | 1 | – |", "| kills | 6 | 4 | 2 | 0 |"]
    page = replace_table(PAGE.read_text(), lines)
    assert page.startswith("# Reliability tests") and page.endswith("\n".join(lines) + "\n")
    assert replace_table(page, lines) == page


def test_a_count_travels_with_the_report_of_its_test(
    count: Callable[..., None], request: pytest.FixtureRequest
) -> None:
    count("kills", tried=3, survived=2, lost=1, silent=0)
    assert request.node.user_properties == [("count", ROW)]
    with pytest.raises(AssertionError, match="one of the other columns"):
        count("kills", tried=3, survived=2, lost=0, silent=0)


def test_every_file_has_its_turn_before_the_time_is_over() -> None:
    """The first tests of each file come first, all come once, and a seed gives one order."""
    files = [[f"{file}{test}" for test in range(count)] for file, count in (("a", 40), ("b", 2), ("c", 9))]
    order = drawn([list(file) for file in files], random.Random(1))
    assert sorted(order) == sorted(sum(files, []))
    begin = order[: FIRST + 2 + FIRST]
    assert sorted(test[0] for test in begin) == FIRST * ["a"] + 2 * ["b"] + FIRST * ["c"]
    assert [test[0] for test in begin].count("a") == FIRST and begin != sorted(begin)
    assert order == drawn([list(file) for file in files], random.Random(1)) != drawn(files, random.Random(2))
