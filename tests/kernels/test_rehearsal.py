"""Kernels of a program are compiled side by side, and nothing is launched (see also test_cuda)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from undrift.kernels import launch


class Kernel:
    """What `launch` needs of a Triton kernel, where there is none."""

    def __init__(self) -> None:
        self.launched: list[object] = []

    def __getitem__(self, grid: tuple[int, ...]) -> object:
        return lambda *given, **sizes: self.launched.append((grid, given, sizes))


def test_without_a_gpu_everything_is_launched() -> None:
    kernel, x = Kernel(), torch.zeros(2)
    with launch.rehearsal(torch.device("cpu")):
        launch.launch(kernel, (3,), x, 7, SIZE=16)
    assert kernel.launched == [((3,), (x, 7), {"SIZE": 16})]


@pytest.mark.skipif(torch.cuda.is_available(), reason="pretends that there is a GPU")
@pytest.mark.parametrize("program", ["rehearsed", "compiled"])
def test_kernels_are_compiled_for_a_gpu(tmp_path: Path, program: str) -> None:
    """`rehearsed`: what a program asks for is compiled once and found again. `compiled`: every kernel can be compiled."""
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    found = subprocess.run(
        [sys.executable, "-m", f"tests.kernels.{program}"], env=environment, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr
