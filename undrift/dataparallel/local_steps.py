"""Islands: a training loop of one's own on several ranks, each of which takes many steps by itself between two exchanges.

    outer = undrift.LocalSteps(model, algorithm="diloco", every=100)
    for inputs, targets in loader:  # each rank has samples of its own
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        outer.correct()  # only for methods that correct gradients
        optimizer.step()  # any optimizer of PyTorch
        outer.step()

A rank is a client, and `every` steps are a round: the algorithm's own file says what is corrected, sent and made of it. Where a
method exchanges the model in fragments, every fragment is exchanged every `every` steps, and training goes on meanwhile.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from undrift.algorithms.base import Algorithm, LocalSGD, Worker
from undrift.algorithms.checks import looks_at_single_uploads
from undrift.core.errors import BadRunFolder, BadSetting
from undrift.core.trees import Nothing, State, leaves, map_leaves
from undrift.dataparallel.own_gradients import keep_gradients_of_active
from undrift.dataparallel.own_loop import NoPass, OwnGradient, Wanted, algorithm_in_a_loop, refuse, step_along
from undrift.dataparallel.workers import Ranks
from undrift.jobs.config import check_compress
from undrift.oracle.net import Net
from undrift.round.clients import Answers, Started, begin, end
from undrift.round.compressed import Compressed, Uplink, check_compressed, upload_form
from undrift.round.order import Cost, first_state, play
from undrift.round.who import Task, Who

ALONE: torch.Size = torch.Size(())


class Own(NamedTuple):
    """What an island has for itself."""

    client: State
    work: State
    buffers: Tensor
    point: Tensor


class Flight(NamedTuple):
    """An exchange that is under way."""

    own: Answers  # this island's answers
    receive: Callable[[], tuple[State, Tensor]]  # waits for the answers and running statistics of all islands, as rows


class Later:
    """Asks nobody: keeps what the server has sent until the islands have trained."""

    down: State = Nothing()

    def measure(self, alg: Algorithm, down: State, buffers: Tensor, who: Who) -> Tensor:
        refuse("a first exchange")

    def train(self, alg: Algorithm, down: State, buffers: Tensor, who: Who) -> State:
        self.down = down
        return Nothing()


class LocalSteps:
    """The rounds of an algorithm around the local steps of a loop of one's own, one island on each rank."""

    def __init__(
        self,
        model: nn.Module,
        algorithm: str = "diloco",
        every: int = 100,
        set: Mapping[str, Any] | None = None,
        *,
        compress: str = "",
        seed: int = 0,
        optimizer: torch.optim.Optimizer | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise BadSetting(f"LocalSteps needs the model, an nn.Module, not a {type(model).__name__}")
        if not isinstance(every, int) or every < 1:
            raise BadSetting(f"every must be a whole number of at least 1, not {every!r}")
        if not isinstance(set or {}, Mapping):
            raise BadSetting(f"set takes a dict of fields, such as {{'server_lr': 0.7}}, not a {type(set).__name__}")
        if any(isinstance(part, DistributedDataParallel) for part in model.modules()):
            raise BadSetting("DDP averages the gradients of every step; give LocalSteps the model without DDP")
        self.model, self.every, self.optimizer = model, every, optimizer
        self.workers = Ranks(group)
        self.alg = algorithm_in_a_loop(algorithm, dict(set or {}), optimizer, self.workers.count)
        # Whether a local step is the optimizer's alone; a method whose message arrives late changes the model only then.
        self.plain = LocalSGD.local_step is type(self.alg).local_step or type(self.alg).arrive is not Worker.arrive
        self.steps = steps_of_a_round(self.alg, every)
        self.net = Net(without_memory(model), dtype=widest(model))
        named = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.params = [named[name] for name in self.net.layout.names]
        self.statistics = [dict(model.named_buffers())[name] for name in self.net.buffer_layout.names]
        self.net.counters = self.net.counters.to(self.params[0].device)
        facts = {field.name: getattr(self.alg, field.name) for field in fields(self.alg)}
        tensors = {f"the model's tensor {n}": f"{list(p.shape)} {p.dtype}" for n, p in named.items()}
        about = {"the algorithm": algorithm, "every": every, "compress": compress, "seed": seed}
        self.workers.agree(about | facts | tensors)
        self.compress = compress
        self.uplink = make_uplink(compress, seed, self.alg, self.net, self.workers.count)
        apart = self.uplink is not None and not self.uplink.linear
        self.means = not (apart or looks_at_single_uploads(self.alg))  # whether the mean of all answers is enough

        x, buffers = self.read()
        for vector in (x, buffers):
            if vector.numel():
                self.workers.copy_from_first(vector)
        ids = torch.arange(self.workers.count, device=x.device)
        ones = x.new_ones(self.workers.count, 1)
        self.who = Who(ids, ids, ones, ones / self.workers.count, self.steps * ones)
        self.task = Task(self.net, self.workers.count)
        self.state = first_state(self.alg, self.net, x, buffers, self.workers.count)
        self.client: State | None = None
        self.work: Any = None
        self.flight: Flight | None = None
        self.point, self.buffers = x, buffers  # where the next gradient is wanted, and the model's running statistics
        self.rounds, self.k = 0, 0  # exchanges so far, and steps since the last one
        self.corrected = self.evaluates = False
        self.shift: Tensor | None = None
        self.open()
        if not self.plain:
            self.step_along(torch.zeros_like(x))  # which refuses a method that wants more than one gradient
        # Until the first step: a framework may put DDP around the model, whose means of gradients are not wanted.
        self.search: Any = model.register_forward_pre_hook(keep_gradients_of_active)

    # The user's calls.
    @torch.no_grad()
    def correct(self) -> None:
        """Make of the gradients, between `backward()` and `optimizer.step()`, what the algorithm steps along."""
        if self.corrected:
            raise BadSetting("correct() is called twice in one step; call it once, before optimizer.step()")
        self.corrected = True
        if self.plain:
            return
        g = self.flat([torch.zeros_like(p) if p.grad is None else p.grad for p in self.params])
        work = self.step_along(g)
        u, start = work.opt
        if work.x is not self.work.x:  # what the algorithm adds to the step
            self.shift = work.x - self.work.x
        self.work = work._replace(opt=self.work.opt)
        if start is not self.point:
            self.write(start)
        for p, part in zip(self.params, self.parts(u), strict=True):
            if p.grad is None:
                p.grad = torch.empty_like(p)
            p.grad.copy_(part)

    def step_along(self, g: Tensor) -> Any:
        """The work after a local step with the gradient g, and which step the optimizer is to take."""
        oracle = OwnGradient(self.net.layout, self.buffers, g)
        return step_along(self.alg, self.down, self.own_client, self.work, oracle)

    @torch.no_grad()
    def step(self) -> bool:
        """Count a step of the optimizer; when it is time exchange. Returns whether an exchange has ended with this step."""
        if self.evaluates:
            raise BadSetting("step() would train the model to evaluate; leave `with evaluating()`")
        if not (self.plain or self.corrected):
            kind = type(self.alg).__name__
            raise BadSetting(f"{kind} corrects gradients: call correct() between backward() and optimizer.step()")
        self.search.remove()
        x, self.buffers = self.read()
        if self.shift is not None:
            x = x + self.shift
            self.write(x)
        k = self.work.k + 1 if self.plain else self.work.k
        self.work, self.corrected, self.shift = self.work._replace(x=x, k=k), False, None
        self.k += 1
        if self.k == self.steps:
            self.flight, self.k = self.send(), 0
        if self.flight is not None and self.k == self.alg.late:
            self.land(self.flight)
            return True
        self.aim()
        return False

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Make the parameters those of the last exchange, the model to test and save; on exit they are restored exactly."""
        if self.evaluates:
            raise BadSetting("the parameters are those to evaluate already")
        kept = [t.detach().clone() for t in (*self.params, *self.statistics)]
        self.evaluates = True
        self.write(self.state.x, self.state.buffers)
        try:
            yield
        finally:
            self.evaluates = False
            with torch.no_grad():
                for t, before in zip((*self.params, *self.statistics), kept, strict=True):
                    t.copy_(before)

    @property
    def sent(self) -> int:
        """Bytes that all islands have sent so far, as a ring sends them."""
        return self.workers.sent

    # A round.
    @torch.no_grad()
    def open(self, goes_on: bool = True) -> None:
        """Begin a round: what the server sends, and the work before the first step, or what has become of it meanwhile."""
        later = Later()
        close = play(
            self.wrapped, self.task, self.state, self.who, later, Cost(),
            finish=lambda close, who, companion, fine, answered, state: (
                lambda answers: close(who, companion, fine, answers, state)
            ),
        )  # fmt: skip
        self.close, self.down = close, later.down
        if self.client is None:
            rank = torch.tensor(self.workers.rank, device=self.state.x.device)
            self.client = self.wrapped.client_init(self.down, rank, self.state.buffers)
        local = NoPass(self.state.buffers, self.net.layout)
        self.work = begin(self.wrapped, self.down, self.client, self.state.buffers, ALONE, local).work
        if not isinstance(self.work.opt, Nothing):
            kind = type(self.alg).__name__
            raise BadSetting(
                f"{kind} sets the buffers of local momentum, which your optimizer has; take another method"
            )
        if self.k:  # the islands have trained while the exchange was under way
            x = self.read()[0] if goes_on else self.work.x
            self.work = self.work._replace(x=x, k=self.work.k + self.k)
        self.work = self.alg.arrive(self.down, self.own_client, self.work, self.work.k == self.alg.late)
        self.buffers, self.flight, self.corrected = self.state.buffers, None, False
        self.write(self.work.x, self.buffers)
        self.aim()

    def aim(self) -> None:
        """Put the parameters where the next gradient is wanted."""
        self.point = self.work.x
        if self.plain:
            return
        oracle: Any = OwnGradient(self.net.layout, self.buffers)
        try:
            self.alg.local_step(self.down, self.own_client, self.work, oracle)
        except Wanted as wanted:
            self.point = wanted.point
        if self.point is not self.work.x:
            self.write(self.point)

    def send(self) -> Flight:
        """End the round's local steps and send what they give; where the mean of all answers is enough, that."""
        started = Started(self.client, self.work, self.buffers)
        own = end(self.wrapped, self.down, started, self.buffers.new_zeros(1))
        sent = [*leaves(own.up), own.buffers]
        fine = torch.stack([t.isfinite().all() for t in sent]).all().to(self.work.x.dtype).view(1)
        everybody = self.workers.mean_later(fine)  # a mean would hide whose answer is not finite
        means = [self.workers.mean_later(t.clone()) if t.numel() else t.clone for t in sent] if self.means else []

        def receive() -> tuple[State, Tensor]:
            found = [mean() for mean in means]
            if bool(everybody() == 1) and found:
                *up, buffers = [t.expand(self.workers.count, *t.shape) for t in found]
            else:
                *up, buffers = map(self.rows, sent)
            arrivals = iter(up)
            return map_leaves(lambda t: next(arrivals), own.up), buffers

        return Flight(own, receive)

    def land(self, flight: Flight) -> None:
        """End an exchange: every rank has the answers, and takes the server's step itself."""
        own, (up, buffers) = flight.own, flight.receive()
        x, none = own.x.expand(self.workers.count, -1), own.x.new_zeros(self.workers.count, 1)
        after = self.close(Answers(up, Nothing(), buffers, x, none, Nothing()))
        mine = (after.ids == self.workers.rank).nonzero().flatten()
        if len(mine):
            self.client = own.client
            if leaves(after.reply):
                self.client = self.wrapped.receive(own.client, map_leaves(lambda t: t[int(mine)], after.reply))
        else:
            warnings.warn(f"what island {self.workers.rank} has trained is not finite and was left out", stacklevel=4)
        self.state = after.state
        self.rounds += 1
        if self.optimizer is not None and not self.alg.keep_moments:
            self.optimizer.state.clear()
        self.open(goes_on=len(mine) > 0)

    @property
    def wrapped(self) -> Any:
        """The algorithm of this round with the compression around it."""
        return self.alg if self.uplink is None else Compressed(self.alg, self.uplink, self.rounds)

    @property
    def own_client(self) -> State:
        """The algorithm's part of what this island keeps."""
        return self.client if self.uplink is None else self.wrapped.open("client", self.client)

    def rows(self, t: Tensor) -> Tensor:
        """[W, ...] a tensor of each island."""
        return self.workers.all_rows(t.contiguous()) if t.numel() else t.expand(self.workers.count, *t.shape)

    # Vectors.
    def flat(self, tensors: list[Tensor]) -> Tensor:
        like = torch.zeros((), dtype=self.net.dtype, device=tensors[0].device)
        return self.net.layout.join(dict(zip(self.net.layout.names, tensors, strict=True)), like)

    def parts(self, x: Tensor) -> list[Tensor]:
        return list(self.net.layout.split(x).values())

    def read(self) -> tuple[Tensor, Tensor]:
        """The parameters and running statistics of the model, as vectors."""
        x = self.flat(list(self.params))
        like = torch.zeros((), dtype=self.net.dtype, device=x.device)
        named = dict(zip(self.net.buffer_layout.names, self.statistics, strict=True))
        return x, self.net.buffer_layout.join(named, like)

    @torch.no_grad()
    def write(self, x: Tensor, buffers: Tensor | None = None) -> None:
        for p, part in zip(self.params, self.parts(x), strict=True):
            p.copy_(part)
        if buffers is not None:
            for t, value in zip(self.statistics, self.net.buffer_layout.split(buffers).values(), strict=True):
                t.copy_(value)

    # Checkpoints.
    def whole_state_dict(self) -> dict[str, Any]:
        """The state of all islands; all must call it, one may save it. Each saves its own optimizer."""
        own = [self.rows(t).clone() for t in leaves(Own(self.client or Nothing(), self.work, self.buffers, self.point))]
        state = {
            "algorithm": type(self.alg).__name__, "every": self.every, "compress": self.compress,
            "islands": self.workers.count, "rounds": self.rounds, "k": self.k,
            "server": [t.clone() for t in leaves(self.state)], "own": own,
        }  # fmt: skip
        if self.flight is not None:
            up, buffers = self.flight.receive()
            self.flight = self.flight._replace(receive=lambda: (up, buffers))
            kept = [self.rows(t).clone() for t in leaves(self.flight.own.client)]
            state |= {"flight": {"own": kept, "answers": [t.clone() for t in (*leaves(up), buffers)]}}
        return state

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `whole_state_dict()`, bit for bit on as many islands; on another number right after an exchange."""
        kind, now = type(self.alg).__name__, self.workers.count
        stored = (state["algorithm"], state["every"], state.get("compress", ""))
        if stored != (kind, self.every, self.compress):
            raise BadRunFolder(
                f"the checkpoint is of {describe_run(*stored)}, not of {describe_run(kind, self.every, self.compress)}"
            )
        before, other = int(state["islands"]), int(state["islands"]) != now
        flight = state.get("flight")
        if other and (flight or state["k"] not in (0, self.alg.late)):
            since = "while an exchange was under way" if flight else f"{state['k']} steps after an exchange"
            raise BadRunFolder(
                f"the checkpoint was made by {before} islands {since}, and their models differ; "
                f"to go on with {now}, save right after an exchange, where step() returns True"
            )
        self.state = put(self.state, state["server"])
        self.rounds = int(state["rounds"])
        if other and leaves(self.client) and self.workers.rank == 0:
            warnings.warn(
                f"the checkpoint was made by {before} islands, now there are {now}: each begins anew", stacklevel=3
            )
        self.client, self.flight, self.k = None, None, 0
        self.open()
        if other:
            return
        own = Own(self.client or Nothing(), self.work, self.buffers, self.point)
        self.client, self.work, self.buffers, _ = put(own, [row[self.workers.rank] for row in state["own"]])
        self.k = int(state["k"])
        if flight:
            self.flight = self.landing(flight)
        self.write(self.work.x, self.buffers)
        self.aim()

    def landing(self, stored: Mapping[str, list[Tensor]]) -> Flight:
        """An exchange that was under way when a checkpoint was made."""
        own = end(self.wrapped, self.down, Started(self.client, self.work, self.buffers), self.buffers.new_zeros(1))
        own = own._replace(client=put(own.client, [row[self.workers.rank] for row in stored["own"]]))
        *answers, buffers = stored["answers"]
        up = put(map_leaves(lambda t: t.expand(self.workers.count, *t.shape), own.up), answers)
        return Flight(own, lambda: (up, buffers.to(own.buffers)))


def describe_run(kind: str, every: int, compress: str) -> str:
    return f"{kind} with every={every}" + (f" and compress={compress}" if compress else "")


def put(state: Any, stored: list[Tensor]) -> Any:
    """A state with the stored tensors in place of its own, in their order."""
    found = iter(stored)

    def take(t: Tensor) -> Tensor:
        given = next(found, None)
        if given is None or given.shape != t.shape:
            shape = None if given is None else list(given.shape)
            raise BadRunFolder(f"the checkpoint does not fit: {shape} is stored where {list(t.shape)} belongs")
        return given.to(t).clone()

    return map_leaves(take, state)


def steps_of_a_round(alg: Algorithm, every: int) -> int:
    """Local steps between two exchanges, of which each has one fragment where the model is exchanged in several."""
    steps, rest = divmod(every, alg.turns)
    if rest or steps <= alg.late:
        raise BadSetting(
            f"every must be a multiple of the {alg.turns} fragments and leave more than the {alg.late} steps of delay for each: "
            f"{alg.turns * (alg.late + 1)} or {alg.turns * (alg.late + 2)}, not {every}"
        )
    return steps


def make_uplink(compress: str, seed: int, alg: Any, net: Net, islands: int) -> Uplink | None:
    """How uploads are compressed, as in `undrift run --compress`."""
    check_compress(compress)
    if not compress:
        return None
    check_compressed(alg)
    return Uplink(compress, seed, net, upload_form(alg, net, islands))


def widest(model: nn.Module) -> torch.dtype:
    return torch.float64 if any(p.dtype == torch.float64 for p in model.parameters()) else torch.float32


def without_memory(model: nn.Module) -> nn.Module:
    """A copy of the model whose tensors have shapes alone."""
    memo: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in model.parameters()
    }
    memo |= {id(b): torch.empty_like(b, device="meta") for b in model.buffers()}
    return copy.deepcopy(model, memo)
