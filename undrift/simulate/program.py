"""Rounds as a program for the GPU: all that a round does, on tensors that stay where they are, replayed as CUDA graphs.

The inputs of the next rounds (who takes part, on which samples, at which rate) are laid out on the device beforehand, and
a counter on the device says which round it is. A replay needs nothing from the host, which looks at the results only when
a stretch of rounds is over. The functions captured are ordinary ones: without a GPU they run as they stand, which is how
the tests compare them with the engine's own rounds.

What a stretch takes for granted is checked afterwards: where a client's answer was not finite, the stretch is taken back
and the engine runs it round by round.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from undrift.algorithms.base import Algorithm, Cohort, Up, Worker
from undrift.core.forms import Seen, watching
from undrift.core.trees import leaves, map_leaves, nbytes
from undrift.core.vec import witness
from undrift.data.federation import Federation
from undrift.oracle.net import Net
from undrift.oracle.oracle import Oracle
from undrift.round.order import Answers, State, begin, client_init, consistency, end, replied, server_part, step
from undrift.simulate.execute import LocalWhole, mini_batch
from undrift.simulate.graphs import fused, recorded, silence

T = TypeVar("T")
COMPILED_FROM = 64  # round: compiling takes twenty seconds, in which somebody would wait for the first one
LONGEST_UNROLLED = 16  # local steps of one graph; with more, a step is a graph of its own


def uses_whole(alg: Algorithm) -> bool:
    """Whether the method makes passes over a client's whole data."""
    return alg.measures or type(alg).prepare is not Worker.prepare


def try_server(alg: Algorithm, net: Net, state: State, clients: int, empty: bool) -> Seen:
    """What a server's step does, found out by making one with zeros, on a copy of its state that is thrown away."""
    with watching() as seen:
        if alg.needs_single_updates:
            x, ids = state.x, torch.zeros(1, dtype=torch.int64, device=state.x.device)
            one, nothing = x.new_ones(1, 1), torch.zeros_like(x)
            cohort = Cohort(ids, ids, one, one, alg.lr, clients, net.layout, one if empty else None)
            server = map_leaves(lambda t: t.to(x.device, copy=True), state.server)
            with silence():
                alg.server_step(server, x, nothing, Up(nothing.unsqueeze(0)), cohort)
    return seen


class Ahead(NamedTuple):
    """The inputs of R rounds. Where a round has fewer than S clients, the places behind them are empty.

    Where clients make different numbers of steps, they stand in the order of these, so that those that still have a batch are
    always the first ones.
    """

    ids: Tensor  # [R, S]
    back: Tensor  # [R, S] where in this order the clients stand in the order of their ids
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


class Now(NamedTuple):
    """What is known of a round before it begins; () where a field is not needed."""

    ids: Tensor  # [..., S]
    drawn: Tensor  # [..., S]
    weight: Tensor  # [..., S, 1]
    steps: Tensor  # [..., S, 1]
    there: Any  # [..., S, 1] 1 for a client, 0 for an empty place
    rate: Any  # [...] eta_l, where it changes


class Here(NamedTuple):
    """Where the clients stand in a round."""

    companion: Any  # of the server, after a first exchange
    down: Any
    client: Any
    work: Any
    buffers: Tensor
    loss: Tensor  # [..., S, 1] summed over the steps made
    made: Tensor  # [..., S, 1] steps made
    fine: Tensor  # [...] whether the first exchange was finite


class Standing(NamedTuple):
    """A round under way."""

    now: Now
    here: Here


class Graphs(NamedTuple):
    """A round, or its beginning, one local step for each of some numbers of clients, and its end."""

    first: Callable[[], Any]
    steps: dict[int, Callable[[], Any]]
    last: Callable[[], Any] | None


class After(NamedTuple):
    """What a round leaves."""

    state: State
    client: Any
    numbers: Tensor  # [n, ...] for the record, in float64


class Program:
    """The rounds of one algorithm on one federation. `state` and the clients' table are changed in place.

    `packed.PackedProgram` has several runs as one more leading dimension: [..., S] below is [S] here and [R, S] there, and what
    is done otherwise there has a method or a field of its own here.
    """

    lead: tuple[int, ...] = ()  # runs that are packed

    def __init__(
        self,
        alg: Algorithm,
        net: Net,
        data: Federation,
        state: State,
        width: int,
        by_size: bool,
        empty: bool,
        compile: bool,
    ) -> None:
        self.alg, self.net, self.data, self.width, self.by_size = alg, net, data, width, by_size
        self.server_alg = alg  # for the server's vectors [..., P]
        self.total = data.clients  # N
        device = state.x.device
        seen = self.try_server(state, empty)
        self.apart = seen.by_value  # the server's part is no part of a graph
        self.captures = True  # False: play rounds as they are written, on a GPU too
        self.compile = compile
        self.compiled: dict[tuple[Any, ...], Callable[..., Any]] = {}
        self.fuses_end = not seen.in_place
        self.state = map_leaves(lambda t: t.clone() if self.apart else t.to(device, copy=True), state)
        self.uniform: dict[torch.Size, Tensor] = {}  # weights 1/S by the cohort's shape
        self.sizes, self.start = (torch.from_numpy(v).to(device) for v in (data.sizes, data.start))
        self.ahead: Tensor  # [R, ...] the inputs of R rounds
        self.rates: Tensor  # [R, ...] their rates
        self.forms: list[torch.Size] = []  # of the inputs of one round
        self.columns: list[Tensor] = []  # the clients' table, [N + 1, ...] each; the last row is that of empty places
        self.known = torch.zeros(data.clients + 1, dtype=torch.bool, device=device)  # whose row holds a state
        self.turn, self.at = (torch.zeros(1, dtype=torch.int64, device=device) for _ in range(2))  # round, local step
        self.left: Tensor  # [R, n, ...] what each round leaves for its record
        self.told: list[str] = []  # its names
        self.graphs: dict[Shape, Graphs] = {}
        # What every round has alike, found out by playing one.
        self.down: Any = None
        self.bytes_measured = self.bytes_answered = 0  # what one client sends up in the two exchanges
        self.bytes_replied = 0  # what it gets when the round is over
        self.calls = 0  # gradients of a step
        self.passes = 0  # over a client's whole data

    def try_server(self, state: State, empty: bool) -> Seen:
        """What a server's step does that looks at single updates; `empty` says that cohorts may have empty places."""
        return try_server(self.alg, self.net, state, self.total, empty)

    def take(self, ahead: Ahead) -> None:
        """The inputs of the next R rounds: whole numbers side by side, so that a round reads them at once."""
        numbers = ahead._replace(rate=ahead.ids[..., :0])
        self.forms = [t.shape[1:] for t in numbers]
        flat = torch.cat([t.flatten(1) for t in numbers], 1)
        if hasattr(self, "ahead"):
            self.ahead.copy_(flat)
            self.rates.copy_(ahead.rate)
        else:
            self.ahead, self.rates = flat, ahead.rate

    def read(self) -> Ahead:
        """The inputs of the present round."""
        row = self.ahead.index_select(0, self.turn).squeeze(0)
        parts = row.split([form.numel() for form in self.forms])
        this = Ahead(*(part.view(form) for part, form in zip(parts, self.forms, strict=True)))
        return this._replace(rate=self.rates.index_select(0, self.turn).squeeze(0) if len(self.rates) else self.rates)

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

    def compiled_in_time(self, t: int, most: int) -> int:
        """Compile from round COMPILED_FROM on; how many of the next rounds come before or after that together."""
        if t < COMPILED_FROM:
            return min(most, COMPILED_FROM - t)
        if not self.compile:
            self.compile = True
            self.graphs.clear()
        return most

    def run(self, shape: Shape, clients: Sequence[int], live: Sequence[int]) -> None:
        """The next round, of so many clients (in each run), of whom `live[k]` make a k-th step."""
        if shape not in self.graphs:
            self.graphs[shape] = self.captured(shape)
        graphs = self.graphs[shape]
        end = graphs.first()
        for count in filter(None, live):
            graphs.steps[min(width for width in graphs.steps if width >= count)]()
        if graphs.last is not None:
            end = graphs.last()
        if self.apart:
            now, companion, answers, fine = end
            state = self.served_apart(self.state._replace(companion=companion), answers, now, clients)
            self.keep(now, self.after(state, answers, fine, self.cohort(now)))

    def captured(self, shape: Shape) -> Graphs:
        """The round as one graph, or as several: its beginning, a step of so many clients, its end."""
        if shape.steps:

            def whole() -> Any:
                this = self.read()
                now = self.look(this, shape)
                here = self.open(now, shape)
                for k in range(shape.steps):
                    here = self.advance(now, here, self.batch(this, shape.clients, k), shape)
                return self.close(now, here)

            return Graphs(self.recorded(whole), {}, None)

        now = self.look(self.read(), shape)
        held = map_leaves(lambda t: t.clone(), Standing(now, self.open(now, shape)))
        self.at.zero_()

        def hold(new: Any, place: Any) -> None:
            for old, tensor in zip(leaves(place), leaves(new), strict=True):
                old.copy_(tensor)

        def opening() -> None:
            now = self.look(self.read(), shape)
            hold((now, self.open(now, shape)), held)
            self.at.zero_()

        def one_step(width: int) -> None:
            """A step of the first clients."""
            here = held.here
            moving = (here.client, here.work, here.buffers, here.loss, here.made)
            first = [map_leaves(lambda t: t.narrow(len(self.lead), 0, width), part) for part in moving]
            part = here._replace(client=first[0], work=first[1], buffers=first[2], loss=first[3], made=first[4])
            new = self.advance(held.now, part, self.batch(self.read(), width, None), shape)
            hold((new.work, new.buffers, new.loss, new.made), first[1:])
            self.at.add_(1)

        def closing() -> Any:
            """The clients' work in the order of their ids."""
            ordered = functools.partial(self.reordered, self.read().back[..., : shape.clients])
            now, here = held
            now = now._replace(
                **{name: ordered(getattr(now, name)) for name in ("ids", "drawn", "weight", "steps", "there")}
            )
            moved = {name: ordered(getattr(here, name)) for name in ("client", "work", "buffers", "loss", "made")}
            return self.close(now, here._replace(**moved))

        steps = {width: self.recorded(functools.partial(one_step, width)) for width in self.widths(shape.clients)}
        return Graphs(self.recorded(opening), steps, self.recorded(closing))

    def widths(self, clients: int) -> list[int]:
        """How many clients a step is recorded for: some numbers up to all of them, or because compiling takes time only that."""
        return [clients] if self.compile else sorted({-(-clients * tenths // 10) for tenths in (1, 2, 3, 5, 7, 10)})

    def reordered(self, order: Tensor, state: T) -> T:
        """A state of clients [..., S, ...] with its clients in another order [..., S]."""

        def moved(t: Tensor) -> Tensor:
            index = order.view(*order.shape, *(1,) * (t.dim() - order.dim()))
            return t.take_along_dim(index.expand(t.shape), len(self.lead))

        return map_leaves(moved, state)

    def recorded(self, play: Callable[[], Any]) -> Callable[[], Any]:
        if not self.captures:
            return play
        changed = [self.turn, self.at, self.known, *leaves(self.state), *self.columns]
        return recorded(play, changed, self.turn.device)

    # The parts of a round. None of them asks the host for anything, but for a server step that says so.
    def on_clients(self, rate: Any) -> Algorithm:
        """The algorithm with this round's rate, for the clients' vectors [..., S, P]."""
        return replace(self.alg, lr=cast(float, rate)) if isinstance(rate, Tensor) else self.alg

    def on_server(self, rate: Any) -> Algorithm:
        """The same for the server's vectors [..., P]."""
        return replace(self.server_alg, lr=cast(float, rate)) if isinstance(rate, Tensor) else self.server_alg

    def rows(self, ids: Tensor) -> Tensor:
        """Where clients ids [..., S] stand in all tables."""
        return ids

    def look(self, this: Ahead, shape: Shape) -> Now:
        """The round's clients, among them perhaps empty places."""
        x, ids = self.state.x, this.ids[..., : shape.clients]
        there: Any = ()
        if self.by_size or shape.empty:
            weight = (self.sizes[self.rows(ids)] if self.by_size else torch.ones_like(ids)).to(x.dtype).unsqueeze(-1)
            if shape.empty:
                place = torch.arange(shape.clients, device=x.device)
                there = (place < this.clients).to(x.dtype).unsqueeze(-1)
                weight = weight * there
            weight = weight / weight.sum(-2, keepdim=True)
        else:  # one tensor for all rounds
            if ids.shape not in self.uniform:
                self.uniform[ids.shape] = x.new_full((*ids.shape, 1), 1 / shape.clients)
            weight = self.uniform[ids.shape]
        steps = this.steps[..., : shape.clients].to(x.dtype).unsqueeze(-1)
        rate: Any = this.rate if this.rate.numel() else ()
        return Now(ids, this.drawn[..., : shape.clients], weight, steps, there, rate)

    def cohort(self, now: Now) -> Cohort:
        ids, drawn, weight, steps, there, rate = now
        empty = there if isinstance(there, Tensor) else None
        return Cohort(ids, drawn, weight, steps, self.on_server(rate).lr, self.total, self.net.layout, empty)

    def open(self, now: Now, shape: Shape) -> Here:
        """Up to the first local step."""
        alg, server, state, fine = self.on_clients(now.rate), self.on_server(now.rate), self.state, self.turn >= 0
        cohort, buffers = self.cohort(now), state.buffers.unsqueeze(-2)
        ids, rows = cohort.ids, self.rows(cohort.ids)
        start, sizes = self.start[rows], self.sizes[rows]
        whole = LocalWhole(self.net, self.data, ids, start, sizes, self.width, shape.batches, buffers)
        companion, down = state.companion, server.broadcast(state.x, state.companion, cohort)
        shared = map_leaves(lambda t: t.unsqueeze(-2), down)
        fresh = client_init(alg, shared, ids, buffers)
        known, columns = self.known[rows], iter(self.columns)
        client = map_leaves(
            lambda new: torch.where(
                known.view(*known.shape, *(1,) * (new.dim() - known.dim())), next(columns)[rows], new
            ),
            fresh,
        )
        if alg.measures:  # two exchanges
            sent = alg.measure(shared, whole)
            self.bytes_measured = nbytes(self.net.sent(sent)) // ids.numel()
            fine = sent.isfinite().flatten(len(self.lead)).all(-1).view(-1)
            companion = server.measured(companion, sent, cohort)
            down = server.broadcast(state.x, companion, cohort)
            shared = map_leaves(lambda t: t.unsqueeze(-2), down)
        self.down = down
        client, buffers, work = begin(alg, shared, client, buffers, ids.shape, whole)
        self.passes = whole.calls
        nothing = torch.zeros_like(work.x[..., :1])
        return Here(companion, shared, client, work, buffers, nothing, nothing, fine)

    def batch(self, this: Ahead, clients: int, k: int | None) -> Inputs:
        """What the first clients make their k-th local step on; None: the one that is next."""
        everything, dim = (this.samples, this.real, this.dropout, this.augment), len(self.lead)
        some = [t.narrow(dim, 0, clients) for t in everything]
        if k is None:
            return Inputs(this.ids[..., :clients], *(t.index_select(dim + 1, self.at).squeeze(dim + 1) for t in some))
        return Inputs(this.ids[..., :clients], *(t.select(dim + 1, k) for t in some))

    def advance(self, now: Now, here: Here, inputs: Inputs, shape: Shape) -> Here:
        """One local step."""
        play = functools.partial(self.one_step, ragged=shape.ragged)
        made: Here = self.fused(("step", inputs.ids.shape[-1], shape.ragged), play, now.rate, here, inputs)
        return made

    def fused(self, name: tuple[Any, ...], play: Callable[..., T], *given: Any) -> T:
        """play(*given), compiled where that was asked for: a function of states that returns a state and changes nothing."""
        if not self.compile:
            return play(*given)
        name = (*name, *(t.stride() for t in leaves(given)))  # in the first step all clients share the server's vectors
        if name not in self.compiled:
            self.compiled[name] = fused(play, *given)
        return cast(T, self.compiled[name](*given))

    def one_step(self, rate: Any, here: Here, inputs: Inputs, ragged: bool) -> Here:
        """One local step as it is written."""
        alg = self.on_clients(rate)
        ids, samples, real, dropout, augment = inputs
        batch = mini_batch(self.net, self.data, ids, samples, real if ragged else None, dropout, augment)
        live = (real > 0).unsqueeze(-1) if ragged else None
        oracle = Oracle(self.net, batch, here.buffers)
        work, buffers, loss = step(alg, here.down, here.client, here.work, here.buffers, oracle, live)
        self.calls = oracle.calls
        made = torch.ones_like(loss) if live is None else live.to(loss.dtype)
        loss = loss if live is None else torch.where(live, loss, 0.0)
        return here._replace(work=work, buffers=buffers, loss=here.loss + loss, made=here.made + made)

    def close(self, now: Now, here: Here) -> Any:
        """The end of a round; where the server's part is made apart from it, what that needs."""
        if self.apart:
            return now, here.companion, *self.answers(now, here)
        name, given = ("end", now.ids.shape[-1]), (now, here, self.state)
        return self.keep(now, self.fused(name, self.end, *given) if self.fuses_end else self.end(*given))

    def end(self, now: Now, here: Here, state: State) -> After:
        """What comes back from the clients, and the server's step."""
        (answers, fine), cohort = self.answers(now, here), self.cohort(now)
        with watching() as seen:
            new = self.served(state._replace(companion=here.companion), answers, cohort)
        settled = self.settled(seen)
        return self.after(new, answers, fine if settled is None else fine & settled, cohort)

    def answers(self, now: Now, here: Here) -> tuple[Answers, Tensor]:
        """What comes back from the clients, and whether it is all finite."""
        loss = here.loss / here.made.clamp(min=1)
        answers = end(self.on_clients(now.rate), here.down, here.client, here.work, here.buffers, loss)
        dim = len(self.lead)
        looked_at = [witness(t, now.weight) for t in (*leaves(answers.up), answers.buffers)]
        sums = torch.stack([t.flatten(dim).sum(-1) for t in looked_at])
        sent = nbytes(self.net.sent(answers.up)) + (nbytes(answers.buffers) if self.alg.buffers_up else 0)
        self.bytes_answered = sent // loss.numel()
        return answers, here.fine & sums.isfinite().all(0)

    def served(self, state: State, answers: Answers, cohort: Cohort) -> State:
        """The server's step."""
        return server_part(replace(self.server_alg, lr=cohort.lr), self.net, state, answers, cohort)

    def served_apart(self, state: State, answers: Answers, now: Now, clients: Sequence[int]) -> State:
        """The same on the first clients alone, without empty places."""
        (count,) = clients
        first = now._replace(
            **{name: getattr(now, name)[:count] for name in ("ids", "drawn", "weight", "steps")}, there=()
        )
        return self.served(state, map_leaves(lambda t: t[:count], answers), self.cohort(first))

    def settled(self, seen: Seen) -> Tensor | None:
        """[...] whether the server's step holds that was seen; None: it does for certain."""
        return ~torch.stack(seen.doubts).any(0).view(-1) if seen.doubts else None

    def facts(self, server: Any) -> dict[str, Tensor]:
        """The server part's own numbers."""
        return self.alg.facts(server)

    def after(self, state: State, answers: Answers, fine: Tensor, cohort: Cohort) -> After:
        """The states of server and clients, and the numbers for the record."""
        share, clients = cohort.uniform, (-2, -1)
        tells = {"train_loss": (answers.loss * share).sum(clients), "consistency": consistency(answers, share)}
        tells |= {name: (fact * share).sum(clients) for name, fact in answers.facts._asdict().items()}
        tells |= {"fine": fine} | self.facts(state.server)
        self.told = list(tells)
        numbers = [value.reshape(self.lead).to(share.device, torch.float64) for value in tells.values()]
        client, reply = replied(self.server_alg, state, answers, cohort)
        self.bytes_replied = nbytes(self.net.sent(reply)) // share.numel()
        return After(state, client, torch.stack(numbers))

    def keep(self, now: Now, after: After) -> None:
        """Put what a round leaves where the next one finds it."""
        for old, new in zip(leaves(self.state), leaves(after.state), strict=True):
            old.copy_(new)
        if self.columns:
            rows = self.rows(now.ids)
            if isinstance(now.there, Tensor):
                rows = torch.where(now.there.squeeze(-1) > 0, rows, len(self.sizes))
            rows = rows.flatten()
            self.known.index_fill_(0, rows, True)
            for column, new in zip(self.columns, leaves(after.client), strict=True):
                column.index_copy_(0, rows, new.reshape(len(rows), *column.shape[1:]))
        if not hasattr(self, "left"):
            self.left = after.numbers.new_zeros((len(self.ahead), *after.numbers.shape))
        self.left.index_copy_(0, self.turn, after.numbers.unsqueeze(0))
        self.turn.add_(1)

    def numbers(self, first: int, count: int) -> dict[str, Tensor]:
        """What each of some rounds left for its record, [count, ...] under each name."""
        return dict(zip(self.told, self.left[first : first + count].cpu().unbind(1), strict=True))
