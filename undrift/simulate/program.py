"""Rounds as a program for the GPU: `play` on tensors that stay where they are, replayed as CUDA graphs.

The inputs of the next rounds lie on the device, where a counter says which round it is. The host looks at the results when a
block of rounds is over; if an answer was not finite, the block is taken back and run round by round. Without a GPU everything
runs as written, so that tests can compare.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from undrift.algorithms.base import Algorithm
from undrift.core.forms import watch
from undrift.core.layout import Layout
from undrift.core.trees import State, leaves, map_leaves
from undrift.core.vec import witness
from undrift.data.federation import Federation
from undrift.oracle.oracle import Oracle
from undrift.round.clients import Answers, Started, begin, end, new_clients, step
from undrift.round.order import After, Cost, ServerState, play
from undrift.round.who import Task, Who
from undrift.simulate.graphs import Recording, fuse, record_graph
from undrift.simulate.here import add_client_dimension
from undrift.simulate.work import LocalWhole, mini_batch

T = TypeVar("T")
LONGEST_UNROLLED = 16  # local steps of one graph; with more, a step is a graph of its own


class Noticing:
    """`LocalData` that notices whether it is asked for anything."""

    def __init__(self, buffers: Tensor, layout: Layout) -> None:
        self.buffers, self.layout, self.asked = buffers, layout, False

    def full_grad(self, x: Tensor) -> Tensor:
        self.asked = True
        return torch.zeros_like(x)


def uses_whole(alg: Algorithm, down: State, client: State, buffers: Tensor, layout: Layout) -> bool:
    """Whether the method makes passes over a client's whole data."""
    local = Noticing(buffers, layout)
    alg.local_start(down, client, local)
    return alg.measures or local.asked


class Ahead(NamedTuple):
    """The inputs of R rounds. Places behind a round's clients are empty; clients with more steps come first."""

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
    attack: Tensor  # [R, S] keys; [R, 0] where nobody needs them


class Shape(NamedTuple):
    """What a graph is recorded for."""

    clients: int  # S
    steps: int  # K, or 0 for any number
    empty: bool  # there may be empty places
    ragged: bool  # not all batches are full
    unequal: bool  # a client may make fewer steps than others
    batches: int  # batches in a pass over a client's whole data


class Inputs(NamedTuple):
    """What a local step is made on."""

    ids: Tensor  # [S]
    samples: Tensor  # [S, B]
    real: Tensor  # [S]
    dropout: Tensor  # [S] keys
    augment: Tensor  # [S] keys


class Moving(NamedTuple):
    """Clients between two local steps."""

    at: Started
    loss: Tensor  # [..., S, 1] summed over the steps made
    made: Tensor  # [..., S, 1] steps made


class Held(NamedTuple):
    """What steps that are graphs of their own read, and change: it stays where it is."""

    rate: Any
    down: State
    moving: Moving


class Trained(NamedTuple):
    """What a program's clients answer with; `ProgramTask.read` makes the answers of it."""

    down: State
    moving: Moving


class Later(NamedTuple):
    """The end of a round that the host has to make, and what it needs."""

    close: Callable[..., After]
    given: tuple[Any, ...]


class ProgramTask(Task):
    """Leaves nobody out: whether all answers are finite is checked when the block is over."""

    def __init__(self, plain: Task, clients: int, lead: tuple[int, ...], device: torch.device) -> None:
        super().__init__(plain.net, clients, plain.rule, plain.attackers)
        self.lead = lead  # the number of packed runs, if any
        self.fine = torch.ones(lead, dtype=torch.bool, device=device)

    def everybody(self, who: Who) -> Tensor:
        return self.fine

    def read(self, alg: Algorithm, answered: Trained) -> Answers:
        at, loss, made = answered.moving
        return end(alg, answered.down, at, loss / made.clamp(min=1))

    def finite(self, who: Who, sent: list[Tensor]) -> Tensor:
        looked_at = [witness(t, who.weight) for t in sent]
        return torch.stack([t.flatten(len(self.lead)).sum(-1) for t in looked_at]).isfinite().all(0)

    def anybody(self, good: Tensor) -> bool:
        return True

    def numbers(self, good: Tensor) -> dict[str, Tensor]:
        return {"good": good}

    def keep(self, who: Who, answers: T, good: Tensor) -> tuple[Who, T]:
        return who, answers


class AskPlaces:
    """Asks the clients in the places of a program: their steps are part of a graph, or graphs of their own."""

    def __init__(self, program: Program, shape: Shape, this: Ahead, recording: Recording[Any] | None) -> None:
        self.program, self.shape, self.this, self.recording = program, shape, this, recording

    def whole(self, ids: Tensor, buffers: Tensor) -> LocalWhole:
        p, rows, statistics = self.program, self.program.rows(ids), buffers.unsqueeze(-2)
        return LocalWhole(p.net, p.data, ids, p.start[rows], p.sizes[rows], p.width, self.shape.batches, statistics)

    def measure(self, alg: Algorithm, down: State, buffers: Tensor, who: Who) -> Tensor:
        whole = self.whole(who.ids, buffers)
        sent = alg.measure(add_client_dimension(down), whole)
        self.program.passes_measured = whole.calls
        return sent

    def train(self, alg: Algorithm, down: State, buffers: Tensor, who: Who) -> Trained:
        p, message, this = self.program, add_client_dimension(down), self.this
        ids = this.ids[..., : self.shape.clients]  # in the order of the steps that they make
        whole, rows, columns = self.whole(ids, buffers), p.rows(ids), iter(p.columns)
        known = p.known[rows]

        def take_stored(new: Tensor) -> Tensor:
            mask = known.view(*known.shape, *(1,) * (new.dim() - known.dim()))
            return torch.where(mask, next(columns)[rows], new)

        client = map_leaves(take_stored, new_clients(alg, message, ids, buffers.unsqueeze(-2)))
        at = begin(alg, message, client, buffers.unsqueeze(-2), ids.shape, whole)
        p.passes = whole.calls
        none = torch.zeros_like(at.work.x[..., :1])
        moving = Moving(at, none, none)
        if self.shape.steps:
            for k in range(self.shape.steps):
                inputs = p.batch(this, self.shape.clients, k)
                moving = p.advance(who.rate, message, moving, inputs, self.shape)
        else:
            moving = self.steps_apart(who, message, moving)
        return Trained(message, moving)

    def steps_apart(self, who: Who, message: State, moving: Moving) -> Moving:
        """Any number of steps, each a graph of its own; afterwards the clients in the order of their ids."""
        p, shape = self.program, self.shape
        if shape not in p.held:
            p.held[shape] = map_leaves(lambda t: t.clone(), Held(who.rate, message, moving))
        held = p.held[shape]
        copy_into(held, Held(who.rate, message, moving))
        p.at.zero_()
        if self.recording is None:
            p.run_steps(shape, record=False)
        else:
            self.recording.host(lambda: p.run_steps(shape, record=True), lambda: p.try_steps(shape))
        back = self.this.back[..., : shape.clients]
        return map_leaves(lambda t: reorder(t, back), held.moving)


class Program:
    """The rounds of one algorithm on one federation, or of several runs, where [..., S] below is [R, S].

    `state` and the clients' table are changed in place. Client i of run r stands in row r N + i of all tables.
    """

    def __init__(
        self,
        alg: Algorithm,
        task: Task,
        data: Federation,
        state: ServerState,
        width: int,
        by_size: bool,
        empty: bool,
        compile: bool,
        lead: tuple[int, ...] = (),
    ) -> None:
        self.alg, self.net, self.data, self.width, self.by_size = alg, task.net, data, width, by_size
        self.lead = lead  # runs that are packed
        device = state.x.device
        clients = data.clients // (lead[0] if lead else 1)
        self.task = ProgramTask(task, clients, lead, device)
        self.first_row = torch.arange(lead[0], device=device).view(-1, 1) * clients if lead else None
        # A part that keeps numbers of slots or clients is not written for empty places: the host ends such a round.
        self.apart = bool(alg.one_run and empty)
        self.captures = True  # False: play rounds as they are written, on a GPU too
        self.compile, self.in_place = compile, False
        self.tried = False  # whether a round was played to see what may be recorded and compiled
        self.compiled: dict[tuple[Any, ...], Callable[..., Any]] = {}
        self.home = [t.device for t in leaves(state)]  # where the server's tensors lie when nothing is recorded
        self.state = map_leaves(lambda t: t.clone() if self.apart else t.to(device, copy=True), state)
        self.uniform: dict[torch.Size, Tensor] = {}  # weights 1/S by the cohort's shape
        self.sizes, self.start = (torch.from_numpy(v).to(device) for v in (data.sizes, data.start))
        self.ahead: Tensor  # [R, ...] the inputs of R rounds
        self.rates: Tensor  # [R, ...] their rates
        self.forms: list[torch.Size] = []  # shapes of the inputs of one round
        self.columns: list[Tensor] = []  # the clients' table, [N + 1, ...] each; the last row is that of empty places
        self.known = torch.zeros(data.clients + 1, dtype=torch.bool, device=device)  # whose row holds a state
        self.turn, self.at = (torch.zeros(1, dtype=torch.int64, device=device) for _ in range(2))  # round, local step
        self.left: Tensor  # [R, n, ...] the numbers of each round
        self.graphs: dict[Shape, Callable[[], Any]] = {}
        self.step_graphs: dict[tuple[Shape, int], Callable[[], None]] = {}  # a local step's, by shape and clients
        self.held: dict[Shape, Held] = {}
        self.live: Sequence[int] = ()  # how many clients make a first step, a second, ...; of the round under way
        self.cost = Cost()  # what a round costs a client, measured by playing one
        self.calls = 0  # gradients of a step
        self.passes = self.passes_measured = 0  # over a client's whole data, in either exchange

    def rows(self, ids: Tensor) -> Tensor:
        """Where clients ids [..., S] stand in all tables."""
        return ids if self.first_row is None else ids + self.first_row

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

    def load(self, state: ServerState, columns: list[Tensor], known: Collection[int], turn: int) -> None:
        """Begin with this state of server and clients at one of the rounds ahead."""
        if [id(c) for c in columns] != [id(c) for c in self.columns]:
            self.forget_graphs()  # they were recorded for other tensors
            self.columns = columns
        for old, new in zip(leaves(self.state), leaves(state), strict=True):
            old.copy_(new)
        self.known.zero_()
        if columns and known:
            self.known[torch.tensor(list(known), device=self.known.device)] = True
        self.turn.fill_(turn)

    def compile_in_time(self, t: int, most: int, first: int) -> int:
        """Compile from round `first` on; return how many of the next rounds lie on the same side of it."""
        if t < first:
            return min(most, first - t)
        if not self.compile:
            self.compile = True
            self.forget_graphs()
        return most

    def forget_graphs(self) -> None:
        self.graphs.clear()
        self.step_graphs.clear()

    def run(self, shape: Shape, clients: Sequence[int], live: Sequence[int]) -> None:
        """Play the next round, of so many clients in each run; `live[k]` of them make a k-th step."""
        self.live = live
        if shape not in self.graphs:
            self.graphs[shape] = self.record(shape)
        later = self.graphs[shape]()
        if later is not None:
            self.end_apart(later, clients)

    def record(self, shape: Shape) -> Callable[[], Later | None]:
        """Return a function that plays a round of this shape."""

        def whole(recording: Recording[Any] | None) -> Later | None:
            this = self.read()
            who, ask = self.who(this, shape), AskPlaces(self, shape, this, recording)
            after = play(self.alg, self.task, self.state, who, ask, self.cost, self.finish)
            if isinstance(after, Later):
                return after
            self.keep(who, after)
            return None

        if not self.captures:
            return functools.partial(whole, None)
        device = self.turn.device
        changed = [self.turn, self.at, self.known, *leaves(self.state), *self.columns]
        recording = Recording(whole, changed, device)
        if not self.tried:
            self.tried, compile, self.compile = True, self.compile, False
            with watch() as seen:
                recording.rehearse()
            self.compile, self.in_place = compile, seen.in_place  # what writes into the state is not compiled
            if seen.by_value and device.type == "cuda":  # no graph can hold what the host decides
                self.apart = True
                home = iter(self.home)
                self.state = map_leaves(lambda t: t.to(next(home)), self.state)
                return self.record(shape)
        if self.compile:
            recording.rehearse()
        recording.record()
        return recording

    def finish(self, close: Callable[..., After], *given: Any) -> After | Later:
        """The end of a round: within the graph, compiled where that was asked for; or later, on the host."""
        if self.apart:
            return Later(close, given)
        with watch() as seen:
            if self.in_place:
                after = close(*given)
            else:
                after = self.fuse(("end", given[0].ids.shape[-1]), close, *given)
        if seen.doubts:  # run after run; the host has to solve such a problem, so the block is taken back
            doubtful = torch.cat([doubt.reshape(-1) for doubt in seen.doubts]).view(*self.lead, -1).any(-1)
            after.numbers[self.cost.names.index("good")].mul_(~doubtful)
        return after

    def end_apart(self, later: Later, clients: Sequence[int]) -> None:
        """The end of a round on the host, for one run on its first clients alone, without empty places."""
        who, companion, fine, trained, state = later.given
        if self.lead:
            self.keep(who, later.close(*later.given))
            return
        (count,) = clients
        ids, drawn, share, _, steps = (t[:count] for t in who[:5])
        keys = who.attack[:count] if isinstance(who.attack, Tensor) else ()
        first = Who(ids, drawn, share, share / share.sum(-2, keepdim=True), steps, rate=who.rate, attack=keys)
        some = trained._replace(moving=map_leaves(lambda t: t[:count], trained.moving))
        self.keep(first, later.close(first, companion, fine, some, state))

    # The parts of a round. None of them asks the host for anything.
    def who(self, this: Ahead, shape: Shape) -> Who:
        """The round's clients in the order of their ids, among them perhaps empty places."""
        x = self.state.x
        own = [t[..., : shape.clients] for t in (this.ids, this.drawn, this.steps, this.attack)]
        if not shape.steps:
            own = [reorder(t, this.back[..., : shape.clients]) if t.numel() else t for t in own]
        ids, drawn, steps, keys = own
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
        rate: Any = this.rate if this.rate.numel() else ()
        attack: Any = keys if keys.numel() else ()
        return Who(ids, drawn, weight, weight, steps.to(x.dtype).unsqueeze(-1), there, rate, attack)

    def batch(self, this: Ahead, clients: int, k: int | None) -> Inputs:
        """What the first clients make their k-th local step on; None: the one that is next."""
        everything, dim = (this.samples, this.real, this.dropout, this.augment), len(self.lead)
        some = [t.narrow(dim, 0, clients) for t in everything]
        if k is None:
            return Inputs(this.ids[..., :clients], *(t.index_select(dim + 1, self.at).squeeze(dim + 1) for t in some))
        return Inputs(this.ids[..., :clients], *(t.select(dim + 1, k) for t in some))

    def fuse(self, name: tuple[Any, ...], function: Callable[..., T], *given: Any) -> T:
        """function(*given), compiled where that was asked for: a function of states that changes nothing."""
        if not self.compile:
            return function(*given)
        name = (*name, *(t.stride() for t in leaves(given)))  # in the first step all clients share the server's vectors
        if name not in self.compiled:
            self.compiled[name] = fuse(function, *given)
        return cast(T, self.compiled[name](*given))

    def advance(self, rate: Any, down: State, moving: Moving, inputs: Inputs, shape: Shape) -> Moving:
        """Make one local step."""
        step = functools.partial(self.one_step, shape=shape)
        return self.fuse(("step", inputs.ids.shape[-1], shape.ragged, shape.unequal), step, rate, down, moving, inputs)

    def one_step(self, rate: Any, down: State, moving: Moving, inputs: Inputs, shape: Shape) -> Moving:
        alg = self.task.with_rate(self.alg, rate)
        ids, samples, real, dropout, augment = inputs
        batch = mini_batch(self.net, self.data, ids, samples, real if shape.ragged else None, dropout, augment)
        live = (real > 0).unsqueeze(-1) if shape.unequal else None
        oracle = Oracle(self.net, batch, moving.at.buffers)
        at, loss = step(alg, down, moving.at, oracle, live)
        self.calls = oracle.calls
        made = torch.ones_like(loss) if live is None else live.to(loss.dtype)
        loss = loss if live is None else torch.where(live, loss, 0.0)
        return Moving(at, moving.loss + loss, moving.made + made)

    def step_held(self, shape: Shape, width: int) -> None:
        """The next step of the first clients."""
        rate, down, moving = self.held[shape]
        first = map_leaves(lambda t: t.narrow(len(self.lead), 0, width), moving)
        copy_into(first, self.advance(rate, down, first, self.batch(self.read(), width, None), shape))
        self.at.add_(1)

    def run_steps(self, shape: Shape, record: bool) -> None:
        """The steps of a round, of as many clients as still have a batch."""
        widths = self.widths(shape.clients)
        for count in filter(None, self.live):
            width = min(w for w in widths if w >= count)
            if not record:
                self.step_held(shape, width)
                continue
            if (shape, width) not in self.step_graphs:
                changed = [self.at, *leaves(self.held[shape].moving)]
                graph = record_graph(functools.partial(self.step_held, shape, width), changed, self.turn.device)
                self.step_graphs[shape, width] = graph
            self.step_graphs[shape, width]()

    def try_steps(self, shape: Shape) -> None:
        for width in self.widths(shape.clients):
            self.step_held(shape, width)
            self.at.zero_()

    def widths(self, clients: int) -> list[int]:
        """How many clients a step is recorded for: some numbers up to all of them, or because compiling takes time only that."""
        return [clients] if self.compile else sorted({-(-clients * tenths // 10) for tenths in (1, 2, 3, 5, 7, 10)})

    def keep(self, who: Who, after: After) -> None:
        """Put what a round leaves where the next one finds it."""
        clients = copy_overlaps(after.client, leaves(self.state))
        copy_into(self.state, after.state)
        if self.columns:
            rows = self.rows(who.ids)
            if isinstance(who.there, Tensor):
                rows = torch.where(who.there.squeeze(-1) > 0, rows, len(self.sizes))
            rows = rows.flatten()
            self.known.index_fill_(0, rows, True)
            for column, new in zip(self.columns, leaves(clients), strict=True):
                column.index_copy_(0, rows, new.reshape(len(rows), *column.shape[1:]))
        if not hasattr(self, "left"):
            self.left = after.numbers.new_zeros((len(self.ahead), *after.numbers.shape))
        self.left.index_copy_(0, self.turn, after.numbers.unsqueeze(0))
        self.turn.add_(1)

    def numbers(self, first: int, count: int) -> dict[str, Tensor]:
        """What each of some rounds left for its record, [count, ...] under each name; `good`: all of it was finite."""
        return dict(zip(self.cost.names, self.left[first : first + count].cpu().unbind(1), strict=True))


def copy_into(place: State, new: State) -> None:
    """Write each tensor of `new` where the matching one of `place` lies, unless it is that one, as a large memory is."""
    new = copy_overlaps(new, leaves(place), place)
    for old, tensor in zip(leaves(place), leaves(new), strict=True):
        if old is not tensor:
            old.copy_(tensor)


def copy_overlaps(new: T, places: list[Tensor], own: T | None = None) -> T:
    """`new` with a copy of each tensor in it that lies in one of these places, about to be written, but not in its own.

    A client that keeps the model it was sent, say, returns the place of x itself, where the next x will be.
    """
    memory = {place.untyped_storage().data_ptr() for place in places if place.numel()}

    def copy(t: Tensor, old: Tensor | None = None) -> Tensor:
        return t.clone() if t is not old and t.untyped_storage().data_ptr() in memory else t

    return map_leaves(copy, new) if own is None else map_leaves(copy, new, own)


def reorder(t: Tensor, order: Tensor) -> Tensor:
    """A tensor of clients [..., S, ...] with its clients in another order [..., S]."""
    index = order.view(*order.shape, *(1,) * (t.dim() - order.dim()))
    return t.take_along_dim(index.expand(t.shape), order.dim() - 1)
