"""Rounds as a program for the GPU: all that a round does, on tensors that stay where they are, replayed as CUDA graphs.

The inputs of the next rounds (who takes part, on which samples, at which rate) are laid out on the device beforehand, and
a counter on the device says which round it is. A replay needs nothing from the host, which looks at the results only when
a stretch of rounds is over. The functions captured are ordinary ones: without a GPU they run as they stand, which is how
the tests compare them with the engine's own rounds.

What a stretch takes for granted is checked afterwards: where a client's answer was not finite, the stretch is taken back
and the engine runs it round by round.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from undrift.algorithms.base import Algorithm, Cohort, Worker
from undrift.data.federation import Federation
from undrift.net import Net
from undrift.oracle import Oracle
from undrift.round import Answers, State, begin, consistency, end, fill, server_part, step
from undrift.simulate.execute import LocalWhole, mini_batch
from undrift.simulate.graphs import recorded
from undrift.vec import leaves, map_leaves, nbytes

LONGEST_UNROLLED = 16  # local steps of one graph; with more, a step is a graph of its own


def uses_whole(alg: Algorithm) -> bool:
    """Whether the method makes passes over a client's whole data."""
    return alg.measures or type(alg).prepare is not Worker.prepare


class Ahead(NamedTuple):
    """The inputs of R rounds. Where a round has fewer than S clients, the places behind them are empty."""

    ids: Tensor  # [R, S]
    drawn: Tensor  # [R, S] places in the order of sampling
    steps: Tensor  # [R, S] K_i
    samples: Tensor  # [R, S, K, B] rows of the training set
    real: Tensor  # [R, S, K] how many samples of each batch are real
    rate: Tensor  # [R] eta_l; [0] where it is always the same
    clients: Tensor  # [R, 1] how many of the S places are taken
    dropout: Tensor  # [R, S, K] keys
    augment: Tensor  # [R, S, K] keys


class Shape(NamedTuple):
    """What a graph is captured for."""

    clients: int  # S
    steps: int  # K, or 0 for any number
    empty: bool  # there may be empty places
    ragged: bool  # not all batches are full
    batches: int  # of a pass over a client's whole data


class Inputs(NamedTuple):
    """What a local step is made on."""

    ids: Tensor  # [S]
    samples: Tensor  # [S, B]
    real: Tensor  # [S]
    dropout: Tensor  # [S] keys
    augment: Tensor  # [S] keys


class Here(NamedTuple):
    """Where the clients stand in a round."""

    companion: Any  # of the server, after a first exchange
    down: Any
    client: Any
    work: Any
    buffers: Tensor
    loss: Tensor  # [S, 1] summed over the steps made
    made: Tensor  # [S, 1] steps made
    fine: Tensor  # [1] whether the first exchange was finite


class Program:
    """The rounds of one algorithm on one federation. `state` and the clients' table are changed in place.

    `packed.PackedProgram` has several runs as one more leading dimension: [..., S] below is [S] here and [R, S] there, and what
    is done otherwise there has a method or a field of its own here.
    """

    lead: tuple[int, ...] = ()  # runs that are packed

    def __init__(
        self, alg: Algorithm, net: Net, data: Federation, state: State, width: int, by_size: bool, compile: bool
    ) -> None:
        self.alg, self.net, self.data, self.width, self.by_size = alg, net, data, width, by_size
        self.total = data.clients  # N
        self.apart = alg.needs_host  # the server's part is no part of a graph
        self.captures = True  # False: play rounds as they are written, on a GPU too
        self.compile = compile
        self.compiled: dict[tuple[int, bool], Callable[..., list[Tensor]]] = {}  # local steps
        self.state = map_leaves(lambda t: t.clone(), state)
        device = state.x.device
        self.sizes, self.start = (torch.from_numpy(v).to(device) for v in (data.sizes, data.start))
        self.ahead: Ahead
        self.columns: list[Tensor] = []  # the clients' table, [N + 1, ...] each; the last row is that of empty places
        self.known = torch.zeros(data.clients + 1, dtype=torch.bool, device=device)  # whose row holds a state
        self.turn, self.at = (torch.zeros(1, dtype=torch.int64, device=device) for _ in range(2))  # round, local step
        self.left: dict[str, Tensor] = {}  # what each round leaves for its record, [R] each
        self.graphs: dict[Shape, list[Callable[[], Any]]] = {}
        # What every round has alike, found out by playing one.
        self.down: Any = None
        self.bytes_measured = self.bytes_answered = 0  # what one client sends up in the two exchanges
        self.calls = 0  # gradients of a step
        self.passes = 0  # over a client's whole data

    def take(self, ahead: Ahead) -> None:
        """The inputs of the next R rounds."""
        if hasattr(self, "ahead"):
            for old, new in zip(leaves(self.ahead), leaves(ahead), strict=True):
                old.copy_(new)
        else:
            self.ahead = ahead

    def load(self, state: State, columns: list[Tensor], known: Collection[int], turn: int) -> None:
        """Begin with this state of server and clients at one of the rounds ahead."""
        if [id(c) for c in columns] != [id(c) for c in self.columns]:
            self.graphs.clear()  # they were captured for other tensors
            self.columns = columns
        for old, new in zip(leaves(self.state), leaves(state), strict=True):
            old.copy_(new)
        self.known.zero_()
        if columns and known:
            self.known[torch.tensor(list(known), device=self.known.device)] = True
        self.turn.fill_(turn)

    def run(self, shape: Shape, clients: Sequence[int], steps: int) -> None:
        """The next round, of so many clients (in each run); none takes more steps."""
        if shape not in self.graphs:
            self.graphs[shape] = self.captured(shape)
        first, *rest = self.graphs[shape]
        here = first()
        if rest:
            one_step, last = rest
            for _ in range(steps):
                one_step()
            here = last()
        if self.apart:
            companion, answers, fine = here
            self.keep(self.served_apart(companion, answers, clients), answers, fine, shape)

    def captured(self, shape: Shape) -> list[Callable[[], Any]]:
        """The round as one graph, or as three: its beginning, one step, its end."""

        def close(here: Here) -> Any:
            companion, answers, fine = closed = self.close(here)
            if not self.apart:
                self.keep(
                    self.served(companion, answers, self.cohort(shape.clients, shape.empty)), answers, fine, shape
                )
            return closed

        if shape.steps:

            def whole() -> Any:
                here, batches = self.open(shape), self.batches(shape)
                for k in range(shape.steps):
                    here = self.advance(here, batches[k], shape)
                return close(here)

            return [self.recorded(whole)]

        here = map_leaves(lambda t: t.clone(), self.open(shape))
        self.at.zero_()

        def keep(now: Here) -> None:
            for old, new in zip(leaves(here), leaves(now), strict=True):
                old.copy_(new)

        def opening() -> None:
            keep(self.open(shape))
            self.at.zero_()

        def one_step() -> None:
            keep(self.advance(here, self.batch(shape), shape))
            self.at.add_(1)

        return [self.recorded(opening), self.recorded(one_step), self.recorded(lambda: close(here))]

    def recorded(self, play: Callable[[], Any]) -> Callable[[], Any]:
        if not self.captures:
            return play
        changed = [self.turn, self.at, self.known, *leaves(self.state), *self.columns]
        return recorded(play, changed, self.turn.device)

    # The parts of a round. None of them asks the host for anything, but for a server step that says so.
    def now(self, of_all: Tensor) -> Tensor:
        """The present round's part of what is laid out for the rounds ahead."""
        return of_all.index_select(0, self.turn).squeeze(0)

    def on_clients(self) -> Algorithm:
        """The algorithm with this round's rate, for the clients' vectors [..., S, P]."""
        return replace(self.alg, lr=cast(float, self.now(self.ahead.rate))) if len(self.ahead.rate) else self.alg

    def on_server(self) -> Algorithm:
        """The same for the server's vectors [..., P]."""
        return self.on_clients()

    def rows(self, ids: Tensor) -> Tensor:
        """Where clients ids [..., S] stand in all tables."""
        return ids

    def cohort(self, clients: int, empty: bool = False) -> Cohort:
        """The round's first clients, among them perhaps empty places."""
        ids, drawn, steps = (self.now(t)[..., :clients] for t in self.ahead[:3])
        x, there = self.state.x, None
        weight = (self.sizes[self.rows(ids)] if self.by_size else torch.ones_like(ids)).to(x.dtype).unsqueeze(-1)
        if empty:
            place = torch.arange(clients, device=x.device)
            there = (place < self.now(self.ahead.clients)).to(x.dtype).unsqueeze(-1)
            weight = weight * there
        weight = weight / weight.sum(-2, keepdim=True)
        steps = steps.to(x.dtype).unsqueeze(-1)
        return Cohort(ids, drawn, weight, steps, self.on_server().lr, self.total, self.net.layout, there)

    def open(self, shape: Shape) -> Here:
        """Up to the first local step."""
        alg, server, state, fine = self.on_clients(), self.on_server(), self.state, self.turn >= 0
        cohort, buffers = self.cohort(shape.clients, shape.empty), state.buffers.unsqueeze(-2)
        ids, rows = cohort.ids, self.rows(cohort.ids)
        start, sizes = self.start[rows], self.sizes[rows]
        whole = LocalWhole(self.net, self.data, ids, start, sizes, self.width, shape.batches, buffers)
        companion, down = state.companion, server.broadcast(state.x, state.companion, cohort)
        shared = map_leaves(lambda t: t.unsqueeze(-2), down)
        fresh = fill(alg.client_init(shared, ids, buffers), ids.shape)
        known, columns = self.known[rows], iter(self.columns)
        client = map_leaves(
            lambda new: torch.where(
                known.view(*known.shape, *(1,) * (new.dim() - known.dim())), next(columns)[rows], new
            ),
            fresh,
        )
        if alg.measures:  # two exchanges
            sent = alg.measure(shared, whole)
            self.bytes_measured = nbytes(sent) // ids.numel()
            fine = sent.isfinite().flatten(len(self.lead)).all(-1).view(-1)
            companion = server.measured(companion, sent, cohort)
            down = server.broadcast(state.x, companion, cohort)
            shared = map_leaves(lambda t: t.unsqueeze(-2), down)
        self.down = down
        client, buffers, work = begin(alg, shared, client, buffers, ids.shape, whole)
        self.passes = whole.calls
        nothing = torch.zeros_like(work.x[..., :1])
        return Here(companion, shared, client, work, buffers, nothing, nothing, fine)

    def batches(self, shape: Shape) -> list[Inputs]:
        """What the local steps are made on: their clients, samples and keys."""
        everything = (self.ahead.samples, self.ahead.real, self.ahead.dropout, self.ahead.augment)
        ids, (samples, real, dropout, augment) = self.now(self.ahead.ids), map(self.now, everything)
        some = (..., slice(0, shape.clients))
        return [
            Inputs(ids[some], samples[*some, k, :], real[*some, k], dropout[*some, k], augment[*some, k])
            for k in range(shape.steps)
        ]

    def batch(self, shape: Shape) -> Inputs:
        """The same of the local step that is next."""
        everything = (self.ahead.samples, self.ahead.real, self.ahead.dropout, self.ahead.augment)
        ids, clients, step = self.now(self.ahead.ids), shape.clients, len(self.lead) + 1
        some = (self.now(t).narrow(step - 1, 0, clients) for t in everything)
        return Inputs(ids[..., :clients], *(t.index_select(step, self.at).squeeze(step) for t in some))

    def advance(self, here: Here, inputs: Inputs, shape: Shape) -> Here:
        """One local step, compiled where that was asked for."""
        if not self.compile:
            return self.one_step(here, inputs, shape)
        rate = self.on_clients().lr
        tensors = [*leaves((here, inputs)), *([rate] if isinstance(rate, Tensor) else [])]
        key = (shape.clients, shape.ragged)
        if key not in self.compiled:

            def flat(*tensors: Tensor) -> list[Tensor]:
                given = iter(tensors)
                inside = map_leaves(lambda _: next(given), here), map_leaves(lambda _: next(given), inputs)
                return leaves(self.one_step(*inside, shape, *given))

            self.compiled[key] = torch.compile(make_fx(flat)(*tensors), dynamic=False)
        made = iter(self.compiled[key](*tensors))
        return map_leaves(lambda _: next(made), here)

    def one_step(self, here: Here, inputs: Inputs, shape: Shape, rate: Tensor | None = None) -> Here:
        """One local step as it is written."""
        alg = self.on_clients() if rate is None else replace(self.alg, lr=cast(float, rate))
        ids, samples, real, dropout, augment = inputs
        batch = mini_batch(self.net, self.data, ids, samples, real if shape.ragged else None, dropout, augment)
        live = (real > 0).unsqueeze(-1) if shape.ragged else None
        oracle = Oracle(self.net, batch, here.buffers)
        work, buffers, loss = step(alg, here.down, here.client, here.work, here.buffers, oracle, live)
        self.calls = oracle.calls
        made = torch.ones_like(loss) if live is None else live.to(loss.dtype)
        loss = loss if live is None else torch.where(live, loss, 0.0)
        return here._replace(work=work, buffers=buffers, loss=here.loss + loss, made=here.made + made)

    def close(self, here: Here) -> tuple[Any, Answers, Tensor]:
        """The server's companion, what comes back from the clients, and whether it is all finite."""
        loss = here.loss / here.made.clamp(min=1)
        answers = end(self.on_clients(), here.down, here.client, here.work, here.buffers, loss)
        sums = torch.stack([t.flatten(len(self.lead)).sum(-1) for t in (*leaves(answers.up), answers.buffers)])
        self.bytes_answered = (nbytes(answers.up) + nbytes(answers.buffers)) // loss.numel()
        return here.companion, answers, here.fine & sums.isfinite().all(0)

    def served(self, companion: Any, answers: Answers, cohort: Cohort) -> State:
        """The server's step."""
        return server_part(self.on_server(), self.net, self.state._replace(companion=companion), answers, cohort)

    def served_apart(self, companion: Any, answers: Answers, clients: Sequence[int]) -> State:
        """The same on the first clients alone, without empty places."""
        (count,) = clients
        return self.served(companion, map_leaves(lambda t: t[:count], answers), self.cohort(count))

    def facts(self, server: Any) -> dict[str, Tensor]:
        """The server part's own numbers."""
        return self.alg.facts(server)

    def keep(self, state: State, answers: Answers, fine: Tensor, shape: Shape) -> None:
        """The round's end: the states of server and clients, and the numbers for the record."""
        cohort = self.cohort(shape.clients, shape.empty)
        for old, new in zip(leaves(self.state), leaves(state), strict=True):
            old.copy_(new)
        rows = self.rows(cohort.ids)
        if cohort.there is not None:
            rows = torch.where(cohort.there.squeeze(-1) > 0, rows, len(self.sizes))
        rows = rows.flatten()
        self.known.index_fill_(0, rows, True)
        for column, new in zip(self.columns, leaves(answers.client), strict=True):
            column.index_copy_(0, rows, new.reshape(len(rows), *column.shape[1:]))
        share, clients = cohort.uniform, (-2, -1)
        tells = {"train_loss": (answers.loss * share).sum(clients), "consistency": consistency(answers, share)}
        tells |= {name: (fact * share).sum(clients) for name, fact in answers.facts._asdict().items()}
        for name, value in (tells | {"fine": fine} | self.facts(state.server)).items():
            if name not in self.left:
                shaped = (len(self.ahead.ids), *self.lead)
                self.left[name] = torch.zeros(shaped, dtype=torch.float64, device=rows.device)
            self.left[name].index_copy_(0, self.turn, value.reshape(1, *self.lead).to(self.left[name]))
        self.turn.add_(1)
