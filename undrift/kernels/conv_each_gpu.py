"""Convolutions of stacked clients one client at a time through cuDNN, several side by side on streams of their own.

cuDNN's heuristics choose its kernels, so that the same command gives the same bits in another process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from undrift.kernels.launch import current, side_by_side

aten: Any = torch.ops.aten


def each(clients: int, branches: int, device: torch.device, run: Callable[[int], None]) -> None:
    """Call `run` for every client on so many streams; in a rehearsal for nobody."""
    if current.get() is None:
        with without_timing():
            side_by_side(clients, branches, device, run)


@contextlib.contextmanager
def without_timing() -> Iterator[None]:
    """cuDNN's kernels follow from sizes and versions, not from a clock."""
    before, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def outputs(x: Tensor, f: Tensor, out: Tensor, stride: int, padding: int) -> None:
    """Write the convolution of one client's x [B, C, H, W] with f [N, C, k, k] to out, all with channels last."""
    if x.is_cuda:
        cudnn = torch.backends.cudnn
        flags = cudnn.benchmark, cudnn.deterministic, cudnn.conv.fp32_precision == "tf32"  # type: ignore[attr-defined]
        aten.cudnn_convolution.out(x, f, [padding] * 2, [stride] * 2, [1, 1], 1, *flags, out=out)
    else:
        out.copy_(torch.conv2d(x, f, None, stride, padding))


def inputs(d: Tensor, f: Tensor, out: Tensor, stride: int, padding: int) -> None:
    """Write the gradient of one client's inputs for the outputs' gradient d to out."""
    out.copy_(backward(d, out, f, stride, padding, (True, False, False))[0])


def filters(x: Tensor, d: Tensor, k: int, stride: int, padding: int) -> Tensor:
    """The gradient of one client's filters, as [N, k, k, C]."""
    like = x.new_empty(d.shape[1], k, k, x.shape[1]).permute(0, 3, 1, 2)
    found = backward(d, x, like, stride, padding, (False, True, False))[1]
    return found.permute(0, 2, 3, 1).contiguous()


def backward(
    d: Tensor, x: Tensor, f: Tensor, stride: int, padding: int, wanted: tuple[bool, bool, bool]
) -> tuple[Tensor, Tensor, Tensor]:
    found: tuple[Tensor, Tensor, Tensor] = aten.convolution_backward(
        d, x, f, None, [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], 1, wanted
    )
    return found
