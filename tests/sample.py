"""A budget of time: `pytest --minutes 85 --seed 3` takes tests in an order drawn by the seed, and skips those left after that.

What was skipped is counted in the last line, and another seed leaves out others. The tests of a file stay together, because they
share fixtures.
"""

from __future__ import annotations

import random
import time
from itertools import groupby

import pytest

BEGAN = time.monotonic()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--minutes", type=float, default=0.0, help="skip tests that would begin later than that")
    parser.addoption("--seed", type=int, default=0, help="of the order of tests under --minutes")


def draw_order(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files in an order drawn by the seed, and the tests of each as well."""
    if not config.getoption("minutes"):
        return
    draw = random.Random(config.getoption("seed"))
    files = [list(group) for _, group in groupby(items, key=lambda item: item.path)]
    draw.shuffle(files)
    for file in files:
        draw.shuffle(file)
    items[:] = [item for file in files for item in file]


def pytest_runtest_setup(item: pytest.Item) -> None:
    minutes = item.config.getoption("minutes")
    if minutes and time.monotonic() - BEGAN > 60 * minutes:
        pytest.skip(f"left out: {minutes:g} minutes are over; another --seed takes others")
