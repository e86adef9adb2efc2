"""SparseLoCo: clients send the largest entries of what they still owe, in two bits each; this stands for an outer momentum.

Sarfi, Thérien, Lidin, Belilovsky: Communication Efficient LLM Pre-training with SparseLoCo. 2025.

Differs: chunks are stretches of the model's vector, where the authors' code cuts matrices into squares of 64 by 64; a place in
a chunk travels in 16 bits, where 12 would do. The paper leaves the two bits open. Here, as in their code but for each chunk
by itself, the values' mean and deviation set four bins, and the mean of the values in each bin travels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from undrift.algorithms.base import Average, Cohort, LocalSGD, State, Work
from undrift.algorithms.checks import at_least
from undrift.compress import LargestEntries, count_kept
from undrift.core.errors import BadSetting
from undrift.core.vec import first_numbers, mean

BINS = 4
WIDTH = 1.5  # the width of a bin, in standard deviations: six for all
LARGEST = 2**16  # a chunk's entries: a place has 16 bits


@dataclass(frozen=True)
class SparseUploads(LocalSGD):
    """e_i <- beta e_i + x_t - x_i;  C(e_i) goes up;  e_i <- e_i - C(e_i)."""

    lr: float = 0.002
    optimizer: str = "adamw"
    keep_moments: bool = True
    ratio: float = 64.0  # one of so many entries of each chunk is sent
    chunk: int = 4096  # entries among which the largest are found
    beta: float = 0.95  # how much is kept of what was not sent
    bits: Literal[0, 2] = 2  # bits of each value that is sent; 0 sends it as it is

    sends_updates: ClassVar[bool] = False
    whole_uploads: ClassVar[bool] = False
    uploads_apart: ClassVar[bool] = True  # each has places of its own

    class Client(NamedTuple):
        e: Tensor

    class Up(NamedTuple):
        """One chunk after the other; [..., 0] for what is not sent."""

        values: Tensor
        bins: Tensor  # uint8, those of four values in a byte
        levels: Tensor  # what the four bins of each chunk stand for
        places: Tensor  # uint8, two bytes for each place in its chunk

    def local_end(self, down: State, client: Client, work: Work) -> tuple[Up, Client]:
        e = self.beta * client.e + (down.x - work.x)  # e_r <- beta e_r + Delta_r
        *_, entries = e.shape
        size, chunks, _ = self.sizes(entries)
        parts = F.pad(e, (0, chunks * size - entries)).unflatten(-1, (chunks, size))
        places = LargestEntries((size,), self.ratio).places(parts)
        values = parts.take_along_dim(places, -1)
        none = values[..., :0]
        bins, levels = quantise(values) if self.bits else (none, none)
        sent = self.Up(none if self.bits else values, pack_bins(bins), levels, split(places))
        up = self.Up(*(part.flatten(-2) for part in sent))
        return up, self.Client(e - self.unpack(up, entries))  # e_r <- e_r - Q(Top-k(e_r))

    def gather(self, companion: State, up: Up, cohort: Cohort) -> tuple[Tensor, State]:
        return mean(self.unpack(up, cohort.layout.size), cohort.weight), companion

    def unpack(self, up: Up, entries: int) -> Tensor:
        """C(e) [..., P] from what travelled."""
        size, chunks, kept = self.sizes(entries)
        places = join(up.places.unflatten(-1, (chunks, 2 * kept))).clamp(max=size - 1)  # whatever a client sends
        values = (
            up.values.unflatten(-1, (chunks, kept))
            if not self.bits
            else (
                up.levels.unflatten(-1, (chunks, BINS)).take_along_dim(
                    unpack_bins(up.bins.unflatten(-1, (chunks, -1)), kept), -1
                )
            )
        )
        whole = values.new_zeros(*values.shape[:-1], size).scatter(-1, places, values)
        return whole.flatten(-2)[..., :entries]

    def sizes(self, entries: int) -> tuple[int, int, int]:
        """Of a vector: entries of a chunk, chunks, and entries of a chunk that are sent."""
        size = min(self.chunk, entries)
        return size, math.ceil(entries / size), count_kept(size, self.ratio)

    def check(self, clients: int, cohort: int) -> None:
        super().check(clients, cohort)
        at_least(self, 1.0, "ratio", "chunk")
        at_least(self, 0.0, "beta")
        if self.beta > 1:
            raise BadSetting(f"beta keeps a share from 0 to 1 of what was not sent, not {self.beta}")
        if self.chunk != int(self.chunk) or self.chunk > LARGEST:
            raise BadSetting(f"chunk is a whole number of at most {LARGEST} entries, not {self.chunk}")


def quantise(values: Tensor) -> tuple[Tensor, Tensor]:
    """The bin from 0 to 3 of each value [..., k], and the mean [..., 4] of those in each bin.

    >>> quantise(torch.tensor([-9.0, -1.0, 1.0, 3.0, 6.0]))
    (tensor([1, 2, 2, 2, 3]), tensor([ 0., -9.,  1.,  6.]))
    """
    *_, kept = values.shape
    centred = values - values.mean(-1, keepdim=True)
    width = WIDTH * (centred.square().sum(-1, keepdim=True) / max(1, kept - 1)).sqrt()
    bins = ((centred / width).nan_to_num(0.0).round() + BINS // 2).clamp(0, BINS - 1)  # all alike: the width is 0
    there = bins.unsqueeze(-1) == first_numbers(BINS, values)
    levels = (there * values.unsqueeze(-1)).sum(-2) / there.sum(-2).clamp(min=1)  # NaN is not hidden
    return bins.long(), levels


def pack_bins(bins: Tensor) -> Tensor:
    """Bins [..., k], four in a byte [..., ceil(k / 4)].

    >>> pack_bins(torch.tensor([3, 0, 1, 2, 1])).tolist()
    [147, 1]
    """
    fours = F.pad(bins, (0, -bins.shape[-1] % 4)).unflatten(-1, (-1, 4)).to(torch.uint8)
    return (fours << shifts(bins)).sum(-1, dtype=torch.uint8)


def unpack_bins(packed: Tensor, kept: int) -> Tensor:
    """What `pack_bins` has packed.

    >>> unpack_bins(torch.tensor([147, 1], dtype=torch.uint8), 5).tolist()
    [3, 0, 1, 2, 1]
    """
    return (packed.unsqueeze(-1) >> shifts(packed) & 3).flatten(-2)[..., :kept].long()


def split(places: Tensor) -> Tensor:
    """Places [..., k] as bytes [..., 2 k], which every transport knows.

    >>> split(torch.tensor([3, 258])).tolist()
    [3, 0, 2, 1]
    """
    return torch.stack([places & 255, places >> 8], -1).to(torch.uint8).flatten(-2)


def join(parts: Tensor) -> Tensor:
    """What `split` has split.

    >>> join(torch.tensor([3, 0, 2, 1], dtype=torch.uint8)).tolist()
    [3, 258]
    """
    low, high = parts.long().unflatten(-1, (-1, 2)).unbind(-1)
    return low | high << 8


def shifts(like: Tensor) -> Tensor:
    return (2 * first_numbers(4, like)).to(torch.uint8)


@dataclass(frozen=True)
class SparseLoCo(SparseUploads, Average):
    """x_{t+1} = x_t - eta_g mean_i C(e_i), with AdamW on the clients."""
