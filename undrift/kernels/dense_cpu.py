"""The gradient of dense layers, or a step along it, for stacked clients on a CPU, in C: dense_cpu.c. Before them there may be
convolutions with ReLU and pooling: conv_cpu.c.

PyTorch multiplies the stacked layers one after another, so that a cohort's vectors pass through memory for each of them; in C
a thread takes a client at a time. The plain form is Chain.gradient of chain.py.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from undrift.kernels import devices
from undrift.kernels.native import address, library

Rate = float | Tensor


class Block(NamedTuple):
    """A convolution, a ReLU and a pooling that halves both sides."""

    channels: int
    outputs: int
    kernel: int
    padding: int
    biased: bool

    def leaves(self, high: int, wide: int) -> tuple[int, int]:
        """Rows and columns of what comes out for so many with padding."""
        return (high - self.kernel + 1) // 2, (wide - self.kernel + 1) // 2


class Dense:
    """Linear layers one after another: `sizes` of the first input and of every output, which have biases, which a ReLU behind.

    Before them there may be blocks of convolutions, whose outputs are flattened.
    """

    def __init__(self, sizes: list[int], biased: list[bool], bent: list[bool], blocks: tuple[Block, ...] = ()) -> None:
        self.sizes, self.biased, self.bent, self.blocks = sizes, biased, bent, blocks
        self.entries = sum((n + bias) * m for n, m, bias in zip(sizes, sizes[1:], biased, strict=False))
        self.entries += sum(b.outputs * (b.channels * b.kernel**2 + b.biased) for b in blocks)

    def serves(self, like: Tensor, clients: int) -> bool:
        """Whether `gradient` is for so many stacked clients (0: one alone) with vectors of such a kind.

        Float32, and a client for every thread at least, for a thread takes one at a time.
        """
        fits = devices.cpu(like.device) and like.dtype == torch.float32 and max(clients, 1) >= torch.get_num_threads()
        return fits and not devices.traced() and library() is not None

    def gradient(
        self, x: Tensor, inputs: Tensor, targets: Tensor, real: Tensor | None, rate: Rate | None = None
    ) -> tuple[Tensor, Tensor]:
        """The mean cross-entropy [...] over the real samples at x [..., P], and its gradient g or, with a rate, x - rate g.

        The rate is a number, or one for each client [...].
        """
        self.check(x, inputs, targets, real, rate)
        x, inputs, targets = x if x.stride(-1) == 1 else x.contiguous(), inputs.contiguous(), targets.contiguous()
        real = None if real is None else real.to(x.dtype).contiguous()
        loss, made = x.new_empty(x.shape[:-1]), x.new_empty(x.shape)
        made[..., self.entries :] = 0.0 if rate is None else x[..., self.entries :]
        rates = (
            None
            if rate is None
            else torch.as_tensor(rate, dtype=x.dtype, device=x.device).expand(loss.shape).contiguous()
        )
        layers, flags = len(self.biased), ctypes.c_uint8 * len(self.biased)
        shapes = [n for shape in self.shapes(inputs) for n in shape]
        failed = library().dense_gradient(  # type: ignore[union-attr]
            ctypes.c_long(len(self.blocks)), (ctypes.c_long * len(shapes))(*shapes),
            ctypes.c_long(layers), (ctypes.c_long * (layers + 1))(*self.sizes), flags(*self.biased), flags(*self.bent),
            ctypes.c_long(loss.numel()), ctypes.c_long(targets.shape[-1]),
            address(x), apart(x), address(inputs), address(targets), *map(address, (real, rates, loss, made)), apart(made),
            ctypes.c_int(torch.get_num_threads()),
        )  # fmt: skip
        if failed == 1:
            raise IndexError(f"a target is out of bounds for {self.sizes[-1]} classes")
        if failed:
            raise MemoryError("no memory for the layers' outputs")
        return loss, made

    def shapes(self, inputs: Tensor) -> list[tuple[int, ...]]:
        """Every block for such inputs, as conv_cpu.h describes it."""
        found: list[tuple[int, ...]] = []
        high, wide = inputs.shape[-2:] if self.blocks else (0, 0)
        for b in self.blocks:
            high, wide = high + 2 * b.padding, wide + 2 * b.padding
            found.append((b.channels, high, wide, b.outputs, b.kernel, b.padding, int(b.biased)))
            high, wide = b.leaves(high, wide)
        return found

    def left(self, inputs: Tensor) -> int:
        """How many neurons the first dense layer sees of such inputs; 0: the blocks do not fit them or each other."""
        if not self.blocks:
            return inputs.shape[-1]
        channels = inputs.shape[-3]
        for b, (_, high, wide, *_) in zip(self.blocks, self.shapes(inputs), strict=True):
            rows, columns = b.leaves(high, wide)
            if b.channels != channels or rows < 1 or columns < 1:
                return 0
            channels = b.outputs
        return channels * rows * columns

    def check(self, x: Tensor, inputs: Tensor, targets: Tensor, real: Tensor | None, rate: Rate | None) -> None:
        """Refuse what C would read or write past the end of."""
        lead, batch = x.shape[:-1], targets.shape[-1:]
        right = x.shape[-1] >= self.entries and batch.numel() > 0
        right = right and (targets.shape, targets.dtype) == (lead + batch, torch.int64)
        right = right and (inputs.shape[: -3 if self.blocks else -1], inputs.dtype) == ((*lead, *batch), x.dtype)
        right = right and self.left(inputs) == self.sizes[0]
        right = right and (real is None or real.shape == targets.shape)
        right = right and (not isinstance(rate, Tensor) or rate.shape in (lead, ()))
        if not right:
            shapes = [None if t is None else list(t.shape) for t in (x, inputs, targets, real)]
            raise ValueError(
                f"vectors, inputs, targets and mask of shapes {shapes} and types {x.dtype}, {inputs.dtype} and {targets.dtype} "
                f"do not fit each other, or not layers of {self.sizes} neurons"
            )


def apart(t: Tensor) -> ctypes.c_long:
    """How far one client's vector lies from the next one's."""
    return ctypes.c_long(t.stride(0) if t.dim() > 1 else 0)
