"""The order of calls in a round, written once for every engine, and the record of what a round did."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from undrift.algorithms.base import Algorithm, Cohort, Nothing, Served
from undrift.core.forms import plain
from undrift.core.trees import leaves, map_leaves, where
from undrift.core.vec import mean
from undrift.oracle.net import Net
from undrift.oracle.oracle import LocalData, Oracle

T = TypeVar("T")


class State(NamedTuple):
    """Everything the server holds."""

    x: Tensor  # [P]
    buffers: Tensor  # [Q] BatchNorm statistics, averaged beside x
    server: Any  # the server part's state
    companion: Any  # what the worker part keeps on the server


class Answers(NamedTuple):
    """What came back from clients [..., S]: `up` travels, `client` stays with them."""

    up: Any
    client: Any
    buffers: Tensor  # [..., Q]
    x: Tensor  # [..., P] the local models x_i^K, for the consistency metric
    loss: Tensor  # [..., 1] mean training loss over the local steps
    facts: Any  # the worker part's own numbers [..., 1]


class Kept(NamedTuple):
    """What a client keeps between rounds, where it keeps the base optimiser's state too."""

    own: Any  # what the worker part keeps
    opt: Any


def fill(state: T, lead: torch.Size) -> T:
    """Leaves [P] or [1, P] expanded to [*lead, P]."""
    return map_leaves(lambda t: t.expand(*lead, t.shape[-1]), state) if lead else state


def server_init(alg: Algorithm, net: Net, x0: Tensor, buffers: Tensor, clients: int) -> State:
    others = {name: Served(*(v.to(x0.device) for v in other.start())) for name, other in net.beside.items()}
    starts = {"model": Served(x0, buffers)} | others
    companion = alg.companion_more(alg.companion_init(x0, clients), starts)
    return State(x0, buffers, alg.server_init(x0, clients, net.layout), companion)


def client_init(alg: Algorithm, down: Any, ids: Tensor, buffers: Tensor) -> Any:
    """The states [..., S, ...] of clients that take part for the first time; down and buffers are [..., 1, ...]."""
    client = alg.client_init(down, ids, buffers)
    return fill(Kept(client, alg.rest(down.x)) if alg.keep_moments else client, ids.shape)


def client_part(
    alg: Algorithm,
    down: Any,
    client: Any,
    buffers: Tensor,
    steps: Iterable[tuple[Oracle, Tensor | None]],
    local: LocalData | None = None,
) -> Answers:
    """What the clients of a round do: one client or a stacked cohort, as the oracle's leading dimensions say.

    `steps` yields an oracle for each local step and `live` [..., 1], false for a client that has no batch left, or None
    where everybody has one.
    """
    work, losses = None, []
    for oracle, live in steps:
        if work is None:
            client, buffers, work = begin(alg, down, client, buffers, oracle.lead, local)
        work, buffers, loss = step(alg, down, client, work, buffers, oracle, live)
        losses.append(loss)
    assert work is not None, "a client of the cohort takes at least one step"
    return end(alg, down, client, work, buffers, torch.stack(losses).nanmean(0))


def begin(
    alg: Algorithm, down: Any, client: Any, buffers: Tensor, lead: torch.Size, local: LocalData | None
) -> tuple[Any, Tensor, Any]:
    """The clients' states, buffers and work before the first step, for clients [*lead]."""
    client, buffers = fill(client, lead), fill(buffers, lead)
    own = client.own if isinstance(client, Kept) else client
    work = fill(alg.local_start(down, own), lead)
    if isinstance(client, Kept):
        work = alg.take_moments(work, client.opt)
    return client, buffers, work if local is None else fill(alg.prepare(down, own, work, local), lead)


def step(
    alg: Algorithm, down: Any, client: Any, work: Any, buffers: Tensor, oracle: Oracle, live: Tensor | None
) -> tuple[Any, Tensor, Tensor]:
    """The work and the buffers after one step, and its loss [..., 1]: NaN for a client that has no batch left."""
    oracle.buffers = buffers
    own = client.own if isinstance(client, Kept) else client
    new = fill(alg.local_step(down, own, work, oracle), oracle.lead)
    work = new if live is None else where(live, new, work)
    buffers = oracle.buffers if live is None else torch.where(live, oracle.buffers, buffers)
    if "buffers" in work._fields:
        work = work._replace(buffers=buffers)
    return work, buffers, oracle.loss if live is None else torch.where(live, oracle.loss, torch.nan)


def end(alg: Algorithm, down: Any, client: Any, work: Any, buffers: Tensor, loss: Tensor) -> Answers:
    """What comes back from the clients."""
    lead = loss.shape[:-1]
    up, after = alg.local_end(down, client.own if isinstance(client, Kept) else client, work)
    client = Kept(after, alg.left_moments(work, client.opt)) if isinstance(client, Kept) else after
    return Answers(fill(up, lead), fill(client, lead), buffers, work.x, loss, fill(alg.local_facts(work), lead))


def server_part(alg: Algorithm, net: Net, state: State, answers: Answers, cohort: Cohort) -> State:
    """What the server does with the answers."""
    d, companion = alg.gather(state.companion, answers.up, cohort)
    x, server = alg.server_step(state.server, state.x, d, answers.up, cohort)
    companion = alg.companion_step(companion, answers.up, cohort, state.x, x)
    if not alg.buffers_up:
        return State(x, state.buffers, server, companion)
    averaged = mean(answers.buffers, cohort.weight)
    buffers = torch.where(net.counters, answers.buffers.amax(-2), averaged) if net.counters.numel() else averaged
    return State(x, buffers, server, companion)


def replied(alg: Algorithm, state: State, answers: Answers, cohort: Cohort) -> tuple[Any, Any]:
    """The clients' states after the round is over, and what the server sent each of them for that."""
    reply = alg.reply(state.companion, answers.up, answers.buffers, cohort)
    return received(alg, answers.client, reply), reply


def received(alg: Algorithm, client: Any, reply: Any) -> Any:
    """The clients' states with the server's reply; where there are none, or they are elsewhere, still none."""
    if isinstance(client, Nothing):
        return client
    if isinstance(client, Kept):
        return client._replace(own=alg.receive(client.own, reply))
    return alg.receive(client, reply)


def finite(answers: Answers) -> Tensor:
    """[S] whether everything a client sent is finite. A finite sum has finite terms; only a doubtful one is looked into."""
    sent = [t.flatten(1) for t in (*leaves(answers.up), answers.buffers)]
    if bool(torch.stack([t.sum(1) for t in sent]).isfinite().all()):
        return torch.ones(len(answers.loss), dtype=torch.bool, device=answers.loss.device)
    return torch.stack([t.isfinite().all(1) for t in sent]).all(0)


@plain
def consistency(answers: Answers, share: Tensor) -> Tensor:
    """(1/S) sum |x_i^K - mean x^K|^2, how far apart the local models end; `share` [..., S, 1] is 1/S for every client."""
    apart = answers.x - mean(answers.x, share).unsqueeze(-2)
    return mean(torch.linalg.vector_norm(apart, dim=-1, keepdim=True).square(), share).squeeze(-1)


class RoundRecord(NamedTuple):
    """One line of rounds.jsonl."""

    round: int
    loss: float | None  # on the test set, in rounds that were evaluated
    accuracy: float | None
    bytes_down: int
    bytes_up: int
    gradients: int  # mini-batch gradients that the clients computed
    consistency: float
    seconds: float
    train_loss: float | None  # mean over the cohort and its local steps; None where a pipeline has only been filled
    clients: int  # that were invited
    dropped: int  # who failed to answer, or whose update was not finite
    more: dict[str, Any]  # other metrics, validation scores, the algorithm's own facts

    def as_dict(self) -> dict[str, Any]:
        flat = self._asdict() | self.more
        del flat["more"]
        return flat
