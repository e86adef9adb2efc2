"""How long to wait on a machine that is slow or busy."""

from __future__ import annotations

import functools
import subprocess
import sys
import time

QUIET = 2.5  # seconds in which a quiet machine starts a process with PyTorch
AGAIN = 300.0  # seconds after which it is measured again: the load changes


@functools.cache
def slowness(period: int) -> float:
    """How many times as long as on a quiet machine it takes to start a process with PyTorch; at least 1."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return max(1.0, (time.monotonic() - began) / QUIET)


def patient(seconds: float) -> float:
    """What so many seconds of a quiet machine are on this one, now."""
    return seconds * slowness(int(time.monotonic() / AGAIN))
