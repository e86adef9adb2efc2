"""Blocks of rounds as a `Program`: inputs are prepared on the host, rounds are run on the device and recorded afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from undrift.algorithms.base import Algorithm
from undrift.core.device import available_memory
from undrift.core.streams import Purpose, fold, stream
from undrift.core.trees import State, map_leaves, nbytes
from undrift.data.batches import table
from undrift.data.federation import Federation, Ids
from undrift.oracle.net import Net
from undrift.round.order import Cost, ServerState
from undrift.round.record import RoundRecord
from undrift.round.who import Attendance, Sampling, attendances
from undrift.simulate.client_store import DiskTable
from undrift.simulate.clients import ClientTable
from undrift.simulate.here import Execution, Stacked
from undrift.simulate.program import COMPILED_FROM, LONGEST_UNROLLED, Ahead, Program, Shape

LONGEST = 128  # rounds at most that are laid out together
TOGETHER = 512  # of all runs of a pack, so that it does not take longer than the device takes for the rounds before
ROOM = 1 << 28  # bytes for their samples


class FirstStates(NamedTuple):
    """The states of the next round's clients, as they would be at their first."""

    client: State
    whole: bool  # whether the method makes passes over a client's whole data


class Replayed(Protocol):
    """What is asked of a run whose rounds are replayed."""

    t: int
    alg: Algorithm
    net: Net
    data: Federation
    settings: Any
    state: ServerState
    device: torch.device
    clients: ClientTable | DiskTable
    execution: Execution | None
    position: Ids
    last_cohort: Ids

    @property
    def sampling(self) -> Sampling: ...

    def wrap(self, alg: Algorithm) -> Algorithm: ...

    def first_states(self) -> FirstStates | None: ...

    def record(
        self, attendance: Attendance, kept: int, cost: Cost, gradients: int, numbers: dict[str, Any], began: float
    ) -> RoundRecord: ...


class Block(NamedTuple):
    """Rounds that are laid out together, of one run or of several."""

    first: int  # round
    parts: list[list[Attendance]]  # of each run
    ahead: Ahead

    def holds(self, t: int) -> bool:
        return self.first <= t < self.first + len(self.parts[0])


class Outlook:
    """What lies ahead of a run: the sizes of its rounds. The runs of a pack share them."""

    def __init__(self, run: Replayed, whole: bool = False) -> None:
        settings, data = run.settings, run.data
        self.run, self.data, self.sampling, self.plan = run, data, run.sampling, settings.plan
        self.device, self.dtype, self.whole = run.device, run.state.x.dtype, whole
        self.width = int(min(self.plan.batch, data.sizes.max()))
        self.steps = int(self.plan.steps_of(data.sizes).max())  # most local steps
        self.always_whole = settings.sampling == "fixed" and not settings.dropout_rate
        self.clients = self.sampling.largest
        self.longest = self.fitting(1)
        self.unrolled = 0 < self.plan.steps <= LONGEST_UNROLLED  # a round is one graph
        self.scheduled = settings.lr_decay != 1.0 or bool(settings.lr_drops or settings.warmup) or settings.warmup > 0
        full = self.plan.steps and not settings.slow[0] and self.plan.batch == self.width
        self.ragged = not (full and self.always_whole and not (data.sizes % self.width).any())
        self.largest = int(-(-data.sizes.max() // self.width))  # batches of the largest client
        self.aside = None  # a stream of its own, so that the next rounds are laid out while these are run
        if run.device.type == "cuda":
            torch.cuda.synchronize()  # the samples are in place
            self.aside = torch.cuda.Stream()

    def rate(self, t: int) -> float:
        """The local rate of round t."""
        return float(self.run.alg.lr * self.run.settings.schedule(t))

    def fitting(self, runs: int) -> int:
        """How many rounds of so many runs are laid out together."""
        return max(1, min(LONGEST, TOGETHER // runs, ROOM // (8 * runs * self.clients * self.steps * self.width)))

    def wait(self) -> None:
        """What was laid out is ready for what follows on the device."""
        if self.aside is not None:
            torch.cuda.current_stream().wait_stream(self.aside)

    def put(self, array: NDArray[Any]) -> Tensor:
        """The array on the device, without waiting for what the device is doing."""
        tensor = torch.from_numpy(array)
        if self.device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)

    def shape(self, part: Attendance) -> Shape:
        """The graph for a round. Sizes are rounded up to a few, so that few are recorded."""
        steps = self.plan.steps if self.unrolled else 0
        clients = self.clients if self.always_whole else rounded_up(len(part.ids), self.clients)
        batches = 0
        if self.whole:
            batches = rounded_up(int(-(-self.data.sizes[part.ids].max() // self.width)), self.largest)
        return Shape(clients, steps, not self.always_whole, self.ragged, batches)

    def live(self, part: Attendance) -> list[int]:
        """How many clients make a first step, a second, and so on."""
        return [] if self.unrolled else (part.steps[:, None] > np.arange(self.steps)).sum(0).tolist()

    def gradients(self, part: Attendance, program: Program) -> int:
        """Mini-batch gradients that a round takes."""
        passes = (program.passes + program.passes_measured) * int((-(-self.data.sizes[part.ids] // self.width)).sum())
        return program.calls * int(part.steps.sum()) + passes

    def moved(self, parts: Sequence[Attendance]) -> Ids:
        """How many batches each client has taken after these rounds."""
        position = self.run.position.copy()
        for part in parts:
            position[part.ids] += part.steps
        return position


def lay_out(
    outlooks: Sequence[Outlook], data: Federation, first: int, positions: Sequence[Ids], lead: tuple[int, ...]
) -> Block:
    """The rounds from `first` on, where the clients of each run have taken `positions` batches before.

    `data` holds the clients run after run; `lead` is () for one run, (runs,) for a pack. It is made on the stream `aside`.
    """
    one, runs = outlooks[0], len(outlooks)
    R, S, N, device, plan = one.longest, one.clients, data.clients // runs, one.device, one.plan
    ahead = range(first, first + R)
    parts = attendances([o.sampling for o in outlooks], ahead)
    # One row for each round and run, the runs of a round together.
    ids, drawn, steps, taken = (np.zeros((R * runs, S), dtype=np.int64) for _ in range(4))
    clients, back = np.zeros((R * runs, 1), dtype=np.int64), np.tile(np.arange(S), (R * runs, 1))
    whole = one.unrolled and one.always_whole  # then all rows are filled alike, and there is no need to go one by one
    if whole:
        of_rows = [part for of_round in zip(*parts, strict=True) for part in of_round]
        ids[:], drawn[:], steps[:] = (np.stack(column) for column in zip(*(part[1:] for part in of_rows), strict=True))
        clients[:] = S
    for run, (mine, before) in enumerate(zip(parts, positions, strict=True)):
        position = before.copy()
        for n, part in enumerate(mine):
            if whole:
                taken[n * runs + run] = position[part.ids]
                position[part.ids] += part.steps
                continue
            row, order = n * runs + run, np.arange(min(S, len(part.ids)))  # with more than S, the round is not replayed
            if not one.unrolled:
                order = order[np.argsort(-part.steps[order], kind="stable")]
            some = slice(0, len(order))
            ids[row], steps[row], clients[row] = part.ids[order[0]] if len(order) else 0, 1, len(order)
            ids[row, some], drawn[row, some], steps[row, some] = part.ids[order], part.drawn[order], part.steps[order]
            back[row, order] = np.arange(len(order))
            taken[row, some] = position[part.ids[order]]
            position[part.ids] += part.steps

    def named(names: Callable[[int, Ids], Ids]) -> Ids:
        """[R * runs] a stream for each round and run, by seed and round."""
        return np.stack([names(o.sampling.seed, np.asarray(ahead)) for o in outlooks], 1).reshape(-1)

    with torch.cuda.stream(one.aside):
        real = np.zeros((R * runs, S, one.steps), dtype=np.int64)
        samples = torch.zeros((R * runs * S, one.steps, one.width), dtype=torch.int64, device=device)
        there, place = np.nonzero(np.arange(S) < clients)
        if len(there):
            who = ids[there, place]
            rows = who + there % runs * N
            batches = table(
                plan, named(plan.shuffle_streams)[there], who, data.members, data.start[rows], data.sizes[rows],
                taken[there, place],
            ).shorten(steps[there, place])  # fmt: skip
            most, width = batches.count.shape[1], batches.index.shape[2]
            real[there, place, :most] = batches.count
            samples[one.put(there * S + place), :most, :width] = batches.index[:, :most]
        # An empty place repeats the first client's first step: it counts for nothing, but what comes of it is finite.
        empty, behind = np.nonzero((np.arange(S) >= clients) & (clients > 0))
        if len(empty):
            real[empty, behind, 0] = real[empty, 0, 0]
            samples[one.put(empty * S + behind), 0] = samples[one.put(empty * S), 0]
        where, step = one.put(ids), torch.arange(one.steps, device=device)

        def keys(use: Purpose) -> Tensor:
            """[R * runs, S, K]"""
            names = one.put(named(lambda seed, rounds: fold(stream(seed, use), torch.from_numpy(rounds)).numpy()))
            return fold(fold(names.unsqueeze(-1), where).unsqueeze(-1), step)

        rates = [[o.rate(t) for o in outlooks] for t in ahead if one.scheduled]
        rate = one.put(np.array(rates)).to(one.dtype).view(len(rates), *lead)

        def shaped(numbers: Tensor, *each: int) -> Tensor:
            return numbers.view(R, *lead, *each)

        K, B = one.steps, one.width
        return Block(
            first,
            parts,
            Ahead(
                ids=shaped(where, S), back=shaped(one.put(back), S), drawn=shaped(one.put(drawn), S),
                steps=shaped(one.put(steps), S), samples=shaped(samples, S, K, B), real=shaped(one.put(real), S, K),
                rate=rate, clients=shaped(one.put(clients), 1),
                dropout=shaped(keys(Purpose.DROPOUT), S, K), augment=shaped(keys(Purpose.AUGMENT), S, K),
            ),
        )  # fmt: skip


class Stretch:
    """Rounds of one run that a program plays, to be kept or taken back."""

    def __init__(self, outlook: Outlook, table: ClientTable, parts: list[Attendance]) -> None:
        self.run, self.outlook, self.table, self.parts = outlook.run, outlook, table, parts
        self.position, self.stood = outlook.moved(parts), (self.run.t, self.run.last_cohort)
        self.touched = np.unique(np.concatenate([part.ids for part in parts]))
        self.rows = torch.from_numpy(self.touched).to(outlook.device)
        self.before = [column[self.rows] for column in table.columns]
        self.records: list[RoundRecord] = []

    def write(self, program: Program, cost: Cost) -> None:
        """The records, without what the device has to tell: it may still be busy."""
        for part in self.parts:
            gradients = self.outlook.gradients(part, program)
            self.records.append(self.run.record(part, len(part.ids), cost, gradients, {}, 0.0))
            self.run.t += 1

    def take_back(self) -> None:
        """Put everything back as it was."""
        for column, old in zip(self.table.columns, self.before, strict=True):
            column[self.rows] = old
        self.run.t, self.run.last_cohort = self.stood

    def keep(self, state: ServerState, numbers: list[dict[str, float]]) -> list[RoundRecord]:
        """The run after these rounds, and their records with the device's numbers."""
        run = self.run
        run.state = map_leaves(lambda t, old: t.to(old.device, copy=True), state, run.state)
        run.position = self.position
        if self.table.columns:
            self.table.row |= {i: i for i in self.touched.tolist()}
        return [record.with_numbers(mine) for record, mine in zip(self.records, numbers, strict=True)]


class Replay:
    """Runs one run's rounds as a `Program`."""

    def __init__(self, run: Replayed, table: ClientTable, whole: bool) -> None:
        self.run, self.table, self.outlook = run, table, Outlook(run, whole)
        settings, outlook = run.settings, self.outlook
        self.program = Program(
            run.wrap(run.alg), run.net, run.data, run.state, outlook.width, settings.weights == "size",
            not outlook.always_whole, settings.compile and run.t >= COMPILED_FROM,
        )  # fmt: skip
        self.block: Block | None = None
        self.following: Block | None = None  # laid out while the device was busy

    @staticmethod
    def possible(run: Replayed, client: State) -> bool:
        """Whether cohorts are stacked whole, samples lie on the device, and everybody's state has room there.

        `client` [S, ...] is the state of some clients.
        """
        execution, data = run.execution, run.data
        everybody = nbytes(map_leaves(lambda t: t[0], client)) * data.clients
        return (
            isinstance(run.clients, ClientTable)
            and isinstance(execution, Stacked)
            and execution.chunk >= run.sampling.largest
            and data.train.held is not None
            and everybody < available_memory(run.device) // 3
        )

    def rounds(self, most: int) -> tuple[list[RoundRecord], Ids]:
        """The records of the next rounds, without scores and times, and who took part in the last one.

        None, and nothing changed, where it does not work out: nobody comes, too many, or an answer was not finite.
        """
        run, program, outlook = self.run, self.program, self.outlook
        most = program.compiled_in_time(run.t, most) if run.settings.compile else most
        block, nobody = self.due(), np.zeros(0, dtype=np.int64)
        at, every = run.t - block.first, block.parts[0]
        parts = every[at : at + most]
        sizes = [len(part.ids) for part in parts]
        fitting = [0 < size <= outlook.clients for size in sizes]
        parts = parts[: [*fitting, False].index(False)]
        if not parts:
            self.block = None if sizes[0] else block  # this round is run by itself, and may drop somebody
            return [], nobody
        stretch = Stretch(outlook, self.table, parts)
        program.load(run.state, self.table.columns, self.table.row.keys(), at)
        try:
            for part in parts:
                program.run(outlook.shape(part), [len(part.ids)], outlook.live(part))
        except RuntimeError:
            stretch.take_back()
            raise
        if at + len(parts) == len(every):  # lay out what follows while the device is busy
            self.following = lay_out([outlook], outlook.data, block.first + len(every), [stretch.position], ())
        stretch.write(program, program.cost)
        numbers = {name: values.tolist() for name, values in program.numbers(at, len(parts)).items()}
        if not all(numbers.pop("good")):
            stretch.take_back()
            self.block = self.following = None
            return [], nobody
        by_round = [{name: values[n] for name, values in numbers.items()} for n in range(len(parts))]
        return stretch.keep(program.state, by_round), parts[-1].ids

    def due(self) -> Block:
        """The block that holds the next round."""
        t = self.run.t
        if self.block is None or not self.block.holds(t):
            block = self.following if self.following is not None and self.following.holds(t) else None
            block = block or lay_out([self.outlook], self.outlook.data, t, [self.run.position], ())
            self.block, self.following = block, None
            self.outlook.wait()
            self.program.take(block.ahead)
        return self.block


def rounded_up(size: int, most: int, shapes: int = 4) -> int:
    """The size, rounded up to one of a few.

    >>> [rounded_up(n, 22) for n in (1, 6, 7, 22)]
    [6, 6, 12, 22]
    """
    step = max(1, -(-most // shapes))
    return min(most, -(-size // step) * step)
