"""The gradient of dense layers, or a step along it, for stacked clients on a CPU, in C: dense_cpu.c, and conv_cpu.c for
convolutions with ReLU and pooling before them.

PyTorch computes layer by layer, so a cohort's vectors pass through memory for each one; in C a thread takes a client at a time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from undrift.kernels import devices
from undrift.kernels.native import address, library

Rate = float | Tensor


class Block(NamedTuple):
    """A convolution, a ReLU and 2 x 2 pooling."""

    channels: int
    outputs: int
    kernel: int
    padding: int
    biased: bool

    def output_size(self, high: int, wide: int) -> tuple[int, int]:
        """Rows and columns of the output for a padded input."""
        return (high - self.kernel + 1) // 2, (wide - self.kernel + 1) // 2


class Norm(NamedTuple):
    """BatchNorm after a linear layer."""

    eps: float
    momentum: float


class Dense:
    """Blocks of convolutions, if any, and linear layers: `sizes` of the first input and every output, biases, norms and ReLUs."""

    def __init__(
        self,
        sizes: list[int],
        biased: list[bool],
        relu: list[bool],
        blocks: tuple[Block, ...] = (),
        norms: Sequence[Norm | None] = (),
    ) -> None:
        self.sizes, self.biased, self.relu, self.blocks = sizes, biased, relu, blocks
        self.norms = list(norms) or [None] * len(biased)
        self.entries = sum((n + bias) * m for n, m, bias in zip(sizes, sizes[1:], biased, strict=False))
        self.entries += sum(2 * m for m, norm in zip(sizes[1:], self.norms, strict=True) if norm)
        self.kept = sum(2 * m + 1 for m, norm in zip(sizes[1:], self.norms, strict=True) if norm)  # statistics
        self.entries += sum(b.outputs * (b.channels * b.kernel**2 + b.biased) for b in blocks)

    def serves(self, like: Tensor, clients: int) -> bool:
        """Whether every thread has one of these stacked clients (0: a client alone), with vectors like this one."""
        fits = devices.cpu(like.device) and like.dtype == torch.float32 and max(clients, 1) >= torch.get_num_threads()
        return fits and not devices.is_tracing() and library() is not None

    def gradient(
        self,
        x: Tensor,
        inputs: Tensor,
        targets: Tensor,
        real: Tensor | None,
        rate: Rate | None = None,
        buffers: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """As `Chain.gradient`, the plain form; it writes the new statistics to the buffers [..., Q] of BatchNorms."""
        self.check(x, inputs, targets, real, rate, buffers)
        x, inputs, targets = x if x.stride(-1) == 1 else x.contiguous(), inputs.contiguous(), targets.contiguous()
        real = None if real is None else real.to(x.dtype).contiguous()
        loss, result = x.new_empty(x.shape[:-1]), x.new_empty(x.shape)
        result[..., self.entries :] = 0.0 if rate is None else x[..., self.entries :]
        if rate is not None:
            rate = torch.as_tensor(rate, dtype=x.dtype, device=x.device).expand(loss.shape).contiguous()
        layers, flags, pairs = (
            len(self.biased),
            ctypes.c_uint8 * len(self.biased),
            ctypes.c_float * (2 * len(self.biased)),
        )
        norms = pairs(*(number for norm in self.norms for number in norm or Norm(-1.0, 0.0)))
        shapes = [n for shape in self.shapes(inputs) for n in shape]
        failed = library().dense_gradient(  # type: ignore[union-attr]
            ctypes.c_long(len(self.blocks)), (ctypes.c_long * len(shapes))(*shapes),
            ctypes.c_long(layers), (ctypes.c_long * (layers + 1))(*self.sizes), flags(*self.biased), flags(*self.relu),
            norms, ctypes.c_long(loss.numel()), ctypes.c_long(targets.shape[-1]),
            address(x), row_stride(x), *map(address, (inputs, targets, real, rate, buffers, loss, result)), row_stride(result),
            ctypes.c_int(torch.get_num_threads()),
        )  # fmt: skip
        if failed == 1:
            raise IndexError(f"a target is out of bounds for {self.sizes[-1]} classes")
        if failed:
            raise MemoryError("no memory for the layers' outputs")
        return loss, result

    def shapes(self, inputs: Tensor) -> list[tuple[int, ...]]:
        """The fields of every block in conv_cpu.h for these inputs."""
        shapes: list[tuple[int, ...]] = []
        high, wide = inputs.shape[-2:] if self.blocks else (0, 0)
        for b in self.blocks:
            high, wide = high + 2 * b.padding, wide + 2 * b.padding
            shapes.append((b.channels, high, wide, b.outputs, b.kernel, b.padding, int(b.biased)))
            high, wide = b.output_size(high, wide)
        return shapes

    def first_size(self, inputs: Tensor) -> int:
        """The number of inputs of the first dense layer; 0: the blocks do not fit the inputs or each other."""
        if not self.blocks:
            return inputs.shape[-1]
        channels = inputs.shape[-3]
        for b, (_, high, wide, *_) in zip(self.blocks, self.shapes(inputs), strict=True):
            rows, columns = b.output_size(high, wide)
            if b.channels != channels or rows < 1 or columns < 1:
                return 0
            channels = b.outputs
        return channels * rows * columns

    def check(
        self,
        x: Tensor,
        inputs: Tensor,
        targets: Tensor,
        real: Tensor | None,
        rate: Rate | None,
        buffers: Tensor | None,
    ) -> None:
        """Refuse shapes for which C would read or write past the end of a tensor."""
        lead, batch = x.shape[:-1], targets.shape[-1:]
        fits = x.shape[-1] >= self.entries and batch.numel() > 0
        fits = fits and (targets.shape, targets.dtype) == (lead + batch, torch.int64)
        fits = fits and (inputs.shape[: -3 if self.blocks else -1], inputs.dtype) == ((*lead, *batch), x.dtype)
        fits = fits and self.first_size(inputs) == self.sizes[0]
        fits = fits and (real is None or real.shape == targets.shape)
        fits = fits and (not isinstance(rate, Tensor) or rate.shape in (lead, ()))
        if self.kept:
            assert buffers is not None and buffers.is_contiguous()
            fits = fits and (buffers.shape, buffers.dtype) == ((*lead, self.kept), x.dtype)
        if not fits:
            shapes = [None if t is None else list(t.shape) for t in (x, inputs, targets, real, buffers)]
            raise ValueError(
                f"vectors, inputs, targets, mask, buffers of shapes {shapes}, types {x.dtype}, {inputs.dtype}, {targets.dtype} "
                f"do not fit each other, or not layers of {self.sizes} neurons"
            )


def row_stride(t: Tensor) -> ctypes.c_long:
    """The distance between the vectors of two clients."""
    return ctypes.c_long(t.stride(0) if t.dim() > 1 else 0)
