"""A client of a real federation: it answers letters with the same local steps that the simulator takes.

The simulator's own object serves a federation of which this client runs only itself: `opening` lays out its batches, and
`round.client_part` runs with vectors [P].
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from undrift.algorithms.base import Algorithm, Cohort, Nothing
from undrift.core.trees import leaves, map_leaves, named_leaves, unstacked
from undrift.deploy.messages import Fact, Letter, Refused, pack, unpack
from undrift.deploy.state import Store
from undrift.round.order import Answers, begin, client_part, end, received
from undrift.simulate.execute import Execution, LocalWhole
from undrift.simulate.replay import Part
from undrift.simulate.simulation import Simulation

MEASURE, TRAIN = "measure", "train"  # the exchanges of a round
CLOSE = "close"  # and one after the last round, for whom a reply is still to be sent


class Request(NamedTuple):
    """The arrays that the server sends."""

    down: Any
    buffers: Tensor
    reply: Any = Nothing()  # what the algorithm sends this client when a round is over, of the last one that it was in


class Closing(NamedTuple):
    """The arrays that it sends when the run is over."""

    reply: Any


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
        run.enter()
        whom = np.array([id])
        part = Part(whom, whom, np.zeros(1, np.int64), run.settings.plan.steps_of(run.data.sizes[whom]))
        alg, work, alone, expected, _ = run.opening(part)
        past = run.whole.at(since - 1) if since else alg  # the algorithm as it was in this client's last round
        due = reply_like(past, run, alone) if since and exchange in (TRAIN, CLOSE) else Nothing()
        if exchange == CLOSE:
            reply = unpack(letter.arrays, Closing(due), run.net).reply
            kept = store.read(since)
            if kept is None:
                raise Refused(f"the state after round {since}, to which the last reply belongs, is not here")
            fresh = map_leaves(lambda v: v[0], run.fresh(past, expected, work.ids))
            state = received(past, placed(fresh, kept), reply)
            store.finish(since, dict(named_leaves("client", state)))
            return Letter(self.about(letter, id) | {"gradients": 0, "seconds": time.perf_counter() - began}, {})
        down, buffers, reply = unpack(letter.arrays, Request(expected, run.state.buffers, due), run.net)
        run.state = run.state._replace(x=down.x, buffers=buffers)
        whole = LocalWhole.of(work, 0, buffers)
        facts = self.about(letter, id)
        if exchange == MEASURE:
            arrays = pack(Measured(alg.measure(down, whole)), run.net)
        elif exchange == TRAIN:
            fresh = map_leaves(lambda v: v[0], run.fresh(alg, down, work.ids))
            kept = store.read(since) if since and leaves(fresh) else None
            state = fresh if kept is None else received(past, placed(fresh, kept), reply)
            answers = client_part(alg, down, state, buffers, work.steps(0), whole)
            if leaves(fresh):
                store.write(since, t + 1, dict(named_leaves("client", answers.client)))
            arrays = pack(Reply(answers.up, answers.buffers), run.net)
            facts |= {
                "loss": float(answers.loss),
                "steps": int(work.table.steps[0]),
                # Its state is gone, with its disk perhaps: it has begun anew.
                "anew": bool(since and leaves(fresh) and kept is None),
            }
            facts |= {f"fact.{name}": float(value) for name, value in answers.facts._asdict().items()}
        else:
            raise Refused(f"the exchange is {exchange!r}, not {MEASURE}, {TRAIN} or {CLOSE}")
        gradients = work.gradients + whole.gradients
        return Letter(facts | {"gradients": gradients, "seconds": time.perf_counter() - began}, arrays)

    def about(self, letter: Letter, id: int) -> dict[str, Fact]:
        """What every answer says: to what it is one, and how many samples this client has."""
        facts: dict[str, Fact] = {name: letter.facts[name] for name in ("run", "client", "round", "exchange")}
        return facts | {"samples": int(self.simulation.data.sizes[id])}


def answer_like(alg: Algorithm, down: Any, client: Any, buffers: Tensor) -> Answers:
    """One client's answer, without its work: only to know what it will be like."""
    client, buffers, work = begin(alg, down, client, buffers, torch.Size(), None)
    return end(alg, down, client, work, buffers, torch.full_like(down.x[..., :1], torch.nan))


def reply_like(alg: Algorithm, run: Simulation, alone: Cohort) -> Any:
    """What the algorithm replies to a client when a round is over: only to know what it will be like."""
    down = alg.broadcast(run.state.x, run.state.companion, alone)
    client = unstacked(run.fresh(alg, down, alone.ids), 1)[0]
    answer = map_leaves(lambda v: v.unsqueeze(0), answer_like(alg, down, client, run.state.buffers))
    return unstacked(alg.reply(run.state.companion, answer.up, answer.buffers, alone), 1)[0]


def placed(fresh: Any, kept: dict[str, Tensor]) -> Any:
    """The state as it was kept, in the form of a fresh one."""
    form = dict(named_leaves("client", fresh))
    if kept.keys() != form.keys() or any(kept[n].shape != v.shape or kept[n].dtype != v.dtype for n, v in form.items()):
        raise Refused("the state on this client's disk has another form; another version of the algorithm wrote it")
    stored = iter([kept[name].to(v.device) for name, v in form.items()])
    return map_leaves(lambda _: next(stored), fresh)
