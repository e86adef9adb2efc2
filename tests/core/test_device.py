"""PyTorch's switches are as they were after a run, and a CPU run imports no compiler."""

from __future__ import annotations

import subprocess
import sys

import torch

from undrift.core.device import arithmetic


def test_a_cpu_run_imports_no_compiler() -> None:
    code = (
        "import sys, undrift; undrift.run(rounds=1, clients=5, cohort=2, model='logreg'); "
        "assert 'torch._inductor' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_switches_are_put_back() -> None:
    def state() -> tuple[bool, bool, str]:
        conv = torch.backends.cudnn.conv.fp32_precision  # type: ignore[attr-defined]
        return torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark, conv

    before = state()
    with arithmetic("tf32", deterministic=True):
        assert torch.are_deterministic_algorithms_enabled()
    assert state() == before
