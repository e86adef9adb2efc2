"""Tests marked `cuda`: skipped without a GPU; `pytest -m cuda` on one writes when and where they ran.

As a script it says, in one line, when code that runs on a GPU has changed since.
"""

from __future__ import annotations

import json
import os
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "benchmarks" / "results" / "cuda-tests.json"
WATCHED = ("undrift/kernels", "undrift/simulate", "undrift/round")


def git(*words: str) -> str | None:
    """What git says, or None where it cannot say it."""
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def skip_without_gpu(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    options = config.option
    whole = options.markexpr == "cuda" and not options.keyword and config.args == config.getini("testpaths")
    if not (whole and torch.cuda.is_available()) or options.collectonly:
        return
    stats = terminalreporter.stats  # where whole files are skipped, there are other reports too
    counts = {
        n: sum(isinstance(r, pytest.TestReport) for r in stats.get(n, [])) for n in ("passed", "failed", "skipped")
    }
    counts["failed"] += len(stats.get("error", []))
    commit = os.environ.get("UNDRIFT_COMMIT") or git("rev-parse", "HEAD") or "unknown"
    about = {"commit": commit, "device": torch.cuda.get_device_name(), "torch": torch.__version__}
    RECORD.write_text(json.dumps(about | {"date": f"{datetime.now(UTC):%Y-%m-%d}"} | counts, indent=1) + "\n")


if __name__ == "__main__":
    commit = json.loads(RECORD.read_text())["commit"] if RECORD.exists() else "unknown"
    changed = git("diff", "--name-only", commit, "--", *WATCHED)
    if changed is None:
        print("make cuda: it is not known at which commit the CUDA tests ran last")
    elif changed:
        print(f"make cuda: {len(changed.splitlines())} files that run on a GPU have changed since {commit[:9]}")
