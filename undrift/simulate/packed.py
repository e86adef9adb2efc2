"""Several runs as one program, with the runs as one more leading dimension: server [R, P], clients [R, S, P].

A real field in which runs differ becomes a tensor: [R, 1, 1] for clients, [R, 1] for the server. Each simulation draws its own
cohorts and batches; after a block of rounds it gets its part of the state and makes its records.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from undrift.algorithms.base import Algorithm, Cohort
from undrift.algorithms.wrapper import KeepMoments, Wrapper, at_rate, innermost
from undrift.core.errors import BadSetting
from undrift.core.trees import map_leaves
from undrift.data.federation import Federation
from undrift.kernels.launch import side_by_side
from undrift.oracle.net import Net
from undrift.round.order import ServerState
from undrift.round.private import Private
from undrift.round.record import RoundRecord
from undrift.simulate.program import Program
from undrift.simulate.replay import Replay
from undrift.simulate.simulation import Simulation

T = TypeVar("T")
BRANCHES = 8  # server steps side by side


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


def join(algs: Sequence[Algorithm], like: Tensor, dimensions: int) -> Algorithm:
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
    "companion_init", "companion_networks", "companion_step", "broadcast", "gather_measured", "gather", "reply",
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
        """Each run with its own plain algorithm, on its own clients without empty places; on a GPU several side by side."""
        cohort: Cohort | None = given.get("cohort", given.get("invited"))
        views, results = Views(), dict[int, Any]()

        def call(r: int) -> None:
            present = None if cohort is None or cohort.there is None else int(cohort.there[r].sum())
            own = {n: views.take(n, value, r, present, self.algs[r].lr) for n, value in given.items()}
            results[r] = getattr(self.algs[r], name)(**own)

        device = next((value.device for value in given.values() if isinstance(value, Tensor)), torch.device("cpu"))
        side_by_side(len(self.algs), BRANCHES, device, call)
        return views.stack([results[r] for r in range(len(self.algs))])


class Views:
    """Parts of tensors [R, ...] that single runs are given, so that what they give back as it was is known again."""

    def __init__(self) -> None:
        self.given: list[tuple[Tensor, Tensor]] = []  # a run's tensor, and the one that it is a part of

    def take(self, name: str, value: Any, run: int, present: int | None, lr: float) -> Any:
        """A run's part of an argument; of answers and cohorts the first `present` clients."""
        if isinstance(value, int):
            return value
        if isinstance(value, Cohort):
            ids, drawn, weight, steps = (t[run, :present] for t in value[:4])
            weight = weight / weight.sum(-2, keepdim=True) if present is not None else weight
            return value._replace(ids=ids, drawn=drawn, weight=weight, steps=steps, lr=lr, there=None)
        rows = slice(None) if name != "up" else slice(present)

        def part(t: Tensor) -> Tensor:
            own = t[run, rows] if t.dim() > 1 else t[run]
            self.given.append((own, t))
            return own

        return map_leaves(part, value)

    def stack(self, results: list[Any]) -> Any:
        """The results of all runs as one. What every run gave back as it got it stays where it is: it may be large."""
        first = results[0]
        if isinstance(first, Tensor):
            whole = [next((t for own, t in self.given if own is result), None) for result in results]
            return whole[0] if whole[0] is not None and len(set(map(id, whole))) == 1 else torch.stack(results)
        if isinstance(first, dict):
            return {name: torch.stack([result[name] for result in results]) for name in first}
        each = [self.stack(list(parts)) for parts in zip(*results, strict=True)]
        return type(first)(*each) if hasattr(first, "_fields") else tuple(each)


def unite(federations: Sequence[Federation]) -> Federation:
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


class Pack(Replay):
    """Simulations at the same round that are run together."""

    runs: Sequence[Simulation]

    def __init__(self, runs: Sequence[Simulation]) -> None:
        first = runs[0]
        assert all(run.t == first.t and run.data.train is first.data.train for run in runs)
        super().__init__(runs)
        self.lead, self.data = (len(runs),), unite([run.data for run in runs])
        for name in (
            "clients",
            "steps",
            "width",
            "scheduled",
            "ragged",
            "unequal",
            "largest",
        ):  # shapes have room for everybody
            largest = max(getattr(outlook, name) for outlook in self.outlooks)
            for outlook in self.outlooks:
                setattr(outlook, name, largest)
        for outlook in self.outlooks:
            outlook.longest = outlook.fitting(len(runs))

    def join_columns(self) -> list[Tensor]:
        """One table for all clients of all runs, of which each run's is a part."""
        columns = zip(*(table.columns for table in self.tables), strict=True)
        joined = [torch.cat([*(c[:-1] for c in column), column[0][-1:]]) for column in columns]
        N = self.runs[0].data.clients
        for r, table in enumerate(self.tables):
            table.columns = [column[r * N : (r + 1) * N] for column in joined]
        return joined

    def make_program(self) -> Program:
        first = self.runs[0]
        if not all(all(map(torch.equal, constants(run.net), constants(first.net))) for run in self.runs):
            raise BadSetting("runs are packed only where what the model does not train is the same in all of them")
        program = super().make_program()
        program.captures = first.settings.replay
        return program

    def algorithm(self) -> Algorithm:
        algs, x = [innermost(run.alg) for run in self.runs], self.runs[0].state.x
        clients = join(algs, x, 3)
        clients = KeepMoments(clients) if clients.keep_moments else clients
        together, first = Together(clients, join(algs, x, 2), algs), self.runs[0].alg
        return first.around(together) if isinstance(first, Private) else together

    def state(self) -> ServerState:
        return map_leaves(lambda *each: torch.stack(each), *(run.state for run in self.runs))

    def part(self, state: T, run: int) -> T:
        return map_leaves(lambda t: t[run], state)

    def scored_rounds(self, most: int, last: bool) -> list[list[RoundRecord]]:
        """Each run's next rounds, at most so many and no further than the next evaluation; `last`: they end after `most`.

        None, and nothing changed, for a run with an answer that was not finite: it is to leave the pack.
        """
        began = time.perf_counter()
        records = self.rounds(min(most, self.runs[0].score_keeper.until_due(self.runs[0].t)))
        if records is None:
            return [[run.round(last and most == 1)] for run in self.runs]
        for r, (run, own) in enumerate(zip(self.runs, records, strict=True)):
            if own:
                records[r] = run.add_scores(own, self.last[r].ids, last and len(own) == most)
            else:
                self.tables[r].columns = [column.clone() for column in self.tables[r].columns]  # no part of the pack's
        seconds = (time.perf_counter() - began) / max(1, sum(map(len, records)))  # each run's share
        return [[record._replace(seconds=seconds) for record in own] for own in records]
