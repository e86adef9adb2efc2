"""A data set divided among clients, on the device."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from undrift.core.errors import BadData, BadSetting
from undrift.core.pieces import Piece, join, pieces_of
from undrift.core.streams import Purpose, stream
from undrift.data.augment import Transform
from undrift.data.batches import Plan, Table, table
from undrift.data.dataset import Dataset, Samples
from undrift.data.partition import Holdings, deal

Ids = NDArray[np.int64]
MOST_NAMED = 5  # clients in warnings


@dataclass(frozen=True)
class Split:
    """Inputs and targets. `held` is on the device, or None for inputs that are read on demand."""

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
            return self.held.index_select(0, index)  # copies whole samples; held[index] copies entry by entry
        return _channels_first(torch.from_numpy(self.samples[index.cpu().numpy()])).to(index.device)

    def prefetch(self, index: Tensor) -> None:
        """Start reading the next samples, if they are read from files."""
        ahead = getattr(self.samples, "prefetch", None)
        if self.held is None and ahead is not None:
            ahead(index.cpu().numpy())

    def __len__(self) -> int:
        return len(self.targets)


class HeldOut(NamedTuple):
    """Samples held out for evaluation; a site that is not a client has owner 0."""

    split: Split
    rows: Tensor  # [n] rows of the split
    owners: Tensor  # [n] the client of each row


@dataclass(frozen=True)
class Federation:
    """The clients' samples, the held-out samples, and the transform that makes inputs of them."""

    train: Split
    test: Split
    validation: NDArray[np.int64]  # rows of `train` that no client holds; may be empty
    members: Tensor  # [n] rows of `train`, client after client
    start: NDArray[np.int64]  # [N] start of each client's rows in `members`
    sizes: NDArray[np.int64]  # [N] n_i
    transform: Transform
    classes: int
    shape: tuple[int, ...]  # shape of one input
    pieces: tuple[Piece, ...] = ()  # the parts of one input, which lie behind one another
    masks: bool = False  # targets are masks, cropped and flipped with their pictures
    task: str = ""  # for targets that are neither labels nor masks: binary, or survival
    site_names: tuple[str, ...] = ()
    held_out: Mapping[str, HeldOut] = field(default_factory=dict)  # by name: test, val, unseen

    @property
    def clients(self) -> int:
        return len(self.sizes)

    def rows_of(self, ids: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """The rows of `train` that clients ids [S] hold, client after client, and the owner of each."""
        sizes = self.sizes[ids]
        begin = np.cumsum(sizes) - sizes
        place = np.repeat(self.start[ids] - begin, sizes) + np.arange(sizes.sum())
        device = self.members.device
        return self.members[torch.from_numpy(place).to(device)], torch.from_numpy(np.repeat(ids, sizes)).to(device)

    def class_counts(self, most: int) -> Ids:
        """[clients, classes] the samples of each class that each of the first `most` clients trains on."""
        clients = min(self.clients, most)
        rows, owners = self.rows_of(np.arange(clients))
        cell = owners * self.classes + self.train.targets[rows]
        counts: Ids = torch.bincount(cell, minlength=clients * self.classes).cpu().numpy()
        return counts.reshape(clients, self.classes)

    def table(self, plan: Plan, seed: int, round: int | Ids, ids: Ids, position: Ids) -> Table:
        """The batches of clients ids [S] in a round, or in one of each client."""
        stream = plan.shuffle_stream(seed, round) if isinstance(round, int) else plan.shuffle_streams(seed, round)
        return table(plan, stream, ids, self.members, self.start[ids], self.sizes[ids], position)


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

    `own_test` is the share of each client's samples that is held out to test the model that serves it.
    """
    pieces = pieces_of(data.x_train)
    if pieces:
        data = replace(data, x_train=join(np.asarray(data.x_train)), x_test=join(np.asarray(data.x_test)))
    rows = np.arange(len(data.y_train))
    count = round(val_fraction * len(rows))
    if not 0.0 <= val_fraction < 1.0 or (val_fraction > 0 and count == 0):
        raise BadSetting(f"val_fraction must lie in [0, 1) and leave at least one sample, not {val_fraction}")
    order = np.random.Generator(np.random.PCG64(stream(seed, Purpose.VALIDATION))).permutation(rows)
    validation, kept = np.sort(order[:count]), np.sort(order[count:])
    if data.validation is not None:
        if val_fraction:
            raise BadSetting(f"{data.name} has a validation split of its own; leave val_fraction at 0")
        validation, kept = data.validation, np.setdiff1d(rows, data.validation)
    labelled = data.y_train.ndim == 1 and data.y_train.dtype.kind in "iu"
    if not labelled and spec.partition(":")[0] not in ("iid", "sites", "own", "resample"):
        found = f"{data.y_train.dtype} {list(data.y_train.shape)}"
        raise BadSetting(
            f"{spec} needs class labels, whole numbers [n], and the targets are {found}; use iid, sites or resample:20"
        )
    labels = data.y_train.astype(np.int64) if labelled else np.zeros(len(rows), np.int64)
    sites = None if data.sites is None else data.sites[kept]
    holdings = deal(spec, labels[kept], clients, seed, sites)
    holdings, tested = hold_out(holdings._replace(members=kept[holdings.members]), own_test)
    train, test = as_split(data.x_train, data.y_train, device), as_split(data.x_test, data.y_test, device)
    say_not_finite(data, holdings)
    held_out: dict[str, HeldOut] = {}
    natural = spec in ("sites", "own")

    def add(name: str, split: Split, rows: Ids, owners: Ids) -> None:
        held_out[name] = HeldOut(split, torch.from_numpy(rows).to(device), torch.from_numpy(owners).to(device))

    if own_test:
        add("test", train, tested.members, np.repeat(np.arange(clients), tested.sizes))
    elif natural and data.sites is not None and data.test_sites is not None:
        client = {site: k for k, site in enumerate(np.unique(data.sites[kept]).tolist())}
        for name, split, rows_held, at in (
            ("test", test, np.arange(len(data.y_test)), data.test_sites),
            ("val", train, validation, data.sites[validation]),
        ):
            if len(rows_held):
                add(name, split, rows_held, np.array([client[site] for site in at.tolist()]))
    if data.unseen is not None:
        unseen = as_split(*data.unseen, device)
        add("unseen", unseen, np.arange(len(unseen)), np.zeros(len(unseen), np.int64))
    first = train.take(torch.zeros(1, dtype=torch.int64, device=device))
    return Federation(
        train, test, validation,
        members=torch.from_numpy(holdings.members).to(device),
        start=np.cumsum(holdings.sizes) - holdings.sizes, sizes=holdings.sizes,
        transform=Transform(data.mean, data.std, data.crop, data.flip, colour, seed),
        classes=data.classes, shape=tuple(first.shape[1:]), pieces=pieces, masks=bool(data.structures), task=data.task,
        site_names=data.site_names if natural else (), held_out=held_out,
    )  # fmt: skip


def say_not_finite(data: Dataset, holdings: Holdings) -> None:
    """Warn, with the client's name, of training samples with NaN or infinity, and of such test samples.

    It is no error: the answers of such a client are left out of a round, and the report says so.
    """
    bad = not_finite(data.x_train) | not_finite(data.y_train)
    spoilt = np.flatnonzero(bad[holdings.members]) if bad.any() else np.zeros(0, np.int64)
    owners = np.searchsorted(np.cumsum(holdings.sizes), spoilt, side="right")
    named = len(data.site_names) == len(holdings.sizes)
    for client in np.unique(owners).tolist()[:MOST_NAMED]:
        name = f"client {client} ({data.site_names[client]})" if named else f"client {client}"
        warnings.warn(f"{name} has NaN or infinity in {(owners == client).sum()} of its training samples", stacklevel=3)
    tested = int((not_finite(data.x_test) | not_finite(data.y_test)).sum())
    if tested:
        warnings.warn(f"{tested} test samples have NaN or infinity: the scores will not be finite", stacklevel=3)


def not_finite(values: Samples | NDArray[np.generic]) -> NDArray[np.bool_]:
    """[n] whether a sample has a number that is not finite."""
    if not isinstance(values, np.ndarray) or values.dtype.kind != "f" or not values.size:
        return np.zeros(len(values), bool)
    return np.asarray(~np.isfinite(values.reshape(len(values), -1)).all(1))


def hold_out(holdings: Holdings, share: float) -> tuple[Holdings, Holdings]:
    """Each client's training samples, and the share of them, at least one sample, that is held out to test it.

    >>> hold_out(Holdings(np.arange(7), np.array([4, 3])), 0.25)[1]
    Holdings(members=array([0, 4]), sizes=array([1, 1]))
    """
    if not 0.0 <= share < 1.0:
        raise BadSetting(f"own_test must lie in [0, 1), not {share}")
    if not share:
        return holdings, Holdings(holdings.members[:0], 0 * holdings.sizes)
    if (holdings.sizes < 2).any():
        raise BadSetting("own_test needs two samples of every client; use another partition or fewer clients")
    members, sizes = holdings
    held = np.clip(np.rint(share * sizes), 1, sizes - 1).astype(np.int64)
    place = np.arange(len(members)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    tested = place < np.repeat(held, sizes)
    return Holdings(members[~tested], sizes - held), Holdings(members[tested], held)


def pool(data: Federation) -> Federation:
    """Give one client all training samples; held-out samples keep their owners."""
    return replace(data, start=np.zeros(1, np.int64), sizes=data.sizes.sum(keepdims=True))


def as_split(samples: Samples, targets: NDArray[np.generic], device: torch.device) -> Split:
    if len(samples) != len(targets):
        raise BadData(f"{len(samples)} inputs but {len(targets)} targets; give one target for each input")
    held = _channels_first(torch.from_numpy(samples)).to(device) if isinstance(samples, np.ndarray) else None
    labels = torch.from_numpy(targets.astype(np.int64) if targets.dtype.kind in "ui" else targets)
    return Split(samples, held, labels.to(device))


def _channels_first(images: Tensor) -> Tensor:
    """uint8 [n, H, W, C] to [n, C, H, W]; anything else stays as it is."""
    return images.permute(0, 3, 1, 2).contiguous() if images.dtype == torch.uint8 and images.dim() == 4 else images
