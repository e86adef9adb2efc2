"""What the clients of a round train on: their mini-batches, and the whole of their data."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from undrift.core.layout import Layout
from undrift.core.streams import Purpose, fold, stream
from undrift.data.batches import Table
from undrift.data.federation import Federation
from undrift.oracle.net import Net
from undrift.oracle.oracle import Batch, Oracle
from undrift.oracle.samples import samples


@dataclass
class LocalWork:
    """The local work of one round's cohort."""

    net: Net
    data: Federation
    seed: int
    round: int
    ids: Tensor  # [S]
    table: Table
    batch: int  # B
    gradients: int = 0  # mini-batch gradients computed so far
    mapped: bool = False  # whether some were by vmap
    rounds: Tensor | None = None  # [S] of each client, where they differ

    @functools.cached_property
    def keys(self) -> tuple[Tensor, Tensor]:
        """The streams [S, K] of every client's and step's dropout and augmentation."""
        every = torch.arange(self.table.count.shape[1], device=self.ids.device)
        dropout, augment = (
            fold(fold(self.stream_of(purpose), self.ids).unsqueeze(-1), every)
            for purpose in (Purpose.DROPOUT, Purpose.AUGMENT)
        )
        return dropout, augment

    def stream_of(self, purpose: Purpose) -> Tensor | int:
        """The stream of a purpose, in the round of each client."""
        if self.rounds is None:
            return stream(self.seed, purpose, self.round)
        return fold(stream(self.seed, purpose), self.rounds)

    def steps(self, clients: slice | int, limit: int | None = None) -> Iterator[tuple[Oracle, Tensor | None]]:
        """An oracle for each local step of some clients of the cohort: a slice is stacked, a number is a client alone."""
        counts, ids, index = self.table.count[clients], self.ids[clients], self.table.index[clients]
        device, train = ids.device, self.data.train
        total = int(self.table.steps[clients].max()) if limit is None else limit
        dropout, augment = (keys[clients] for keys in self.keys)
        for k in range(total):
            count: NDArray[np.int64] = np.atleast_1d(counts[..., k])
            width = int(count.max())
            rows = index[..., k, :width]
            if k + 1 < total:
                train.prefetch(index[..., k + 1, : int(np.max(counts[..., k + 1]))].flatten())
            live = None if (count > 0).all() else torch.from_numpy(count > 0).to(device).unsqueeze(-1)
            real = None if (count == width).all() else torch.from_numpy(count).to(device).view(ids.shape)
            batch = mini_batch(self.net, self.data, ids, rows, real, dropout[..., k], augment[..., k])
            oracle = Oracle(self.net, batch, torch.zeros((), dtype=self.net.dtype, device=device))
            yield oracle, live
            self.gradients += oracle.calls * int((count > 0).sum())
            self.mapped = self.mapped or oracle.tally.mapped


def mini_batch(
    net: Net, data: Federation, ids: Tensor, rows: Tensor, count: Tensor | None, dropout: Tensor, augment: Tensor
) -> Batch:
    """The samples `rows` [..., B] of clients ids [...], of which the first `count` [...] are real; None: all are.

    `dropout` [...] and `augment` [...] are the keys of the step's streams.
    """
    transform, train = data.transform, data.train
    place = torch.arange(rows.shape[-1], device=rows.device)
    draw = owner = None
    if transform.draws:
        draw = fold(augment.unsqueeze(-1), place).flatten()
    if transform.colour:
        owner = ids.unsqueeze(-1).expand(rows.shape).flatten()
    inputs = samples(net, data, rows, draw, owner)
    targets = train.targets[rows]
    if targets.is_floating_point():
        targets = targets.to(net.dtype)
    if data.masks and draw is not None:
        targets = transform.masks(targets.flatten(0, -3), draw).view(targets.shape)
    if count is None:
        return Batch(inputs, targets, None, dropout)
    real = place < count.unsqueeze(-1)
    # Whatever stands in row 0 must not reach a client that has no sample in that place. masked_fill would lose a turned layout.
    inputs = torch.where(real.view(*rows.shape, *(1,) * (inputs.dim() - rows.dim())), inputs, 0)
    return Batch(inputs, targets, real.to(net.dtype), dropout)


@dataclass
class LocalWhole:
    """The whole data of clients [...], without augmentation and dropout, in `batches` batches."""

    net: Net
    data: Federation
    ids: Tensor  # [...]
    start: Tensor  # [...] where each client's rows begin in data.members
    sizes: Tensor  # [...] n_i
    batch: int
    batches: int  # enough for the largest of them
    buffers: Tensor
    calls: int = 0

    @classmethod
    def of(cls, work: LocalWork, clients: slice | int, buffers: Tensor) -> LocalWhole:
        """The data of some clients of the cohort."""
        ids, data = work.ids[clients], work.data
        host = ids.cpu().numpy()
        start, sizes = (torch.from_numpy(np.asarray(v[host])).to(ids.device) for v in (data.start, data.sizes))
        largest = int(np.max(data.sizes[host]))
        width = min(work.batch, largest)
        return cls(work.net, data, ids, start, sizes, width, -(-largest // width), buffers)

    @property
    def layout(self) -> Layout:
        return self.net.layout

    @property
    def gradients(self) -> int:
        """Mini-batch gradients computed so far, by all of them together."""
        return self.calls * int((-(-self.sizes // self.batch)).sum()) if self.calls else 0

    @property
    def firsts(self) -> range:
        """The place of each batch's first sample."""
        return range(0, self.batches * self.batch, self.batch)

    def rows(self, first: int) -> tuple[Tensor, Tensor]:
        """The rows [..., B] of the batch that begins with sample `first`, and which of them are real."""
        place = torch.arange(self.batch, device=self.ids.device)
        real = place < (self.sizes - first).clamp(0, self.batch).unsqueeze(-1)
        found = self.data.members[(self.start.unsqueeze(-1) + first + place).clamp(max=len(self.data.members) - 1)]
        return torch.where(real, found, found[..., :1]), real

    def labels(self, rows: Tensor, real: Tensor) -> Tensor:
        """[...] how many samples these are; one of whose labels some do not count is a part of one."""
        shares = self.net.label_shares(self.data.train.targets[rows.flatten()]).view(rows.shape)
        return torch.where(real, shares, 0.0).sum(-1)

    def full_grad(self, x: Tensor) -> Tensor:
        """The gradient [..., P] of the mean loss over all local samples, batch by batch in training mode."""
        self.calls += 1
        data, ids, dtype = self.data, self.ids, self.net.dtype
        every = sum((self.labels(*self.rows(first)) for first in self.firsts), torch.zeros_like(self.sizes))
        total = torch.zeros((), dtype=x.dtype, device=x.device)
        for first in self.firsts:
            rows, real = self.rows(first)
            owner = ids.unsqueeze(-1).expand(rows.shape).flatten()  # a client's colour is its own, no augmentation
            inputs = data.transform(data.train.take(rows.flatten()), dtype, None, owner)
            targets = data.train.targets[rows]
            targets = targets.to(dtype) if targets.is_floating_point() else targets
            inputs = inputs.view(*rows.shape, *inputs.shape[1:])
            batch = Batch(inputs, targets, real.to(dtype), torch.zeros_like(ids), False)
            oracle = Oracle(self.net, batch, self.buffers.expand(*ids.shape, self.buffers.shape[-1]))
            share = (self.labels(rows, real).to(x.dtype) / every.clamp(min=1e-30)).unsqueeze(-1)
            total = total + share * torch.where(share > 0, oracle.grad(x, track=False), 0.0)
        return total
