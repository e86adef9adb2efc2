"""The interface of a federated algorithm: a worker part and a server part, pure functions over vectors [..., P].

Write for one client; leading dimensions are () on a real client and (S,) for a stacked cohort in the simulator. Every vector
is [..., P] and every number of a client [..., 1]. Inside `local_*`: no `if` on a tensor, no `.item()`, no writing into inputs.

A worker part says what the clients do, and what the server keeps for them (the *companion*, such as SCAFFOLD's c). A server
part turns the aggregated direction d, positive = descent, into the next x. An algorithm is one final dataclass that joins the
two; its fields are its settings.

A part defines its states as NamedTuples of tensors called Companion, Down, Client, Work and Up, where it needs them. Companion
and Client begin as zeros like x. Down is filled by name from x and the companion. Work begins with x, k, opt, then zeros.
Override the functions below where that does not fit. What few methods need is in `personal.py`, `partial.py` and `stale.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from undrift.algorithms import optimise
from undrift.algorithms.checks import ServerRate, check_local_steps
from undrift.algorithms.optimise import LocalOptimizer, W
from undrift.algorithms.partial import PartialExchange
from undrift.algorithms.personal import Personal
from undrift.algorithms.stale import Weighing
from undrift.core.layout import Layout, weights
from undrift.core.layout import Vec as Vec
from undrift.core.trees import Nothing as Nothing
from undrift.core.trees import State as State
from undrift.core.trees import nbytes
from undrift.core.vec import clip, descend, mean
from undrift.oracle.oracle import GradientOracle as GradientOracle
from undrift.oracle.oracle import LocalData as LocalData


class Down(NamedTuple):
    """The server's message to every client of a cohort."""

    x: Vec


class Up(NamedTuple):
    """A client's answer."""

    d: Vec  # d_i = x_t - x_i^K, positive = descent


class Work(NamedTuple):
    """A client's state between local steps."""

    x: Tensor  # x_i^k
    k: Tensor  # [..., 1] local steps taken so far
    opt: State  # the base optimiser's state


class Cohort(NamedTuple):
    """The clients that answered in a round, in the order of their ids."""

    ids: Tensor  # [..., S] int64
    drawn: Tensor  # [..., S] int64, position in the order of sampling
    weight: Tensor  # [..., S, 1], adds up to one
    steps: Tensor  # [..., S, 1] local steps made, K_i
    lr: float  # the local rate of this round, eta_l
    total: int  # N, all clients
    layout: Layout
    there: Tensor | None = None  # [..., S, 1] 1 for a client, 0 for an empty place; None: no place is empty
    staleness: Tensor | None = None  # [..., S, 1] server steps since the model that each one began with; None: all 0
    start: Tensor | None = None  # [..., S, P] that model; None: the server's present one

    @property
    def size(self) -> int | Tensor:
        """S without empty places; [..., 1] if there may be any."""
        return self.ids.shape[-1] if self.there is None else self.there.sum(-2)

    @property
    def uniform(self) -> Tensor:
        """Equal weights, for control variates, duals and memories."""
        if self.there is None:
            return torch.full_like(self.weight, 1.0 / max(1, self.ids.shape[-1]))
        return self.there / self.there.sum(-2, keepdim=True)

    @property
    def mean_steps(self) -> Tensor:
        """[..., 1] the cohort's mean number of local steps."""
        return self.steps.mean(-2) if self.there is None else mean(self.steps, self.uniform)


@dataclass(frozen=True)
class Worker(LocalOptimizer, Personal, PartialExchange, ABC):
    """The clients' part of a round."""

    lr: float = 0.1  # eta_l; more settings of local steps are in `optimise/`

    sends_updates: ClassVar[bool] = True  # Up.d is the client's update d_i
    moves_alone: ClassVar[bool] = False  # True: the model moves in a round in which nobody's answer counts, too

    # On the server.
    def companion_init(self, x0: Tensor, clients: int) -> State:
        return zeros(getattr(self, "Companion", Nothing), x0)

    def broadcast(self, x: Tensor, companion: State, invited: Cohort) -> State:
        """The message to the clients that are invited to this round."""
        kind = getattr(self, "Down", Down)
        return kind(x, *(getattr(companion, field) for field in kind._fields[1:]))

    def bytes_down(self, down: State, invited: int, returning: int, clients: int) -> int:
        """Bytes on the downlink, when `returning` of the `invited` clients took part in the round before."""
        return invited * nbytes(down)

    def gather(self, companion: State, up: State, cohort: Cohort) -> tuple[Tensor, State]:
        """The direction [..., P] for the server part, and the companion after the answers."""
        return mean(up.d, cohort.weight), companion

    def companion_step(self, companion: State, up: State, cohort: Cohort, x_old: Tensor, x_new: Tensor) -> State:
        """The companion after the server has moved."""
        return companion

    # A first exchange, for methods that measure something at x_t before training.
    measures: ClassVar[bool] = False

    def measure(self, down: State, local: LocalData) -> Tensor:
        """A client's answer [..., P] in the first exchange."""
        return local.full_grad(down.x)

    def gather_measured(self, companion: State, sent: Tensor, invited: Cohort) -> State:
        """The companion after the first exchange."""
        return companion

    # On a client.
    def client_init(self, down: State, ids: Tensor, buffers: Tensor) -> State:
        """A client's state in its first round; ids [...], buffers [..., Q] the server's statistics."""
        return zeros(getattr(self, "Client", Nothing), down.x)

    def local_start(self, down: State, client: State, local: LocalData) -> State:
        """The work before the first step."""
        kind, zero = getattr(self, "Work", Work), torch.zeros_like(down.x)
        return kind(down.x, zero[..., :1], self.rest(down.x), *(zero for _ in kind._fields[3:]))

    @abstractmethod
    def local_step(self, down: State, client: State, work: State, oracle: GradientOracle) -> State: ...

    def local_end(self, down: State, client: State, work: State) -> tuple[State, State]:
        """The answer, by default d_i = x_t - x_i^K, and the client's state after the round."""
        return Up(down.x - work.x), client

    def local_facts(self, work: State) -> State:
        """A NamedTuple of numbers [..., 1] whose means over the cohort are recorded."""
        return Nothing()

    def move(self, work: W, u: Tensor, oracle: GradientOracle, start: Tensor | None = None) -> W:
        """The work after a step along the direction u, from x_i^k or from `start`: clip, decay, base optimiser."""
        x = work.x if start is None else start
        optimizer, rates = optimise.FILES[self.optimizer], self.at_step(work.k)
        if self.clip:
            u = clip(u, self.clip)
        if self.weight_decay:
            decay = self.weight_decay * (work.x if self.decay_biases else work.x * weights(oracle.layout, work.x))
            x, u = (descend(x, rates.lr, decay), u) if optimizer.DECOUPLED else (x, u + decay)
        x, opt = optimizer.step(rates, x, work.opt, u, oracle.layout)
        return work._replace(x=x, k=work.k + 1, opt=opt)

    def check(self, clients: int, cohort: int) -> None:
        """Raise BadSetting where a field's value, alone or with the federation's size, makes no sense."""
        super().check(clients, cohort)
        check_local_steps(self)


@dataclass(frozen=True)
class Server(ServerRate, Weighing, ABC):
    """The server's part of a round."""

    needs_single_updates: ClassVar[bool] = False  # True: needs every update, not only their sum
    varies: ClassVar[tuple[str, ...]] = ("server_lr",)  # real fields in which runs of one program may differ
    one_run: ClassVar[bool] = False  # True: the state cannot have a leading dimension of runs

    def server_init(self, x0: Tensor, clients: int, layout: Layout) -> State:
        return zeros(getattr(self, "State", Nothing), x0)

    @abstractmethod
    def server_step(self, server: State, x: Tensor, d: Tensor, up: State, cohort: Cohort) -> tuple[Tensor, State]:
        """The next x and the server's state, from the direction d; `up` holds the single answers [..., S, P]."""

    def facts(self, server: State) -> dict[str, Tensor]:
        """Numbers for the round's record."""
        return {}

    @property
    def sums_over(self) -> int:
        """Rounds over which d is summed; with privacy, their noise forms a tree. 0: each round's noise is its own."""
        return 0


class Algorithm(Worker, Server, ABC):
    """A worker part and a server part together; for annotations only."""


@dataclass(frozen=True)
class LocalSGD(Worker):
    """The clients do nothing new: x_i^{k+1} = x_i^k - eta_l g_i(x_i^k)."""

    def local_step(self, down: State, client: State, work: Work, oracle: GradientOracle) -> Work:
        return self.move(work, oracle.grad(work.x), oracle)


@dataclass(frozen=True)
class Average(Server):
    """The server does nothing new: x_{t+1} = x_t - eta_g d."""

    def server_step(self, server: Nothing, x: Tensor, d: Tensor, up: State, cohort: Cohort) -> tuple[Tensor, Nothing]:
        return x - self.server_lr * d, server


def zeros(kind: type[State], x: Tensor) -> State:
    """A state of this kind with zeros like x in every field."""
    return kind(*(torch.zeros_like(x) for _ in kind._fields))
