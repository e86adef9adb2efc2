"""Blocks of rounds as a `Program`: inputs are prepared on the host, rounds are run on the device and recorded afterwards."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from undrift.algorithms.base import Algorithm
from undrift.core.device import available_memory
from undrift.core.errors import BadSetting, ClientFailed
from undrift.core.streams import Purpose, fold, stream
from undrift.core.trees import State, map_leaves, nbytes
from undrift.data.batches import table
from undrift.data.federation import Federation, Ids
from undrift.oracle.net import Net
from undrift.round.accounting import Accountant
from undrift.round.order import Cost, ServerState
from undrift.round.record import RoundRecord
from undrift.round.who import Attendance, Sampling, Task, attendances
from undrift.simulate.client_store import DiskTable
from undrift.simulate.clients import ClientTable
from undrift.simulate.here import Execution, Stacked
from undrift.simulate.program import LONGEST_UNROLLED, Ahead, Program, Shape

T = TypeVar("T")
LONGEST = 128  # rounds at most that are laid out together
PLAIN_STEPS = 320  # local steps before rounds are compiled: that takes twenty seconds
TOGETHER = (
    512  # rounds of all runs of a pack, so that preparing them takes no longer than the device takes for those before
)
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
    counted: Ids
    latest: int
    accountant: Accountant | None

    @property
    def sampling(self) -> Sampling: ...

    @property
    def task(self) -> Task: ...

    def wrap(self, alg: Algorithm) -> Algorithm: ...

    def first_states(self) -> FirstStates | None: ...

    def record(
        self, attendance: Attendance, kept: Ids, cost: Cost, gradients: int, numbers: dict[str, Any], began: float
    ) -> RoundRecord: ...


class Block(NamedTuple):
    """Rounds that are laid out together, of one run or of several."""

    first: int  # round
    parts: list[list[Attendance]]  # one list for each run
    ahead: Ahead

    def holds(self, t: int) -> bool:
        return self.first <= t < self.first + len(self.parts[0])


class Outlook:
    """What lies ahead of a run: the sizes of its rounds. The runs of a pack share them."""

    whole = False  # whether the method makes passes over a client's whole data

    def __init__(self, run: Replayed) -> None:
        settings, data = run.settings, run.data
        self.run, self.data, self.sampling, self.plan = run, data, run.sampling, settings.plan
        self.device, self.dtype = run.device, run.state.x.dtype
        self.width = int(min(self.plan.batch, data.sizes.max()))
        steps = self.plan.steps_of(data.sizes)
        self.steps = int(steps.max())  # most local steps
        self.always_whole = settings.sampling == "fixed" and not settings.dropout_rate
        self.clients = self.sampling.largest
        self.longest = self.fitting(1)
        self.unrolled = 0 < self.plan.steps <= LONGEST_UNROLLED  # a round is one graph
        self.scheduled = settings.lr_decay != 1.0 or bool(settings.lr_drops or settings.warmup) or settings.warmup > 0
        self.unequal = bool((steps != self.steps).any() or settings.slow[0]) or not self.always_whole
        self.ragged = self.unequal or self.plan.batch != self.width or bool((data.sizes % self.width).any())
        self.largest = int(-(-data.sizes.max() // self.width))  # batches of the largest client
        self.aside = None  # a stream of its own, so that the next rounds are laid out while these are run
        if run.device.type == "cuda":
            torch.cuda.synchronize()  # the samples are in place
            self.aside = torch.cuda.Stream()

    @property
    def compiled_from(self) -> int:
        """The round from which on rounds are compiled."""
        return max(1, PLAIN_STEPS // self.steps)

    def rate(self, t: int) -> float:
        """The local rate of round t."""
        return float(self.run.alg.lr * self.run.settings.schedule(t))

    def fitting(self, runs: int) -> int:
        """How many rounds of so many runs are laid out together."""
        return max(1, min(LONGEST, TOGETHER // runs, ROOM // (8 * runs * self.clients * self.steps * self.width)))

    def wait(self) -> None:
        """Let the device wait until the block is ready."""
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
        clients = self.clients if self.always_whole else round_up(len(part.ids), self.clients)
        batches = 0
        if self.whole:
            batches = round_up(int(-(-self.data.sizes[part.ids].max() // self.width)), self.largest)
        return Shape(clients, steps, not self.always_whole, self.ragged, self.unequal, batches)

    def live(self, part: Attendance) -> list[int]:
        """How many clients make a first step, a second, and so on."""
        return [] if self.unrolled else (part.steps[:, None] > np.arange(self.steps)).sum(0).tolist()

    def gradients(self, part: Attendance, program: Program) -> int:
        """Mini-batch gradients that a round takes."""
        passes = (program.passes + program.passes_measured) * int((-(-self.data.sizes[part.ids] // self.width)).sum())
        return program.calls * int(part.steps.sum()) + passes

    def positions_after(self, parts: Sequence[Attendance]) -> Ids:
        """How many batches each client has taken after these rounds."""
        position = self.run.position.copy()
        for part in parts:
            position[part.ids] += part.steps
        return position


def lay_out(
    outlooks: Sequence[Outlook], data: Federation, first: int, positions: Sequence[Ids], lead: tuple[int, ...]
) -> Block:
    """Prepare the rounds from `first` on, when clients have taken `positions` batches; `data` holds clients run after run."""
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
        columns = zip(*((part.ids, part.drawn, part.steps) for part in of_rows), strict=True)
        ids[:], drawn[:], steps[:] = (np.stack(column) for column in columns)
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

    def name_streams(names: Callable[[int, Ids], Ids]) -> Ids:
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
                plan, name_streams(plan.shuffle_streams)[there], who, data.members, data.start[rows], data.sizes[rows],
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
            names = one.put(name_streams(lambda seed, rounds: keys_of(seed, use, rounds)))
            return fold(fold(names.unsqueeze(-1), where).unsqueeze(-1), step)

        drawing = one.run.task.attackers is not None and one.run.task.attackers.draws
        attack = fold(
            one.put(name_streams(lambda seed, rounds: keys_of(seed, Purpose.ATTACK, rounds))).unsqueeze(-1), where
        )
        rates = [[o.rate(t) for o in outlooks] for t in ahead if one.scheduled]
        rate = one.put(np.array(rates)).to(one.dtype).view(len(rates), *lead)

        def shape(numbers: Tensor, *each: int) -> Tensor:
            return numbers.view(R, *lead, *each)

        K, B = one.steps, one.width
        return Block(
            first,
            parts,
            Ahead(
                ids=shape(where, S), back=shape(one.put(back), S), drawn=shape(one.put(drawn), S),
                steps=shape(one.put(steps), S), samples=shape(samples, S, K, B), real=shape(one.put(real), S, K),
                rate=rate, clients=shape(one.put(clients), 1),
                dropout=shape(keys(Purpose.DROPOUT), S, K), augment=shape(keys(Purpose.AUGMENT), S, K),
                attack=shape(attack, S)[..., : S * drawing],
            ),
        )  # fmt: skip


def keys_of(seed: int, use: Purpose, rounds: Ids) -> Ids:
    """The streams of a purpose in each of some rounds."""
    return fold(stream(seed, use), torch.from_numpy(rounds)).numpy()


class Stretch:
    """Rounds of one run that a program plays, to be kept or taken back."""

    def __init__(self, outlook: Outlook, table: ClientTable, parts: list[Attendance]) -> None:
        self.run, self.outlook, self.table, self.parts = outlook.run, outlook, table, parts
        self.position, self.stood = outlook.positions_after(parts), (self.run.t, self.run.latest)
        self.touched = np.unique(np.concatenate([part.ids for part in parts]))
        self.counted, self.accountant = self.run.counted[self.touched], copy.deepcopy(self.run.accountant)
        self.rows = torch.from_numpy(self.touched).to(outlook.device)
        self.before = [column[self.rows] for column in table.columns]
        self.records: list[RoundRecord] = []

    def write(self, program: Program, cost: Cost) -> None:
        """The records, without what the device has to tell: it may still be busy."""
        for part in self.parts:
            gradients = self.outlook.gradients(part, program)
            self.records.append(self.run.record(part, part.ids, cost, gradients, {}, 0.0))
            self.run.t += 1

    def take_back(self) -> None:
        """Put everything back as it was."""
        for column, old in zip(self.table.columns, self.before, strict=True):
            column[self.rows] = old
        self.run.t, self.run.latest = self.stood
        self.run.counted[self.touched] = self.counted
        self.run.accountant = self.accountant

    def keep(self, state: ServerState, numbers: list[dict[str, float]]) -> list[RoundRecord]:
        """The run after these rounds, and their records with the device's numbers."""
        run = self.run
        run.state = map_leaves(lambda t, old: t.to(old.device, copy=True), state, run.state)
        run.position = self.position
        if self.table.columns:
            self.table.row |= {i: i for i in self.touched.tolist()}
        return [record.with_numbers(mine) for record, mine in zip(self.records, numbers, strict=True)]


class Replay:
    """Plays the rounds of one run as a `Program`; `packed.Pack` those of several that stand at the same round."""

    lead: tuple[int, ...] = ()  # the number of packed runs, if any

    def __init__(self, runs: Sequence[Replayed]) -> None:
        self.runs, self.outlooks = runs, [Outlook(run) for run in runs]
        self.data = runs[0].data
        self.program: Program | None = None
        self.tables: list[ClientTable] = []
        self.columns: list[Tensor] = []  # clients' tables, with a row for everybody and a last one that is nobody's
        self.last: list[Attendance] = []  # who took part in each run's last round
        self.block: Block | None = None
        self.following: Block | None = None  # laid out while the device was busy
        self.taken = False  # whether the program has taken the block's inputs
        self.reach = LONGEST  # rounds that are worth playing before the host looks at them

    def begin(self) -> bool:
        """Make the program and the tables; False where the runs cannot be replayed."""
        for outlook, run in zip(self.outlooks, self.runs, strict=True):
            first, table = run.first_states(), run.clients
            if first is None or not isinstance(table, ClientTable) or not possible(run, first.client):
                return False
            outlook.whole = first.whole
            table.begin(first.client)
            table.spread(run.data.clients)
            self.tables.append(table)
        self.columns, self.program = self.join_columns(), self.make_program()
        return True

    def join_columns(self) -> list[Tensor]:
        return self.tables[0].columns

    def make_program(self) -> Program:
        run, outlook = self.runs[0], self.outlooks[0]
        empty = not all(outlook.always_whole for outlook in self.outlooks)
        compile = run.settings.compile and run.t >= outlook.compiled_from
        by_size = run.settings.weights == "size"
        alg, state = self.algorithm(), self.state()
        return Program(alg, run.task, self.data, state, outlook.width, by_size, empty, compile, self.lead)

    def algorithm(self) -> Algorithm:
        return self.runs[0].wrap(self.runs[0].alg)

    def state(self) -> ServerState:
        """The server's state, of all runs."""
        return self.runs[0].state

    def part(self, state: T, run: int) -> T:
        """A run's part of a state of all runs."""
        return state

    def rounds(self, most: int) -> list[list[RoundRecord]] | None:
        """Play the next rounds of each run and return their records, without scores and times.

        They end before the first with an answer that was not finite, or with a problem for the host. A run that begins with such
        a round gets no records and does not change. None: a run's next round has nobody, or
        more clients than there is room for.
        """
        first, block = self.runs[0], self.due()
        most = min(most, self.reach)
        if self.program is not None and first.settings.compile:
            most = self.program.compile_in_time(first.t, most, self.outlooks[0].compiled_from)
        at, room = first.t - block.first, self.outlooks[0].clients
        parts = [every[at : at + most] for every in block.parts]
        fitting = [all(0 < len(part.ids) <= room for part in now) for now in zip(*parts, strict=True)]
        count = [*fitting, False].index(False)
        if not count:  # this round is run by itself, and may drop somebody
            self.block = None if any(len(mine[0].ids) for mine in parts) else block
            return None
        if self.program is None and not self.begin():
            raise BadSetting("runs are packed only where cohorts are stacked, and samples and client state in memory")
        program = self.program
        assert program is not None
        if not self.taken:
            program.take(block.ahead)
            self.taken = True
        each = zip(self.outlooks, self.tables, parts, strict=True)
        stretches = [Stretch(outlook, table, mine[:count]) for outlook, table, mine in each]
        known = [r * first.data.clients + i for r, table in enumerate(self.tables) for i in table.row]
        program.load(self.state(), self.columns, known, at)
        try:
            for now in zip(*(stretch.parts for stretch in stretches), strict=True):
                self.play(program, now)
        except (RuntimeError, ClientFailed):
            for stretch in stretches:
                stretch.take_back()
            raise
        # While the device is busy: what follows, and the records.
        if at + count == len(block.parts[0]):
            self.following = self.lay_out(first.t + count, [stretch.position for stretch in stretches])
        for r, stretch in enumerate(stretches):
            stretch.write(program, replace(program.cost, down=self.part(program.cost.down, r)))
        numbers = {name: values.view(count, -1).T.tolist() for name, values in program.numbers(at, count).items()}
        good, self.last = numbers.pop("good"), [stretch.parts[-1] for stretch in stretches]
        whole = min([*map(bool, mine), False].index(False) for mine in good)
        self.reach = min(LONGEST, 2 * self.reach) if whole == count else max(1, whole)
        if 0 < whole < count:  # only those before the first bad one: then the number asked for does not matter
            for stretch in stretches:
                stretch.take_back()
            self.block = self.following = None
            return self.rounds(whole)
        records: list[list[RoundRecord]] = []
        for r, stretch in enumerate(stretches):
            if not all(good[r]):
                stretch.take_back()
                self.block = self.following = None
                records.append([])
                continue
            by_round = [{name: values[r][n] for name, values in numbers.items()} for n in range(count)]
            records.append(stretch.keep(self.part(program.state, r), by_round))
        return records

    def play(self, program: Program, now: Sequence[Attendance]) -> None:
        """The next round of all runs, in a shape that has room for each."""
        pairs = list(zip(self.outlooks, now, strict=True))
        shape = Shape(*(max(sizes) for sizes in zip(*(outlook.shape(part) for outlook, part in pairs), strict=True)))
        live = zip(*(outlook.live(part) for outlook, part in pairs), strict=True)
        program.run(shape, [len(part.ids) for part in now], [max(counts) for counts in live])

    def lay_out(self, t: int, positions: Sequence[Ids]) -> Block:
        return lay_out(self.outlooks, self.data, t, positions, self.lead)

    def due(self) -> Block:
        """The block that holds the next round."""
        t = self.runs[0].t
        if self.block is None or not self.block.holds(t):
            block = self.following if self.following is not None and self.following.holds(t) else None
            self.block = block or self.lay_out(t, [run.position for run in self.runs])
            self.following, self.taken = None, False
            self.outlooks[0].wait()
        return self.block


def possible(run: Replayed, client: State) -> bool:
    """Whether cohorts are stacked whole, samples lie on the device, and everybody's state, like `client` [S, ...], fits there."""
    execution, data = run.execution, run.data
    everybody = nbytes(map_leaves(lambda t: t[0], client)) * data.clients
    return (
        isinstance(execution, Stacked)
        and execution.chunk >= run.sampling.largest
        and data.train.held is not None
        and everybody < available_memory(run.device) // 3
    )


def round_up(size: int, most: int, shapes: int = 4) -> int:
    """The size, rounded up to one of a few.

    >>> [round_up(n, 22) for n in (1, 6, 7, 22)]
    [6, 6, 12, 22]
    """
    step = max(1, -(-most // shapes))
    return min(most, -(-size // step) * step)
