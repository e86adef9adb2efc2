"""The flat form of a module: names, shapes and order of the tensors in a vector [P]."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, TypeVar

import torch
from torch import Tensor

from undrift.core.errors import BadSetting

T = TypeVar("T")
FACTORS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")  # as peft names them
MODEL = "model"
Vec = Annotated[Tensor, MODEL]  # marks a field that holds vectors [..., P] of the shared model


@dataclass(frozen=True)
class Layout:
    """Names and shapes of consecutive tensors in a vector, the number of zeros at its end, and which tensors are embeddings."""

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    padding: int = 0
    tables: frozenset[str] = frozenset()  # names of embeddings, in which a row is one thing

    @classmethod
    def of(cls, named: Iterable[tuple[str, Tensor]], multiple: int = 1, tables: frozenset[str] = frozenset()) -> Layout:
        """The layout of these tensors, with the vector's length rounded up to a multiple."""
        pairs = list(named)
        shapes = tuple(tensor.shape for _, tensor in pairs)
        names = tuple(name for name, _ in pairs)
        return cls(names, shapes, -sum(s.numel() for s in shapes) % multiple, tables.intersection(names))

    @property
    def sizes(self) -> list[int]:
        return [shape.numel() for shape in self.shapes]

    @property
    def entries(self) -> int:
        """The length of the vector without its padding."""
        return sum(self.sizes)

    @property
    def size(self) -> int:
        """P, the vector's length."""
        return self.entries + self.padding

    @property
    def segments(self) -> list[slice]:
        """The range of each tensor in the vector; the last one includes the padding."""
        *starts, _ = itertools.accumulate(self.sizes, initial=0)
        return [slice(a, b) for a, b in itertools.pairwise([*starts, self.size])]

    def split(self, x: Tensor) -> dict[str, Tensor]:
        """The named tensors of a vector [P], by one `split`, because its backward is one `cat`."""
        parts = x.split([*self.sizes, self.padding])
        return {name: part.view(s) for name, part, s in zip(self.names, parts, self.shapes, strict=False)}

    def join(self, tensors: dict[str, Tensor], like: Tensor) -> Tensor:
        """The vector [P] of named tensors, in the dtype and on the device of `like`."""
        parts = [tensors[name].detach().reshape(-1).to(like) for name in self.names]
        return torch.cat([*parts, like.new_zeros(self.padding)])


def weights(layout: Layout, like: Tensor) -> Tensor:
    """[P] with 1 for weights, and 0 for tensors of fewer than two dimensions (biases, normalisation).

    >>> weights(Layout(("weight", "bias"), (torch.Size((2, 2)), torch.Size((2,)))), torch.zeros(6))
    tensor([1., 1., 1., 1., 0., 0.])
    """
    return _weights(layout, like.dtype, like.device)


def last_layer(layout: Layout, like: Tensor) -> Tensor:
    """[P] with 1 for the tensors of the last layer, and 0 for those of the layers before it.

    >>> last_layer(Layout(("0.weight", "1.weight", "1.bias"), (torch.Size((2,)),) * 3), torch.zeros(6))
    tensor([0., 0., 1., 1., 1., 1.])
    """
    layers = [name.rpartition(".")[0] for name in layout.names]
    if len({*layers}) < 2:
        raise BadSetting("the model has a single layer, of which no last one can be told apart; take a deeper model")
    return _tensors(layout, tuple(layer == layers[-1] for layer in layers), like.dtype, like.device)


def normalisation(layout: Layout, like: Tensor) -> Tensor:
    """[P] with 1 for the tensors of layers whose weight has one dimension, which normalise, and 0 for all others.

    >>> shapes = (torch.Size((2, 1)), torch.Size((2,)), torch.Size((2,)), torch.Size((2,)))
    >>> normalisation(Layout(("0.weight", "0.bias", "1.weight", "1.bias"), shapes), torch.zeros(8))
    tensor([0., 0., 0., 0., 1., 1., 1., 1.])
    """
    layers = [name.rpartition(".")[0] for name in layout.names]
    named = zip(layers, layout.names, layout.shapes, strict=True)
    flat = {layer for layer, name, shape in named if name.endswith("weight") and len(shape) == 1}
    return _tensors(layout, tuple(layer in flat for layer in layers), like.dtype, like.device)


def factor(name: str) -> str:
    """Which factor of an adapter B A a tensor is: "A", "B", or "" if it is neither.

    >>> factor("attention.q_proj.lora_A.default.weight"), factor("lora_embedding_B.default"), factor("head.weight")
    ('A', 'B', '')
    """
    found = [part for part in name.split(".") if part in FACTORS]
    return found[0][-1] if found else ""


def check_adapters(names: Iterable[str]) -> None:
    """Raise BadSetting unless adapters are among the tensors."""
    if not {"A", "B"} <= {factor(name) for name in names}:
        raise BadSetting(
            "this method trains adapters, and the model has no tensors lora_A and lora_B; give --lora r=8, a model of peft, or "
            "another method"
        )


def places_without(layout: Layout, fixed: str, like: Tensor) -> Tensor:
    """[n] the places in the vector of all tensors but the adapters' factors A, or B; int64.

    >>> shapes = (torch.Size((1, 2)), torch.Size((2, 1)), torch.Size((1,)))
    >>> places_without(Layout(("lora_A.weight", "lora_B.weight", "bias"), shapes), "A", torch.zeros(8))
    tensor([2, 3, 4])
    """
    check_adapters(layout.names)
    return _places(layout, tuple(factor(name) != fixed for name in layout.names), like.device)


@functools.cache
def _places(layout: Layout, chosen: tuple[bool, ...], device: torch.device) -> Tensor:
    starts = [part.start for part in layout.segments]
    each = zip(starts, layout.sizes, chosen, strict=True)
    return torch.cat([torch.arange(start, start + n, device=device) for start, n, one in each if one])


@functools.cache
def _tensors(layout: Layout, chosen: tuple[bool, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    each = [
        torch.full((n,), float(one), dtype=dtype, device=device) for n, one in zip(layout.sizes, chosen, strict=True)
    ]
    return torch.cat([*each, torch.zeros(layout.padding, dtype=dtype, device=device)])


@functools.cache
def _weights(layout: Layout, dtype: torch.dtype, device: torch.device) -> Tensor:
    each = [torch.full((s.numel(),), float(len(s) > 1), dtype=dtype, device=device) for s in layout.shapes]
    return torch.cat([*each, torch.zeros(layout.padding, dtype=dtype, device=device)])
