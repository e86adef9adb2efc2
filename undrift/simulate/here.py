"""Ways to ask clients that live in this process: stacked into one program, on a pool of threads, or one after another.

All give the same answers to rounding. Stacking wins for dense layers, for models in C (kernels/dense_cpu.py), and on a GPU; a
pool wins for other convolutions on a CPU, where stacked ones are slow. One after another is for finding faults.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from undrift.algorithms.base import Algorithm
from undrift.core.errors import ClientFailed
from undrift.core.trees import State, map_leaves
from undrift.round.clients import Answers, new_clients, stage, train
from undrift.round.who import Who
from undrift.simulate.client_store import DiskTable
from undrift.simulate.clients import ClientTable
from undrift.simulate.work import LocalWhole, LocalWork

T = TypeVar("T")


class Execution(Protocol):
    """Runs the clients of a round, whose states are known."""

    name: str

    def train(
        self, alg: Algorithm, down: State, client: State, buffers: Tensor, work: LocalWork, limit: int | None = None
    ) -> Answers: ...

    def measure(self, alg: Algorithm, down: State, buffers: Tensor, work: LocalWork) -> Tensor: ...


class AskHere:
    """Asks the clients of one round, which an execution runs; their states are in a table."""

    def __init__(self, execution: Execution, work: LocalWork, clients: ClientTable | DiskTable) -> None:
        self.execution, self.work, self.clients = execution, work, clients

    def measure(self, alg: Algorithm, down: State, buffers: Tensor, who: Who) -> Tensor:
        return self.execution.measure(alg, down, buffers, self.work)

    def train(self, alg: Algorithm, down: State, buffers: Tensor, who: Who) -> Answers:
        new = new_clients(alg, add_client_dimension(down), who.ids, buffers.unsqueeze(-2))
        client = self.clients.read(who.ids, new)
        return self.execution.train(alg, down, client, buffers, self.work)


def add_client_dimension(down: State) -> State:
    """The server's message with a dimension for clients."""
    return map_leaves(lambda t: t.unsqueeze(-2), down)


class Apart(NamedTuple):
    """Messages that differ between the clients, with a dimension for them; the buffers are then [S, Q]."""

    down: State


def message_to(some: slice | int, down: State, buffers: Tensor) -> tuple[State, Tensor]:
    """What goes to some clients, stacked, or to one alone: the message and BatchNorm's statistics."""
    if isinstance(down, Apart):
        return map_leaves(lambda t: t[..., some, :], down.down), buffers[some]
    return add_client_dimension(down) if isinstance(some, slice) else down, buffers


def row(state: T, clients: slice | int) -> T:
    """The states of some clients, or of one."""
    return map_leaves(lambda t: t[clients], state)


class Stacked:
    """All clients of the cohort in one program, or `chunk` of them at a time where memory is short."""

    name = "stacked"

    def __init__(self, chunk: int) -> None:
        self.chunk = chunk

    def train(
        self, alg: Algorithm, down: State, client: State, buffers: Tensor, work: LocalWork, limit: int | None = None
    ) -> Answers:
        size, gradients = len(work.ids), work.gradients
        done: list[Answers] = []
        while (at := sum(len(answers.loss) for answers in done)) < size:
            part = slice(at, min(at + self.chunk, size))
            try:
                done.append(train_some(alg, down, client, buffers, work, part, limit))
                gradients = work.gradients
            except torch.cuda.OutOfMemoryError:
                if self.chunk == 1:
                    raise
                self.chunk, work.gradients = max(1, min(self.chunk, size) // 2), gradients
                torch.cuda.empty_cache()
        return done[0] if len(done) == 1 else map_leaves(lambda *parts: torch.cat(parts), *done)

    def measure(self, alg: Algorithm, down: State, buffers: Tensor, work: LocalWork) -> Tensor:
        parts = [slice(at, at + self.chunk) for at in range(0, len(work.ids), self.chunk)]
        return torch.cat([measure_some(alg, down, buffers, work, part) for part in parts])


class Pool:
    """A few clients at a time on each of a few threads, each with one core (on a GPU: one after another).

    `group` clients of a thread are stacked where all take the same steps; it is 1 where stacking does not pay.
    """

    name = "pool"

    def __init__(self, device: torch.device, group: int = 1) -> None:
        self.threads = torch.get_num_threads() if device.type == "cpu" else 1
        self.group = group
        self.executor = ThreadPoolExecutor(self.threads, initializer=_single_threaded) if self.threads > 1 else None

    def train(
        self, alg: Algorithm, down: State, client: State, buffers: Tensor, work: LocalWork, limit: int | None = None
    ) -> Answers:
        work.keys  # noqa: B018  made once for all of them
        parts = self.parts(work.table.count)
        answers = self.each(work, parts, lambda mine, part: train_some(alg, down, client, buffers, mine, part, limit))
        if isinstance(parts[0], slice):
            return map_leaves(lambda *each: torch.cat(each), *answers)
        ordered = [answers[parts.index(s)] for s in range(len(parts))]
        return map_leaves(lambda *each: torch.stack(each), *ordered)

    def measure(self, alg: Algorithm, down: State, buffers: Tensor, work: LocalWork) -> Tensor:
        everybody = range(len(work.ids))
        return torch.stack(self.each(work, everybody, lambda mine, s: measure_some(alg, down, buffers, mine, s)))

    def each(self, work: LocalWork, parts: Sequence[slice | int], do: Callable[[LocalWork, slice | int], T]) -> list[T]:
        """What `do` answers for each part of the cohort; the gradients that it takes are counted."""

        def one(part: slice | int) -> tuple[T, int]:
            mine = copy.copy(work)
            mine.gradients = 0
            return do(mine, part), mine.gradients

        results = list((self.executor.map if self.executor else map)(one, parts))
        work.gradients += sum(gradients for _, gradients in results)
        return [answer for answer, _ in results]

    def parts(self, count: NDArray[np.int64]) -> list[slice] | list[int]:
        """Who is run together, in the order in which the threads take them; count [S, K] are the samples of each step."""
        size = len(count)
        if self.group > 1 and (count == count[0]).all():
            turns = -(-size // (self.threads * self.group))
            ends = np.cumsum([len(part) for part in np.array_split(np.arange(size), min(size, self.threads * turns))])
            return [slice(int(a), int(b)) for a, b in zip([0, *ends[:-1]], ends, strict=True)]
        longest: list[int] = np.argsort(-count.sum(1), kind="stable").tolist()  # no long one is left for the end
        return longest


class OneByOne:
    """One client after another; the simulation then runs in plain PyTorch, so that a fault is where it seems to be."""

    name = "debug"

    def train(
        self, alg: Algorithm, down: State, client: State, buffers: Tensor, work: LocalWork, limit: int | None = None
    ) -> Answers:
        answers = [train_some(alg, down, client, buffers, work, s, limit) for s in range(len(work.ids))]
        return map_leaves(lambda *each: torch.stack(each), *answers)

    def measure(self, alg: Algorithm, down: State, buffers: Tensor, work: LocalWork) -> Tensor:
        return torch.stack([measure_some(alg, down, buffers, work, s) for s in range(len(work.ids))])


def train_some(
    alg: Algorithm,
    down: State,
    client: State,
    buffers: Tensor,
    work: LocalWork,
    some: slice | int,
    limit: int | None = None,
) -> Answers:
    """The answers of some clients of the cohort, stacked, or of one alone. A failure names the client."""
    message, own = message_to(some, down, buffers)
    whole = LocalWhole.of(work, some, own)
    try:
        answers = train(alg, message, row(client, some), own, work.steps(some, limit), whole)
    except ClientFailed as failure:
        if isinstance(some, int):
            raise failure.of(int(work.ids[some])) from failure.error
        for s in range(len(work.ids))[some]:  # who is it? alone it fails again
            train_some(alg, down, client, buffers, work, s, limit)
        raise
    work.gradients += whole.gradients
    return answers


def measure_some(alg: Algorithm, down: State, buffers: Tensor, work: LocalWork, some: slice | int) -> Tensor:
    """What some clients of the cohort measure in the first exchange. A failure names the client."""
    whole = LocalWhole.of(work, some, buffers)
    try:
        with stage("measure"):
            sent = alg.measure(add_client_dimension(down) if isinstance(some, slice) else down, whole)
    except ClientFailed as failure:
        if isinstance(some, int):
            raise failure.of(int(work.ids[some])) from failure.error
        for s in range(len(work.ids))[some]:
            measure_some(alg, down, buffers, work, s)
        raise
    work.gradients += whole.gradients
    return sent


def _single_threaded() -> None:
    torch.set_num_threads(1)
