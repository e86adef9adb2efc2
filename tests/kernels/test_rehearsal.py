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
def test_what_a_program_asks_for_is_compiled_once_and_found_again(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    found = subprocess.run(
        [sys.executable, "-m", "tests.kernels.rehearsed"], env=environment, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr
