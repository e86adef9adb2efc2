"""The order of calls in a round: the only one there is.

Stacked clients, a pool, ranks, CUDA graphs, packs and real federations differ in how they *ask* the clients; what comes
before and after is `play`, which a GPU records as it stands.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from undrift.algorithms.base import Algorithm, Cohort
from undrift.algorithms.personal import Served
from undrift.core.layout import MODEL
from undrift.core.trees import Nothing, State, leaves, map_leaves, nbytes
from undrift.core.vec import mean
from undrift.oracle.net import Net
from undrift.round.attack import spoil, spoil_answers
from undrift.round.clients import Answers
from undrift.round.numbers import numbers_of
from undrift.round.robust import agree, agree_answers
from undrift.round.who import Task, Who


class ServerState(NamedTuple):
    """Everything the server holds."""

    x: Tensor  # [P]
    buffers: Tensor  # [Q] BatchNorm statistics, averaged beside x
    server: State  # the server part's
    companion: State  # what the worker part keeps on the server


class Ask(Protocol):
    """How answers are had from the clients of a round. Both methods return rows in the order of `who`."""

    def measure(self, alg: Algorithm, down: State, buffers: Tensor, who: Who) -> Tensor:
        """The first exchange: what every client measures [..., S, P]."""

    def train(self, alg: Algorithm, down: State, buffers: Tensor, who: Who) -> State:
        """The clients' answers, as `Task.read` takes them."""


class After(NamedTuple):
    """What a round leaves."""

    state: ServerState
    good: Tensor  # [S] whose answers count; where nobody is left out, [...] whether all of them are finite
    ids: Tensor  # [..., S] of the clients whose answers count
    client: State  # their states, with the server's reply
    reply: State  # what the server sent each of them for that
    numbers: Tensor  # [n, ...] for the record, in float64; `Cost.names` says which


@dataclass
class Cost:
    """What a round costs each of its clients, measured on the messages themselves; and the names of its numbers."""

    down: State = Nothing()  # the message to each client
    measured: int = 0  # bytes that a client sends in a first exchange
    up: int = 0  # and when it has trained
    reply: int = 0  # and gets when the round is over
    names: list[str] = field(default_factory=list)

    def bytes_up(self, clients: int) -> int:
        return clients * (self.measured + self.up)


class Nobody:
    """Asks nobody, where nobody is there."""

    def __init__(self, form: Answers) -> None:
        self.form = form  # one client's answer, without memory

    def measure(self, alg: Algorithm, down: State, buffers: Tensor, who: Who) -> Tensor:
        return torch.zeros(0, down.x.shape[-1], dtype=down.x.dtype, device=buffers.device)

    def train(self, alg: Algorithm, down: State, buffers: Tensor, who: Who) -> Answers:
        return map_leaves(lambda v: torch.zeros(0, *v.shape, dtype=v.dtype, device=buffers.device), self.form)


def at_once(close: Callable[..., After], *given: Any) -> After:
    return close(*given)


def play(
    alg: Algorithm,
    task: Task,
    state: ServerState,
    who: Who,
    ask: Ask,
    cost: Cost,
    finish: Callable[..., Any] = at_once,
) -> Any:
    """One round: broadcast, first exchange, ask the clients, leave out bad answers, rule, server, reply, bytes, numbers.

    `finish(close, *given)` makes the part after the answers: at once, compiled, or later on the host.
    """
    net = task.net
    rated = task.with_rate(alg, who.rate)
    invited = task.cohort(rated, who)
    companion, fine = state.companion, task.everybody(who)
    down = send_down(rated, state.x, companion, invited)
    if rated.measures:  # two exchanges: measure at x_t, then train with what the server made of it
        sent = spoil(task.attackers, ask.measure(rated, down, state.buffers, who), who)
        cost.measured, fine = nbytes(net.without_padding(sent, MODEL)) // who.ids.numel(), task.finite(who, [sent])
        if task.anybody(fine):
            kept, sent = task.keep(who, sent, fine)
            answering = task.cohort(rated, kept)
            companion = rated.gather_measured(companion, agree(task.rule, sent, answering), answering)
        down = send_down(rated, state.x, companion, invited)
    cost.down = net.without_padding(down)
    answered = ask.train(rated, down, state.buffers, who)

    def close(who: Who, companion: State, fine: Tensor, answered: State, state: ServerState) -> After:
        rated = task.with_rate(alg, who.rate)
        answers = spoil_answers(task.attackers, task.read(rated, answered), who, state.buffers, net.counters)
        sent = nbytes(net.without_padding(answers.up)) + (nbytes(answers.buffers) if rated.buffers_up else 0)
        cost.up = sent // max(1, who.ids.numel())
        good = fine & task.finite(who, [*leaves(answers.up), answers.buffers])
        good = good & answers.there if isinstance(answers.there, Tensor) else good
        none, anybody = torch.zeros(0, dtype=torch.float64), task.anybody(good)
        if not (anybody or rated.moves_alone):  # nobody's answer counts: everything stays as it was
            return After(state, good, who.ids[:0], Nothing(), Nothing(), none)
        kept, answers = task.keep(who, answers, good)
        cohort = task.cohort(rated, kept)
        answers = agree_answers(task.rule, answers, cohort, state.buffers, net.counters)

        weighed = rated.weigh(cohort)
        d, companion = rated.gather(companion, answers.up, weighed)
        x, server = state.x, state.server
        if not rated.stands_still:
            x, server = rated.server_step(server, x, d, answers.up, cohort)
        companion = rated.companion_step(companion, answers.up, cohort, state.x, x)
        buffers = state.buffers
        if rated.buffers_up:
            buffers = average_buffers(net, answers, weighed, buffers, rated.mixing(cohort))
        reply = reply_to(rated, companion, answers, cohort)
        cost.reply = nbytes(net.without_padding(reply)) // max(1, cohort.ids.numel())
        client = receive(rated, answers.client, reply)

        cost.names, numbers = [], none
        if anybody:
            cost.names, numbers = numbers_of(rated, server, answers, cohort, task.numbers(good))
        return After(ServerState(x, buffers, server, companion), good, cohort.ids, client, reply, numbers)

    return finish(close, who, companion, fine, answered, state)


def first_state(alg: Algorithm, net: Net, x0: Tensor, buffers: Tensor, clients: int) -> ServerState:
    """What the server holds before the first round."""
    others = {name: Served(*(v.to(x0.device) for v in other.start())) for name, other in net.networks.items()}
    starts = {"model": Served(x0, buffers)} | others
    companion = alg.companion_networks(alg.companion_init(x0, clients), starts)
    return ServerState(x0, buffers, alg.server_init(x0, clients, net.layout), companion)


def send_down(alg: Algorithm, x: Tensor, companion: State, invited: Cohort) -> State:
    """The server's message to every client that is invited."""
    return alg.broadcast(x, companion, invited)


def reply_to(alg: Algorithm, companion: State, answers: Answers, cohort: Cohort) -> State:
    """The server's message to each client by itself, when the round is over."""
    return alg.reply(companion, answers.up, answers.buffers, cohort)


def receive(alg: Algorithm, client: State, reply: State) -> State:
    """The clients' states with the server's reply; where there are none, or they are elsewhere, still none."""
    return client if isinstance(client, Nothing) else alg.receive(client, reply)


def average_buffers(net: Net, answers: Answers, cohort: Cohort, old: Tensor, mixing: float | Tensor) -> Tensor:
    """BatchNorm's statistics, averaged, as far as the server goes there; its counters are aggregated by maximum."""
    averaged = mean(answers.buffers, cohort.weight)
    averaged = old + mixing * (averaged - old) if isinstance(mixing, Tensor) else averaged
    return torch.where(net.counters, answers.buffers.amax(-2), averaged) if net.counters.numel() else averaged
