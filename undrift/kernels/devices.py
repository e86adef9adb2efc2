"""Where a tensor lies and what can be had there: all conditions of the faster forms ask here, so that tests can answer."""

from __future__ import annotations

import functools
import math

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode

try:
    import triton
except ImportError:  # no Triton here: the plain forms serve
    triton = None


def gpu(device: torch.device) -> bool:
    """Whether Triton's kernels run there."""
    return triton is not None and device.type == "cuda"


def cpu(device: torch.device) -> bool:
    """Whether C and loops over tensors that are in the cache serve there."""
    return device.type == "cpu"


def traced() -> bool:
    """Whether a compiler is listening, which fuses by itself what it is shown."""
    return get_proxy_mode() is not None


@functools.cache
def cache(device: torch.device) -> float:
    """A GPU's cache in bytes; infinite for one without NVIDIA's TF32, which the kernels for large vectors are written for."""
    return float(torch.cuda.get_device_properties(device).L2_cache_size) if tensor_cores(device) else math.inf


@functools.cache
def tensor_cores(device: torch.device) -> bool:
    """Whether a GPU has NVIDIA's TF32."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


def precision() -> str:
    """TF32's ten bits where they are allowed; else three products of them, which make up for one of float32's."""
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "tf32x3"
