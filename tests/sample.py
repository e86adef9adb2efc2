"""A budget of time: `pytest --minutes 75 --seed 3` takes tests in an order drawn by the seed, and skips those left after that.

Some tests of every file come first, so that each kind of check is made whatever the machine; then the rest of them. What was
skipped is counted in the last line, and another seed leaves out others. The tests of a file stay together in both parts, because
they share fixtures.
"""

from __future__ import annotations

import random
import time
from itertools import groupby
from typing import TypeVar

import pytest

BEGAN = time.monotonic()
FIRST = 6  # tests of each file that are not left to the end
T = TypeVar("T")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--minutes", type=float, default=0.0, help="skip tests that would begin later than that")
    parser.addoption("--seed", type=int, default=0, help="of the order of tests under --minutes")


def draw_order(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the tests in an order drawn by the seed."""
    if config.getoption("minutes"):
        files = [list(group) for _, group in groupby(items, key=lambda item: item.path)]
        items[:] = drawn(files, random.Random(config.getoption("seed")))


def drawn(files: list[list[T]], draw: random.Random) -> list[T]:
    """Files in a drawn order, and the tests of each as well: FIRST of every file, then the rest of every file."""
    draw.shuffle(files)
    for file in files:
        draw.shuffle(file)
    return [test for part in (slice(FIRST), slice(FIRST, None)) for file in files for test in file[part]]


def pytest_runtest_setup(item: pytest.Item) -> None:
    minutes = item.config.getoption("minutes")
    if minutes and time.monotonic() - BEGAN > 60 * minutes:
        pytest.skip(f"left out: {minutes:g} minutes are over; another --seed takes others")
