"""The order of calls in a round, written once for every engine, and the record of what a round did."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from undrift.algorithms.base import Algorithm, Cohort
from undrift.algorithms.personal import Served
from undrift.core.trees import Nothing, leaves
from undrift.core.vec import mean
from undrift.kernels import consistency_gpu as spread
from undrift.oracle.net import Net
from undrift.round.clients import Answers as Answers

T = TypeVar("T")


class State(NamedTuple):
    """Everything the server holds."""

    x: Tensor  # [P]
    buffers: Tensor  # [Q] BatchNorm statistics, averaged beside x
    server: Any  # the server part's state
    companion: Any  # what the worker part keeps on the server


def server_init(alg: Algorithm, net: Net, x0: Tensor, buffers: Tensor, clients: int) -> State:
    others = {name: Served(*(v.to(x0.device) for v in other.start())) for name, other in net.beside.items()}
    starts = {"model": Served(x0, buffers)} | others
    companion = alg.companion_networks(alg.companion_init(x0, clients), starts)
    return State(x0, buffers, alg.server_init(x0, clients, net.layout), companion)


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
    return client if isinstance(client, Nothing) else alg.receive(client, reply)


def finite(answers: Answers) -> Tensor:
    """[S] whether everything a client sent is finite. A finite sum has finite terms; only a doubtful one is looked into."""
    sent = [t.flatten(1) for t in (*leaves(answers.up), answers.buffers)]
    if bool(torch.stack([t.sum(1) for t in sent]).isfinite().all()):
        return torch.ones(len(answers.loss), dtype=torch.bool, device=answers.loss.device)
    return torch.stack([t.isfinite().all(1) for t in sent]).all(0)


def consistency(answers: Answers, share: Tensor) -> Tensor:
    """(1/S) sum |x_i^K - mean x^K|^2, how far apart the local models end; `share` [..., S, 1] is 1/S for every client."""
    if spread.available(answers.x):
        return spread.spread(answers.x, share)
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
