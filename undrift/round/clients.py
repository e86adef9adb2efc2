"""What the clients of a round do, from the server's message to their answers: the same lines for one client and for many."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from undrift.algorithms.base import Algorithm, LocalSGD, Worker
from undrift.algorithms.wrapper import innermost
from undrift.core.errors import ClientFailed, UndriftError
from undrift.core.trees import State, map_leaves, where
from undrift.oracle.oracle import LocalData, Oracle

T = TypeVar("T")


class Answers(NamedTuple):
    """What came back from clients [..., S]: `up` travels, `client` stays with them."""

    up: State
    client: State
    buffers: Tensor  # [..., Q]
    x: Tensor  # [..., P] the local models x_i^K, for the consistency metric
    loss: Tensor  # [..., 1] mean training loss over the local steps
    facts: State  # the worker part's own numbers [..., 1]
    there: Any = ()  # [S] who has answered, where every row of `up` is the mean of all answers; (): each is a client's own


class Started(NamedTuple):
    """Clients before their next local step."""

    client: State
    work: State
    buffers: Tensor


def fill(state: T, lead: torch.Size) -> T:
    """Leaves [P] or [1, P] expanded to [*lead, P]."""
    return map_leaves(lambda t: t.expand(*lead, t.shape[-1]), state) if lead else state


def new_clients(alg: Algorithm, down: State, ids: Tensor, buffers: Tensor) -> State:
    """The states [..., S, ...] of clients that take part for the first time; down and buffers are [..., 1, ...]."""
    with stage("client_init"):
        return fill(alg.client_init(down, ids, buffers), ids.shape)


def train(
    alg: Algorithm,
    down: State,
    client: State,
    buffers: Tensor,
    steps: Iterable[tuple[Oracle, Tensor | None]],
    local: LocalData,
) -> Answers:
    """Train one client or a stacked cohort, as the oracle's leading dimensions say.

    `steps` yields an oracle for each local step and `live` [..., 1]: which clients still have a batch; None: all have.
    """
    at, losses = None, []
    for k, (oracle, live) in enumerate(steps):
        at = at or begin(alg, down, client, buffers, oracle.lead, local)
        at, loss = step(alg, down, at, oracle, live, k)
        losses.append(loss)
    assert at is not None, "a client of the cohort takes at least one step"
    return end(alg, down, at, torch.stack(losses).nanmean(0))


def begin(alg: Algorithm, down: State, client: State, buffers: Tensor, lead: torch.Size, local: LocalData) -> Started:
    """The clients [*lead] before their first step."""
    client, buffers = fill(client, lead), fill(buffers, lead)
    with stage("local_start"):
        return Started(client, fill(alg.local_start(down, client, local), lead), buffers)


def step(
    alg: Algorithm, down: State, at: Started, oracle: Oracle, live: Tensor | None, k: int | None = None
) -> tuple[Started, Tensor]:
    """The clients after one step, and its loss [..., 1]: NaN for a client that has no batch left."""
    oracle.buffers = at.buffers
    with stage("local_step" if k is None else f"local_step {k}"):
        new = fill(local_step(alg, down, at, oracle), oracle.lead)
    if live is None:
        return at._replace(work=new, buffers=oracle.buffers), oracle.loss
    buffers = torch.where(live, oracle.buffers, at.buffers)
    return at._replace(work=where(live, new, at.work), buffers=buffers), torch.where(live, oracle.loss, torch.nan)


def local_step(alg: Algorithm, down: State, at: Started, oracle: Oracle) -> State:
    """`alg.local_step`; where that is x - eta_l g(x) and nothing more, the oracle may have it in one pass."""
    rule = innermost(alg)
    plain = type(rule).local_step is LocalSGD.local_step and type(rule).move is Worker.move
    if plain and rule.optimizer == "sgd" and rule.steady and not (rule.clip or rule.weight_decay):
        return at.work._replace(x=oracle.step(at.work.x, rule.lr), k=at.work.k + 1)
    return alg.local_step(down, at.client, at.work, oracle)


def end(alg: Algorithm, down: State, at: Started, loss: Tensor) -> Answers:
    """What comes back from the clients."""
    lead = loss.shape[:-1]
    with stage("local_end"):
        up, client = alg.local_end(down, at.client, at.work)
        facts = fill(alg.local_facts(at.work), lead)
    return Answers(fill(up, lead), fill(client, lead), at.buffers, at.work.x, loss, facts)


@contextlib.contextmanager
def stage(name: str) -> Iterator[None]:
    """Say of whatever is raised here in which stage of a client's round it was."""
    try:
        yield
    except (UndriftError, torch.cuda.OutOfMemoryError):
        raise
    except Exception as error:  # whatever the algorithm, the model or the loss raise
        raise ClientFailed(name, error) from error
