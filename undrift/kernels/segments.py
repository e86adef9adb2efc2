"""Blocks of a vector for kernels, none of which crosses the border of two segments."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor


def bounds(segments: list[slice]) -> list[int]:
    """Where consecutive segments begin, and where the last one ends.

    >>> bounds([slice(0, 3), slice(3, 10)])
    [0, 3, 10]
    """
    return [*(s.start for s in segments), segments[-1].stop]


def blocks(bounds: Sequence[int], width: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Begin, end and segment [n, 3] of blocks of at most `width` entries; the first block of each segment, and n [T + 1].

    >>> blocks([0, 3, 10], 4, torch.zeros(10))
    (tensor([[ 0,  3,  0],
            [ 3,  7,  1],
            [ 7, 10,  1]]), tensor([0, 1, 3]))
    """
    return _blocks(tuple(bounds), width, like.device)


@functools.cache
def _blocks(bounds: tuple[int, ...], width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    found, first = [], [0]
    for segment, (begin, end) in enumerate(itertools.pairwise(bounds)):
        found += [(at, min(at + width, end), segment) for at in range(begin, max(end, begin + 1), width)]
        first.append(len(found))
    return torch.tensor(found, device=device), torch.tensor(first, device=device)
