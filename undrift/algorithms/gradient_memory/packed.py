"""The server's memory of the clients' updates in five levels an entry: an eleventh of the memory of `memory.py`.

Ours. An entry is one of 0, ±0.76 and ±1.72 times its block's root mean square, the best five levels for normal entries; three
entries share a byte and 96 a scale. The error of a row is nearly at right angles to everything else, so that the products
which a programme is made of hardly change.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from undrift.algorithms.gradient_memory.cone import Projection, gram, project
from undrift.algorithms.gradient_memory.memory import Memory, stored_scale
from undrift.core.forms import plain
from undrift.core.vec import first_numbers

LEVELS = (-1.7240, -0.7646, 0.0, 0.7646, 1.7240)  # Max, Quantizing for minimum distortion, 1960, table I
LIMITS = (-1.2443, -0.3823, 0.3823, 1.2443)  # half way between two of them
BYTE, BLOCK = 3, 96  # entries
AT_A_TIME = 1 << 16  # entries of a row that are unpacked at a time


class PackedMemory(NamedTuple):
    """D[i] = beta_2^age times what `codes` and `scales` say of row i; whom the rows belong to stands in `whose`."""

    codes: Tensor  # [m, ceil(P / 96) 32] uint8
    scales: Tensor  # [m, ceil(P / 96)] bfloat16, each block's root mean square
    whose: Memory  # without rows

    @classmethod
    def empty(cls, m: int, x0: Tensor, parts: int) -> PackedMemory:
        blocks = -(-len(x0) // BLOCK)
        codes = x0.new_zeros(m, blocks * BLOCK // BYTE, dtype=torch.uint8)
        return cls(codes, x0.new_zeros(m, blocks, dtype=torch.bfloat16), Memory.empty(m, x0[:0], parts))

    @property
    def ids(self) -> Tensor:
        return self.whose.ids

    @property
    def evictions(self) -> Tensor:
        return self.whose.evictions

    def let_in(self, clients: Tensor) -> tuple[PackedMemory, Tensor]:
        whose, place = self.whose.let_in(clients)
        return self._replace(whose=whose), place

    def remember(
        self, place: Tensor, updates: Tensor, beta2: float, segments: list[slice], m: Tensor
    ) -> tuple[PackedMemory, Tensor]:
        """`Memory.remember`, but that the changed rows are packed again, and all products are those of packed rows."""
        scale = stored_scale(self.whose.age[place], beta2, updates)
        old = unpack(self.codes[place], self.scales[place], slice(0, len(m)), m)
        codes, scales = pack(scale * old + updates)
        memory = self._replace(
            codes=self.codes.index_copy(0, place, codes), scales=self.scales.index_copy(0, place, scales)
        )
        new, along = memory.products(place, m, segments)
        products = self.whose.products.index_copy(1, place, new).index_copy(2, place, new.transpose(1, 2))
        age = (self.whose.age + 1).index_fill(0, place, 0)
        return memory._replace(whose=self.whose._replace(age=age, products=products)), along

    def products(self, place: Tensor, m: Tensor, segments: list[slice]) -> tuple[Tensor, Tensor]:
        """Of the rows at `place` with all rows [T, S, m], and of the vector m with them [T, m], in float64."""
        total = self.whose.products.new_zeros(len(segments), len(place) + 1, len(self.codes))
        for n, segment in enumerate(segments):
            for part in parts(segment):
                rows = unpack(self.codes, self.scales, part, m)
                total[n] += gram(torch.cat([rows[place], m[None, part]]), rows)
        return total[:, :-1], total[:, -1]

    def constrains(self, beta2: float) -> Tensor:
        return self.whose.constrains(beta2)

    def project(
        self, p: Tensor, segments: list[slice], along: Tensor, counts: Tensor, start: Tensor, rho: float
    ) -> Projection:
        """`Memory.project`, by vectors of m + 1 numbers that have the same products."""
        u, each = p.clone(), []
        for segment, G, b, guess in zip(segments, self.whose.products, along, start, strict=True):
            square = p[segment].double().square().sum().view(1)
            small = vectors_of(torch.cat([torch.cat([G, b[:, None]], 1), torch.cat([b, square])[None]]))
            each.append(project(small[-1], small[:-1], G, rho, b, counts, guess, allowed=1e-6))
            for part in parts(segment):
                moved = each[-1].z.to(p) @ unpack(self.codes, self.scales, part, p)
                u[part] += torch.where(each[-1].solved, moved, 0.0)
        return Projection(u, torch.stack([q.z for q in each]), torch.stack([q.solved for q in each]))


def parts(segment: slice) -> Iterator[slice]:
    """A segment in pieces of at most AT_A_TIME entries."""
    edges = [*range(segment.start, segment.stop, AT_A_TIME), segment.stop]
    return (slice(a, b) for a, b in itertools.pairwise(edges))


def pack(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of rows [n, P]."""
    blocks = torch.nn.functional.pad(rows, (0, -rows.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    scales = blocks.square().mean(-1).sqrt().to(torch.bfloat16)
    unit = scales.to(rows).unsqueeze(-1)
    digits = torch.bucketize(torch.where(unit > 0, blocks / unit, 0.0), rows.new_tensor(LIMITS))
    powers = len(LEVELS) ** first_numbers(BYTE, rows)
    return (digits.flatten(1).unflatten(1, (-1, BYTE)) * powers).sum(-1).to(torch.uint8), scales


def unpack(codes: Tensor, scales: Tensor, part: slice, like: Tensor) -> Tensor:
    """The entries `part` of packed rows, [n, stop - start]."""
    first, last = part.start // BLOCK, -(-part.stop // BLOCK)
    width = BLOCK // BYTE
    table = like.new_tensor(
        [[LEVELS[code // len(LEVELS) ** k % len(LEVELS)] for k in range(BYTE)] for code in range(125)]
    )
    values = table[codes[:, first * width : last * width].int()].flatten(1).unflatten(1, (-1, BLOCK))
    rows = (values * scales[:, first:last, None].to(like)).flatten(1)
    return rows[:, part.start - first * BLOCK : part.stop - first * BLOCK]


@plain(by_value=True)
def vectors_of(products: Tensor) -> Tensor:
    """Vectors, one a row, with these products [n, n]."""
    values, vectors = torch.linalg.eigh(products)
    return vectors * values.clamp(min=0.0).sqrt()
