"""Counts of what the system tests tried and what came of it; as a script: one table, also written to docs/reliability.md.

A test takes the fixture `count` and says, once or several times,

    count("kill -9 and resume", tried=4, survived=4, lost=0, silent=0)

Counts of one name are added up over all tests. `survived` went on or was refused in one line; `lost` ended in a traceback
or cost more than the rounds since the last checkpoint; `silent` gave something wrong without a word (None: not looked at).
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
COUNTS = ROOT / "build" / "reliability.json"  # by test: a part that is run again replaces its own counts only
PAGE = ROOT / "docs" / "reliability.md"
COLUMNS = ("tried", "survived", "lost", "silent")


@pytest.fixture
def count(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Record how many were tried, survived, were lost, and went wrong in silence."""

    def record(name: str, *, tried: int, survived: int, lost: int, silent: int | None) -> None:
        assert tried == survived + lost + (silent or 0), "each that was tried is in one of the other columns"
        row = {"name": name, "tried": tried, "survived": survived, "lost": lost, "silent": silent}
        request.node.user_properties.append(("count", row))

    return record


@contextlib.contextmanager
def counted(count: Callable[..., None], name: str, tried: int) -> Iterator[None]:
    """Count a check of several tries that holds for all of them or for none: where it fails, all count as lost."""
    try:
        yield
    except BaseException:
        count(name, tried=tried, survived=0, lost=tried, silent=0)
        raise
    count(name, tried=tried, survived=tried, lost=0, silent=0)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Keep the counts of the system tests that were run, also of those that failed."""
    reports = [r for n in ("passed", "failed") for r in terminalreporter.stats.get(n, []) if "system" in r.keywords]
    counted = {r.nodeid: [row for n, row in r.user_properties if n == "count"] for r in reports}
    if any(counted.values()):
        old = json.loads(COUNTS.read_text()) if COUNTS.exists() else {}
        COUNTS.parent.mkdir(exist_ok=True)
        COUNTS.write_text(json.dumps(old | counted, indent=1) + "\n")


def table(counted: dict[str, list[dict[str, Any]]]) -> list[str]:
    """The counts, added up by name, as lines of Markdown."""
    rows: dict[str, dict[str, int | None]] = {}
    for row in (row for test in counted.values() for row in test):
        before = rows.setdefault(row["name"], dict.fromkeys(COLUMNS))
        for name in COLUMNS:
            both = [n for n in (before[name], row[name]) if n is not None]
            before[name] = sum(both) if both else None
    head = [f"| what | {' | '.join(COLUMNS)} |", "| --- |" + " ---: |" * len(COLUMNS)]
    cells = {name: ["–" if row[c] is None else f"{row[c]:,}" for c in COLUMNS] for name, row in sorted(rows.items())}
    return head + [f"| {name} | {' | '.join(numbers)} |" for name, numbers in cells.items()]


def replace_table(page: str, lines: list[str]) -> str:
    """The page with its table, from the line that says when it was made, replaced."""
    before = page.partition("Made on")[0]
    made = f"Made on {datetime.now(UTC):%Y-%m-%d} with {os.cpu_count()} cores:"
    return before + "\n".join([made, "", *lines]) + "\n"


if __name__ == "__main__":
    lines = table(json.loads(COUNTS.read_text())) if COUNTS.exists() else table({})
    PAGE.write_text(replace_table(PAGE.read_text(), lines))
    print("\n".join(lines))
