"""Optional functions of a worker part: personal models, replies to single clients, selectors and phases.

Their defaults do nothing. A method with personal models sets `personalises` and defines `serves`: see `apfl.py` for a short
one and `fedsm.py` for one that uses nearly all.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, NamedTuple

import torch
from torch import Tensor

from undrift.algorithms.checks import Checked
from undrift.core.trees import Nothing, State
from undrift.core.vec import positions
from undrift.oracle.oracle import GradientOracle, LocalData

if TYPE_CHECKING:
    from undrift.algorithms.base import Cohort, Worker


SelectorVec = Annotated[Tensor, "selector"]  # a message's field with a vector of the network `selector`


class Served(NamedTuple):
    """A model in use: its vector and its BatchNorm statistics."""

    x: Tensor
    buffers: Tensor


class Stream(NamedTuple):
    """A further model that a client trains."""

    x: Tensor
    k: Tensor  # [..., 1] steps of this round
    opt: State
    statistics: Tensor  # [..., Q] its BatchNorm statistics


class Personal(Checked):
    """The functions of a worker part that plain methods do not need."""

    personalises: ClassVar[bool] = False  # True: every client has its own model
    pools: ClassVar[bool] = False  # True: one client gets all samples before training
    uploads_apart: ClassVar[bool] = False  # True: needs every answer, not only their sum

    def serves(self, down: State, client: State, local: LocalData) -> Served:
        """The model that a client uses between rounds; `down` is the message it would get now."""
        return Served(down.x, local.buffers)

    # The server's message to each single client at the end of a round.
    def reply(self, companion: State, up: State, buffers: Tensor, cohort: Cohort) -> State:
        """[..., S, P] for each client that answered; buffers [..., S, Q] are the clients' statistics."""
        return Nothing()

    def receive(self, client: State, reply: State) -> State:
        """The client's state with the reply."""
        return client

    @property
    def stands_still(self) -> bool:
        """Whether the server's model and the server part's state stay as they are in this round."""
        return False

    @property
    def since(self) -> int | None:
        """The round, counted from 0, from which on clients have what `returning` ones need not be sent; None: the last one."""
        return None

    # BatchNorm's statistics.
    def buffers_down(self, invited: int, returning: int) -> int:
        """How many clients they are sent to in this round."""
        return invited

    @property
    def buffers_up(self) -> bool:
        """Whether they go up in this round."""
        return True

    # Further networks; `selector` chooses among the models.
    chooses: ClassVar[str] = ""  # threshold, argmax or mix, see `undrift.personal.choosing`

    def networks(self, clients: int) -> dict[str, tuple[str, int]]:
        """Further networks by name: the model and its number of outputs."""
        return {}

    def companion_networks(self, companion: State, starts: Mapping[str, Served]) -> State:
        """The companion with the start of further networks; `model` is the network that all clients train."""
        return companion

    def selector(self, companion: State) -> Served:
        """The server's current `selector`."""
        raise NotImplementedError

    def selects(self, rounds: int) -> bool:
        """Whether the selector has begun to learn after so many rounds; before, the server's model is used."""
        return bool(self.chooses)

    # Methods with several phases.
    def at(self, t: int) -> State:
        """The algorithm of round t, counted from 0."""
        return self

    def remarks(self, rounds: int, cohort: int) -> list[str]:
        """Warnings about settings that are legal but probably unintended."""
        if rounds and self.at(rounds - 1) == self.at(0) != self.at(sys.maxsize):
            begin = getattr(self, "begin", "?")
            return [f"the second phase was to begin after round {begin}, which was not reached; lower begin"]
        return []

    # With `keep_moments`, the optimiser's state that a client keeps between rounds.
    def take_moments(self, client: State, work: State, opt: State) -> State:
        """`work` with the optimiser state `opt` that the client kept."""
        return work._replace(opt=opt)

    def leave_moments(self, work: State, opt: State) -> State:
        """The optimiser state to keep; `opt` is that before the round."""
        return work.opt


def advance(worker: Worker, stream: Stream, oracle: GradientOracle) -> tuple[Stream, Tensor]:
    """One plain step of a further model on the same mini-batch, and its loss [..., 1]."""
    other = oracle.at(stream.statistics)
    moved = worker.move(stream, other.grad(stream.x), oracle)
    return moved._replace(statistics=other.buffers), other.loss


def stand_still(cohort: Cohort) -> Tensor:
    """The direction [..., P] of a round that does not move the server's model: zero."""
    return cohort.weight.new_zeros(*cohort.weight.shape[:-2], cohort.layout.size)


def put(rows: Tensor, new: Tensor, cohort: Cohort) -> Tensor:
    """Replace the cohort's rows of rows [..., N, n] by new [..., S, n]."""
    number = positions(rows, -2).unsqueeze(-1)
    match = (number == cohort.ids.unsqueeze(-2)).to(new.dtype)  # [..., N, S]
    if cohort.there is not None:
        match = match * cohort.there.transpose(-1, -2)
    return torch.where(match.sum(-1, keepdim=True) > 0, match @ new, rows) if new.shape[-1] else rows
