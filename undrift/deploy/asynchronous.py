"""The timeline of real clients that do not wait: each gets the server's model of the moment, and answers are used as they come.

A client is asked once at most about each of the server's models. Where nobody is at work and nobody can be asked, a round ends
with the answers that are there. The trace of all answers that were used lets the simulator make the same steps.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from undrift.algorithms.base import Algorithm
from undrift.core.streams import Purpose, sample, stream
from undrift.core.trees import State, map_leaves
from undrift.deploy.client import TRAIN, Request
from undrift.deploy.messages import Encoded, Letter, pack
from undrift.deploy.remote import Remote, Stream, length, most_batches, read_answers, read_gradients
from undrift.round.clients import Answers
from undrift.round.order import Ask
from undrift.round.shapes import Forms
from undrift.round.timeline import Arrival, attendance_of
from undrift.round.who import Attendance, Sampling, Who
from undrift.simulate.simulation import Simulation
from undrift.simulate.work import LocalWork


class Asked(NamedTuple):
    """A client that is at work."""

    client: int
    version: int  # the round whose model it was sent
    steps: int
    letter: Letter
    sent: float  # when, by time.perf_counter


class Came(NamedTuple):
    """An answer that waits to be used."""

    asked: Asked
    answers: Answers
    gradients: int
    seconds: float  # since the run's start, when it came


class Arriving:
    """Asks real clients, `concurrent` at a time, and gives their answers to rounds in the order in which they come."""

    def __init__(
        self, remote: Remote, post: Stream, concurrent: int, least: int, keep: Callable[[list[Arrival]], None]
    ) -> None:
        """A step needs `least` answers; `keep` stores those that were used."""
        self.remote, self.post, self.concurrent, self.least, self.keep = remote, post, concurrent, least, keep
        self.now, self.t, self.last, self.began = 0.0, -1, Attendance.nobody(), time.perf_counter()
        self.working: dict[str, Asked] = {}  # by the client's name
        self.waiting: list[Came] = []
        self.used: dict[int, Came] = {}  # in this round, by the client's id
        self.tried = set[int]()  # clients that were asked in this round
        self.uses = Counter[int]()  # how many clients at work or waiting use each round's model

    def serve(self, run: Simulation) -> None:
        """Let a simulation ask these clients."""
        self.run = run
        self.form = Forms.of(run.whole, run.net, run.data.clients).answers
        run.timeline, run.remote = self, self

    def attend(self, t: int, sampling: Sampling) -> Attendance:
        if t == self.t:
            return self.last
        self.tried, draws = set(), 0
        arrays = pack(Request(self.run.down(self.everybody()), self.run.state.buffers), self.run.net)
        self.begin(t, 0, sampling, arrays)
        while len(self.waiting) < sampling.cohort and self.working:
            for name, answer in self.post.receive():
                self.take(self.working.pop(name), answer)
            if len(self.waiting) < sampling.cohort:
                draws += 1
                self.begin(t, draws, sampling, arrays)
        some, self.waiting = self.waiting[: sampling.cohort], self.waiting[sampling.cohort :]
        for came in some:
            self.forget(came.asked)
        self.now = time.perf_counter() - self.began
        if len(some) < self.least:
            self.remote.say(f"round {t + 1}: fewer than {self.least} clients answered; the model stays as it is")
            some = []
        self.used = {came.asked.client: came for came in some}
        self.keep([Arrival(t + 1, c.asked.client, c.asked.version, c.asked.steps, c.seconds, True) for c in some])
        self.t, self.last = t, attendance_of([(c.asked.client, c.asked.version, c.asked.steps) for c in some])
        return self.last

    def everybody(self) -> Who:
        every = np.arange(self.run.data.clients)
        return self.run.who(Attendance(every, every, every, np.ones_like(every)))

    def begin(self, t: int, draw: int, sampling: Sampling, arrays: dict[str, Encoded]) -> None:
        """Send the model to clients that have nothing to do, as the simulator chooses them."""
        busy = {asked.client for asked in self.working.values()} | {came.asked.client for came in self.waiting}
        rest = np.array(sorted(set(range(sampling.clients)) - busy - self.tried), dtype=np.int64)
        places = min(self.concurrent - len(self.working), len(rest))
        if not places:
            return
        key = stream(sampling.seed, Purpose.COHORT, *((t, draw) if draw else (t,)))
        chosen = rest[sample(key, len(rest), places)]
        steps = sampling.plan.steps_of(sampling.sizes[chosen])
        letters: dict[str, Letter] = {}
        for client, made in zip(chosen.tolist(), steps.tolist(), strict=True):
            name, letter = self.remote.names[client], self.remote.letter(client, t, TRAIN, arrays)
            letters[name] = letter
            self.working[name] = Asked(client, t, made, letter, time.perf_counter())
        self.tried |= set(chosen.tolist())
        self.uses[t] += places
        self.post.send(letters)

    def take(self, asked: Asked, answer: Letter | str) -> None:
        """Keep an answer until it is used, or say why it does not count."""
        run, size = self.run, int(self.run.data.sizes[asked.client])
        most = most_batches(np.array([asked.steps]), np.array([size]), run.settings.plan.batch)

        def read(letter: Letter) -> tuple[Answers, int]:
            gradients = read_gradients(letter, int(most[0]))
            return read_answers(self.remote, run.alg, self.form, letter, asked.version, run.net, run.state.x), gradients

        away = time.perf_counter() - asked.sent
        content, visit = self.remote.take(asked.letter, answer, size, away, read, "does not count")
        self.remote.visits.append(visit)
        if content is None:
            self.forget(asked)
        else:
            answers, gradients = content
            self.waiting.append(Came(asked, answers, gradients, time.perf_counter() - self.began))

    def forget(self, asked: Asked) -> None:
        self.uses[asked.version] -= 1
        if not self.uses[asked.version]:
            del self.uses[asked.version]

    def rounds_in_use(self) -> set[int]:
        return set(self.uses)

    def tensors(self) -> dict[str, Tensor]:
        return {"clock.now": torch.tensor(self.now, dtype=torch.float64)}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Nobody is at work for a server that was started again: its clients are asked anew."""
        self.now = float(tensors["clock.now"])
        self.began = time.perf_counter() - self.now

    def __call__(self, work: LocalWork) -> Ask:
        return Folded(self, work)


class Folded:
    """Gives a round the answers that have come."""

    def __init__(self, arriving: Arriving, work: LocalWork) -> None:
        self.arriving, self.work = arriving, work

    def measure(self, alg: Algorithm, down: State, buffers: Tensor, who: Who) -> Tensor:
        raise NotImplementedError  # `check_asynchronous` refuses methods that measure

    def train(self, alg: Algorithm, down: State, buffers: Tensor, who: Who) -> Answers:
        used = [self.arriving.used[id] for id in who.ids.tolist()]
        lengths = {came.asked.client: length(came.answers.up) for came in used}
        self.arriving.remote.say_lengths(self.work.round, lengths)
        self.work.gradients += sum(came.gradients for came in used)
        first, *others = [came.answers for came in used]
        return map_leaves(lambda *rows: torch.stack(rows), first, *others)
