"""How long to wait on a machine that is slow or busy."""

from __future__ import annotations

import functools
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from undrift.jobs.folder import RunFolder

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


def wait_for_rounds(folder: Path, more: int, process: subprocess.Popen[Any]) -> None:
    """Wait until a process has written so many rounds of a run beyond the checkpoint that it began with, or has ended."""
    file = folder / "rounds.jsonl"
    before, reached = (file.stat().st_mtime_ns, RunFolder(folder).last_checkpoint()) if file.exists() else (0, 0)
    while process.poll() is None:
        if file.exists() and file.stat().st_mtime_ns != before and file.read_bytes().count(b"\n") >= reached + more:
            return
        time.sleep(0.01)
