"""Compressors of long vectors: RBGS, Random-K, Top-K, and the Top-K of a leader.

A compressor C keeps b = ceil(d / R) of a vector's d entries without rescaling and drops the others. RBGS (one random
contiguous block) and Random-K draw the entries from (seed, iteration) alone: all workers keep the same ones, which can
be summed in place, and no index is sent. Top-K keeps each worker's own largest entries. With a leader all workers keep
the largest entries of one of them, each in turn.
"""

from __future__ import annotations

import functools
import itertools
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

COMPRESSORS = ("leader", "rbgs", "randk", "topk")
BLOCKS = ("flat", "tensor", "shuffle")
Place = slice | Tensor  # entries of a vector
Fill = Callable[[Sequence[slice]], None]  # computes some stretches of a vector
FEW = 2  # blocks; with more, computing between them costs more than waiting


def skip(stretches: Sequence[slice]) -> None:
    """The vector is computed already."""


class Collective(Protocol):
    """Collectives of workers. A real rank holds its own vector [b], simulated workers are stacked [W, b]."""

    count: int
    overlap: bool  # whether computing can overlap with sending

    def mean(self, v: Tensor) -> Tensor:
        """[b], the same on every worker; v may be overwritten."""

    def mean_later(self, v: Tensor) -> Callable[[], Tensor]:
        """Begin the mean now; the returned function waits for it. Leave v alone until then."""

    def all_rows(self, v: Tensor) -> Tensor:
        """[W, b] the vectors of all workers."""

    def from_one(self, worker: int, choose: Callable[[Tensor], Tensor], v: Tensor) -> Tensor:
        """`choose` of the vector of one worker, the same on every worker."""


@dataclass(frozen=True)
class Exchanged:
    """c = mean over workers of C(p_k), as values at places."""

    places: list[Place]
    values: list[Tensor]
    kept: Tensor | None = None  # [..., b] the entries of C(p_k), if asked for and the places are shared

    def add_to(self, x: Tensor, alpha: float = 1.0) -> None:
        """x <- x + alpha c."""
        if all(isinstance(place, slice) for place in self.places):
            torch._foreach_add_([x[place] for place in self.places], self.values, alpha=alpha)
        else:
            for place, values in zip(self.places, self.values, strict=True):
                x[place] = x[place].add(values, alpha=alpha)


class Compressor(Protocol):
    """The interface between optimisers and compressors."""

    def exchange(
        self, p: Tensor, t: int, workers: Collective, fill: Fill = skip, rest: Fill = skip, keep: bool = False
    ) -> Exchanged:
        """c = mean over workers of C(p_k) in iteration t, the only communication; p_k [..., d] becomes p_k - C(p_k).

        `fill` computes p before it is sent, `rest` the other stretches meanwhile; `keep` asks for Exchanged.kept.
        """


class SharedPlaces(ABC):
    """A compressor that keeps the same entries on all workers, known before they are computed."""

    @abstractmethod
    def places(self, t: int, device: torch.device) -> list[Place]:
        """The places that are kept in iteration t."""

    def exchange(
        self, p: Tensor, t: int, workers: Collective, fill: Fill = skip, rest: Fill = skip, keep: bool = False
    ) -> Exchanged:
        places, whole = self.places(t, p.device), slice(0, p.shape[-1])
        blocks = [place for place in places if isinstance(place, slice)]
        if not workers.overlap or not blocks or len(blocks) > FEW:
            blocks = [whole]
        fill(blocks)
        parts = [p[..., place] for place in places]
        message = parts[0] if len(parts) == 1 else torch.cat(parts, -1)  # a single block is sent without a copy
        kept = message.clone() if keep else None
        mean = workers.mean_later(message)
        rest(list(gaps(blocks, whole.stop)))
        values = mean().split([part.shape[-1] for part in parts])
        for place in places:
            p[..., place] = 0.0
        return Exchanged(places, list(values), kept)


@dataclass(frozen=True)
class RandomBlock(SharedPlaces):
    """RBGS: one contiguous block that wraps around, so that every entry is equally likely (Vogels et al., PowerSGD,
    NeurIPS 2019, appendix; Xu, DEF)."""

    parts: tuple[int, ...]  # lengths of the stretches that give a block each: the whole vector, or every tensor
    ratio: float
    seed: int

    def places(self, t: int, device: torch.device) -> list[Place]:
        places: list[Place] = []
        for number, (begin, n) in enumerate(stretches(self.parts)):
            b = count_kept(n, self.ratio)
            s = stream(self.seed, Purpose.KEPT, t, number) * n >> 64 if b < n else 0  # uniform in 0 .. n - 1
            places.append(slice(begin + s, begin + min(s + b, n)))
            if s + b > n:
                places.append(slice(begin, begin + s + b - n))
        return places


@dataclass(frozen=True)
class ShuffledBlocks(SharedPlaces):
    """About R blocks, each kept once in every R iterations, in an order drawn anew."""

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
    """Random-K: entries drawn without replacement from one seed for all workers."""

    parts: tuple[int, ...]
    ratio: float
    seed: int

    def places(self, t: int, device: torch.device) -> list[Place]:
        drawn = []
        for number, (begin, n) in enumerate(stretches(self.parts)):
            random = np.random.Generator(np.random.PCG64(stream(self.seed, Purpose.KEPT, t, number)))
            drawn.append(begin + np.sort(random.choice(n, count_kept(n, self.ratio), replace=False, shuffle=False)))
        return [torch.from_numpy(np.concatenate(drawn)).to(device)]


@dataclass(frozen=True)
class LargestEntries:
    """Top-K: each worker keeps its own entries of largest magnitude."""

    parts: tuple[int, ...]
    ratio: float

    def places(self, v: Tensor) -> Tensor:
        """[..., k] the entries of v [..., d] that are kept, in rising order; padding at the end of v never is."""
        places = []
        for begin, n in stretches(self.parts):
            largest = v[..., begin : begin + n].abs().topk(count_kept(n, self.ratio), -1, sorted=False).indices
            places.append(begin + largest.sort(-1).values)
        return torch.cat(places, -1)

    def exchange(
        self, p: Tensor, t: int, workers: Collective, fill: Fill = skip, rest: Fill = skip, keep: bool = False
    ) -> Exchanged:
        fill([slice(0, p.shape[-1])])
        index = self.places(p)
        values, where = workers.all_rows(p.take_along_dim(index, -1)), workers.all_rows(index.int())
        p.scatter_(-1, index, 0.0)
        # A place per worker: a sum over repeated places would have no fixed order on a GPU.
        return Exchanged(list(where.long()), list(values / workers.count))


@dataclass(frozen=True)
class LeadersEntries:
    """CLT-k: all workers keep the entries that are largest for one of them, each in turn (Chen et al., ScaleCom, NeurIPS 2020).

    Where one worker's error is large, so are the others', as far as the errors have something in common.
    """

    largest: LargestEntries

    def exchange(
        self, p: Tensor, t: int, workers: Collective, fill: Fill = skip, rest: Fill = skip, keep: bool = False
    ) -> Exchanged:
        fill([slice(0, p.shape[-1])])
        index = workers.from_one(t % workers.count, lambda v: self.largest.places(v).int(), p).long()
        message = p[..., index]
        kept = message.clone() if keep else None
        mean = workers.mean(message)
        p[..., index] = 0.0
        return Exchanged([index], [mean], kept)


def make_compressor(name: str, block: str, ratio: float, seed: int, sizes: Sequence[int]) -> Compressor:
    """Build a compressor for vectors made of tensors with these sizes.

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
            raise BadSetting(
                f"block shuffle deals out contiguous blocks, {name} has none; use flat or tensor, or compressor rbgs"
            )
        return ShuffledBlocks(sum(sizes), ratio, seed)
    if name in ("topk", "leader"):
        largest = LargestEntries(parts, ratio)
        return largest if name == "topk" else LeadersEntries(largest)
    return RandomBlock(parts, ratio, seed) if name == "rbgs" else RandomEntries(parts, ratio, seed)


def stretches(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The beginning and the length of each stretch."""
    return zip(itertools.accumulate(lengths, initial=0), lengths, strict=False)


def count_kept(n: int, ratio: float) -> int:
    """b = ceil(n / R), the number of entries that are kept of n.

    >>> count_kept(10, 4), count_kept(10, 1000)
    (3, 1)
    """
    return math.ceil(n / ratio)


def gaps(blocks: Iterable[slice], size: int) -> Iterator[slice]:
    """The stretches between blocks that do not overlap.

    >>> list(gaps([slice(6, 8), slice(0, 2)], 9))
    [slice(2, 6, None), slice(8, 9, None)]
    """
    end = 0
    for block in [*sorted(blocks, key=lambda block: int(block.start)), slice(size, size)]:
        if block.start > end:
            yield slice(end, block.start)
        end = block.stop


def overlaps(part: slice, others: Iterable[slice]) -> Iterator[slice]:
    """The overlaps of a part with others.

    >>> list(overlaps(slice(3, 7), [slice(0, 4), slice(5, 9), slice(8, 9)]))
    [slice(3, 4, None), slice(5, 7, None)]
    """
    for other in others:
        begin, end = max(part.start, other.start), min(part.stop, other.stop)
        if begin < end:
            yield slice(begin, end)


@functools.lru_cache(maxsize=2)
def _order(seed: int, visit: int, blocks: int) -> list[int]:
    return sample(stream(seed, Purpose.KEPT, visit), blocks, blocks)
