"""A client of a real federation: it answers letters with the same local steps that the simulator takes.

The simulator's own object serves a federation of which this client runs only itself: `opening` lays out its batches, and
`round.client_part` runs with vectors [P].
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from torch import Tensor

from undrift.deploy.messages import Fact, Letter, Refused, pack, unpack
from undrift.deploy.state import Store
from undrift.round import client_part
from undrift.simulate.engine import Simulation, named_leaves
from undrift.simulate.execute import Execution, LocalWhole
from undrift.simulate.replay import Part
from undrift.vec import leaves, map_leaves

MEASURE, TRAIN = "measure", "train"  # the exchanges of a round


class Request(NamedTuple):
    """The arrays that the server sends."""

    down: Any
    buffers: Tensor


class Reply(NamedTuple):
    """The arrays that a client sends back when it has trained."""

    up: Any
    buffers: Tensor


class Measured(NamedTuple):
    """The arrays that it sends back when it has measured."""

    sent: Tensor


class Client:
    """One client: its name, its data and model within `simulation`, and where its states are kept."""

    def __init__(self, name: str, simulation: Simulation, root: Path) -> None:
        self.name, self.simulation, self.root = name, simulation, root
        simulation.execution = cast(Execution, self)  # chosen already: this client alone

    def answer(self, letter: Letter) -> Letter:
        """The answer to a letter of the server; Refused where the letter is not for this client or cannot be read."""
        began = time.perf_counter()
        run = self.simulation
        id, t, since = (letter.fact(name, int) for name in ("id", "round", "since"))
        position, exchange = letter.fact("position", int), letter.fact("exchange", str)
        if letter.fact("client", str) != self.name:
            raise Refused(f"a letter for {letter.facts['client']!r} came to {self.name!r}")
        if not (0 <= id < run.data.clients and run.data.sizes[id]):
            raise Refused(f"client {id} has no samples here")
        store = Store(self.root, letter.fact("run", str), self.name)

        run.t, run.position[id] = t, position
        whom = np.array([id])
        part = Part(whom, whom, np.zeros(1, np.int64), run.settings.plan.steps_of(run.data.sizes[whom]))
        alg, work, _, expected, _ = run.opening(part)
        layout = run.net.layout
        down, buffers = unpack(letter.arrays, Request(expected, run.state.buffers), layout)
        run.state = run.state._replace(x=down.x, buffers=buffers)
        whole = LocalWhole.of(work, 0, buffers)
        facts: dict[str, Fact] = {name: letter.facts[name] for name in ("run", "client", "round", "exchange")}
        if exchange == MEASURE:
            arrays = pack(Measured(alg.measure(down, whole)), layout)
        elif exchange == TRAIN:
            fresh = map_leaves(lambda v: v[0], run.fresh(alg, down, work.ids))
            kept = store.read(since) if since and leaves(fresh) else None
            answers = client_part(alg, down, placed(fresh, kept), buffers, work.steps(0), whole)
            if leaves(fresh):
                store.write(since, t + 1, dict(named_leaves("client", answers.client)))
            arrays = pack(Reply(answers.up, answers.buffers), layout)
            facts |= {
                "loss": float(answers.loss),
                "steps": int(work.table.steps[0]),
                # Its state is gone, with its disk perhaps: it has begun anew.
                "anew": bool(since and leaves(fresh) and kept is None),
            }
            facts |= {f"fact.{name}": float(value) for name, value in answers.facts._asdict().items()}
        else:
            raise Refused(f"the exchange is {exchange!r}, not {MEASURE} or {TRAIN}")
        gradients = work.gradients + whole.gradients
        return Letter(facts | {"gradients": gradients, "seconds": time.perf_counter() - began}, arrays)


def placed(fresh: Any, kept: dict[str, Tensor] | None) -> Any:
    """The state as it was kept, in the form of a fresh one."""
    if kept is None:
        return fresh
    form = dict(named_leaves("client", fresh))
    if kept.keys() != form.keys() or any(kept[n].shape != v.shape or kept[n].dtype != v.dtype for n, v in form.items()):
        raise Refused("the state on this client's disk has another form; another version of the algorithm wrote it")
    stored = iter([kept[name].to(v.device) for name, v in form.items()])
    return map_leaves(lambda _: next(stored), fresh)
