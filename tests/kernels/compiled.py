"""Run by test_rehearsal, without a GPU: Triton's compiler takes every kernel, which its interpreter does not show."""

from __future__ import annotations

import importlib
import pkgutil
import threading
from typing import Any

import torch
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import undrift.kernels
from tests.kernels.rehearsed import Absent, program
from undrift.kernels import gram_gpu, launch, norm_stacked_gpu, pictures_gpu

PARTS = {
    "_layer",
    "_remainder",
    "_load_inputs",
    "_over",
    "_exchange",
    "_over_groups",
    "_store_row",
    "_under",
    "_unit",
}  # called by other kernels
made: set[str] = set()
failed: list[str] = []


def make(self: launch.Rehearsal, kernel: Any, grid: tuple[int, ...], given: Any, sizes: dict[str, Any]) -> None:
    try:
        kernel.warmup(*given, grid=grid, **sizes)
    except Exception as error:
        failed.append(f"{kernel.fn.__name__}: {error}")
    made.add(kernel.fn.__name__)


def programmes() -> None:
    """GradMA's, with as many constraints as one program takes, and with few."""
    for m in (100, 12):
        rows, p, segments = torch.randn(m, 700), torch.randn(700), [slice(0, 650), slice(650, 700)]
        gram_gpu.grams_gpu(rows, rows, segments)
        counts = torch.ones(m, dtype=torch.bool)
        products, along, length = torch.randn(2, m, m).double(), torch.randn(2, m).double(), torch.ones(2).double()
        given = products, along, length, counts, counts.expand(2, m), 0.0, True
        z, _ = torch.ops.undrift.pivots(*given)
        torch.ops.undrift.add_rows(p, z, rows, [0, 650, 700])
    torch.ops.undrift.project_three(*torch.randn(4, 3, 700), torch.zeros(3), [0, 650, 700])


def layers() -> None:
    """Convolutions and norms of stacked clients, and their gradients."""
    for dtype in (torch.bfloat16, torch.float32):
        for channels, filters, k, stride in ((3, 64, 3, 1), (16, 32, 3, 2), (64, 128, 1, 2), (128, 128, 3, 1)):
            x = torch.randn(2, 3, channels, 8, 8).to(dtype).requires_grad_()
            w = torch.randn(2, filters, channels, k, k, requires_grad=True)
            y = torch.ops.undrift.stacked_outputs(x, w, stride, k // 2)[0]
            backward = threading.Thread(target=y.sum().backward)
            backward.start()
            backward.join()
    x = torch.randn(2, 3, 64, 8, 8).bfloat16().requires_grad_()
    w, b, real = torch.randn(2, 64, requires_grad=True), torch.randn(2, 64, requires_grad=True), torch.ones(2, 3)
    for y in (norm_stacked_gpu.to_groups(x, w, b, 8, 1e-5)[0], norm_stacked_gpu.to_batch(x, real, w, b, 1e-5)[0]):
        y.float().sum().backward()


def pictures() -> None:
    held, table = torch.zeros(9, 3, 8, 8, dtype=torch.uint8), torch.randn(3, 256)
    given = held, torch.zeros(6, dtype=torch.int64), table, torch.zeros(6, 192)
    launch.launch(pictures_gpu._look_up, (6, 1), *given, 192, 64, WIDTH=1024)
    launch.launch(pictures_gpu._transpose, (6, 3, 1), *given, 6, 192, 64, PIXELS=64, SIDE=64, num_warps=4)


def main() -> None:
    driver.set_active(Absent())
    launch.Rehearsal.make = make  # type: ignore[method-assign]
    rooms = [
        importlib.import_module(f"undrift.kernels.{room.name}")
        for room in pkgutil.iter_modules(undrift.kernels.__path__)
    ]
    everything = {
        kernel.fn.__name__ for room in rooms for kernel in vars(room).values() if isinstance(kernel, JITFunction)
    }
    with launch.rehearsal(torch.device("cuda:0")):
        program()
        programmes()
        layers()
        pictures()
    assert not failed, failed
    assert everything - made == PARTS, everything - made


if __name__ == "__main__":
    main()
