"""What is kept of a long vector when it must be sent in few bytes: RBGS, Random-K and Top-K.

A compressor C keeps b = ceil(d / R) of the d entries of a vector and drops the others; nothing is rescaled. RBGS (one
random contiguous block) and Random-K keep the same entries on all workers, drawn from (seed, iteration) alone, so that
the kept entries can be summed where they are and no index is ever sent. Top-K keeps each worker's own largest entries.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from undrift.core.errors import BadSetting, UnknownName
from undrift.core.streams import Purpose, sample, stream

COMPRESSORS = ("rbgs", "randk", "topk")
BLOCKS = ("flat", "tensor", "shuffle")
Place = slice | Tensor  # entries of a vector
Fill = Callable[[Sequence[slice]], None]  # computes a vector in some stretches
FEW = 2  # blocks: with more, computing between them costs more than waiting


def done(stretches: Sequence[slice]) -> None:
    """The vector has been computed before."""


class Collective(Protocol):
    """What workers can do together; a real rank holds its own vector [b], simulated ones are stacked [W, b]."""

    count: int
    overlap: bool  # whether anything can be computed while something is sent

    def mean(self, v: Tensor) -> Tensor:
        """[b], the same on every worker; v may be written over."""
        ...

    def mean_later(self, v: Tensor) -> Callable[[], Tensor]:
        """The same begun now and waited for by a call; v must not be touched before."""
        ...

    def all_rows(self, v: Tensor) -> Tensor:
        """[W, b] everybody's."""
        ...


@dataclass(frozen=True)
class Exchanged:
    """c = mean over workers of C(p_k), as values at places; and, where it was asked for, what this worker kept."""

    places: list[Place]
    values: list[Tensor]
    mine: Tensor | None = None  # [..., b] C(p_k)'s entries before the exchange, for places that all share

    def add_to(self, x: Tensor, alpha: float = 1.0) -> None:
        """x <- x + alpha c."""
        if all(isinstance(place, slice) for place in self.places):
            torch._foreach_add_([x[place] for place in self.places], self.values, alpha=alpha)
        else:
            for place, values in zip(self.places, self.values, strict=True):
                x[place] = x[place].add(values, alpha=alpha)


class Compressor(Protocol):
    """What an optimiser asks of a compressor."""

    def exchange(
        self, p: Tensor, t: int, workers: Collective, fill: Fill = done, meanwhile: Fill = done, remember: bool = False
    ) -> Exchanged:
        """c = mean over workers of C(p_k) in iteration t, the only communication; p_k [..., d] becomes p_k - C(p_k).

        `fill` has p computed before it is sent; `meanwhile` computes those stretches that are not, while the others are
        on their way.
        """
        ...


class SharedPlaces(ABC):
    """A compressor that keeps the same entries on all workers."""

    @abstractmethod
    def places(self, t: int, device: torch.device) -> list[Place]:
        """What is kept in iteration t."""

    def exchange(
        self, p: Tensor, t: int, workers: Collective, fill: Fill = done, meanwhile: Fill = done, remember: bool = False
    ) -> Exchanged:
        places, whole = self.places(t, p.device), slice(0, p.shape[-1])
        blocks = [place for place in places if isinstance(place, slice)]
        if not workers.overlap or not blocks or len(blocks) > FEW:
            blocks = [whole]
        fill(blocks)
        parts = [p[..., place] for place in places]
        joined = parts[0] if len(parts) == 1 else torch.cat(parts, -1)  # a single block is sent from where it lies
        mine = joined.clone() if remember else None
        mean = workers.mean_later(joined)
        meanwhile(list(between(blocks, whole.stop)))
        values = mean().split([part.shape[-1] for part in parts])
        for place in places:
            p[..., place] = 0.0
        return Exchanged(places, list(values), mine)


@dataclass(frozen=True)
class RandomBlock(SharedPlaces):
    """RBGS: one contiguous block, which goes on at the beginning where it reaches the end, so that every entry is
    equally likely (Vogels et al., PowerSGD, NeurIPS 2019, appendix; Xu, DEF).

    `parts` are the lengths of the stretches that each give a block: the whole vector, or one for every tensor.
    """

    parts: tuple[int, ...]
    ratio: float
    seed: int

    def places(self, t: int, device: torch.device) -> list[Place]:
        found: list[Place] = []
        begin = 0
        for number, n in enumerate(self.parts):
            b = count_kept(n, self.ratio)
            s = stream(self.seed, Purpose.KEPT, t, number) * n >> 64 if b < n else 0  # uniform in 0 .. n - 1
            found.append(slice(begin + s, begin + min(s + b, n)))
            if s + b > n:
                found.append(slice(begin, begin + s + b - n))
            begin += n
        return found


@dataclass(frozen=True)
class ShuffledBlocks(SharedPlaces):
    """The vector cut into about R blocks, each of them kept once in every R iterations, in an order drawn anew."""

    size: int
    ratio: float
    seed: int

    def places(self, t: int, device: torch.device) -> list[Place]:
        b = count_kept(self.size, self.ratio)
        blocks = -(-self.size // b)
        begin = b * _order(self.seed, t // blocks, blocks)[t % blocks]
        return [slice(begin, min(begin + b, self.size))]


@dataclass(frozen=True)
class RandomEntries(SharedPlaces):
    """Random-K: entries drawn without replacement, by one seed for all workers."""

    parts: tuple[int, ...]
    ratio: float
    seed: int

    def places(self, t: int, device: torch.device) -> list[Place]:
        drawn, begin = [], 0
        for number, n in enumerate(self.parts):
            random = np.random.Generator(np.random.PCG64(stream(self.seed, Purpose.KEPT, t, number)))
            drawn.append(begin + np.sort(random.choice(n, count_kept(n, self.ratio), replace=False, shuffle=False)))
            begin += n
        return [torch.from_numpy(np.concatenate(drawn)).to(device)]


@dataclass(frozen=True)
class LargestEntries:
    """Top-K: each worker keeps its own entries of largest magnitude."""

    parts: tuple[int, ...]
    ratio: float

    def places(self, v: Tensor) -> Tensor:
        """[..., k] which entries of v [..., d] are kept, in rising order."""
        found, begin = [], 0
        for part in v.split(list(self.parts), -1):
            largest = part.abs().topk(count_kept(part.shape[-1], self.ratio), -1, sorted=False).indices
            found.append(begin + largest.sort(-1).values)
            begin += part.shape[-1]
        return torch.cat(found, -1)

    def exchange(
        self, p: Tensor, t: int, workers: Collective, fill: Fill = done, meanwhile: Fill = done, remember: bool = False
    ) -> Exchanged:
        fill([slice(0, p.shape[-1])])
        index = self.places(p)
        values, where = workers.all_rows(p.take_along_dim(index, -1)), workers.all_rows(index.int())
        p.scatter_(-1, index, 0.0)
        # One worker after another, because a sum over repeated places has no fixed order on a GPU.
        return Exchanged(list(where.long()), list(values / workers.count))


def make_compressor(name: str, block: str, ratio: float, seed: int, sizes: Sequence[int]) -> Compressor:
    """The compressor of that name for vectors of tensors with these sizes.

    >>> make_compressor("rbgs", "flat", 4, 0, [6, 2]).places(0, torch.device("cpu"))
    [slice(1, 3, None)]
    """
    if name not in COMPRESSORS:
        raise UnknownName("compressor", name, COMPRESSORS)
    if block not in BLOCKS:
        raise UnknownName("block", block, BLOCKS)
    if not 1.0 <= ratio < float("inf"):
        raise BadSetting(f"ratio must be a number of at least 1, not {ratio}; 64 sends a 64th")
    parts = (sum(sizes),) if block == "flat" else tuple(sizes)
    if block == "shuffle":
        if name != "rbgs":
            raise BadSetting(f"block shuffle deals out contiguous blocks, {name} has none; use flat or tensor")
        return ShuffledBlocks(sum(sizes), ratio, seed)
    if name == "topk":
        return LargestEntries(parts, ratio)
    return RandomBlock(parts, ratio, seed) if name == "rbgs" else RandomEntries(parts, ratio, seed)


def count_kept(n: int, ratio: float) -> int:
    """b = ceil(n / R).

    >>> count_kept(10, 4), count_kept(10, 1000)
    (3, 1)
    """
    return math.ceil(n / ratio)


def between(blocks: Iterable[slice], size: int) -> Iterator[slice]:
    """What lies between blocks that do not overlap.

    >>> list(between([slice(6, 8), slice(0, 2)], 9))
    [slice(2, 6, None), slice(8, 9, None)]
    """
    end = 0
    for block in [*sorted(blocks, key=lambda block: int(block.start)), slice(size, size)]:
        if block.start > end:
            yield slice(end, block.start)
        end = block.stop


def common(part: slice, stretches: Iterable[slice]) -> Iterator[slice]:
    """The parts of the stretches that lie in one.

    >>> list(common(slice(3, 7), [slice(0, 4), slice(5, 9), slice(8, 9)]))
    [slice(3, 4, None), slice(5, 7, None)]
    """
    for stretch in stretches:
        begin, end = max(part.start, stretch.start), min(part.stop, stretch.stop)
        if begin < end:
            yield slice(begin, end)


@functools.lru_cache(maxsize=2)
def _order(seed: int, visit: int, blocks: int) -> list[int]:
    return sample(stream(seed, Purpose.KEPT, visit), blocks, blocks)
