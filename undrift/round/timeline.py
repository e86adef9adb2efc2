"""Who answers when, on a virtual clock: rounds that wait for their clients, and a server that never waits.

`Synchronous` rounds last until the slowest client has answered; or, with `over` further ones invited, until as many have as
the cohort has places. In an `Asynchronous` run some clients are always at work. Each begins with the server's model of that
moment, and the server steps as soon as so many answers are there as the cohort has places; such a step is a round. How clients
are chosen and how long they take depends on the seed and the clock alone, never on what they compute. So a timeline runs ahead
of its round.

At one instant all answers come in before anybody starts. A client starts from a model once at most: it waits until its answer has
been used.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from undrift.algorithms.base import Algorithm, Worker
from undrift.algorithms.checks import looks_at_single_uploads
from undrift.algorithms.personal import Personal
from undrift.algorithms.wrapper import innermost
from undrift.core.errors import BadSetting
from undrift.core.streams import Purpose, sample, stream
from undrift.round.clock import Clock, Traffic
from undrift.round.who import Attendance, Sampling

Ids = NDArray[np.int64]


class Timeline(Protocol):
    """The course of a run on the virtual clock."""

    now: float  # seconds since the start, when the last round was over

    def attend(self, t: int, sampling: Sampling) -> Attendance:
        """Who takes part in round t; asked again for the same round, the same."""

    def rounds_in_use(self) -> set[int]:
        """The rounds whose models are still trained from."""

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds."""

    def restore(self, tensors: Mapping[str, Tensor]) -> None: ...


class Synchronous:
    """Rounds that last until the first S of S + over clients have answered, or all that do."""

    def __init__(self, clock: Clock, traffic: Traffic, over: int = 0) -> None:
        self.clock, self.traffic, self.over = clock, traffic, over
        self.now, self.t, self.last = 0.0, -1, Attendance.nobody()

    def attend(self, t: int, sampling: Sampling) -> Attendance:
        if t == self.t:
            return self.last
        found = sampling._replace(cohort=sampling.cohort + self.over).round(t)
        everybody = (
            found if len(found.ids) else sampling._replace(dropout_rate=0.0).round(t)
        )  # nobody answers: they were there
        due = self.clock.seconds(everybody.ids, t, everybody.steps, self.traffic)
        if len(found.ids) > sampling.cohort and self.over:
            first = np.sort(np.argsort(due, kind="stable")[: sampling.cohort])
            found, due = found.some(first), due[first]
        self.now, self.t, self.last = self.now + float(due.max(initial=0.0)), t, found
        return found

    def rounds_in_use(self) -> set[int]:
        return set()

    def tensors(self) -> dict[str, Tensor]:
        return {"clock.now": torch.tensor(self.now, dtype=torch.float64)}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        self.now, self.t = float(tensors["clock.now"]), -1


class Start(NamedTuple):
    """A client at work; of two that come at the same instant the one that started first is the first."""

    due: float
    order: int
    client: int
    version: int  # the round whose model it started from
    steps: int
    fails: int  # 1: its answer will not come


class Asynchronous:
    """Rounds of the first S answers that come while `concurrent` clients are at work."""

    def __init__(self, clock: Clock, traffic: Traffic, concurrent: int) -> None:
        self.clock, self.traffic, self.concurrent = clock, traffic, concurrent
        self.now, self.t, self.last = 0.0, -1, Attendance.nobody()
        self.working: list[Start] = []  # a heap
        self.waiting: list[Start] = []  # answers that have come and are not used yet
        self.starts = 0  # so far
        self.uses = Counter[int]()  # how many clients at work or waiting use each round's model

    def attend(self, t: int, sampling: Sampling) -> Attendance:
        if t == self.t:
            return self.last
        self.begin(t, 0, sampling)
        draws = 0
        while len(self.waiting) < sampling.cohort:
            self.now = self.working[0].due
            while self.working and self.working[0].due == self.now:
                came = heapq.heappop(self.working)
                if came.fails:
                    self.forget(came)
                else:
                    self.waiting.append(came)
            if len(self.waiting) < sampling.cohort:
                draws += 1
                self.begin(t, draws, sampling)
        used, self.waiting = self.waiting[: sampling.cohort], self.waiting[sampling.cohort :]
        for start in used:
            self.forget(start)
        self.t, self.last = t, attendance_of([(s.client, s.version, s.steps) for s in used])
        return self.last

    def begin(self, t: int, draw: int, sampling: Sampling) -> None:
        """Fill the free places with clients that have nothing to do, from the model of round t; `draw` counts the choices."""
        idle = np.ones(sampling.clients, dtype=bool)
        idle[[start.client for start in (*self.working, *self.waiting)]] = False
        rest = np.flatnonzero(idle)
        places = min(self.concurrent - len(self.working), len(rest))
        if not places:
            return
        key = stream(
            sampling.seed, Purpose.COHORT, *((t, draw) if draw else (t,))
        )  # the first choice is a round's cohort
        chosen = rest[sample(key, len(rest), places)]
        found = sampling.attend(t, torch.from_numpy(chosen), torch.arange(places))
        steps = dict(zip(found.ids.tolist(), found.steps.tolist(), strict=True))
        planned = sampling.plan.steps_of(sampling.sizes[chosen])
        made = np.array([steps.get(i, k) for i, k in zip(chosen.tolist(), planned.tolist(), strict=True)])
        due = self.now + self.clock.seconds(chosen, t, made, self.traffic)
        for client, when, k in zip(chosen.tolist(), due.tolist(), made.tolist(), strict=True):
            heapq.heappush(self.working, Start(when, self.starts, client, t, k, int(client not in steps)))
            self.starts += 1
        self.uses[t] += places

    def forget(self, start: Start) -> None:
        self.uses[start.version] -= 1
        if not self.uses[start.version]:
            del self.uses[start.version]

    def rounds_in_use(self) -> set[int]:
        return set(self.uses)

    def tensors(self) -> dict[str, Tensor]:
        now = {"clock.now": torch.tensor(self.now, dtype=torch.float64), "clock.starts": torch.tensor(self.starts)}
        return now | pack_starts("working", sorted(self.working)) | pack_starts("waiting", self.waiting)

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        self.now, self.starts, self.t = float(tensors["clock.now"]), int(tensors["clock.starts"]), -1
        self.working, self.waiting = (
            unpack_starts(name, tensors) for name in ("working", "waiting")
        )  # sorted, thus a heap
        self.uses = Counter(start.version for start in (*self.working, *self.waiting))


class Arrival(NamedTuple):
    """An answer in the trace of a real federation."""

    round: int  # counted from 1, that used it
    client: int
    version: int  # the round, counted from 0, whose model it started from
    steps: int
    seconds: float  # since the run's start, when it came
    counts: bool  # whether it could be used


class Recorded:
    """The answers of a real federation, in the order in which they came."""

    def __init__(self, arrivals: list[Arrival]) -> None:
        self.now, self.t, self.last, self.total = 0.0, -1, Attendance.nobody(), arrivals[-1].round if arrivals else 0
        self.rounds: dict[int, list[Arrival]] = {}
        for arrival in arrivals:
            if arrival.counts:
                self.rounds.setdefault(arrival.round - 1, []).append(arrival)
        self.latest: dict[int, int] = {}  # the last round that uses each model
        for t, used in sorted(self.rounds.items()):
            self.latest |= {arrival.version: t for arrival in used}

    def attend(self, t: int, sampling: Sampling) -> Attendance:
        if t >= self.total:
            raise BadSetting(f"the trace of arrivals has {self.total} rounds; ask for no more rounds")
        used = self.rounds.get(t, [])
        self.t, self.now = t, max([a.seconds for a in used], default=self.now)
        return attendance_of([(a.client, a.version, a.steps) for a in used])

    def rounds_in_use(self) -> set[int]:
        return {version for version, last in self.latest.items() if version <= self.t < last}

    def tensors(self) -> dict[str, Tensor]:
        return {"clock.now": torch.tensor(self.now, dtype=torch.float64), "clock.round": torch.tensor(self.t)}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        self.now, self.t = float(tensors["clock.now"]), int(tensors["clock.round"])


def attendance_of(used: list[tuple[int, int, int]]) -> Attendance:
    """Those who answered, as (client, version, steps) in the order of their answers."""
    found = np.array(used, dtype=np.int64).reshape(-1, 3)
    order = np.argsort(found[:, 0], kind="stable")
    ids, versions, steps = np.ascontiguousarray(found[order].T)
    return Attendance(ids, ids, order, steps, versions)


def pack_starts(name: str, starts: list[Start]) -> dict[str, Tensor]:
    """Clients at work as tensors: when they are due, and the rest."""
    due = torch.tensor([start.due for start in starts], dtype=torch.float64)
    rest = torch.tensor([start[1:] for start in starts], dtype=torch.int64).view(-1, len(Start._fields) - 1)
    return {f"clock.{name}.due": due, f"clock.{name}": rest}


def unpack_starts(name: str, tensors: Mapping[str, Tensor]) -> list[Start]:
    due, rest = tensors[f"clock.{name}.due"].tolist(), tensors[f"clock.{name}"].tolist()
    return [Start(when, *others) for when, others in zip(due, rest, strict=True)]


def staleness_of(attendance: Attendance, t: int) -> dict[str, Any]:
    """Numbers for the record: how many server steps the answers of round t have missed."""
    if attendance.versions is None or not len(attendance.versions):
        return {}
    missed = t - attendance.versions
    return {"staleness_mean": float(missed.mean()), "staleness_max": int(missed.max())}


def check_asynchronous(alg: Algorithm, replies: bool) -> None:
    """Refuse a method that needs its whole cohort at once; `replies`: the server answers clients after a round."""
    name, inner = type(alg).__name__, innermost(alg)
    whole = "choose a method whose server needs only the sum of what clients send, such as fedbuff or scaffold+fedbuff"
    if looks_at_single_uploads(alg):
        raise BadSetting(f"asynchronous: {name} looks at each client's answer in its round; {whole}")
    if alg.measures or replies:
        more = (
            "measures something with a whole cohort before anybody trains" if alg.measures else "replies to its cohort"
        )
        raise BadSetting(f"asynchronous: {name} {more}, and there is no cohort that is there together; {whole}")
    for what, base in (("bytes_down", Worker), ("at", Personal)):
        if getattr(type(inner), what) is not getattr(base, what):
            why = (
                "has phases that begin in a round"
                if what == "at"
                else "sends what only clients of the last rounds can read"
            )
            raise BadSetting(f"asynchronous: {name} {why}, and here clients are in several rounds at a time; {whole}")
    if alg.pools or alg.moves_alone:
        raise BadSetting(f"asynchronous: {name} has nobody to wait for; {whole}")
