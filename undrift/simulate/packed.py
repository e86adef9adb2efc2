"""Several runs as one program: simulations that differ in seeds and in real-valued settings, with the runs as one more
leading dimension.

The server's models are [R, P], the cohorts [R, S] and the clients' vectors [R, S, P]. A real field in which the runs differ
becomes a tensor: [R, 1, 1] where clients use it, [R, 1] on the server. Every simulation stays what it is: it draws
its own cohorts and batches, and after each block of rounds it is handed its part of the state and makes its records.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from undrift.algorithms.base import Algorithm, Cohort
from undrift.algorithms.wrapper import KeepMoments, Wrapper, at_rate
from undrift.core.errors import BadSetting
from undrift.core.trees import map_leaves
from undrift.data.federation import Federation, Ids
from undrift.oracle.net import Net
from undrift.round.order import ServerState
from undrift.round.record import RoundRecord
from undrift.round.who import Attendance
from undrift.simulate.clients import ClientTable
from undrift.simulate.program import COMPILED_FROM, Later, Program, Shape
from undrift.simulate.replay import Block, Outlook, Replay, Stretch, lay_out
from undrift.simulate.simulation import Simulation


def varying(alg: Algorithm) -> set[str]:
    """The fields in which runs of one program may differ: what the classes of an algorithm name as `varies`."""
    return {name for kind in type(alg).__mro__ for name in vars(kind).get("varies", ())}


def structure(alg: Algorithm) -> tuple[Any, ...]:
    """What algorithms of one kind must have in common to be packed; of real numbers it is how many there are."""
    free = varying(alg)

    def common(name: str, value: Any) -> Any:
        if name not in free:
            return value
        return len(value) if isinstance(value, tuple) else 1

    return tuple(common(f.name, getattr(alg, f.name)) for f in dataclasses.fields(cast(Any, alg)))


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


# What the server does; the rest of the interface is the clients'.
SERVER_SIDE = (
    "companion_init", "companion_networks", "companion_step", "broadcast", "measured", "gather", "reply",
    "server_init", "server_step", "facts", "lr", "selector",
)  # fmt: skip


class Together(Wrapper):
    """The algorithms of several runs as one: clients see one form of the fields that differ, the server another."""

    def __init__(self, inner: Algorithm, server: Algorithm, algs: Sequence[Algorithm]) -> None:
        super().__init__(inner)
        object.__setattr__(self, "server", server)
        object.__setattr__(self, "algs", algs)

    def at_rate(self, lr: float | Tensor) -> Together:
        assert isinstance(lr, Tensor)
        each = [at_rate(alg, rate) for alg, rate in zip(self.algs, lr.expand(len(self.algs)), strict=True)]
        return Together(at_rate(self.inner, lr.view(-1, 1, 1)), at_rate(self.server, lr.view(-1, 1)), each)

    @property
    def lr(self) -> float:
        return self.server.lr  # type: ignore[no-any-return]

    def forward(self, name: str, given: dict[str, Any]) -> Any:
        if name not in SERVER_SIDE:
            return super().forward(name, given)
        if self.inner.one_run or name == "facts":
            return self.run_by_run(name, given)
        return getattr(self.server, name)(**given)

    def run_by_run(self, name: str, given: dict[str, Any]) -> Any:
        """Each run with its own plain algorithm, on its own clients without empty places."""
        cohort: Cohort | None = given.get("cohort", given.get("invited"))
        views: dict[int, Tensor] = {}  # which tensor of all runs a run's tensor is a part of
        results = []
        for r, alg in enumerate(self.algs):
            present = None if cohort is None or cohort.there is None else int(cohort.there[r].sum())
            mine = {n: part_of_run(n, value, r, present, alg.lr, views) for n, value in given.items()}
            results.append(getattr(alg, name)(**mine))
        return together(results, views)


def part_of_run(name: str, value: Any, run: int, present: int | None, lr: float, views: dict[int, Tensor]) -> Any:
    """A run's part of an argument; of answers and cohorts the first `present` clients."""

    def part(t: Tensor) -> Tensor:
        mine = t[run, :present] if name == "up" and present is not None else t[run]
        views[id(mine)] = t
        kept.append(mine)  # a tensor's id is its own only while it lives
        return mine

    kept: list[Tensor] = views.setdefault(0, [])  # type: ignore[arg-type, assignment]
    if isinstance(value, Cohort):
        ids, drawn, weight, steps = (t[run, :present] for t in value[:4])
        weight = weight / weight.sum(-2, keepdim=True) if present is not None else weight
        return value._replace(ids=ids, drawn=drawn, weight=weight, steps=steps, lr=lr, there=None)
    return value if isinstance(value, int) else map_leaves(part, value)


def together(results: list[Any], views: dict[int, Tensor]) -> Any:
    """The results of all runs as one. What every run gave back as it got it stays where it is: it may be large."""
    first = results[0]
    if isinstance(first, Tensor):
        whole = {id(views.get(id(result))) for result in results}
        return views[id(first)] if id(first) in views and len(whole) == 1 else torch.stack(results)
    if isinstance(first, dict):
        return {name: torch.stack([result[name] for result in results]) for name in first}
    each = [together(list(parts), views) for parts in zip(*results, strict=True)]
    return type(first)(*each) if hasattr(first, "_fields") else tuple(each)


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
        state: ServerState,
        width: int,
        by_size: bool,
        empty: bool,
        compile: bool,
    ) -> None:
        runs, clients = len(algs), joined(algs, state.x, 3)
        clients = KeepMoments(clients) if clients.keep_moments else clients
        alg = Together(clients, joined(algs, state.x, 2), algs)
        super().__init__(alg, net, data, state, width, by_size, empty, compile, (runs,))
        self.first_row = torch.arange(runs, device=state.x.device).view(-1, 1) * (data.clients // runs)

    def rows(self, ids: Tensor) -> Tensor:
        return self.first_row + ids

    def end_apart(self, later: Later, clients: Sequence[int]) -> None:
        self.keep(later.given[0], later.close(*later.given))


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
        self.tables: list[ClientTable] = []
        self.data = united([s.data for s in simulations])
        self.block: Block | None = None
        self.following: Block | None = None  # laid out while the device was busy
        self.taken = False  # whether the program has taken the block's inputs

    def begin(self) -> PackedProgram:
        """The program, and one table for all clients of all runs, of which each simulation's is a part."""
        first = self.simulations[0]
        for outlook, simulation in zip(self.outlooks, self.simulations, strict=True):
            states, table = simulation.first_states(), simulation.clients
            if states is None or not Replay.possible(simulation, states.client) or not isinstance(table, ClientTable):
                raise BadSetting(
                    "runs are packed only where cohorts are stacked, and samples and client state in memory"
                )
            if not all(map(torch.equal, constants(simulation.net), constants(first.net))):
                raise BadSetting("runs are packed only where what the model does not train is the same in all of them")
            outlook.whole = states.whole
            table.begin(states.client)
            table.spread(simulation.data.clients)
            self.tables.append(table)
        for column in zip(*(table.columns for table in self.tables), strict=True):
            self.columns.append(torch.cat([*(c[:-1] for c in column), column[0][-1:]]))
        N = first.data.clients
        for r, table in enumerate(self.tables):
            table.columns = [column[r * N : (r + 1) * N] for column in self.columns]
        program = PackedProgram(
            [s.alg for s in self.simulations], first.net, self.data, stack([s.state for s in self.simulations]),
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
        at, room = first.t - block.first, self.outlooks[0].clients
        parts = [mine[at : at + min(most, first.until_scores())] for mine in block.parts]
        count = next((n for n, now in enumerate(zip(*parts, strict=True)) if not fits(now, room)), len(parts[0]))
        if not count:  # nobody comes in one of the runs, or more than there is room for: everybody on their own
            self.block = None
            return [[simulation.round(last and most == 1)] for simulation in self.simulations]
        program = self.program = self.begin() if self.program is None else self.program
        if not self.taken:
            program.take(block.ahead)
            self.taken = True
        stretches = [
            Stretch(outlook, table, mine[:count])
            for outlook, table, mine in zip(self.outlooks, self.tables, parts, strict=True)
        ]
        known = [r * first.data.clients + i for r, table in enumerate(self.tables) for i in table.row]
        program.load(stack([s.state for s in self.simulations]), self.columns, known, at)
        for now in zip(*(stretch.parts for stretch in stretches), strict=True):
            self.play(program, now)
        # While the device is busy: what follows, and the records.
        if at + count == len(block.parts[0]):
            self.following = self.lay_out(first.t + count, [stretch.position for stretch in stretches])
        for r, stretch in enumerate(stretches):
            stretch.write(program, dataclasses.replace(program.cost, down=of_run(program.cost.down, r)))
        numbers = {name: values.T.tolist() for name, values in program.numbers(at, count).items()}  # [R, rounds]
        good = numbers.pop("good")
        records: list[list[RoundRecord]] = []
        for r, (simulation, stretch) in enumerate(zip(self.simulations, stretches, strict=True)):
            if not all(good[r]):
                stretch.take_back()
                stretch.table.columns = [column.clone() for column in stretch.table.columns]  # no part of the pack's
                records.append([])
                continue
            by_round = [{name: values[r][n] for name, values in numbers.items()} for n in range(count)]
            mine = stretch.keep(of_run(program.state, r), by_round)
            records.append(simulation.scored(mine, stretch.parts[-1].ids, last and count == most))
        seconds = (time.perf_counter() - began) / (count * len(records))  # each run's share
        return [[record._replace(seconds=seconds) for record in mine] for mine in records]

    def play(self, program: PackedProgram, now: Sequence[Attendance]) -> None:
        """The next round of all runs."""
        pairs = list(zip(self.outlooks, now, strict=True))
        shape = Shape(*(max(sizes) for sizes in zip(*(outlook.shape(part) for outlook, part in pairs), strict=True)))
        live = zip(*(outlook.live(part) for outlook, part in pairs), strict=True)
        program.run(shape, [len(part.ids) for part in now], [max(counts) for counts in live])

    def lay_out(self, t: int, positions: Sequence[Ids]) -> Block:
        return lay_out(self.outlooks, self.data, t, positions, (len(self.outlooks),))

    def due(self) -> Block:
        """The block that holds the next round."""
        t = self.simulations[0].t
        if self.block is None or not self.block.holds(t):
            block = self.following if self.following is not None and self.following.holds(t) else None
            self.block = block or self.lay_out(t, [simulation.position for simulation in self.simulations])
            self.following, self.taken = None, False
            self.outlooks[0].wait()
        return self.block


def of_run(state: Any, run: int) -> Any:
    """A run's part of a state [R, ...]."""
    return map_leaves(lambda t: t[run], state)


def fits(parts: Sequence[Attendance], room: int) -> bool:
    """Whether a round of every run has somebody in it, and not more than there is room for."""
    return all(0 < len(part.ids) <= room for part in parts)


def stack(states: Sequence[ServerState]) -> ServerState:
    """The states of R runs as one [R, ...]."""
    return map_leaves(lambda *each: torch.stack(each), *states)
