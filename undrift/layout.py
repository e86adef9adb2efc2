"""The flat form of a module: which tensors make up a vector [P], under which names and in which order."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Names and shapes of the tensors that lie one after another in a vector."""

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]

    @classmethod
    def of(cls, named: Iterable[tuple[str, Tensor]]) -> Layout:
        pairs = list(named)
        return cls(tuple(name for name, _ in pairs), tuple(tensor.shape for _, tensor in pairs))

    @property
    def sizes(self) -> list[int]:
        return [shape.numel() for shape in self.shapes]

    @property
    def size(self) -> int:
        return sum(self.sizes)

    @property
    def segments(self) -> list[slice]:
        """Where each tensor lies in the vector."""
        ends = [0]
        for size in self.sizes:
            ends.append(ends[-1] + size)
        return [slice(a, b) for a, b in itertools.pairwise(ends)]

    def split(self, x: Tensor) -> dict[str, Tensor]:
        """The named tensors of a vector [P]. One `split`, because its backward is one `cat`."""
        return {
            name: part.view(shape)
            for name, part, shape in zip(self.names, x.split(self.sizes), self.shapes, strict=True)
        }

    def join(self, tensors: dict[str, Tensor], like: Tensor) -> Tensor:
        """The vector [P] of named tensors, in the dtype and on the device of `like`."""
        parts = [tensors[name].detach().reshape(-1).to(like) for name in self.names]
        return torch.cat(parts) if parts else like.new_zeros(0)


@functools.cache
def weights(layout: Layout, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[P] with 1 for the weights, and 0 for biases and normalisation: the tensors of fewer than two dimensions.

    >>> weights(Layout(("weight", "bias"), (torch.Size((2, 2)), torch.Size((2,)))), torch.float32, torch.device("cpu"))
    tensor([1., 1., 1., 1., 0., 0.])
    """
    return torch.cat([torch.full((s.numel(),), float(len(s) > 1), dtype=dtype, device=device) for s in layout.shapes])
