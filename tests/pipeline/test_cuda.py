"""Pipelines on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from undrift.pipeline.train import run_pipe

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("method", ["bp", "bp-k", "fr", "ddg", "dni", "gpipe", "dsp"])
def test_pipelines_agree_with_the_cpu(method: str, tmp_path: Path) -> None:
    """Every block in a CUDA stream of its own; stopped and resumed on the GPU."""
    settings = {
        "method": method,
        "dtype": "float64",
        "rounds": 4,
        "steps": 12,
        "batch": 32,
        "lr": 0.02,
        "model": "gradma-nn",
    }
    settings |= {"cuts": "" if method == "bp" else "hidden2,head", "queues": "1,1,0;4,2,0" if method == "dsp" else ""}
    here, there = (run_pipe(settings, device=device) for device in ("cpu", "cuda"))
    for n, tensor in here.model.items():
        torch.testing.assert_close(there.model[n].cpu(), tensor, rtol=1e-8, atol=1e-9)
    run_pipe(settings | {"rounds": 2}, device="cuda", out=tmp_path / "run")
    again = run_pipe(out=tmp_path / "run", resume=True, rounds=4)
    for n, tensor in here.model.items():
        torch.testing.assert_close(again.model[n].cpu(), tensor, rtol=1e-8, atol=1e-9)
