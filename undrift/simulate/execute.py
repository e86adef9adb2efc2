"""How the clients of a round are run: stacked into one program, or one by one on a pool of single-threaded workers.

Both give the same answers to rounding. Stacking wins for small dense layers and always on a GPU; on a CPU a stacked
convolution becomes a grouped one, which is slow, so that a pool of threads that each train one client wins there, unless the
model is one that is computed in C (kernels/dense_cpu.py).
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from undrift.algorithms.base import Algorithm
from undrift.core.errors import BadData, BadSetting, UndriftError
from undrift.core.streams import Purpose, fold, stream
from undrift.core.trees import map_leaves
from undrift.data.batches import Table
from undrift.data.federation import Federation
from undrift.oracle.net import Net
from undrift.oracle.oracle import Batch, Oracle, stacks_in_a_thread, task_loss
from undrift.oracle.samples import samples
from undrift.round.order import Answers, client_part
from undrift.simulate import graphs


@dataclass
class RoundWork:
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

    @functools.cached_property
    def keys(self) -> tuple[Tensor, Tensor]:
        """The streams [S, K] of every client's and step's dropout and augmentation."""
        every = torch.arange(self.table.count.shape[1], device=self.ids.device)
        names = (stream(self.seed, purpose, self.round) for purpose in (Purpose.DROPOUT, Purpose.AUGMENT))
        dropout, augment = (fold(fold(name, self.ids).unsqueeze(-1), every) for name in names)
        return dropout, augment

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
    def of(cls, work: RoundWork, clients: slice | int, buffers: Tensor) -> LocalWhole:
        """The data of some clients of the cohort."""
        ids, data = work.ids[clients], work.data
        host = ids.cpu().numpy()
        start, sizes = (torch.from_numpy(np.asarray(v[host])).to(ids.device) for v in (data.start, data.sizes))
        largest = int(np.max(data.sizes[host]))
        width = min(work.batch, largest)
        return cls(work.net, data, ids, start, sizes, width, -(-largest // width), buffers)

    @property
    def gradients(self) -> int:
        """Mini-batch gradients computed so far, by all of them together."""
        return self.calls * int((-(-self.sizes // self.batch)).sum()) if self.calls else 0

    def full_grad(self, x: Tensor) -> Tensor:
        """The gradient [..., P] of the mean loss over all local samples, batch by batch in training mode."""
        self.calls += 1
        data, ids, dtype = self.data, self.ids, self.net.dtype
        place = torch.arange(self.batch, device=ids.device)
        total = torch.zeros((), dtype=x.dtype, device=x.device)
        for first in range(0, self.batches * self.batch, self.batch):
            count = (self.sizes - first).clamp(0, self.batch)
            real = place < count.unsqueeze(-1)
            rows = data.members[(self.start.unsqueeze(-1) + first + place).clamp(max=len(data.members) - 1)]
            rows = torch.where(real, rows, rows[..., :1])
            owner = ids.unsqueeze(-1).expand(rows.shape).flatten()  # a client's colour is its own, no augmentation
            inputs = data.transform(data.train.take(rows.flatten()), dtype, None, owner)
            targets = data.train.targets[rows]
            targets = targets.to(dtype) if targets.is_floating_point() else targets
            inputs = inputs.view(*rows.shape, *inputs.shape[1:])
            batch = Batch(inputs, targets, real.to(dtype), torch.zeros_like(ids), False)
            oracle = Oracle(self.net, batch, self.buffers.expand(*ids.shape, self.buffers.shape[-1]))
            share = (count.to(x.dtype) / self.sizes).unsqueeze(-1)
            total = total + share * torch.where(share > 0, oracle.grad(x, track=False), 0.0)
        return total


class Stacked:
    """All clients of the cohort in one program, or `chunk` of them at a time where memory is short."""

    name = "stacked"

    def __init__(self, chunk: int) -> None:
        self.chunk = chunk

    def __call__(
        self, alg: Algorithm, down: Any, client: Any, buffers: Tensor, work: RoundWork, limit: int | None = None
    ) -> Answers:
        shared = map_leaves(lambda t: t.unsqueeze(-2), down)
        size, gradients = len(work.ids), work.gradients
        done: list[Answers] = []
        while (at := sum(len(answers.loss) for answers in done)) < size:
            part = slice(at, min(at + self.chunk, size))
            try:
                mine = map_leaves(lambda t, part=part: t[part], client)
                whole = LocalWhole.of(work, part, buffers)
                done.append(client_part(alg, shared, mine, buffers, work.steps(part, limit), whole))
                work.gradients += whole.gradients
                gradients = work.gradients
            except torch.cuda.OutOfMemoryError:
                if self.chunk == 1:
                    raise
                self.chunk, work.gradients = max(1, min(self.chunk, size) // 2), gradients
                torch.cuda.empty_cache()
        return done[0] if len(done) == 1 else map_leaves(lambda *parts: torch.cat(parts), *done)

    def measure(self, alg: Algorithm, down: Any, buffers: Tensor, work: RoundWork) -> Tensor:
        """The first exchange: what every client measures [S, P]."""
        shared = map_leaves(lambda t: t.unsqueeze(-2), down)
        parts = [slice(at, at + self.chunk) for at in range(0, len(work.ids), self.chunk)]
        wholes = [LocalWhole.of(work, part, buffers) for part in parts]
        sent = torch.cat([alg.measure(shared, whole) for whole in wholes])
        work.gradients += sum(whole.gradients for whole in wholes)
        return sent


class Pool:
    """A few clients at a time on each of a few threads, each with one core (on a GPU: one after another).

    `group` clients of a thread are stacked where all take the same steps; it is 1 where stacking does not pay.
    """

    name = "pool"

    def __init__(self, device: torch.device, group: int = 1) -> None:
        self.threads = torch.get_num_threads() if device.type == "cpu" else 1
        self.group = group
        self.executor = ThreadPoolExecutor(self.threads, initializer=_single_threaded) if self.threads > 1 else None

    def __call__(
        self, alg: Algorithm, down: Any, client: Any, buffers: Tensor, work: RoundWork, limit: int | None = None
    ) -> Answers:
        shared = map_leaves(lambda t: t.unsqueeze(-2), down)

        def some(clients: slice | int) -> tuple[Answers, int]:
            mine = copy.copy(work)
            mine.gradients = 0
            whole = LocalWhole.of(mine, clients, buffers)
            sent, theirs = (shared if isinstance(clients, slice) else down), map_leaves(lambda t: t[clients], client)
            answers = client_part(alg, sent, theirs, buffers, mine.steps(clients, limit), whole)
            return answers, mine.gradients + whole.gradients

        work.keys  # noqa: B018  made once for all of them
        parts = self.parts(work.table.count)
        results = list((self.executor.map if self.executor else map)(some, parts))
        work.gradients += sum(gradients for _, gradients in results)
        found = [answers for answers, _ in results]
        if isinstance(parts[0], slice):
            return map_leaves(lambda *each: torch.cat(each), *found)
        ordered = [found[parts.index(s)] for s in range(len(parts))]
        return map_leaves(lambda *each: torch.stack(each), *ordered)

    def parts(self, count: NDArray[np.int64]) -> list[slice] | list[int]:
        """Who is run together, in the order in which the threads take them; count [S, K] are the samples of each step."""
        size = len(count)
        if self.group > 1 and (count == count[0]).all():
            turns = -(-size // (self.threads * self.group))
            ends = np.cumsum([len(part) for part in np.array_split(np.arange(size), min(size, self.threads * turns))])
            return [slice(int(a), int(b)) for a, b in zip([0, *ends[:-1]], ends, strict=True)]
        longest: list[int] = np.argsort(-count.sum(1), kind="stable").tolist()  # no long one is left for the end
        return longest

    def measure(self, alg: Algorithm, down: Any, buffers: Tensor, work: RoundWork) -> Tensor:
        """The first exchange: what every client measures [S, P]."""

        def one(s: int) -> tuple[Tensor, int]:
            whole = LocalWhole.of(work, s, buffers)
            return alg.measure(down, whole), whole.gradients

        sent = list((self.executor.map if self.executor else map)(one, range(len(work.ids))))
        work.gradients += sum(gradients for _, gradients in sent)
        return torch.stack([vector for vector, _ in sent])


Execution = Stacked | Pool
CACHE = 2 << 20  # bytes


def _single_threaded() -> None:
    torch.set_num_threads(1)


def keep_freed_memory() -> None:
    """Let glibc reuse large blocks instead of handing them back to the kernel and faulting every page in again.

    On vectors of 10 MB that made `x - lr * g` nearly twenty times faster here. Elsewhere than glibc it does nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
        mallopt(M_MMAP_THRESHOLD, 1 << 30)
        mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)


def bytes_per_client(net: Net, x: Tensor, buffers: Tensor, work: RoundWork) -> int:
    """What one stacked client holds during a step: activations kept for the backward pass, and a few vectors like x."""
    saved = 0

    def count(t: Tensor) -> Tensor:
        nonlocal saved
        saved += t.numel() * t.element_size()
        return t

    with torch.autograd.graph.saved_tensors_hooks(count, lambda t: t):
        oracle, _ = next(work.steps(0, 1))
        oracle.buffers = buffers
        oracle.grad(x, task_loss)  # recorded by autograd, so that it can be counted
    return 2 * saved + 10 * x.numel() * x.element_size()


def available_memory(device: torch.device) -> int:
    """Bytes free on the device; on a CPU what Linux calls available, elsewhere 4 GiB."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        with open("/proc/meminfo") as lines:
            fields = dict(line.split(":") for line in lines)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return 4 << 30


@contextlib.contextmanager
def told_apart(work: RoundWork) -> Iterator[None]:
    """Say of whatever the user's model or loss raises that it was theirs."""
    try:
        yield
    except UndriftError:
        raise
    except Exception as error:
        shape = list(work.data.shape)
        raise BadSetting(f"the model failed on samples of shape {shape}: {type(error).__name__}: {error}") from error


def check_repeatable(net: Net, x: Tensor, buffers: Tensor, work: RoundWork) -> None:
    """Refuse a model that draws random numbers outside our streams: its runs could not be seeded."""

    def gradient() -> Tensor:
        oracle, _ = next(work.steps(0, 1))
        oracle.buffers = buffers
        return oracle.grad(x)

    with told_apart(work):
        first, second = gradient(), gradient()
    if (first - second).norm() > 0.01 * first.norm():  # a GPU's sums may differ in their last digits, a mask in many
        raise BadSetting(
            "the model gives two different gradients on one batch, so it draws random numbers that cannot be seeded "
            "(functional dropout?) or keeps a state of its own; use nn.Dropout modules and stateless layers"
        )


def check_labels(net: Net, x: Tensor, buffers: Tensor, work: RoundWork) -> None:
    """Refuse class labels that the model has no output for."""
    train, test = work.data.train.targets, work.data.test.targets
    if net.loss is not F.cross_entropy or train.is_floating_point():
        return
    oracle, _ = next(work.steps(0, 1))
    with told_apart(work):
        outputs, _ = net(x, buffers, oracle.batch.inputs[:1], None)
    used = torch.cat([train.flatten(), test.flatten()])
    used = used[used != -100]  # cross-entropy's own mark for "no label"
    if outputs.dim() < 2 or int(used.min()) < 0 or int(used.max()) >= outputs.shape[1]:
        raise BadData(
            f"the labels run from {int(used.min())} to {int(used.max())}, but the model's output is {list(outputs.shape[1:])}; "
            "labels must be 0 .. classes - 1, with one output for each"
        )


def choose(
    name: str, chunk: int, alg: Algorithm, down: Any, client: Any, net: Net, x: Tensor, buffers: Tensor, work: RoundWork
) -> Execution:
    """The execution named, or by `auto` the faster one, timed on two steps of the first cohort."""
    device = x.device
    if chunk == 0:
        chunk = max(1, int(0.5 * available_memory(device) / bytes_per_client(net, x, buffers, work)))
    stacked = Stacked(chunk)
    if name == "stacked":
        return stacked
    # Two or so vectors of a thread fit in its core's own cache.
    group = max(1, CACHE // (len(x) * x.element_size())) if stacks_in_a_thread(net) else 1
    pool = Pool(device, group)
    if name == "pool":
        return pool

    def seconds(execution: Execution) -> float:
        before = time.perf_counter()
        execution(alg, down, client, buffers, work, limit=min(2, int(work.table.steps.min())))
        return time.perf_counter() - before

    try:
        with graphs.rehearsal(device):
            seconds(stacked)  # warms up
    except RuntimeError as error:  # vmap has no rule for something the model does
        if isinstance(error, torch.cuda.OutOfMemoryError):
            raise
        return pool
    if device.type == "cuda":
        return stacked
    seconds(pool)
    # In turns, so that a busy moment meets both; and the kind of model decides unless the other way is clearly faster, so
    # that noise in the timing changes no results.
    both = [(seconds(stacked), seconds(pool)) for _ in range(3)]
    ratio = min(p for _, p in both) / min(s for s, _ in both)
    convolutional = any(isinstance(m, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) for m in net.original.modules())
    grouped = convolutional and work.mapped  # in C, each thread has a client in either way
    return pool if ratio < (1.6 if grouped else 0.6) else stacked
