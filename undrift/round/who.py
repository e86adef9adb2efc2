"""Who takes part in a round, and what the server makes of those whose answers do not count."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from undrift.algorithms.base import Algorithm, Cohort
from undrift.algorithms.wrapper import at_rate
from undrift.core.streams import Purpose, fold, sample, samples, stream, uniform
from undrift.core.trees import State, map_leaves
from undrift.data.batches import Plan
from undrift.data.federation import Ids
from undrift.oracle.net import Net
from undrift.round.clients import Answers

if TYPE_CHECKING:
    from undrift.round.aggregate import Rule
    from undrift.round.attack import Attackers

T = TypeVar("T")
DRAWN_TOGETHER = 128  # clients of a cohort: larger ones are drawn one after another


class Who(NamedTuple):
    """The clients of a round, in any number of runs: tensors alone, so that a round can be recorded."""

    ids: Tensor  # [..., S]
    drawn: Tensor  # [..., S] the place of each in the order of sampling
    share: Tensor  # [..., S, 1] what each one's answer weighs: 1, or its number of samples
    weight: Tensor  # [..., S, 1] the same, adding up to one
    steps: Tensor  # [..., S, 1] K_i
    there: Any = ()  # [..., S, 1] 1 for a client, 0 for an empty place; (): all places are taken
    rate: Any = ()  # [...] eta_l; (): the algorithm's own
    attack: Any = ()  # [..., S] keys of what attackers draw; (): they draw nothing
    staleness: Any = ()  # [..., S, 1] server steps since the model that each one began with; (): they began with the last one
    start: Any = ()  # [..., S, P] that model, where it may be an older one


class Task:
    """What all rounds of a run have in common, and how answers that are not finite are left out: their rows are dropped."""

    def __init__(self, net: Net, clients: int, rule: Rule | None = None, attackers: Attackers | None = None) -> None:
        self.net, self.clients = net, clients
        self.rule, self.attackers = rule, attackers  # how the server guards itself, and against whom

    def with_rate(self, alg: Algorithm, rate: Any) -> Algorithm:
        """The algorithm with the round's local rate, where it has one of its own."""
        return at_rate(alg, rate) if isinstance(rate, Tensor) else alg

    def cohort(self, alg: Algorithm, who: Who) -> Cohort:
        there = who.there if isinstance(who.there, Tensor) else None
        late = (who.staleness, who.start) if isinstance(who.staleness, Tensor) else (None, None)
        return Cohort(who.ids, who.drawn, who.weight, who.steps, alg.lr, self.clients, self.net.layout, there, *late)

    def everybody(self, who: Who) -> Tensor:
        return torch.ones_like(who.ids, dtype=torch.bool)

    def read(self, alg: Algorithm, answered: State) -> Answers:
        """The answers in what the clients sent."""
        answers: Answers = answered
        return answers

    def finite(self, who: Who, sent: list[Tensor]) -> Tensor:
        """[S] whether all that a client sent is finite. A finite sum has finite terms; only a doubtful one is looked into."""
        flat = [t.flatten(1) for t in sent]
        if bool(torch.stack([t.sum(1) for t in flat]).isfinite().all()):
            return self.everybody(who)
        return torch.stack([t.isfinite().all(1) for t in flat]).all(0)

    def anybody(self, good: Tensor) -> bool:
        return bool(good.any())

    def numbers(self, good: Tensor) -> dict[str, Tensor]:
        """What the record is to say of whose answers count: nothing, where the others were left out."""
        return {}

    def keep(self, who: Who, answers: T, good: Tensor) -> tuple[Who, T]:
        """Those whose answers count, with weights that add up to one again."""
        if bool(good.all()):
            return who, answers
        share = who.share[good]
        kept = Who(who.ids[good], who.drawn[good], share, share / share.sum(-2, keepdim=True), who.steps[good])
        if isinstance(who.staleness, Tensor):
            kept = kept._replace(staleness=who.staleness[good], start=who.start[good])
        return kept, map_leaves(lambda v: rows_of(v, good), answers)


def rows_of(v: Tensor, good: Tensor) -> Tensor:
    """The rows of v [S, ...] that are good [S]; rows that are the same memory stay the same memory."""
    return v[: int(good.sum())] if v.stride(0) == 0 else v[good]


class Attendance(NamedTuple):
    """Who takes part in a round, on the host."""

    invited: Ids
    ids: Ids  # who answers
    drawn: Ids  # their places in the order drawn
    steps: Ids  # K_i
    versions: Ids | None = None  # the rounds whose model each one began with; None: this one's

    @classmethod
    def nobody(cls) -> Attendance:
        none = np.zeros(0, dtype=np.int64)
        return cls(none, none, none, none)

    def some(self, which: Ids) -> Attendance:
        """The same, but only some of them answer."""
        return self._replace(ids=self.ids[which], drawn=self.drawn[which], steps=self.steps[which])


class Sampling(NamedTuple):
    """How cohorts are drawn from clients of these sizes, and who fails or is slow."""

    sizes: Ids  # [N]
    plan: Plan
    cohort: int
    seed: int
    sampling: str = "fixed"
    dropout_rate: float = 0.0
    slow: tuple[float, float] = (0.0, 1.0)
    empty: bool = False  # whether a cohort may be empty; otherwise it is drawn again
    secret: Callable[[int, int], Tensor] | None = None  # gives random words for a round; None: they come from the seed

    @property
    def clients(self) -> int:
        return len(self.sizes)

    @property
    def largest(self) -> int:
        """The most clients to be expected in a round: four standard deviations above the mean, where chance decides."""
        if self.sampling == "fixed":
            return self.cohort
        deviation = math.sqrt(self.cohort * (1 - self.cohort / self.clients))
        return min(self.clients, math.ceil(self.cohort + 4 * deviation))

    def invite(self, t: int) -> tuple[Tensor, Tensor]:
        """Who is invited to round t: ids in rising order, and each one's place in the order drawn."""
        key = stream(self.seed, Purpose.COHORT, t)
        if self.sampling == "fixed":
            if self.secret is not None:
                ids = self.secret(t, self.clients).argsort()[: self.cohort]
            else:
                ids = torch.tensor(sample(key, self.clients, self.cohort))
            order = ids.argsort()
            return ids[order], order
        ids, drawn = torch.zeros(0, dtype=torch.int64), False
        while not (len(ids) or (drawn and self.empty)):
            every = torch.arange(self.clients)
            each = chances(key, every) if self.secret is None else uniform(self.secret(t, self.clients))
            ids, drawn = (each < self.cohort / self.clients).nonzero().squeeze(-1), True
            key += 1
        return ids, torch.arange(len(ids))

    def attend(self, t: int, invited: Tensor, drawn: Tensor) -> Attendance:
        """Who of the invited takes part in round t, and how much each one does."""
        ids = invited
        if self.dropout_rate:
            answering = chances(stream(self.seed, Purpose.FAILURE, t), ids) >= self.dropout_rate
            ids, drawn = ids[answering], drawn[answering]
        steps = self.plan.steps_of(self.sizes[ids.numpy()])
        chance, share = self.slow
        if chance:
            slow = chances(stream(self.seed, Purpose.SLOWNESS, t), ids).numpy() < chance
            steps = np.where(slow, np.maximum(1, np.rint(share * steps)), steps).astype(np.int64)
        return Attendance(invited.numpy(), ids.numpy(), drawn.numpy(), steps)

    def round(self, t: int) -> Attendance:
        return self.attend(t, *self.invite(t))

    def rounds(self, rounds: Sequence[int], invited: Tensor, drawn: Tensor) -> list[Attendance]:
        """The same for some rounds with the cohorts invited [R, S]."""
        if self.dropout_rate or self.slow[0]:
            return [self.attend(t, *mine) for t, *mine in zip(rounds, invited, drawn, strict=True)]
        ids = invited.numpy()
        return list(map(Attendance, ids, ids, drawn.numpy(), self.plan.steps_of(self.sizes[ids])))


def attendances(runs: Sequence[Sampling], rounds: Sequence[int]) -> list[list[Attendance]]:
    """Who takes part in each of some rounds of each run: `Sampling.round`, with all cohorts drawn together."""
    size, clients = runs[0].cohort, runs[0].clients
    alike = all((s.cohort, s.clients, s.sampling, s.secret) == (size, clients, "fixed", None) for s in runs)
    if not alike or size > DRAWN_TOGETHER or clients >> 31:
        return [[s.round(t) for t in rounds] for s in runs]
    every = torch.tensor(rounds)
    keys = torch.cat([fold(stream(s.seed, Purpose.COHORT), every) for s in runs])
    drawn = (t.view(len(runs), len(rounds), -1) for t in samples(keys, clients, size).sort(1))
    return [s.rounds(rounds, *mine) for s, *mine in zip(runs, *drawn, strict=True)]


def chances(key: int, ids: Tensor) -> Tensor:
    """A number in [0, 1) for each client."""
    return uniform(fold(key, ids))
