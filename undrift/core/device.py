"""The device of a run: its choice, PyTorch's arithmetic switches, and its free memory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

from undrift.core.errors import BadSetting


def pick_device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise BadSetting("device cuda was asked for, but this PyTorch sees no GPU; use --device cpu or auto")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


_half = False  # whether models compute in bfloat16 on a GPU, as set by `arithmetic`


def half_precision(device: torch.device) -> bool:
    """Whether convolutions multiply in bfloat16, and their outputs are kept so."""
    return _half and device.type == "cuda"


@contextlib.contextmanager
def arithmetic(precision: str, deterministic: bool) -> Iterator[None]:
    """Set PyTorch's switches for GPU arithmetic and our own, and restore them at the end."""
    global _half
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn.conv  # type: ignore[attr-defined]
    torch.set_num_threads(torch.get_num_threads())  # also tells MKL not to choose a number by itself
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    precisions = products.fp32_precision, convolutions.fp32_precision
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    products.fp32_precision = convolutions.fp32_precision = "ieee" if precision == "fp32" else "tf32"
    halved, _half = _half, precision == "bf16"
    torch.backends.cudnn.benchmark = not deterministic  # time the convolutions and take the fastest
    try:
        yield
    finally:
        _half = halved
        if deterministic:  # to ask for it imports torch._inductor, which takes seconds
            torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.benchmark = before[1]
        products.fp32_precision, convolutions.fp32_precision = precisions


def available_memory(device: torch.device) -> int:
    """Bytes free on the device; on a CPU what Linux calls available, elsewhere 4 GiB."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else host_memory("MemAvailable")


def total_memory(device: torch.device) -> int:
    """Bytes on the device, free or not; on a CPU elsewhere than on Linux 4 GiB."""
    return int(torch.cuda.mem_get_info(device)[1]) if device.type == "cuda" else host_memory("MemTotal")


def host_memory(field: str) -> int:
    try:
        with open("/proc/meminfo") as lines:
            fields = dict(line.split(":") for line in lines)
        return int(fields[field].split()[0]) * 1024
    except (OSError, KeyError):
        return 4 << 30
