"""The table of counts that `make system` prints."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.reliability import PAGE, replace_table, table

ROW = {"name": "kills", "tried": 3, "survived": 2, "lost": 1, "silent": 0}


def test_counts_of_one_name_are_added_and_replace_the_old_table() -> None:
    lines = table({"a": [ROW, ROW | {"name": "damages", "silent": None}], "b": [ROW]})
    assert lines[2:] == ["| damages | 3 | 2 | 1 | – |", "| kills | 6 | 4 | 2 | 0 |"]
    page = replace_table(PAGE.read_text(), lines)
    assert page.startswith("# What was tried") and page.endswith("\n".join(lines) + "\n")
    assert replace_table(page, lines) == page


def test_a_count_travels_with_the_report_of_its_test(
    count: Callable[..., None], request: pytest.FixtureRequest
) -> None:
    count("kills", tried=3, survived=2, lost=1, silent=0)
    assert request.node.user_properties == [("count", ROW)]
    with pytest.raises(AssertionError, match="one of the other columns"):
        count("kills", tried=3, survived=2, lost=0, silent=0)
