"""The interface of a federated algorithm: a worker part and a server part, pure functions over vectors [..., P].

Write for one client; the leading dimensions may be anything. On a real client they are (), in the simulator (S,) for a
stacked cohort. Every vector is [..., P] and every number that belongs to a client [..., 1]; states are NamedTuples whose
leaves are tensors. Inside `local_*`: no `if` on a tensor, no `.item()`, no writing into inputs.

A worker part is what the clients do, and what its method keeps on the server for them (its *companion*: SCAFFOLD's c,
for instance). A server part turns the aggregated direction d, positive = descent, into the next x. An algorithm is one
final dataclass that joins the two; its fields are its settings.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from undrift.core.errors import BadSetting, UnknownName
from undrift.core.layout import Layout, weights
from undrift.core.trees import Nothing as Nothing
from undrift.core.trees import nbytes
from undrift.core.vec import clip, descend, mean
from undrift.oracle.oracle import GradientOracle, LocalData


class Down(NamedTuple):
    """What the server sends to every client of a cohort."""

    x: Tensor


class Up(NamedTuple):
    """What a client sends back."""

    d: Tensor  # d_i = x_t - x_i^K, positive = descent


class Momentum(NamedTuple):
    """The base optimiser's state for momentum SGD."""

    b: Tensor


class Adam(NamedTuple):
    """The base optimiser's state for Adam."""

    m: Tensor
    v: Tensor
    n: Tensor  # [..., 1] steps that m and v have seen


class Stream(NamedTuple):
    """A further model that a client trains, beside the one that it begins with or instead of it."""

    x: Tensor
    k: Tensor  # [..., 1] steps
    opt: Any
    statistics: Tensor  # [..., Q] of its BatchNorm layers


class Served(NamedTuple):
    """The model that a client is served by."""

    x: Tensor
    buffers: Tensor


class Work(NamedTuple):
    """A client's work in progress."""

    x: Tensor  # x_i^k
    k: Tensor  # [..., 1] local steps taken so far
    opt: Nothing | Momentum | Adam  # the base optimiser's state
    # A method's own Work may have more fields; one called `buffers` is kept at the client's BatchNorm statistics.


class Cohort(NamedTuple):
    """The clients that answered in a round, in the order of their ids."""

    ids: Tensor  # [..., S] int64
    drawn: Tensor  # [..., S] int64, the place of each in the order of sampling
    weight: Tensor  # [..., S, 1], adds up to one
    steps: Tensor  # [..., S, 1] local steps made, K_i
    lr: float  # the local rate of this round, eta_l
    total: int  # N, all clients
    layout: Layout
    there: Tensor | None = None  # [..., S, 1] 1 for a client, 0 for a place that is empty; None: all are taken

    @property
    def size(self) -> int | Tensor:
        """S, without empty places ([..., 1] where there are any)."""
        return self.ids.shape[-1] if self.there is None else self.there.sum(-2)

    @property
    def uniform(self) -> Tensor:
        """Equal weights, for what must not be weighted by size (control variates, duals, memories)."""
        if self.there is None:
            return torch.full_like(self.weight, 1.0 / self.ids.shape[-1])
        return self.there / self.there.sum(-2, keepdim=True)

    @property
    def mean_steps(self) -> Tensor:
        """[..., 1] the cohort's mean number of local steps."""
        return self.steps.mean(-2) if self.there is None else mean(self.steps, self.uniform)


OPTIMIZERS = ("sgd", "momentum", "adam")


@dataclass(frozen=True)
class Worker(ABC):
    """What the clients do in a round."""

    lr: float = 0.1  # eta_l
    weight_decay: float = 0.0  # coupled L2, added to the final direction of each local step
    decay_biases: bool = True  # False: weight decay spares biases and normalisation, the tensors of one dimension
    clip: float = 0.0  # longest local direction; 0 does not clip
    optimizer: str = "sgd"  # the base optimiser of local steps: sgd, momentum or adam
    momentum: float = 0.9  # of the base optimiser: momentum's mu, Adam's beta_1
    keep_moments: bool = False  # True: a client keeps the base optimiser's state between rounds

    paper: ClassVar[str] = ""  # BibTeX
    sends_updates: ClassVar[bool] = True  # Up.d is the client's own update d_i, not a difference of memories

    # What the method keeps on the server for its clients.
    def companion_init(self, x0: Tensor, clients: int) -> Any:
        return Nothing()

    def broadcast(self, x: Tensor, companion: Any, invited: Cohort) -> Any:
        """What goes down to the clients that are invited to this round."""
        return Down(x)

    def bytes_down(self, down: Any, invited: int, returning: int, clients: int) -> int:
        """Bytes on the downlink, when `returning` of the `invited` clients took part in the round before."""
        return invited * nbytes(down)

    def gather(self, companion: Any, up: Any, cohort: Cohort) -> tuple[Tensor, Any]:
        """The direction [..., P] that the server part is to follow, and the companion after the answers."""
        return mean(up.d, cohort.weight), companion

    def companion_step(self, companion: Any, up: Any, cohort: Cohort, x_old: Tensor, x_new: Tensor) -> Any:
        """The companion after the server has moved."""
        return companion

    # A first exchange, for methods that measure something at x_t before anybody trains.
    measures: ClassVar[bool] = False

    def measure(self, down: Any, local: LocalData) -> Tensor:
        """What a client sends up in the first exchange [..., P]."""
        return local.full_grad(down.x)

    def measured(self, companion: Any, sent: Tensor, invited: Cohort) -> Any:
        """The companion after the first exchange."""
        return companion

    # What a client keeps and does.
    def client_init(self, down: Any, ids: Tensor, buffers: Tensor) -> Any:
        """A client's state when it takes part for the first time; ids [...], buffers [..., Q] the server's statistics."""
        return Nothing()

    def local_start(self, down: Any, client: Any) -> Any:
        """The work before the first step: at the server's model."""
        return Work(down.x, torch.zeros_like(down.x[..., :1]), self.rest(down.x))

    def prepare(self, down: Any, client: Any, work: Any, local: LocalData) -> Any:
        """The work with what it needs of the whole of the client's data, before the first step."""
        return work

    @abstractmethod
    def local_step(self, down: Any, client: Any, work: Any, oracle: GradientOracle) -> Any: ...

    def local_end(self, down: Any, client: Any, work: Any) -> tuple[Any, Any]:
        """What goes up, and the client's state after the round: the update d_i = x_t - x_i^K."""
        return Up(down.x - work.x), client

    def local_facts(self, work: Any) -> Any:
        """A NamedTuple of numbers [..., 1] about the local steps; the record gets each one's mean over the cohort."""
        return Nothing()

    # What the server sends to each client of a round by itself, when the round is over.
    def reply(self, companion: Any, up: Any, buffers: Tensor, cohort: Cohort) -> Any:
        """[..., S, P] for each client that answered; buffers [..., S, Q] are the statistics that came up."""
        return Nothing()

    def receive(self, client: Any, reply: Any) -> Any:
        """The client's state with the reply."""
        return client

    # Methods that leave every client a model of its own, and methods that train more than one network.
    personalises: ClassVar[bool] = False
    pools: ClassVar[bool] = False  # True: all samples are put into one client's hands before training begins
    uploads_apart: ClassVar[bool] = False  # True: what a client sends is used by itself, not only in a sum

    def serves(self, down: Any, client: Any, local: LocalData) -> Served:
        """The model that serves a client between rounds, where the method is personal; `down` is what would go down now."""
        return Served(down.x, local.buffers)

    @property
    def buffers_down(self) -> bool:
        """Whether the server's BatchNorm statistics go down to the clients in this round."""
        return True

    @property
    def buffers_up(self) -> bool:
        """Whether the clients' come up and are averaged."""
        return True

    # Methods with a network that chooses among the models: its vector, and how it chooses.
    chooses: ClassVar[str] = ""  # threshold, argmax or mix, see `undrift.personal.choosing`

    def selects(self, rounds: int) -> bool:
        """Whether after so many rounds it has begun to learn; until then the server's model serves."""
        return bool(self.chooses)

    def selector(self, companion: Any) -> Served:
        """The network called `selector`, as the server has it now."""
        raise NotImplementedError

    def networks(self, clients: int) -> dict[str, tuple[str, int]]:
        """Further networks by name: which model, and how many outputs it has."""
        return {}

    def companion_more(self, companion: Any, starts: Mapping[str, Served]) -> Any:
        """The companion with what further networks begin with; `model` is the network that everybody trains."""
        return companion

    # Methods whose rounds are not all alike.
    def at(self, t: int) -> Any:
        """The algorithm of round t, counted from 0: itself, or a copy with a field that says what is done now."""
        return self

    def remarks(self, rounds: int, cohort: int) -> list[str]:
        """What is allowed, and perhaps not meant."""
        if rounds and self.at(rounds - 1) == self.at(0) != self.at(sys.maxsize):
            return [
                f"the second phase was to begin after round {getattr(self, 'begin', '?')}, which was not reached; lower begin"
            ]
        return []

    def take_moments(self, work: Any, opt: Any) -> Any:
        """The work with the base optimiser's state that the client has kept."""
        return work._replace(opt=opt)

    def left_moments(self, work: Any, opt: Any) -> Any:
        """What the client keeps of the base optimiser's state, where it had `opt` before the round."""
        return work.opt

    # How every local step ends.
    def advance(self, stream: Stream, oracle: GradientOracle) -> tuple[Stream, Tensor]:
        """One plain step of a further model on the same mini-batch, and its loss [..., 1]."""
        beside = oracle.at(stream.statistics)
        moved: Stream = self.move(stream, beside.grad(stream.x), oracle)
        return moved._replace(statistics=beside.buffers), beside.loss

    def rest(self, x: Tensor) -> Nothing | Momentum | Adam:
        """The base optimiser's state before the first step from x."""
        if self.optimizer == "momentum":
            return Momentum(torch.zeros_like(x))
        if self.optimizer == "adam":
            return Adam(torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(x[..., :1]))
        return Nothing()

    @property
    def moves_plainly(self) -> bool:
        """Whether `move` is x - eta_l u and nothing more, where the base optimiser keeps nothing."""
        own = type(self).move is Worker.move and type(self).optimise is Worker.optimise
        return own and not (self.clip or self.weight_decay)

    def move(self, work: Any, u: Tensor, oracle: GradientOracle) -> Any:
        """One local step along the method's direction u: clip it, add weight decay, let the base optimiser step.

        `work` is `Work`, or a method's own NamedTuple that has x, k and opt among its fields.
        """
        if self.clip:
            u = clip(u, self.clip)
        if self.weight_decay:
            decayed = work.x if self.decay_biases else work.x * weights(oracle.layout, work.x.dtype, work.x.device)
            u = u + self.weight_decay * decayed
        return self.optimise(work, u)

    def optimise(self, work: Any, u: Tensor) -> Any:
        """One step of the base optimiser along u."""
        opt = work.opt
        if isinstance(opt, Momentum):  # b <- mu b + u
            opt = Momentum(self.momentum * opt.b + u)
            u = opt.b
        elif isinstance(opt, Adam):
            n, beta2 = opt.n + 1, 0.999
            opt = Adam(torch.lerp(u, opt.m, self.momentum), torch.lerp(u * u, opt.v, beta2), n)
            u = opt.m / (1 - self.momentum**n) / ((opt.v / (1 - beta2**n)).sqrt() + 1e-8)
        return arrived(work._replace(opt=opt), descend(work.x, self.lr, u))

    def check(self, clients: int, cohort: int) -> None:
        """Raise BadSetting where a field's value, alone or with the federation's size, makes no sense."""
        at_least(self, 0.0, "lr", "weight_decay", "clip")
        below_one(self, "momentum")
        if self.lr == 0:
            raise BadSetting("lr must be greater than 0")
        if self.optimizer not in OPTIMIZERS:
            raise UnknownName("optimizer", self.optimizer, OPTIMIZERS)


def arrived(work: Any, x: Tensor) -> Any:
    """The work after a local step to x."""
    return work._replace(x=x, k=work.k + 1)


@dataclass(frozen=True)
class Server(ABC):
    """What the server makes of the aggregated direction."""

    server_lr: float = 1.0  # eta_g

    needs_single_updates: ClassVar[bool] = False  # True: the sum of the updates is not enough

    def server_init(self, x0: Tensor, clients: int, layout: Layout) -> Any:
        return Nothing()

    @abstractmethod
    def server_step(self, server: Any, x: Tensor, d: Tensor, up: Any, cohort: Cohort) -> tuple[Tensor, Any]:
        """The next x and the server's state, from the direction d; `up` holds the single answers [..., S, P]."""

    def facts(self, server: Any) -> dict[str, Tensor]:
        """Numbers for the round's record."""
        return {}

    def check_server(self, clients: int, cohort: int) -> None:
        """As `Worker.check`, for the server's fields."""
        at_least(self, 0.0, "server_lr")


class Algorithm(Worker, Server, ABC):
    """A worker part and a server part together; for annotations only."""


def check(alg: Algorithm, clients: int, cohort: int) -> None:
    """Raise BadSetting unless the algorithm's fields make sense and its two parts fit each other."""
    alg.check(clients, cohort)
    alg.check_server(clients, cohort)
    if alg.needs_single_updates and not alg.sends_updates:
        raise BadSetting(
            f"the server part of {type(alg).__name__} needs the clients' own updates; its worker part sends none"
        )


def looks_at_single_uploads(alg: Any) -> bool:
    """Whether the sum of what clients send is not enough for an algorithm or its class."""
    return bool(alg.needs_single_updates or alg.uploads_apart)


def standing_still(cohort: Cohort) -> Tensor:
    """The direction [..., P] of a round in which the server's model stays where it is."""
    return cohort.weight.new_zeros(*cohort.weight.shape[:-2], cohort.layout.size)


@dataclass(frozen=True)
class LocalSGD(Worker):
    """The clients do nothing new: x_i^{k+1} = x_i^k - eta_l g_i(x_i^k)."""

    def local_step(self, down: Any, client: Any, work: Work, oracle: GradientOracle) -> Any:
        if self.moves_plainly and isinstance(work.opt, Nothing):  # the same, which may be had in one pass
            return arrived(work, oracle.step(work.x, self.lr))
        return self.move(work, oracle.grad(work.x), oracle)


@dataclass(frozen=True)
class Average(Server):
    """The server does nothing new: x_{t+1} = x_t - eta_g d."""

    def server_step(self, server: Nothing, x: Tensor, d: Tensor, up: Any, cohort: Cohort) -> tuple[Tensor, Nothing]:
        return x - self.server_lr * d, server


def at_least(settings: object, lowest: float, *fields: str) -> None:
    """Raise BadSetting unless every named field is a finite number >= lowest."""
    for field in fields:
        value = getattr(settings, field)
        if not lowest <= float(value) < 1e30:  # NaN compares false
            raise BadSetting(f"{field} must be a number of at least {lowest:g} and below 1e30, not {value}")


def below_one(settings: object, *fields: str) -> None:
    """Raise BadSetting unless every named field lies in [0, 1)."""
    at_least(settings, 0.0, *fields)
    for field in fields:
        if not getattr(settings, field) < 1.0:
            raise BadSetting(f"{field} must lie in [0, 1), not {getattr(settings, field)}")
