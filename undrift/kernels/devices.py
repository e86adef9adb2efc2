"""Properties of devices. All conditions of the faster forms call these functions, so that tests can replace them."""

from __future__ import annotations

import functools
import math

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from undrift.kernels.launch import triton


def gpu(device: torch.device) -> bool:
    """Whether Triton kernels run on the device."""
    return triton is not None and device.type == "cuda"


def cpu(device: torch.device) -> bool:
    """Whether C and loops over cached blocks are fast on the device."""
    return device.type == "cpu"


def is_tracing() -> bool:
    """Whether torch.compile traces the code: it fuses plain operations by itself."""
    return get_proxy_mode() is not None


@functools.cache
def cache(device: torch.device) -> float:
    """The cache of a GPU in bytes; infinite without NVIDIA's TF32, which the kernels for large vectors need."""
    return float(torch.cuda.get_device_properties(device).L2_cache_size) if tensor_cores(device) else math.inf


@functools.cache
def tensor_cores(device: torch.device) -> bool:
    """Whether a GPU has NVIDIA's TF32."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


def precision() -> str:
    """TF32 if it is allowed; else three TF32 products, which together have the precision of float32."""
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "tf32x3"
