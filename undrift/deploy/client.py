"""A client of a real federation: it answers letters with the simulator's local steps.

It holds the algorithm, the net and its samples. The forms of messages and states it knows as tensors without memory
(PyTorch's meta device).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from undrift.algorithms.base import Algorithm
from undrift.algorithms.personal import Served
from undrift.core.layout import Vec
from undrift.core.trees import Nothing, State, leaves, map_leaves, named_leaves
from undrift.data.federation import Federation
from undrift.deploy.messages import Fact, Letter, Refused, pack, unpack
from undrift.deploy.scores import SCORE, Scoring, tell_scores
from undrift.deploy.secure import KEYS, SHARES, UNMASK, Summand
from undrift.deploy.sent import write_sent
from undrift.deploy.state import Store
from undrift.oracle.net import Net
from undrift.round.clients import new_clients, train
from undrift.round.compressed import Uplink, upload_form, wrap
from undrift.round.order import receive
from undrift.round.shapes import Forms
from undrift.simulate.evaluate import Metrics, means, sample_scores, weights_of
from undrift.simulate.settings import Settings
from undrift.simulate.work import LocalWhole, LocalWork

# The exchanges: two in a round, and one after the last round for replies that are still to be sent.
MEASURE, TRAIN, CLOSE = "measure", "train", "close"
AROUND = (KEYS, SHARES, UNMASK)  # letters around an exchange whose answers are added up under masks
ECHOED = ("run", "client", "round", "exchange")  # the facts of a letter that its answer repeats


class Request(NamedTuple):
    """The arrays of the server's letter; when the run is over, only the reply."""

    down: State = Nothing()
    buffers: State = Nothing()
    reply: State = Nothing()  # the server's reply to the client's last round


class Reply(NamedTuple):
    """The arrays that a client sends when it has trained."""

    up: State
    buffers: Tensor


class Measured(NamedTuple):
    """The arrays that a client sends when it has measured."""

    sent: Vec


@dataclass
class Client:
    """One client."""

    name: str
    alg: Algorithm
    net: Net
    data: Federation
    settings: Settings
    device: torch.device
    root: Path  # the folder of its states
    secure_bound: float = 0.0  # the largest entry of an upload that travels under masks; 0: uploads are not masked
    sums: int = 0  # fewest clients whose uploads are added up before the server sees them; 0: any, even this one's
    metrics: Metrics = field(default_factory=dict)  # for samples that it holds out
    run_settings: str = ""  # the run's, as text

    def __post_init__(self) -> None:
        self.net, how = self.net.to(self.device), self.settings
        self.uplink: Uplink | None = None
        if how.compress:
            form = upload_form(self.alg, self.net, self.data.clients)
            self.uplink = Uplink(how.compress, how.seed, self.net, form)

    def algorithm(self, t: int, later: int = 0) -> Algorithm:
        """The algorithm as it is in round t, at the rate of so many rounds later."""
        return wrap(self.alg.at(t), self.settings.schedule(t + later), self.uplink, t + later)

    def answer(self, letter: Letter) -> Letter:
        """Answer a letter of the server, and write down what was sent; raise Refused if the letter cannot be answered."""
        answer = self.make_answer(letter)
        write_sent(self.root / letter.fact("run", str) / self.name, letter, answer)
        return answer

    def make_answer(self, letter: Letter) -> Letter:
        """Answer a letter, which must be for this client."""
        began = time.perf_counter()
        id, t, since = (letter.fact(name, int) for name in ("id", "round", "since"))
        position, exchange = letter.fact("position", int), letter.fact("exchange", str)
        if letter.fact("client", str) != self.name:
            raise Refused(f"a letter for {letter.facts['client']!r} came to {self.name!r}")
        if not (0 <= id < self.data.clients and self.data.sizes[id]):
            raise Refused(f"client {id} has no samples here")
        if t < 0 or since < 0 or position < 0:
            raise Refused(f"a round, or a number of batches, below 0: {t}, {since}, {position}")
        store = Store(self.root, letter.fact("run", str), self.name)
        summand = Summand(store.folder, self.net, self.device, self.secure_bound, self.sums, self.run_settings)
        exchange, dash, step = exchange.partition("-")
        if self.secure_bound and dash + step in AROUND and exchange in (MEASURE, TRAIN):
            return Letter(self.echo(letter), summand.answer(letter, exchange, dash + step))
        alg, net = self.algorithm(t), self.net
        past = self.algorithm(since - 1) if since else alg  # as it was in this client's last round
        forms, before = (Forms.of(a, net, self.data.clients) for a in (alg, past))
        due = before.reply if since and exchange in (TRAIN, CLOSE) else Nothing()
        if exchange == SCORE:
            return self.score(letter, id, past)
        if exchange == CLOSE:
            reply = unpack(letter.arrays, Request(reply=due), net, self.device).reply
            if (kept := store.read(since)) is None:
                raise Refused(f"the state after round {since}, to which the last reply belongs, is not here")
            state = receive(past, self.place(before.client, kept), reply)
            store.write(since, since, dict(named_leaves("client", state)), "final")
            return Letter(self.about(letter, id) | {"gradients": 0, "seconds": time.perf_counter() - began}, {})
        form = Request(forms.down, forms.buffers, due)
        if self.secure_bound and exchange in (MEASURE, TRAIN):
            down, buffers, reply = summand.take(letter, exchange, form)
        else:
            down, buffers, reply = unpack(letter.arrays, form, net, self.device)
        work = self.work(id, t, position)
        whole, facts, numbers = LocalWhole.of(work, 0, buffers), self.about(letter, id), list[float]()
        sent: State
        if exchange == MEASURE:
            sent = Measured(alg.measure(down, whole))
        elif exchange == TRAIN:
            kept = store.read(since) if since and leaves(forms.client) else None
            state = new_clients(alg, down, work.ids[0], buffers)
            if kept is not None:
                state = receive(past, self.place(state, kept), reply)
            answers = train(alg, down, state, buffers, work.steps(0), whole)
            if leaves(forms.client):
                store.write(since, t + 1, dict(named_leaves("client", answers.client)))
            sent, numbers = Reply(answers.up, answers.buffers), [float(v) for v in (answers.loss, *answers.facts)]
            lost = bool(since and leaves(forms.client) and kept is None)  # its state, so that it began anew
            facts |= {"loss": float(answers.loss), "steps": int(work.table.steps[0]), "anew": lost}
            facts |= {f"fact.{name}": float(value) for name, value in answers.facts._asdict().items()}
        else:
            raise Refused(f"the exchange is {exchange!r}, not {MEASURE}, {TRAIN} or {CLOSE}")
        if self.secure_bound:
            return Letter(self.echo(letter), summand.mask(letter, exchange, sent, numbers))
        arrays = pack(sent, net)
        if self.settings.privacy is not None:  # the update, and which letter it answers
            return Letter(self.echo(letter), arrays)
        gradients = work.gradients + whole.gradients
        return Letter(facts | {"gradients": gradients, "seconds": time.perf_counter() - began}, arrays)

    def score(self, letter: Letter, id: int, past: Algorithm) -> Letter:
        """Score the server's model, and the one that serves this client, on the samples that it holds out.

        `past` is the algorithm as it was in this client's last round.
        """
        began, t, since = time.perf_counter(), letter.fact("round", int), letter.fact("since", int)
        alg, net, own = self.algorithm(t, 1), self.net, self.data.held_out.get("test")
        if own is None or self.settings.privacy is not None or self.secure_bound:
            raise Refused("this client holds no samples out, or does not say how models do on them")
        forms, due = Forms.of(alg, net, self.data.clients), Forms.of(past, net, self.data.clients).reply
        form = Scoring(forms.down.x, forms.down, forms.buffers, due if since else Nothing())
        x, down, buffers, reply = unpack(letter.arrays, form, net, self.device)
        work = self.work(id, t, letter.fact("position", int))
        mine = own.owners == id
        rows, owners = own.rows[mine], own.owners[mine]
        weight = weights_of(net, own.split, rows)

        def means_of(model: Served) -> dict[str, float]:
            scores = sample_scores(net, *model, own.split, self.data.transform, self.metrics, rows, owners)
            return means(scores, weight)

        found = {"global": means_of(Served(x, buffers))}
        if alg.personalises:
            state = new_clients(alg, down, work.ids[0], buffers)
            store = Store(self.root, letter.fact("run", str), self.name)
            if since and leaves(forms.client) and (kept := store.read(since)) is not None:
                state = receive(past, self.place(state, kept), reply)
            found["personal"] = means_of(alg.serves(down, state, LocalWhole.of(work, 0, buffers)))
        facts = self.about(letter, id) | tell_scores(found, float(weight.sum()))
        return Letter(facts | {"seconds": time.perf_counter() - began}, {})

    def work(self, id: int, t: int, position: int) -> LocalWork:
        """The samples and steps of a round, after `position` earlier batches."""
        ids, plan, seed = np.array([id]), self.settings.plan, self.settings.seed
        table = self.data.table(plan, seed, t, ids, np.array([position]))
        return LocalWork(self.net, self.data, seed, t, torch.from_numpy(ids).to(self.device), table, plan.batch)

    def echo(self, letter: Letter) -> dict[str, Fact]:
        """The facts that say which letter an answer belongs to."""
        return {name: letter.facts[name] for name in ECHOED}

    def about(self, letter: Letter, id: int) -> dict[str, Fact]:
        """The facts of an answer that is open: which letter it answers, and how many samples this client has."""
        return self.echo(letter) | {"samples": int(self.data.sizes[id])}

    def place(self, fresh: State, kept: dict[str, Tensor]) -> State:
        """Put the kept tensors into the form of a fresh state."""
        form = dict(named_leaves("client", fresh))
        if {n: (t.shape, t.dtype) for n, t in kept.items()} != {n: (t.shape, t.dtype) for n, t in form.items()}:
            raise Refused("the state on this client's disk has another form; another version of the algorithm wrote it")
        stored = iter([kept[name].to(self.device) for name in form])
        return map_leaves(lambda _: next(stored), fresh)
