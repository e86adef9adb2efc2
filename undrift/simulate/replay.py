"""Stretches of rounds replayed as a `Program`: laid out on the host, run on the device, told afterwards."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from undrift.core.streams import Purpose, fold, stream
from undrift.core.trees import map_leaves, nbytes
from undrift.data.batches import table
from undrift.data.federation import Federation, Ids
from undrift.round.order import RoundRecord
from undrift.simulate.clients import ClientTable
from undrift.simulate.execute import Stacked, available_memory
from undrift.simulate.program import COMPILED_FROM, LONGEST_UNROLLED, Ahead, Program, Shape, uses_whole

if TYPE_CHECKING:
    from undrift.simulate.simulation import Settings, Simulation

LONGEST = 128  # rounds at most that are laid out together
TOGETHER = 512  # of all runs of a pack, so that it does not take longer than the device takes for the rounds before
ROOM = 1 << 28  # bytes for their samples


class Part(NamedTuple):
    """Who takes part in a round, on the host."""

    invited: Ids
    ids: Ids  # who answers
    drawn: Ids  # their places in the order drawn
    steps: Ids  # K_i


class Block(NamedTuple):
    """Rounds that are laid out together, of one run or of several."""

    first: int  # round
    parts: list[list[Part]]  # of each run
    ahead: Ahead

    def holds(self, t: int) -> bool:
        return self.first <= t < self.first + len(self.parts[0])


class Outlook:
    """What lies ahead of a simulation: lays its rounds out, and makes their records afterwards.

    The simulations of a pack share the sizes of what is laid out.
    """

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        settings, data, alg = simulation.settings, simulation.data, simulation.alg
        self.plan, self.data, self.alg = settings.plan, data, alg
        self.width = int(min(self.plan.batch, data.sizes.max()))
        self.steps = int(self.plan.steps_of(data.sizes).max())  # most local steps
        self.always_whole = settings.sampling == "fixed" and not settings.dropout_rate
        self.clients = largest_cohort(settings, data.clients)
        self.longest = self.fitting(1)
        self.unrolled = 0 < self.plan.steps <= LONGEST_UNROLLED  # a round is one graph
        self.scheduled = settings.lr_decay != 1.0 or bool(settings.lr_drops) or settings.warmup > 0
        full = self.plan.steps and not settings.slow[0] and self.plan.batch == self.width
        self.ragged = not (full and self.always_whole and not (data.sizes % self.width).any())
        self.largest = int(-(-data.sizes.max() // self.width))  # batches of the largest client
        self.aside = None  # a stream of its own, so that the next rounds are laid out while these are run
        if simulation.device.type == "cuda":
            torch.cuda.synchronize()  # the samples are in place
            self.aside = torch.cuda.Stream()

    def fitting(self, runs: int) -> int:
        """How many rounds of so many runs are laid out together."""
        return max(1, min(LONGEST, TOGETHER // runs, ROOM // (8 * runs * self.clients * self.steps * self.width)))

    def waited_for(self) -> None:
        """What was laid out is ready for what follows on the device."""
        if self.aside is not None:
            torch.cuda.current_stream().wait_stream(self.aside)

    def put(self, array: NDArray[Any]) -> Tensor:
        """The array on the device, without waiting for what the device is doing."""
        tensor = torch.from_numpy(array)
        if self.simulation.device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self.simulation.device, non_blocking=True)

    def shape(self, part: Part) -> Shape:
        """The graph for a round. Sizes are rounded up to a few, so that few are captured."""
        steps = self.plan.steps if self.unrolled else 0
        clients = self.clients if self.always_whole else rounded_up(len(part.ids), self.clients)
        batches = 0
        if uses_whole(self.alg):
            batches = rounded_up(int(-(-self.data.sizes[part.ids].max() // self.width)), self.largest)
        return Shape(clients, steps, not self.always_whole, self.ragged, batches)

    def live(self, part: Part) -> list[int]:
        """How many clients make a first step, a second, and so on."""
        return [] if self.unrolled else (part.steps[:, None] > np.arange(self.steps)).sum(0).tolist()

    def record(self, part: Part, program: Program, sent: Any) -> RoundRecord:
        """The record of the next round, in which `sent` went down to each client; without what the device has to tell."""
        simulation, invited, clients = self.simulation, len(part.invited), len(part.ids)
        # In the first round nobody lacks anything of a round before.
        before = set(simulation.last_cohort.tolist())
        returning = len(before.intersection(part.invited.tolist())) if simulation.t else invited
        bytes_down = self.alg.bytes_down(sent, invited, returning, self.data.clients)
        bytes_down += invited * nbytes(simulation.state.buffers) if self.alg.buffers_down else 0
        bytes_down += clients * program.bytes_replied
        bytes_up = clients * (program.bytes_measured + program.bytes_answered)
        passes = program.passes * int((-(-self.data.sizes[part.ids] // self.width)).sum())
        network = simulation.network_seconds(bytes_down / invited + bytes_up / clients, 2 if self.alg.measures else 1)
        simulation.last_cohort = part.ids
        simulation.t += 1
        return RoundRecord(
            round=simulation.t, loss=None, accuracy=None, bytes_down=bytes_down, bytes_up=bytes_up,
            gradients=program.calls * int(part.steps.sum()) + passes, consistency=0.0, seconds=0.0,
            train_loss=0.0, clients=invited, dropped=invited - clients, more=network,
        )  # fmt: skip


def laid_out(
    outlooks: Sequence[Outlook], data: Federation, first: int, positions: Sequence[Ids], lead: tuple[int, ...]
) -> Block:
    """The rounds from `first` on, where the clients of each run have taken `positions` batches before.

    `data` holds the clients run after run; `lead` is () for one run, (runs,) for a pack. It is made on the stream `aside`.
    """
    one, runs = outlooks[0], len(outlooks)
    R, S, N, device, plan = one.longest, one.clients, data.clients // runs, one.simulation.device, one.plan
    ahead = range(first, first + R)
    parts = one.simulation.parts([o.simulation for o in outlooks], ahead)
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
        return np.stack([names(o.simulation.settings.seed, np.asarray(ahead)) for o in outlooks], 1).reshape(-1)

    with torch.cuda.stream(one.aside):
        real = np.zeros((R * runs, S, one.steps), dtype=np.int64)
        samples = torch.zeros((R * runs * S, one.steps, one.width), dtype=torch.int64, device=device)
        there, place = np.nonzero(np.arange(S) < clients)
        if len(there):
            who = ids[there, place]
            rows = who + there % runs * N
            batches = table(
                plan, named(plan.all_shuffled_by)[there], who, data.members, data.start[rows], data.sizes[rows],
                taken[there, place],
            ).shortened(steps[there, place])  # fmt: skip
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

        rates = [[o.alg.lr * o.simulation.settings.schedule(t) for o in outlooks] for t in ahead if one.scheduled]
        rate = one.put(np.array(rates)).to(one.simulation.state.x.dtype).view(len(rates), *lead)

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


def filled(record: RoundRecord, told: dict[str, float]) -> RoundRecord:
    """The record with what the device has told of the round."""
    loss, consistency = told.pop("train_loss"), told.pop("consistency")
    return record._replace(train_loss=loss, consistency=consistency, more=told | record.more)


class Replay:
    """Runs a simulation's rounds as a `Program`."""

    def __init__(self, simulation: Simulation, table: ClientTable) -> None:
        self.simulation, self.table, self.outlook = simulation, table, Outlook(simulation)
        settings, outlook = simulation.settings, self.outlook
        weighted = settings.weights == "size"
        self.program = Program(
            simulation.alg, simulation.net, simulation.data, simulation.state, outlook.width, weighted,
            not outlook.always_whole, settings.compile and simulation.t >= COMPILED_FROM,
        )  # fmt: skip
        self.block: Block | None = None
        self.following: Block | None = None  # laid out while the device was busy

    @staticmethod
    def possible(simulation: Simulation, client: Any) -> bool:
        """Whether cohorts are stacked whole, samples lie on the device, and everybody's state has room there.

        `client` [S, ...] is the state of some clients.
        """
        execution, data = simulation.execution, simulation.data
        everybody = nbytes(map_leaves(lambda t: t[0], client)) * data.clients
        return (
            isinstance(simulation.clients, ClientTable)
            and isinstance(execution, Stacked)
            and execution.chunk >= largest_cohort(simulation.settings, data.clients)
            and data.train.held is not None
            and everybody < available_memory(simulation.device) // 3
        )

    def rounds(self, most: int) -> tuple[list[RoundRecord], Ids]:
        """The records of the next rounds, without scores and times, and who took part in the last one.

        None, and nothing changed, where it does not work out: nobody comes, too many, or an answer was not finite.
        """
        simulation, program, outlook = self.simulation, self.program, self.outlook
        most = program.compiled_in_time(simulation.t, most) if simulation.settings.compile else most
        block, nobody = self.due(), np.zeros(0, dtype=np.int64)
        at, every = simulation.t - block.first, block.parts[0]
        parts = every[at : at + most]
        sizes = [len(part.ids) for part in parts]
        fitting = [0 < size <= outlook.clients for size in sizes]
        parts = parts[: [*fitting, False].index(False)]
        if not parts:
            self.block = None if sizes[0] else block  # the engine runs this round, and may drop somebody
            return [], nobody
        table = self.table
        touched = np.unique(np.concatenate([part.ids for part in parts]))
        rows = torch.from_numpy(touched).to(simulation.device)
        before = [column[rows] for column in table.columns]
        program.load(simulation.state, table.columns, table.row.keys(), at)

        def take_back() -> None:
            for column, old in zip(table.columns, before, strict=True):
                column[rows] = old

        try:
            for part in parts:
                program.run(outlook.shape(part), [len(part.ids)], outlook.live(part))
        except RuntimeError:
            take_back()
            raise
        position = simulation.position.copy()
        for part in parts:
            position[part.ids] += part.steps
        if at + len(parts) == len(every):  # lay out what follows while the device is busy
            self.following = laid_out([outlook], outlook.data, block.first + len(every), [position], ())
        before_records = simulation.t, simulation.last_cohort
        sent = simulation.net.sent(program.down)
        records = [outlook.record(part, program, sent) for part in parts]  # and the records
        left = {name: values.tolist() for name, values in program.numbers(at, len(parts)).items()}
        if not all(left.pop("fine")):
            take_back()
            simulation.t, simulation.last_cohort = before_records
            self.block = self.following = None
            return [], nobody
        simulation.state = map_leaves(lambda t, old: t.to(old.device, copy=True), program.state, simulation.state)
        simulation.position = position
        if table.columns:
            table.row |= {i: i for i in touched.tolist()}
        told = [{name: values[n] for name, values in left.items()} for n in range(len(parts))]
        return [filled(record, numbers) for record, numbers in zip(records, told, strict=True)], parts[-1].ids

    def due(self) -> Block:
        """The block that holds the next round."""
        t = self.simulation.t
        if self.block is None or not self.block.holds(t):
            block = self.following if self.following is not None and self.following.holds(t) else None
            block = block or laid_out([self.outlook], self.outlook.data, t, [self.simulation.position], ())
            self.block, self.following = block, None
            self.outlook.waited_for()
            self.program.take(block.ahead)
        return self.block


def largest_cohort(settings: Settings, clients: int) -> int:
    """The most clients to be expected in a round: four standard deviations above the mean, where chance decides."""
    if settings.sampling == "fixed":
        return settings.cohort
    deviation = math.sqrt(settings.cohort * (1 - settings.cohort / clients))
    return min(clients, math.ceil(settings.cohort + 4 * deviation))


def rounded_up(size: int, most: int, shapes: int = 4) -> int:
    """The size, rounded up to one of a few.

    >>> [rounded_up(n, 22) for n in (1, 6, 7, 22)]
    [6, 6, 12, 22]
    """
    step = max(1, -(-most // shapes))
    return min(most, -(-size // step) * step)
