"""Rules that divide the training samples among the clients.

A rule gives every sample exactly one owner, so no rule can lose a sample or give it twice. The exception is `resample`,
which draws every client's samples with replacement.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from undrift.core.errors import BadSetting, UnknownName
from undrift.core.streams import Purpose, below, fold, stream

STREAM = 0x9A27  # separates these random numbers from others with the same seed
CLIENTS_AT_ONCE = 1 << 16  # bounds the temporary memory of `resample`
MOST_MEMBERS = 1 << 31  # most indices that `resample` makes, 16 GiB

EXAMPLES = {"shards": "2", "resample": "20"}  # parameters for messages

Indices = NDArray[np.int64]


class Holdings(NamedTuple):
    """The samples of all clients in two arrays: making a list of a million lists would take longer than training."""

    members: Indices  # sample indices, client after client
    sizes: Indices  # [clients] number of samples of each client


@dataclass(frozen=True)
class Task:
    """The input of a rule."""

    labels: Indices
    clients: int
    seed: int
    parameter: str  # the text after the colon, or ''
    generator: np.random.Generator
    sites: Indices | None

    @property
    def samples(self) -> int:
        return len(self.labels)


def partition(spec: str, labels: Indices, clients: int, seed: int, sites: Indices | None = None) -> list[Indices]:
    """The sample indices of each client, shuffled, for a spec such as 'iid' or 'dirichlet:0.1'."""
    members, sizes = deal(spec, labels, clients, seed, sites)
    return np.split(members, np.cumsum(sizes)[:-1])


def deal(spec: str, labels: Indices, clients: int, seed: int, sites: Indices | None = None) -> Holdings:
    """`partition` without a loop over the clients."""
    name, _, parameter = spec.partition(":")
    if name not in PARTITIONS:
        raise UnknownName("partition", name, PARTITIONS)
    if clients < 1:
        raise BadSetting(f"{clients} clients; expected at least 1")
    if seed < 0:
        raise BadSetting(f"seed must be at least 0, not {seed}")
    generator = np.random.Generator(np.random.PCG64([seed, STREAM]))
    task = Task(labels, clients, seed, parameter, generator, sites)
    if name == "resample":
        return resample(task)
    if name == "own":
        return own(task)
    if clients > len(labels):
        raise BadSetting(f"{clients} clients but only {len(labels)} training samples; use fewer, or 'resample:20'")
    if labels.ndim != 1 and name != "sites":
        raise BadSetting(f"partition {name!r} needs one class per sample, which this data lacks; try 'sites'")
    owner = OWNER_RULES[name](task)
    shuffled = generator.permutation(len(labels))
    by_client = shuffled[np.argsort(owner[shuffled], kind="stable")]
    return Holdings(by_client, np.bincount(owner, minlength=clients))


def iid(task: Task) -> Indices:
    """iid: every client gets the same share of every class; sizes differ by at most one"""
    refuse_parameter("iid", task.parameter)
    _, class_of = np.unique(task.labels, return_inverse=True)
    # Going through the classes without restarting at the first client evens out both classes and sizes.
    # Random orders keep small clients from always pairing the same classes.
    turn_of_class = task.generator.permutation(int(class_of.max()) + 1)
    shuffled = task.generator.permutation(task.samples)
    by_class = shuffled[np.argsort(turn_of_class[class_of[shuffled]], kind="stable")]
    owner = np.empty(task.samples, dtype=np.int64)
    owner[by_class] = task.generator.permutation(task.clients)[np.arange(task.samples) % task.clients]
    return owner


def dirichlet(task: Task) -> Indices:
    """dirichlet:ω: each class is cut among the clients by Dirichlet(ω) proportions; sizes vary (GradMA)"""
    concentration = positive_number("dirichlet", task.parameter)
    if task.samples < 2 * task.clients:
        raise BadSetting(
            f"partition 'dirichlet' gives every client two samples, but {task.clients} clients share "
            f"{task.samples}; use at most {task.samples // 2} clients, or another partition such as 'iid'"
        )
    waiting = samples_by_class(task.labels)
    owner = np.empty(task.samples, dtype=np.int64)
    # Drawing among classes with samples left equals redrawing until such a class comes up.
    available = list(range(len(waiting)))
    taken = [0] * len(waiting)
    for turn, draw in enumerate(task.generator.random(2 * task.clients).tolist()):
        slot = int(draw * len(available))
        chosen = available[slot]
        taken[chosen] += 1
        owner[waiting[chosen][-taken[chosen]]] = turn % task.clients
        if taken[chosen] == len(waiting[chosen]):
            available.pop(slot)
    for samples, count in zip(waiting, taken, strict=True):
        proportions = dirichlet_draw(task.generator, concentration, task.clients)
        remaining = task.generator.permutation(samples[: len(samples) - count])
        inner_cuts = np.floor(np.cumsum(proportions)[:-1] * len(remaining)).astype(np.int64)
        cuts = np.concatenate([[0], np.minimum(inner_cuts, len(remaining)), [len(remaining)]])
        owner[remaining] = np.repeat(np.arange(task.clients), np.diff(cuts))
    return owner


def dirichlet_balanced(task: Task) -> Indices:
    """dirichlet-balanced:u: each client has its own Dirichlet(u) mixture of classes; equal sizes (FedMIM)"""
    concentration = positive_number("dirichlet-balanced", task.parameter)
    waiting = [task.generator.permutation(samples).tolist() for samples in samples_by_class(task.labels)]
    has_samples = np.ones(len(waiting), dtype=bool)
    priors = dirichlet_draw(task.generator, concentration, len(waiting), task.clients)
    cumulative = [cumulative_share(prior) for prior in priors]
    room = [task.samples // task.clients] * task.clients
    open_clients = list(range(task.clients))
    owner = np.full(task.samples, -1, dtype=np.int64)
    draws = task.generator.random((sum(room), 2)).tolist()
    for client_draw, class_draw in draws:
        slot = int(client_draw * len(open_clients))
        client = open_clients[slot]
        chosen = bisect_right(cumulative[client], class_draw)
        if not waiting[chosen]:
            # Draw from the prior restricted to classes with samples left: like redrawing, but it always ends.
            # A client whose prior has no mass on them draws among them uniformly.
            mass = np.where(has_samples, priors[client], 0.0)
            cumulative[client] = cumulative_share(mass if mass.sum() > 0 else has_samples.astype(float))
            chosen = bisect_right(cumulative[client], task.generator.random())
        owner[waiting[chosen].pop()] = client
        has_samples[chosen] = bool(waiting[chosen])
        room[client] -= 1
        if room[client] == 0:
            open_clients[slot] = open_clients[-1]
            open_clients.pop()
    left_over = task.generator.permutation(np.flatnonzero(owner < 0))
    owner[left_over] = np.arange(len(left_over))
    return owner


def similarity(task: Task) -> Indices:
    """similarity:s: a share s (0..1 or e.g. 10%) is dealt at random, the rest in label order; equal sizes"""
    share = share_number(task.parameter)
    shuffled = task.generator.permutation(task.samples)
    random, rest = np.split(shuffled, [round(share * task.samples)])
    by_label = rest[np.argsort(task.labels[rest], kind="stable")]
    sizes_by_label = even_sizes(len(by_label), task.clients)
    owner = np.empty(task.samples, dtype=np.int64)
    owner[by_label] = np.repeat(np.arange(task.clients), sizes_by_label)
    sizes_random = even_sizes(task.samples, task.clients) - sizes_by_label
    owner[random] = np.repeat(np.arange(task.clients), sizes_random)
    return owner


def shards(task: Task) -> Indices:
    """shards:k: samples in label order are cut into k shards per client, dealt at random (McMahan et al.)"""
    count = whole_number("shards", task.parameter) * task.clients
    if count > task.samples:
        raise BadSetting(
            f"partition 'shards:{task.parameter}' makes {count} shards for {task.clients} clients out of "
            f"{task.samples} samples; use fewer shards or fewer clients"
        )
    shuffled = task.generator.permutation(task.samples)
    by_label = shuffled[np.argsort(task.labels[shuffled], kind="stable")]
    owner_of_shard = task.generator.permutation(np.arange(count) % task.clients)
    owner = np.empty(task.samples, dtype=np.int64)
    owner[by_label] = np.repeat(owner_of_shard, even_sizes(task.samples, count))
    return owner


def sites(task: Task) -> Indices:
    """sites: one client per place the samples come from, for data sets that say so"""
    refuse_parameter("sites", task.parameter)
    if task.sites is None:
        raise BadSetting("partition 'sites' needs a data set with sites, which this one lacks; try 'iid'")
    names, owner = np.unique(task.sites, return_inverse=True)
    if len(names) != task.clients or len(owner) != task.samples:
        raise BadSetting(f"there are {len(names)} sites, not {task.clients}; set the number of clients to {len(names)}")
    return owner.astype(np.int64)


def resample(task: Task) -> Holdings:
    """resample:n: every client gets n samples drawn with replacement; for more clients than samples"""
    count = whole_number("resample", task.parameter)
    if not task.samples:
        raise BadSetting("partition 'resample' draws from the training samples, but there are none")
    if count * task.clients > MOST_MEMBERS:
        raise BadSetting(
            f"partition 'resample:{count}' draws {count * task.clients} samples for {task.clients} clients, more "
            f"than {MOST_MEMBERS}; use fewer samples or fewer clients"
        )
    # One stream per client, so that its samples do not depend on the number of clients.
    key, draws = stream(task.seed, Purpose.RESAMPLE), torch.arange(count)
    members = np.empty((task.clients, count), dtype=np.int64)
    for ids in torch.arange(task.clients).split(CLIENTS_AT_ONCE):
        members[ids[0] : ids[-1] + 1] = below(fold(fold(key, ids).unsqueeze(-1), draws), task.samples).numpy()
    return Holdings(members.ravel(), np.full(task.clients, count, dtype=np.int64))


def own(task: Task) -> Holdings:
    """own: as sites, but each client shuffles its samples by its own number, without knowing the others"""
    owner = sites(task)
    sizes = np.bincount(owner, minlength=task.clients)
    clients = np.split(np.argsort(owner, kind="stable"), np.cumsum(sizes)[:-1])
    return Holdings(
        np.concatenate([rows[client_order(len(rows), task.seed, k)] for k, rows in enumerate(clients)]), sizes
    )


def client_order(samples: int, seed: int, client: int) -> Indices:
    """The order of the samples that a client has brought itself."""
    return np.random.Generator(np.random.PCG64([seed, STREAM, client])).permutation(samples)


OWNER_RULES: dict[str, Callable[[Task], Indices]] = {
    "iid": iid,
    "dirichlet": dirichlet,
    "dirichlet-balanced": dirichlet_balanced,
    "similarity": similarity,
    "shards": shards,
    "sites": sites,
}
PARTITIONS: dict[str, Callable[[Task], Indices | Holdings]] = {**OWNER_RULES, "own": own, "resample": resample}


def samples_by_class(labels: Indices) -> list[Indices]:
    """The samples of each class that occurs, in their order."""
    _, counts = np.unique(labels, return_counts=True)
    return np.split(np.argsort(labels, kind="stable"), np.cumsum(counts)[:-1])


def even_sizes(samples: int, parts: int) -> Indices:
    """Sizes that differ by at most one, the larger ones first."""
    return samples // parts + (np.arange(parts) < samples % parts).astype(np.int64)


def dirichlet_draw(
    generator: np.random.Generator, concentration: float, length: int, size: int | None = None
) -> NDArray[np.float64]:
    # Beyond 1e12 the shares are practically equal, and numpy's sums could overflow.
    return generator.dirichlet(np.full(length, min(concentration, 1e12)), size)


def cumulative_share(mass: NDArray[np.float64]) -> list[float]:
    """Ends in exactly 1, so that a draw below 1 always hits an entry with mass."""
    total = np.cumsum(mass)
    shares: list[float] = (total / total[-1]).tolist()
    return shares


def refuse_parameter(name: str, parameter: str) -> None:
    if parameter:
        raise BadSetting(f"partition {name!r} takes no parameter, found '{name}:{parameter}'")


def positive_number(name: str, parameter: str) -> float:
    value = number_or_nan(parameter)
    if not 0 < value < math.inf:
        example = EXAMPLES.get(name, "0.1")
        raise BadSetting(f"partition {name!r} needs a number above 0, e.g. '{name}:{example}', found {parameter!r}")
    return value


def whole_number(name: str, parameter: str) -> int:
    value = positive_number(name, parameter)
    if not value.is_integer():
        raise BadSetting(f"partition {name!r} needs a whole number like '{name}:{EXAMPLES[name]}', not {parameter!r}")
    return int(value)


def share_number(parameter: str) -> float:
    value = number_or_nan(parameter.removesuffix("%")) / (100 if parameter.endswith("%") else 1)
    if not 0 <= value <= 1:
        raise BadSetting(
            "partition 'similarity' needs a share between 0 and 1 or a percentage after a colon, e.g. "
            f"'similarity:0.1' or 'similarity:10%', found {parameter!r}"
        )
    return value


def number_or_nan(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
