"""One thread a test process: two processes share two cores, and small tensors gain nothing from more.

Without a GPU Triton's kernels are interpreted, as far as they are called at all (test_interpreted).
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["XDG_DATA_HOME"] = "/nonexistent"  # what the developer has added does not count

import torch

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before any kernel is defined

from typing import Any  # noqa: E402

import pytest  # noqa: E402

from tests import cuda_record, reliability, sample  # noqa: E402
from tests.reliability import count  # noqa: E402, F401
from tests.sample import pytest_addoption, pytest_runtest_setup  # noqa: E402, F401


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    cuda_record.skip_without_gpu(items)
    sample.draw_order(config, items)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    cuda_record.pytest_terminal_summary(terminalreporter, config)
    reliability.pytest_terminal_summary(terminalreporter)
