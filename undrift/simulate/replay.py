"""Stretches of rounds replayed as a `Program`: laid out on the host, run on the device, told afterwards."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from undrift.round import RoundRecord
from undrift.simulate.execute import Stacked, available_memory
from undrift.simulate.program import LONGEST_UNROLLED, Ahead, Program, Shape, uses_whole
from undrift.streams import Purpose, signed, stream
from undrift.vec import map_leaves, nbytes

if TYPE_CHECKING:
    from undrift.simulate.engine import Simulation

Ids = NDArray[np.int64]
LONGEST = 32  # rounds at most that are laid out together
ROOM = 1 << 28  # bytes for their samples


class Part(NamedTuple):
    """Who takes part in a round, on the host."""

    invited: Ids
    ids: Ids  # who answers
    drawn: Ids  # their places in the order drawn
    steps: Ids  # K_i


class Replay:
    """Runs a simulation's rounds as a `Program`."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        settings, data, alg = simulation.settings, simulation.data, simulation.alg
        self.plan, self.data, self.alg = settings.plan, data, alg
        self.width = int(min(self.plan.batch, data.sizes.max()))
        self.steps = int(self.plan.steps_of(data.sizes).max())  # most local steps
        self.always_whole = settings.sampling == "fixed" and not settings.dropout_rate
        self.clients = settings.cohort  # most clients: four standard deviations above the mean, where chance decides
        if settings.sampling != "fixed":
            deviation = math.sqrt(settings.cohort * (1 - settings.cohort / data.clients))
            self.clients = min(data.clients, math.ceil(settings.cohort + 4 * deviation))
        self.longest = max(1, min(LONGEST, ROOM // (8 * self.clients * self.steps * self.width)))
        self.scheduled = settings.lr_decay != 1.0 or bool(settings.lr_drops)
        self.program = Program(
            alg, simulation.net, data, simulation.state, self.width, settings.weights == "size", settings.compile
        )

    def possible(self, parts: list[Part]) -> bool:
        """Whether the cohorts are stacked whole, with their samples on the device, and none is empty or unusually large."""
        execution = self.simulation.execution
        sizes = [len(part.ids) for part in parts]
        return (
            isinstance(execution, Stacked)
            and execution.chunk >= self.clients
            and self.data.train.held is not None
            and 0 < min(sizes) <= max(sizes) <= self.clients
        )

    def stretch(self, parts: list[Part]) -> list[RoundRecord]:
        """The records of the rounds, without scores and times; none, and nothing changed, where it did not work out."""
        if not self.possible(parts):
            return []
        simulation, program = self.simulation, self.program
        position, new = simulation.position.copy(), self.make_room(parts)
        ahead = self.lay_out(parts, position)
        touched = ahead.row.unique()
        before = [column[touched].clone() for column in simulation.clients.columns]
        program.load(simulation.state, ahead, simulation.clients.columns)
        for part in parts:
            program.run(self.shape(part), len(part.ids), int(part.steps.max()))
        left = {name: values[: len(parts)].tolist() for name, values in program.left.items()}
        if not all(left.pop("fine")):
            for column, old in zip(simulation.clients.columns, before, strict=True):
                column[touched] = old
            simulation.clients.forget(new)
            return []
        simulation.state = map_leaves(lambda t: t.clone(), program.state)
        simulation.position = position
        return [self.record(part, {name: values[n] for name, values in left.items()}) for n, part in enumerate(parts)]

    def make_room(self, parts: list[Part]) -> list[int]:
        """Rows of the clients' table for all who take part, if possible for everybody at once; also who is new in it."""
        table, clients = self.simulation.clients, self.data.clients
        if not table.columns:
            return []
        everybody = sum(column.shape[1:].numel() * column.element_size() for column in table.columns) * clients
        new = [i for i in dict.fromkeys(np.concatenate([p.ids for p in parts]).tolist()) if i not in table.row]
        roomy = everybody < available_memory(self.simulation.device) // 4
        table.reserve((clients if roomy else len(table.row) + len(new)) + 1)  # one for empty places
        return new

    def lay_out(self, parts: list[Part], position: Ids) -> Ahead:
        """The inputs of the rounds; `position` counts on."""
        simulation, seed, table = self.simulation, self.simulation.settings.seed, self.simulation.clients
        R, S, K, device = self.longest, self.clients, self.steps, self.simulation.device
        ids, drawn, steps, row = (np.zeros((R, S), dtype=np.int64) for _ in range(4))
        known, clients, taken = np.zeros((R, S), dtype=bool), np.zeros((R, 1), dtype=np.int64), []
        spare = len(table.columns[0]) - 1 if table.columns else 0  # the row of empty places
        for n, part in enumerate(parts):
            size = len(part.ids)
            taken.append(position[part.ids])
            position[part.ids] += part.steps
            ids[n], steps[n], row[n], clients[n] = part.ids[0], 1, spare, size
            ids[n, :size], drawn[n, :size], steps[n, :size] = part.ids, part.drawn, part.steps
            if table.columns:
                row[n, :size], known[n, :size] = table.assign(part.ids.tolist())
        rounds = np.repeat(np.arange(len(parts)), [len(part.ids) for part in parts])
        everybody = np.concatenate([part.ids for part in parts])
        batches = self.data.table(self.plan, seed, simulation.t + rounds, everybody, np.concatenate(taken))
        batches = batches.shortened(np.concatenate([part.steps for part in parts]))
        place, most = np.arange(S) < clients, batches.count.shape[1]
        real = np.zeros((R, S, K), dtype=np.int64)
        real[:, :, :most][place] = batches.count
        samples = torch.zeros((R, S, K, self.width), dtype=torch.int64, device=device)
        samples[:, :, :most, : batches.index.shape[2]][torch.from_numpy(place).to(device)] = batches.index[:, :most]
        ahead = range(simulation.t, simulation.t + R)
        rates = [self.alg.lr * simulation.settings.schedule(t) for t in ahead] if self.scheduled else []
        dropout, augment = (
            torch.tensor([signed(stream(seed, purpose, t)) for t in ahead], device=device)
            for purpose in (Purpose.DROPOUT, Purpose.AUGMENT)
        )

        def put(array: NDArray[Any]) -> Tensor:
            return torch.from_numpy(array).to(device)

        return Ahead(
            ids=put(ids), drawn=put(drawn), steps=put(steps), row=put(row), known=put(known), samples=samples,
            real=put(real), rate=torch.tensor(rates, dtype=simulation.state.x.dtype, device=device),
            clients=put(clients), dropout=dropout, augment=augment,
        )  # fmt: skip

    def shape(self, part: Part) -> Shape:
        """The graph for a round. Sizes are rounded up to a few, so that few are captured."""
        sizes, slow = self.data.sizes, self.simulation.settings.slow[0]
        steps = self.plan.steps if self.plan.steps <= LONGEST_UNROLLED else 0
        full = self.plan.steps and not slow and self.plan.batch == self.width and not (sizes % self.width).any()
        clients = self.clients if self.always_whole else rounded_up(len(part.ids), self.clients)
        batches = -(-sizes[part.ids].max() // self.width) if uses_whole(self.alg) else 0
        largest = -(-sizes.max() // self.width)
        ragged = not (full and self.always_whole)
        return Shape(clients, steps, not self.always_whole, ragged, rounded_up(int(batches), int(largest)))

    def record(self, part: Part, told: dict[str, float]) -> RoundRecord:
        """The record of the next round."""
        simulation, program, invited, clients = self.simulation, self.program, len(part.invited), len(part.ids)
        # In the first round nobody lacks anything of a round before.
        returning = len(np.intersect1d(part.invited, simulation.last_cohort)) if simulation.t else invited
        bytes_down = self.alg.bytes_down(program.down, invited, returning, self.data.clients)
        bytes_down += invited * nbytes(simulation.state.buffers)
        bytes_up = clients * (program.bytes_measured + program.bytes_answered)
        passes = program.passes * int((-(-self.data.sizes[part.ids] // self.width)).sum())
        network = simulation.network_seconds(bytes_down / invited + bytes_up / clients, 2 if self.alg.measures else 1)
        simulation.last_cohort = part.ids
        simulation.t += 1
        return RoundRecord(
            round=simulation.t, loss=None, accuracy=None, bytes_down=bytes_down, bytes_up=bytes_up,
            gradients=program.calls * int(part.steps.sum()) + passes, consistency=told.pop("consistency"), seconds=0.0,
            train_loss=told.pop("train_loss"), clients=invited, dropped=invited - clients, more=told | network,
        )  # fmt: skip


def rounded_up(size: int, most: int, shapes: int = 4) -> int:
    """The size, rounded up to one of a few.

    >>> [rounded_up(n, 22) for n in (1, 6, 7, 22)]
    [6, 6, 12, 22]
    """
    step = max(1, -(-most // shapes))
    return min(most, -(-size // step) * step)
