"""Random numbers that depend on their purpose, not on the time of drawing.

A stream has a 64-bit key folded from (seed, purpose, round, client, ...). SplitMix64 (Steele, Lea & Flood, OOPSLA 2014) hashes
a counter under that key. It uses integers only: a client draws the same numbers alone or in a cohort, on any device or machine.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor


class Purpose(IntEnum):
    """The purpose of a stream; two purposes never share numbers."""

    COHORT = 1
    BATCHES = 2
    AUGMENT = 3
    DROPOUT = 4
    COLOUR = 5
    VALIDATION = 6
    INITIAL = 7
    FAILURE = 8
    SLOWNESS = 9
    RESAMPLE = 10
    SCORED = 11
    KEPT = 12
    NOISE = 13
    ATTACK = 14
    SPEED = 15


GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, SplitMix64's increment
FIRST, SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # its two multipliers
WORD = (1 << 64) - 1


def to_signed(word: int) -> int:
    """Reinterpret an unsigned 64-bit word as int64."""
    return word - (1 << 64) if word >> 63 else word


def mix(z: Tensor) -> Tensor:
    """SplitMix64's finaliser on int64 tensors: products wrap, `& (2^k - 1)` turns the arithmetic shift logical."""
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * to_signed(FIRST)
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * to_signed(SECOND)
    return z ^ ((z >> 31) & ((1 << 33) - 1))


def fold(key: Tensor | int, part: Tensor) -> Tensor:
    """The key of a sub-stream, for each element of `part`."""
    start = mix_int(key + GOLDEN) if isinstance(key, int) else mix(key + to_signed(GOLDEN))
    return mix((to_signed(start) if isinstance(start, int) else start) + part)


def mix_int(z: int) -> int:
    """`mix` for one Python integer, as an unsigned word."""
    z &= WORD
    z = (z ^ (z >> 30)) * FIRST & WORD
    z = (z ^ (z >> 27)) * SECOND & WORD
    return z ^ (z >> 31)


def stream(seed: int, purpose: Purpose, *parts: int) -> int:
    """The key of a seed, a purpose and any further whole numbers.

    >>> stream(0, Purpose.COHORT, 3) == stream(0, Purpose.COHORT, 3)
    True
    >>> stream(0, Purpose.COHORT, 3) == stream(0, Purpose.COHORT, 4)
    False
    """
    key = mix_int(seed)
    for part in (int(purpose), *parts):
        key = mix_int(mix_int(key + GOLDEN) + part)
    return key


def words(key: Tensor, count: int) -> Tensor:
    """[..., count] random int64 words for keys [...]."""
    return fold(key.unsqueeze(-1), torch.arange(count, device=key.device))


def below(word: Tensor, bound: Tensor | int) -> Tensor:
    """Random words as whole numbers 0 <= r < bound (bound < 2^31; bias below 2^-32)."""
    return (((word >> 32) & 0xFFFFFFFF) * bound) >> 32


def uniform(word: Tensor) -> Tensor:
    """Random words as float64 numbers in [0, 1)."""
    return ((word >> 11) & ((1 << 53) - 1)).double() * 2.0**-53


def normal(word: Tensor) -> Tensor:
    """An even number of random words [..., n] as float64 numbers from N(0, 1), each pair by Box and Muller."""
    first, second = (uniform(half) for half in word.chunk(2, -1))
    radius, angle = (-2 * torch.log1p(-first)).sqrt(), 2 * torch.pi * second
    return torch.cat([radius * angle.cos(), radius * angle.sin()], -1)


def sample(key: int, population: int, size: int) -> list[int]:
    """`size` different numbers of range(population) in random order, in time independent of `population`.

    Floyd's algorithm (Bentley & Floyd, CACM 1987) chooses them, a Fisher-Yates shuffle orders them.

    >>> sorted(sample(7, 5, 5))
    [0, 1, 2, 3, 4]
    """
    chosen: dict[int, None] = {}
    for draw, top in enumerate(range(population - size, population)):
        r = mix_int(key + (draw + 1) * GOLDEN) * (top + 1) >> 64
        chosen[top if r in chosen else r] = None
    order = list(chosen)
    for i in range(size - 1, 0, -1):
        j = mix_int(mix_int(key) + (i + 1) * GOLDEN) * (i + 1) >> 64
        order[i], order[j] = order[j], order[i]
    return order


def samples(keys: Tensor, population: int, size: int) -> Tensor:
    """sample(key, population, size) for all keys at once, as [len(keys), size]; population < 2^31, time O(size^2)."""

    def share(words: Tensor, bounds: Tensor) -> Tensor:
        """word * bound / 2^64, rounded down."""
        high, low = (words >> 32) & 0xFFFFFFFF, words & 0xFFFFFFFF
        return (high * bounds + (low * bounds >> 32)) >> 32

    counts, tops = torch.arange(1, size + 1), torch.arange(population - size, population)
    steps = counts * to_signed(GOLDEN)
    chosen = share(mix(keys.unsqueeze(-1) + steps), tops + 1)
    for n in range(1, size):
        taken = (chosen[:, :n] == chosen[:, n : n + 1]).any(1)
        chosen[taken, n] = tops[n]
    swaps = share(mix(mix(keys).unsqueeze(-1) + steps), counts)
    for i in range(size - 1, 0, -1):
        j, last = swaps[:, i : i + 1], chosen[:, i : i + 1].clone()
        chosen[:, i : i + 1] = chosen.take_along_dim(j, 1)
        chosen.scatter_(1, j, last)
    return chosen
