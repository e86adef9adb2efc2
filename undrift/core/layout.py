"""The flat form of a module: which tensors make up a vector [P], under which names and in which order."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
MODEL = "model"
Vec = Annotated[Tensor, MODEL]  # a field of a message that is a vector [..., P] of the model that everybody trains


@dataclass(frozen=True)
class Layout:
    """Names and shapes of the tensors that lie one after another in a vector, and how many zeros lie behind them."""

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    padding: int = 0

    @classmethod
    def of(cls, named: Iterable[tuple[str, Tensor]], multiple: int = 1) -> Layout:
        """The layout of these tensors; the vector's length is rounded up to a multiple."""
        pairs = list(named)
        shapes = tuple(tensor.shape for _, tensor in pairs)
        return cls(tuple(name for name, _ in pairs), shapes, -sum(s.numel() for s in shapes) % multiple)

    @property
    def sizes(self) -> list[int]:
        return [shape.numel() for shape in self.shapes]

    @property
    def entries(self) -> int:
        """How many numbers the tensors hold."""
        return sum(self.sizes)

    @property
    def size(self) -> int:
        """P, the vector's length."""
        return self.entries + self.padding

    @property
    def segments(self) -> list[slice]:
        """Where each tensor lies in the vector; the zeros behind the last one go with it."""
        ends = [0]
        for size in self.sizes:
            ends.append(ends[-1] + size)
        return [slice(a, b) for a, b in itertools.pairwise([*ends[:-1], self.size])]

    def split(self, x: Tensor) -> dict[str, Tensor]:
        """The named tensors of a vector [P]. One `split`, because its backward is one `cat`."""
        return {
            name: part.view(shape)
            for name, part, shape in zip(self.names, x.split([*self.sizes, self.padding]), self.shapes, strict=False)
        }

    def join(self, tensors: dict[str, Tensor], like: Tensor) -> Tensor:
        """The vector [P] of named tensors, in the dtype and on the device of `like`."""
        parts = [tensors[name].detach().reshape(-1).to(like) for name in self.names]
        return torch.cat([*parts, like.new_zeros(self.padding)])


def weights(layout: Layout, like: Tensor) -> Tensor:
    """[P] with 1 for the weights, and 0 for biases and normalisation: the tensors of fewer than two dimensions.

    >>> weights(Layout(("weight", "bias"), (torch.Size((2, 2)), torch.Size((2,)))), torch.zeros(6))
    tensor([1., 1., 1., 1., 0., 0.])
    """
    return _weights(layout, like.dtype, like.device)


@functools.cache
def _weights(layout: Layout, dtype: torch.dtype, device: torch.device) -> Tensor:
    each = [torch.full((s.numel(),), float(len(s) > 1), dtype=dtype, device=device) for s in layout.shapes]
    return torch.cat([*each, torch.zeros(layout.padding, dtype=dtype, device=device)])
