"""Data-parallel workers on a GPU give the same results as on the CPU."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from undrift.dataparallel.command import run_parallel

pytestmark = pytest.mark.cuda


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own, when the compiler is first imported
@pytest.mark.parametrize("how", [{"replay": False}, {"replay": True}, {"replay": True, "compile": True}])
@pytest.mark.parametrize("method", ["sgd", "saef", "ef21", "ef21-sgdm", "def"])
def test_data_parallel_workers_agree_with_the_cpu(method: str, how: dict[str, Any]) -> None:
    settings = {
        "method": method,
        "workers": 4,
        "rounds": 2,
        "steps": 6,
        "dtype": "float64",
        "model": "gradma-nn",
        "lr": 0.02,
    }
    here = run_parallel(settings, device="cpu", execution="stacked")
    there = run_parallel(settings, device="cuda", **how)
    for n, tensor in here.model.items():
        torch.testing.assert_close(there.model[n], tensor, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("backend", "ranks"), [("nccl", 1), ("gloo", 2)])
@pytest.mark.parametrize("case", ["cuda_case", "islands_case"])  # DEF's, and islands'
def test_over_a_process_group(case: str, backend: str, ranks: int) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*launch, "-m", f"tests.dataparallel.{case}", backend], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("5 ways as on the CPU") == ranks
