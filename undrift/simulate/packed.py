"""Several runs as one program: simulations that differ in seeds and in real-valued settings, with the runs as one more
leading dimension.

The server's models are [R, P], the cohorts [R, S] and the clients' vectors [R, S, P]. A real field in which the runs differ
becomes a tensor: [R, 1, 1] where clients use it, [R, 1] on the server. Every simulation stays what it is: it draws
its own cohorts and batches, and after each stretch of rounds it is handed its part of the state and makes its records.
"""

from __future__ import annotations

import dataclasses
import inspect
import time
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from undrift.algorithms.base import Algorithm, Cohort
from undrift.core.errors import BadSetting
from undrift.core.forms import Seen, watching
from undrift.core.trees import leaves, map_leaves
from undrift.data.federation import Federation, Ids
from undrift.oracle.net import Net
from undrift.round.order import Answers, RoundRecord, State, server_part
from undrift.simulate.clients import ClientTable
from undrift.simulate.program import COMPILED_FROM, Now, Program, Shape, try_server
from undrift.simulate.replay import Block, Outlook, Part, Replay, filled, laid_out
from undrift.simulate.simulation import Simulation

BRANCHED = ("weight_decay", "clip")  # real fields that every method asks whether they are zero


def may_differ(kind: type[Any], field: dataclasses.Field[Any]) -> bool:
    """Whether runs with different values of this field can be packed: a real number that only meets vectors [..., P].

    The package's own parts keep to that, but for those with an objective, which meets single samples instead. Of classes from
    elsewhere nothing is known.
    """
    owner = next(c for c in kind.__mro__ if field.name in inspect.get_annotations(c))
    real = field.type in ("float", float, "tuple[float, ...]", tuple[float, ...]) and field.name not in BRANCHED
    return real and owner.__module__.startswith("undrift.") and "objective" not in vars(owner)


def structure(alg: Algorithm) -> tuple[Any, ...]:
    """What algorithms of one kind must have in common to be packed; of real numbers it is how many there are."""

    def common(field: dataclasses.Field[Any]) -> Any:
        value = getattr(alg, field.name)
        if not may_differ(type(alg), field):
            return value
        return len(value) if isinstance(value, tuple) else 1

    return tuple(common(field) for field in dataclasses.fields(cast(Any, alg)))


def joined(algs: Sequence[Algorithm], like: Tensor, dimensions: int) -> Algorithm:
    """One algorithm for R runs: fields in which they differ are tensors [R, 1, ...] of so many dimensions."""

    def as_tensor(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=like.dtype, device=like.device).view(-1, *(1,) * (dimensions - 1))

    fields: dict[str, Any] = {}
    for field in dataclasses.fields(cast(Any, algs[0])):
        values = [getattr(alg, field.name) for alg in algs]
        if any(value != values[0] for value in values):
            several = isinstance(values[0], tuple)
            fields[field.name] = tuple(map(as_tensor, zip(*values, strict=True))) if several else as_tensor(values)
    return dataclasses.replace(algs[0], **fields)


def united(federations: Sequence[Federation]) -> Federation:
    """One federation of all runs' clients, run after run, on the samples that they share."""
    before = np.cumsum([0, *(len(f.members) for f in federations)])
    return dataclasses.replace(
        federations[0],
        members=torch.cat([f.members for f in federations]),
        start=np.concatenate([f.start + b for f, b in zip(federations, before, strict=False)]),
        sizes=np.concatenate([f.sizes for f in federations]),
    )


def constants(net: Net) -> list[Tensor]:
    """What a model holds beside x and the buffers: frozen parameters, constant buffers."""
    ours = {*net.layout.names, *net.buffer_layout.names}
    everything = [*net.original.named_parameters(), *net.original.named_buffers()]
    return [tensor for name, tensor in everything if name not in ours]


class PackedProgram(Program):
    """The rounds of R runs. Client i of run r stands in row r N + i of all tables."""

    def __init__(
        self,
        algs: list[Algorithm],
        net: Net,
        data: Federation,
        state: State,
        width: int,
        by_size: bool,
        empty: bool,
        compile: bool,
    ) -> None:
        self.algs = algs
        super().__init__(joined(algs, state.x, 3), net, data, state, width, by_size, empty, compile)
        runs = len(algs)
        self.lead, self.server_alg = (runs,), joined(algs, state.x, 2)
        self.total = data.clients // runs
        self.first_row = torch.arange(runs, device=state.x.device).view(-1, 1) * self.total
        # A server part that keeps numbers of slots or clients is not written for more dimensions, nor for empty places.
        kept = leaves((state.server, state.companion))
        self.by_run = not all(t.is_floating_point() or not t.numel() for t in kept)
        self.apart = self.apart or (self.by_run and empty)
        self.holds: Tensor | None = None  # [R] which server steps that were made run by run hold
        self.fuses_end = self.fuses_end and not self.by_run

    def try_server(self, state: State, empty: bool) -> Seen:
        return try_server(self.algs[0], self.net, of_run(state, 0), self.total // len(self.algs), empty)

    def on_clients(self, rate: Any) -> Algorithm:
        return super().on_clients(rate.view(-1, 1, 1) if isinstance(rate, Tensor) else rate)

    def on_server(self, rate: Any) -> Algorithm:
        return super().on_server(rate.view(-1, 1) if isinstance(rate, Tensor) else rate)

    def rows(self, ids: Tensor) -> Tensor:
        return self.first_row + ids

    def served(self, state: State, answers: Answers, cohort: Cohort) -> State:
        if not self.by_run:
            return super().served(state, answers, cohort)
        return self.served_by_run(state, answers, cohort, [cohort.ids.shape[-1]] * len(self.algs))

    def served_apart(self, state: State, answers: Answers, now: Now, clients: Sequence[int]) -> State:
        return self.served_by_run(state, answers, self.cohort(now), clients)

    def served_by_run(self, state: State, answers: Answers, cohort: Cohort, clients: Sequence[int]) -> State:
        """Run by run, each with its own plain algorithm; what is large is written where it is."""
        holds: list[Any] = []
        for r, count in enumerate(clients):
            before, place = of_run(state, r), of_run(self.state, r)
            mine = map_leaves(lambda t, r=r, count=count: t[r, :count], answers)
            ids, drawn, weight, steps = (t[r, :count] for t in cohort[:4])
            alg = self.algs[r]
            if isinstance(cohort.lr, Tensor):
                alg = dataclasses.replace(alg, lr=cast(float, cohort.lr.expand(len(clients), 1)[r, 0]))
            own = Cohort(ids, drawn, weight / weight.sum(), steps, alg.lr, self.total, self.net.layout)
            with watching() as seen:
                after = server_part(alg, self.net, before, mine, own)
            holds.append(super().settled(seen))
            for old, new in zip(leaves(place), leaves(after), strict=True):
                if old.data_ptr() != new.data_ptr():  # GradMA's memory was written where it is
                    old.copy_(new)
        self.holds = None if any(held is None for held in holds) else torch.cat(holds)
        return self.state

    def settled(self, seen: Seen) -> Tensor | None:
        return self.holds if self.by_run else super().settled(seen)

    def facts(self, server: Any) -> dict[str, Tensor]:
        each = [alg.facts(of_run(server, r)) for r, alg in enumerate(self.algs)]
        return {name: torch.stack([facts[name] for facts in each]) for name in each[0]}


def of_run(state: Any, run: int) -> Any:
    """A run's part of a state [R, ...]."""
    return map_leaves(lambda t: t[run], state)


class Pack:
    """Simulations at the same round that are run together."""

    def __init__(self, simulations: Sequence[Simulation]) -> None:
        first = simulations[0]
        assert all(s.t == first.t and s.data.train is first.data.train for s in simulations)
        self.simulations, self.outlooks = simulations, [Outlook(s) for s in simulations]
        for name in ("clients", "steps", "width", "scheduled", "ragged", "largest"):  # shapes have room for everybody
            largest = max(getattr(outlook, name) for outlook in self.outlooks)
            for outlook in self.outlooks:
                setattr(outlook, name, largest)
        for outlook in self.outlooks:
            outlook.longest = outlook.fitting(len(simulations))
        self.program: PackedProgram | None = None  # made for the first round in which somebody takes part in every run
        self.columns: list[Tensor] = []  # the clients' tables, run after run, and a last row that is nobody's
        self.data = united([s.data for s in simulations])
        self.block: Block | None = None
        self.following: Block | None = None  # laid out while the device was busy
        self.taken = False  # whether the program has taken the block's inputs

    def begin(self) -> PackedProgram:
        """The program, and one table for all clients of all runs, of which each simulation's is a part."""
        first, tables = self.simulations[0], []
        for simulation in self.simulations:
            client = simulation.opening(simulation.takes_part(simulation.t)).client
            if not Replay.possible(simulation, client) or not isinstance(simulation.clients, ClientTable):
                raise BadSetting(
                    "runs are packed only where cohorts are stacked, and samples and client state in memory"
                )
            if not all(map(torch.equal, constants(simulation.net), constants(first.net))):
                raise BadSetting("runs are packed only where what the model does not train is the same in all of them")
            simulation.clients.begin(client)
            simulation.clients.spread(simulation.data.clients)
            tables.append(simulation.clients)
        for column in zip(*(table.columns for table in tables), strict=True):
            self.columns.append(torch.cat([*(c[:-1] for c in column), column[0][-1:]]))
        N = first.data.clients
        for r, table in enumerate(tables):
            table.columns = [column[r * N : (r + 1) * N] for column in self.columns]
        state: State = stacked([s.state for s in self.simulations])
        program = PackedProgram(
            [s.alg for s in self.simulations], first.net, self.data, state,
            self.outlooks[0].width, first.settings.weights == "size",
            not all(outlook.always_whole for outlook in self.outlooks),
            first.settings.compile and first.t >= COMPILED_FROM,
        )  # fmt: skip
        program.captures = first.settings.replay
        return program

    def rounds(self, most: int, last: bool) -> list[list[RoundRecord]]:
        """Each run's next rounds, at most so many and no further than the next evaluation; `last`: they end after `most`.

        None, and nothing changed, for a run with an answer that was not finite: it is to leave the pack.
        """
        began, first = time.perf_counter(), self.simulations[0]
        if self.program is not None and first.settings.compile:
            most = self.program.compiled_in_time(first.t, most)
        block = self.due()
        at = first.t - block.first
        parts = [mine[at : at + min(most, first.until_scores())] for mine in block.parts]
        room = self.outlooks[0].clients
        count = next((n for n, now in enumerate(zip(*parts, strict=True)) if not fits(now, room)), len(parts[0]))
        if not count:  # nobody comes in one of the runs, or more than there is room for: everybody on their own
            self.block = None
            return [[simulation.round(last and most == 1)] for simulation in self.simulations]
        program = self.program = self.begin() if self.program is None else self.program
        if not self.taken:
            program.take(block.ahead)
            self.taken = True
        parts = [mine[:count] for mine in parts]
        device, N = first.device, first.data.clients
        touched = [np.unique(np.concatenate([part.ids for part in mine])) for mine in parts]
        rows = [torch.from_numpy(ids + r * N).to(device) for r, ids in enumerate(touched)]
        before = [[column[mine] for column in self.columns] for mine in rows]
        tables = [cast(ClientTable, simulation.clients) for simulation in self.simulations]
        known = [r * N + i for r, table in enumerate(tables) for i in table.row]
        program.load(stacked([s.state for s in self.simulations]), self.columns, known, at)
        for now in zip(*parts, strict=True):
            shapes = [outlook.shape(part) for outlook, part in zip(self.outlooks, now, strict=True)]
            shape = Shape(*(max(sizes) for sizes in zip(*shapes, strict=True)))
            live = zip(*(outlook.live(part) for outlook, part in zip(self.outlooks, now, strict=True)), strict=True)
            program.run(shape, [len(part.ids) for part in now], [max(counts) for counts in live])
        # While the device is busy: what follows, and the records.
        stood = [(s.t, s.last_cohort) for s in self.simulations]
        positions = [simulation.position.copy() for simulation in self.simulations]
        for position, mine in zip(positions, parts, strict=True):
            for part in mine:
                position[part.ids] += part.steps
        if at + count == len(block.parts[0]):
            self.following = self.laid_out(first.t + count, positions)
        sent = [first.net.sent(of_run(program.down, r)) for r in range(len(parts))]
        made = [
            [outlook.record(part, program, down) for part in mine]
            for outlook, mine, down in zip(self.outlooks, parts, sent, strict=True)
        ]
        left = {name: values.T.tolist() for name, values in program.numbers(at, count).items()}  # [R, rounds]
        fine = [all(of_rounds) for of_rounds in left.pop("fine")]
        for r, (simulation, table) in enumerate(zip(self.simulations, tables, strict=True)):
            if not fine[r]:
                for column, old in zip(self.columns, before[r], strict=True):
                    column[rows[r]] = old
                table.columns = [column.clone() for column in table.columns]  # no part of the pack's any more
                simulation.t, simulation.last_cohort = stood[r]
                made[r] = []
                continue
            mine = of_run(program.state, r)
            simulation.state = map_leaves(lambda t, old: t.to(old.device, copy=True), mine, simulation.state)
            if table.columns:
                table.row |= {i: i for i in touched[r].tolist()}
            simulation.position = positions[r]
            told = [{name: values[r][n] for name, values in left.items()} for n in range(count)]
            records = [filled(record, numbers) for record, numbers in zip(made[r], told, strict=True)]
            made[r] = simulation.scored(records, parts[r][-1].ids, last and count == most)
        seconds = (time.perf_counter() - began) / (count * len(made))  # each run's share
        return [[record._replace(seconds=seconds) for record in records] for records in made]

    def laid_out(self, t: int, positions: Sequence[Ids]) -> Block:
        return laid_out(self.outlooks, self.data, t, positions, (len(self.outlooks),))

    def due(self) -> Block:
        """The block that holds the next round."""
        t = self.simulations[0].t
        if self.block is None or not self.block.holds(t):
            block = self.following if self.following is not None and self.following.holds(t) else None
            self.block = block or self.laid_out(t, [simulation.position for simulation in self.simulations])
            self.following, self.taken = None, False
            self.outlooks[0].waited_for()
        return self.block


def fits(parts: Sequence[Part], room: int) -> bool:
    """Whether a round of every run has somebody in it, and not more than there is room for."""
    return all(0 < len(part.ids) <= room for part in parts)


def stacked(states: Sequence[Any]) -> Any:
    """The states of R runs as one [R, ...]."""
    return map_leaves(lambda *each: torch.stack(each), *states)
