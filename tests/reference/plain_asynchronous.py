"""Servers that do not wait a second time, as plainly as they can be written: a list of clients at work, copies of old servers.

What both sides share is handed in: how long an answer takes, who is chosen among the idle, and the samples of each mini-batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tests.reference.plain import Answer, FedAvg, FedAvgM, FedProx, Named, Scaffold


class World(NamedTuple):
    """The shared randomness."""

    seconds: Callable[[int, int, int], float]  # of a client's answer: client, version, steps
    choose: Callable[[int, int, list[int], int], list[int]]  # version, how many choices before, who is idle, places
    batches: Callable[[int, int, int], list[list[int]]]  # client, version, batches taken before
    fails: Callable[[int, int], bool]  # client, version
    concurrent: int
    buffer: int


class AtWork(NamedTuple):
    client: int
    version: int
    batches: list[list[int]]
    due: float
    order: int


class Past(NamedTuple):
    """A server step's outcome."""

    model: Named
    now: float
    staleness: list[int]
    clients: list[int]


def twin(side: Any) -> Any:
    """A copy with everything of its own but the samples."""
    return copy.deepcopy(side, {id(side.problem): side.problem})


class Asynchronous(FedAvg):
    """A server without staleness: x <- x - eta_g mean."""

    def scale(self, staleness: int) -> float:
        return 1.0

    def move(
        self, answers: dict[int, Answer], share: dict[int, float], missed: dict[int, int], began: dict[int, Any]
    ) -> None:
        """The server's step; `share` adds up to one, `began` are the servers that the clients began with."""
        d = {n: sum(share[i] * answers[i].d[n] for i in answers) for n in self.x}
        direction = self.step(d, answers, list(answers))
        self.x = {n: self.x[n] - self.option["server_lr"] * direction[n] for n in self.x}

    def mixing(self, share: dict[int, float], missed: dict[int, int]) -> float:
        return 1.0

    def flow(self, world: World, steps: int) -> list[Past]:
        past: list[Any] = []
        found: list[Past] = []
        working: list[AtWork] = []
        waiting: list[AtWork] = []
        now, order = 0.0, 0
        for t in range(steps):
            drops = sum(t >= drop for drop in self.option["lr_drops"])
            self.rate = self.option["lr"] * self.option["lr_decay"] ** t * self.option["lr_drop"] ** drops
            past.append(twin(self))
            choices = 0
            while True:
                busy = {w.client for w in working + waiting}
                idle = [i for i in range(len(self.problem.sizes)) if i not in busy]
                places = min(world.concurrent - len(working), len(idle))
                if places and (choices == 0 or len(waiting) < world.buffer):
                    for client in world.choose(t, choices, idle, places):
                        batches = world.batches(client, t, self.taken[client])
                        took = world.seconds(client, t, len(batches))
                        working.append(AtWork(client, t, batches, now + took, order))
                        order += 1
                choices += 1
                if len(waiting) >= world.buffer:
                    break
                now = min(w.due for w in working)
                come = sorted((w for w in working if w.due == now), key=lambda w: w.order)
                working = [w for w in working if w.due > now]
                waiting += [w for w in come if not world.fails(w.client, w.version)]
                if len(waiting) >= world.buffer:
                    break
            used, waiting = waiting[: world.buffer], waiting[world.buffer :]
            answers, missed, began = {}, {}, {}
            for work in sorted(used, key=lambda w: w.client):
                old = twin(past[work.version])
                if isinstance(self, Scaffold):
                    old.own = self.own
                answer = old.train(work.client, work.batches)
                answers[work.client], missed[work.client] = answer, t - work.version
                began[work.client] = past[work.version]
                old.keep(work.client, answer)
                self.taken[work.client] += answer.steps
            weight = {i: float(self.problem.sizes[i]) if self.weights == "size" else 1.0 for i in answers}
            share = {i: w / sum(weight.values()) for i, w in weight.items()}
            self.moved_statistics(answers, share, missed)
            self.move(answers, share, missed, began)
            model = {n: v.clone() for n, v in (self.x | self.buffers).items()}
            found.append(Past(model, now, list(missed.values()), sorted(answers)))
        return found

    def moved_statistics(self, answers: dict[int, Answer], share: dict[int, float], missed: dict[int, int]) -> None:
        weight = {i: share[i] * self.scale(missed[i]) for i in answers}
        far = self.mixing(share, missed)
        for name, old in self.buffers.items():
            theirs = {i: answers[i].buffers[name] for i in answers}
            if old.is_floating_point():
                averaged = sum(weight[i] * b for i, b in theirs.items()) / sum(weight.values())
                self.buffers[name] = (1 - far) * old + far * averaged
            else:
                self.buffers[name] = torch.stack(list(theirs.values())).amax(0)


class FedBuff(Asynchronous, FedAvgM):
    """Updates, each divided by a power of its age, are added up and divided by K, or by the sum of what they weigh."""

    defaults = FedAvgM.defaults | dict(beta1=0.0, a=0.5, divide_by="count")

    def scale(self, staleness: int) -> float:
        return float(1 / (1 + staleness) ** self.option["a"])

    def move(
        self, answers: dict[int, Answer], share: dict[int, float], missed: dict[int, int], began: dict[int, Any]
    ) -> None:
        total = {n: torch.zeros_like(v) for n, v in self.x.items()}
        for i, answer in answers.items():
            for n in total:
                total[n] += share[i] * self.scale(missed[i]) * answer.d[n]
        if self.option["divide_by"] == "weights":
            weights = sum(share[i] * self.scale(missed[i]) for i in answers)
            total = {n: v / weights for n, v in total.items()}
        direction = self.step(total, answers, list(answers))
        self.x = {n: self.x[n] - self.option["server_lr"] * direction[n] for n in self.x}


class FedAsync(Asynchronous, FedProx):
    """x <- (1 - alpha_t) x + alpha_t x_new, written with the clients' models themselves."""

    defaults = dict(mu=0.1, mixing_rate=0.6, staleness="polynomial", a=0.5, b=4.0, fresh=0)

    def scale(self, staleness: int) -> float:
        age, a, b = staleness + self.option["fresh"], self.option["a"], self.option["b"]
        if self.option["staleness"] == "polynomial":
            return float((age + 1) ** (-a))
        if self.option["staleness"] == "hinge":
            return 1.0 if age <= b else float(1 / (a * (age - b) + 1))
        return 1.0

    def mixing(self, share: dict[int, float], missed: dict[int, int]) -> float:
        return float(self.option["mixing_rate"] * sum(share[i] * self.scale(missed[i]) for i in share))

    def move(
        self, answers: dict[int, Answer], share: dict[int, float], missed: dict[int, int], began: dict[int, Any]
    ) -> None:
        weight = {i: share[i] * self.scale(missed[i]) for i in answers}
        total, far = sum(weight.values()), self.option["server_lr"] * self.mixing(share, missed)
        for n in self.x:
            new = sum(weight[i] / total * (began[i].x[n] - answers[i].d[n]) for i in answers)
            self.x[n] = (1 - far) * self.x[n] + far * new


class ScaffoldBuff(FedBuff, Scaffold):
    """Control variates on the clients, a buffer on the server."""

    defaults = Scaffold.defaults | FedBuff.defaults | dict(lr=0.05)

    def step(self, mean: Named, answers: dict[int, Answer], sampled: list[int]) -> Named:
        everybody = len(self.problem.sizes)
        self.server = {n: sum(c[n] for c in self.own.values()) / everybody for n in self.x}
        return FedAvgM.step(self, mean, answers, sampled)


ALGORITHMS = {
    "fedavg": Asynchronous, "fedbuff": FedBuff, "fedasync": FedAsync, "scaffold+fedbuff": ScaffoldBuff,
}  # fmt: skip
