"""A data set dealt out to clients and put on the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from undrift.core.errors import BadData, BadSetting
from undrift.core.streams import Purpose, stream
from undrift.data.augment import Transform
from undrift.data.batches import Plan, Table, table
from undrift.data.dataset import Dataset, Samples
from undrift.data.partition import Dealt, deal

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Split:
    """Samples of one kind. `held` is on the device, or None for samples that are read when they are needed."""

    samples: Samples
    held: Tensor | None
    targets: Tensor

    @property
    def labelled(self) -> bool:
        """Whether every sample has a class label, counted from 0."""
        labels = self.targets
        return labels.dim() == 1 and not labels.is_floating_point() and bool((labels >= 0).all())

    def take(self, index: Tensor) -> Tensor:
        """The raw samples at index [n], channels first."""
        if self.held is not None:
            return self.held.index_select(0, index)  # copies whole samples, where held[index] goes entry by entry
        return _channels_first(torch.from_numpy(self.samples[index.cpu().numpy()])).to(index.device)

    def prefetch(self, index: Tensor) -> None:
        """Start reading what will be taken next, where samples are read from files."""
        ahead = getattr(self.samples, "prefetch", None)
        if self.held is None and ahead is not None:
            ahead(index.cpu().numpy())

    def __len__(self) -> int:
        return len(self.targets)


class Own(NamedTuple):
    """Held-out samples that belong to clients, or to a site that is none (then owner 0)."""

    split: Split
    rows: Tensor  # [n] of the split
    owners: Tensor  # [n] the client of each


@dataclass(frozen=True)
class Federation:
    """The clients' samples, the held-out samples, and how a batch is made of them."""

    train: Split
    test: Split
    validation: NDArray[np.int64]  # rows of `train` that belong to no client; empty without a validation split
    members: Tensor  # [n] rows of `train`, client after client
    start: NDArray[np.int64]  # [N] where each client's rows begin in `members`
    sizes: NDArray[np.int64]  # [N] n_i
    transform: Transform
    classes: int
    shape: tuple[int, ...]  # of one input
    masks: bool = False  # targets are masks, which move with their pictures
    site_names: tuple[str, ...] = ()
    own: Mapping[str, Own] = field(default_factory=dict)  # `test`, `val`: held out of each client's own samples

    @property
    def clients(self) -> int:
        return len(self.sizes)

    def held_by(self, ids: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """The rows of `train` that clients ids [S] hold, client after client, and the owner of each."""
        sizes = self.sizes[ids]
        begin = np.cumsum(sizes) - sizes
        place = np.repeat(self.start[ids] - begin, sizes) + np.arange(sizes.sum())
        device = self.members.device
        return self.members[torch.from_numpy(place).to(device)], torch.from_numpy(np.repeat(ids, sizes)).to(device)

    def table(self, plan: Plan, seed: int, round: int, ids: Ids, position: Ids) -> Table:
        """The batches of clients ids [S] in a round."""
        name = plan.shuffled_by(seed, round)
        return table(plan, name, ids, self.members, self.start[ids], self.sizes[ids], position)


def federate(
    data: Dataset,
    spec: str,
    clients: int,
    seed: int,
    device: torch.device,
    val_fraction: float = 0.0,
    colour: float = 0.0,
    own_test: float = 0.0,
) -> Federation:
    """Hold out a validation set, partition the rest, and put the samples on the device.

    `own_test` is the share of each client's own samples that is held out to test what serves it.
    """
    rows = np.arange(len(data.y_train))
    held_out = round(val_fraction * len(rows))
    if not 0.0 <= val_fraction < 1.0 or (val_fraction > 0 and held_out == 0):
        raise BadSetting(f"val_fraction must lie in [0, 1) and leave at least one sample, not {val_fraction}")
    order = np.random.Generator(np.random.PCG64(stream(seed, Purpose.VALIDATION))).permutation(rows)
    validation, kept = np.sort(order[:held_out]), np.sort(order[held_out:])
    if data.validation is not None:
        if val_fraction:
            raise BadSetting(f"{data.name} has a validation split of its own; leave val_fraction at 0")
        validation, kept = data.validation, np.setdiff1d(rows, data.validation)
    labelled = data.y_train.ndim == 1 and data.y_train.dtype.kind in "iu"
    if not labelled and spec.partition(":")[0] not in ("iid", "sites", "own", "resample"):
        raise BadSetting(
            f"{spec} deals samples out by class, but the targets are no class labels; use iid, sites or resample:20"
        )
    labels = data.y_train.astype(np.int64) if labelled else np.zeros(len(rows), np.int64)
    sites = None if data.sites is None else data.sites[kept]
    dealt = deal(spec, labels[kept], clients, seed, sites)
    dealt, tested = hold_out_own(dealt._replace(members=kept[dealt.members]), own_test)
    made = _federation(
        data, dealt, validation, device, Transform(data.mean, data.std, data.crop, data.flip, colour, seed)
    )
    own, natural = {}, spec in ("sites", "own")
    if own_test:
        own["test"] = _own(made.train, tested.members, np.repeat(np.arange(clients), tested.sizes))
    elif natural and data.sites is not None and data.test_sites is not None:
        client = {site: k for k, site in enumerate(np.unique(data.sites[kept]).tolist())}
        for name, split, held, at in (
            ("test", made.test, np.arange(len(data.y_test)), data.test_sites),
            ("val", made.train, validation, data.sites[validation]),
        ):
            if len(held):
                own[name] = _own(split, held, np.array([client[site] for site in at.tolist()]))
    if data.unseen is not None:
        left_out = as_split(*data.unseen, device)
        own["unseen"] = _own(left_out, np.arange(len(left_out)), np.zeros(len(left_out), np.int64))
    return replace(made, masks=bool(data.structures), own=own, site_names=data.site_names if natural else ())


def hold_out_own(dealt: Dealt, share: float) -> tuple[Dealt, Dealt]:
    """What each client keeps for training, and what is held out to test it: a share of its shuffled samples, at least one.

    >>> hold_out_own(Dealt(np.arange(7), np.array([4, 3])), 0.25)[1]
    Dealt(members=array([0, 4]), sizes=array([1, 1]))
    """
    if not 0.0 <= share < 1.0:
        raise BadSetting(f"own_test must lie in [0, 1), not {share}")
    if not share:
        return dealt, Dealt(dealt.members[:0], 0 * dealt.sizes)
    if (dealt.sizes < 2).any():
        raise BadSetting("own_test needs two samples of every client; use another partition or fewer clients")
    held = np.clip(np.rint(share * dealt.sizes), 1, dealt.sizes - 1).astype(np.int64)
    place = np.arange(len(dealt.members)) - np.repeat(np.cumsum(dealt.sizes) - dealt.sizes, dealt.sizes)
    tested = place < np.repeat(held, dealt.sizes)
    return Dealt(dealt.members[~tested], dealt.sizes - held), Dealt(dealt.members[tested], held)


def pooled(data: Federation) -> Federation:
    """All clients' samples in the hands of one; what is held out keeps its owners."""
    return replace(data, start=np.zeros(1, np.int64), sizes=data.sizes.sum(keepdims=True))


def _own(split: Split, rows: NDArray[np.int64], owners: NDArray[np.int64]) -> Own:
    device = split.targets.device
    return Own(split, torch.from_numpy(rows).to(device), torch.from_numpy(owners).to(device))


def _federation(
    data: Dataset,
    dealt: Dealt,
    validation: NDArray[np.int64],
    device: torch.device,
    transform: Transform,
) -> Federation:
    train, test = as_split(data.x_train, data.y_train, device), as_split(data.x_test, data.y_test, device)
    one = train.take(torch.zeros(1, dtype=torch.int64, device=device))
    return Federation(
        train, test, validation,
        members=torch.from_numpy(dealt.members).to(device),
        start=np.cumsum(dealt.sizes) - dealt.sizes,
        sizes=dealt.sizes, transform=transform, classes=data.classes, shape=tuple(one.shape[1:]),
    )  # fmt: skip


def as_split(samples: Samples, targets: NDArray[np.generic], device: torch.device) -> Split:
    if len(samples) != len(targets):
        raise BadData(f"{len(samples)} inputs but {len(targets)} targets; give one target for each input")
    held = _channels_first(torch.from_numpy(samples)).to(device) if isinstance(samples, np.ndarray) else None
    labels = torch.from_numpy(targets.astype(np.int64) if targets.dtype.kind in "ui" else targets)
    return Split(samples, held, labels.to(device))


def _channels_first(images: Tensor) -> Tensor:
    """uint8 [n, H, W, C] to [n, C, H, W]; anything else stays as it is."""
    return images.permute(0, 3, 1, 2).contiguous() if images.dtype == torch.uint8 and images.dim() == 4 else images
