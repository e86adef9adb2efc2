"""What methods may do besides the plain round: personal models, replies to single clients, selectors and phases.

Every worker part has these functions, and their defaults do nothing. A method that leaves each client its own model sets
`personalises` and defines `serves`; see `apfl.py` for a short one and `fedsm.py` for one that uses nearly all.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, NamedTuple

import torch
from torch import Tensor

from undrift.algorithms.settings import Checked
from undrift.core.trees import Nothing, State
from undrift.oracle.oracle import GradientOracle, LocalData

if TYPE_CHECKING:
    from undrift.algorithms.base import Cohort, Worker


SelectorVec = Annotated[Tensor, "selector"]  # a field of a message that is a vector of the network called `selector`


class Served(NamedTuple):
    """A model that serves somebody: its vector and its BatchNorm statistics."""

    x: Tensor
    buffers: Tensor


class Stream(NamedTuple):
    """A further model that a client trains, beside the one that it begins with or instead of it."""

    x: Tensor
    k: Tensor  # [..., 1] steps
    opt: State
    statistics: Tensor  # [..., Q] of its BatchNorm layers


class Personal(Checked):
    """The part of a worker part that plain methods leave alone."""

    personalises: ClassVar[bool] = False  # True: every client is left its own model
    pools: ClassVar[bool] = False  # True: all samples are put into one client's hands before training begins
    uploads_apart: ClassVar[bool] = False  # True: what a client sends is used by itself, not only in a sum

    def serves(self, down: State, client: State, local: LocalData) -> Served:
        """The model that serves a client between rounds; `down` is what would go down now."""
        return Served(down.x, local.buffers)

    # What the server sends to each client of a round by itself, when the round is over.
    def reply(self, companion: State, up: State, buffers: Tensor, cohort: Cohort) -> State:
        """[..., S, P] for each client that answered; buffers [..., S, Q] are the statistics that came up."""
        return Nothing()

    def receive(self, client: State, reply: State) -> State:
        """The client's state with the reply."""
        return client

    # Whether BatchNorm's statistics travel in this round.
    @property
    def buffers_down(self) -> bool:
        return True

    @property
    def buffers_up(self) -> bool:
        return True

    # Further networks, and one among them that chooses among the models.
    chooses: ClassVar[str] = ""  # threshold, argmax or mix, see `undrift.personal.choosing`

    def networks(self, clients: int) -> dict[str, tuple[str, int]]:
        """Further networks by name: which model, and how many outputs it has."""
        return {}

    def companion_networks(self, companion: State, starts: Mapping[str, Served]) -> State:
        """The companion with what further networks begin with; `model` is the network that everybody trains."""
        return companion

    def selector(self, companion: State) -> Served:
        """The network called `selector`, as the server has it now."""
        raise NotImplementedError

    def selects(self, rounds: int) -> bool:
        """Whether after so many rounds the selector has begun to learn; until then the server's model serves."""
        return bool(self.chooses)

    # Methods whose rounds are not all alike.
    def at(self, t: int) -> State:
        """The algorithm of round t, counted from 0: itself, or what does that round in its place."""
        return self

    def remarks(self, rounds: int, cohort: int) -> list[str]:
        """Warnings about settings that are legal but probably unintended."""
        if rounds and self.at(rounds - 1) == self.at(0) != self.at(sys.maxsize):
            begin = getattr(self, "begin", "?")
            return [f"the second phase was to begin after round {begin}, which was not reached; lower begin"]
        return []

    # The base optimiser's state that a client keeps between rounds, where `keep_moments` is set.
    def take_moments(self, work: State, opt: State) -> State:
        """`work` with the optimiser state restored from the client's last round."""
        return work._replace(opt=opt)

    def leave_moments(self, work: State, opt: State) -> State:
        """The optimiser state that the client keeps; it had `opt` before the round."""
        return work.opt


def advance(worker: Worker, stream: Stream, oracle: GradientOracle) -> tuple[Stream, Tensor]:
    """One plain step of a further model on the same mini-batch, and its loss [..., 1]."""
    beside = oracle.at(stream.statistics)
    moved = worker.move(stream, beside.grad(stream.x), oracle)
    return moved._replace(statistics=beside.buffers), beside.loss


def stand_still(cohort: Cohort) -> Tensor:
    """The direction [..., P] of a round in which the server's model stays where it is."""
    return cohort.weight.new_zeros(*cohort.weight.shape[:-2], cohort.layout.size)


def put(rows: Tensor, new: Tensor, cohort: Cohort) -> Tensor:
    """rows [..., N, n], one for every client, with those of the cohort replaced by new [..., S, n]."""
    number = torch.arange(rows.shape[-2], device=rows.device).unsqueeze(-1)
    taken = (number == cohort.ids.unsqueeze(-2)).to(new.dtype)  # [..., N, S]
    if cohort.there is not None:
        taken = taken * cohort.there.transpose(-1, -2)
    return torch.where(taken.sum(-1, keepdim=True) > 0, taken @ new, rows) if new.shape[-1] else rows
