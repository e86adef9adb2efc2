"""The clients' mean: in pieces on a CPU, as a sum under torch.compile, and as it is where all rows are one vector already."""

from __future__ import annotations

import torch
from torch import Tensor

from undrift.core.forms import faster
from undrift.core.vec import mean, witness
from undrift.kernels import devices

# A product of a vector with a matrix runs on one core; the pieces of a long mean run on all cores.
LONG, PIECES = 1 << 16, 8


def same(v: Tensor, weight: Tensor) -> bool:
    """Whether all rows are the same memory, as those of a deployment are, which adds answers up as they arrive."""
    return v.dim() > 1 and v.shape[-2] > 1 and v.stride(-2) == 0


@faster(mean, when=same)
def mean_of_same(v: Tensor, weight: Tensor) -> Tensor:
    return v[..., 0, :] * weight.sum(-2)


def fuses(v: Tensor, weight: Tensor) -> bool:
    """Whether the mean should be a sum: torch.compile can fuse a sum but not a matrix product."""
    return v.shape[-2] <= 16 and v.device.type == "cuda" and devices.is_tracing()


@faster(mean, when=fuses)
def mean_traced(v: Tensor, weight: Tensor) -> Tensor:
    first, *more = (w * u for w, u in zip(weight.unbind(-2), v.unbind(-2), strict=True))
    return sum(more, start=first)


# Most servers compute the mean anyway: a compiler then reads the vectors once for both.
faster(witness, when=fuses)(mean_traced)


def long(v: Tensor, weight: Tensor) -> bool:
    return v.dim() == 2 and v.device.type == "cpu" and v.shape[-1] >= LONG and v.shape[-1] % PIECES == 0


@faster(mean, when=long)
def mean_cpu(v: Tensor, weight: Tensor) -> Tensor:
    pieces = v.unflatten(-1, (PIECES, -1)).transpose(0, 1)
    return torch.matmul(weight.T, pieces).flatten()
