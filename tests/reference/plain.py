"""The five algorithms a second time, as plainly as they can be written, for the package to be held against.

One client after another, a module's own named tensors in dicts, autograd and torch.optim for the local steps,
float64. Nothing here comes from the package. What both sides share is handed in: who takes part in a round,
and which samples are in which mini-batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from scipy.optimize import nnls
from torch import Tensor, nn

Named = dict[str, Tensor]


class Problem(NamedTuple):
    """What is trained on what."""

    module: nn.Module  # float64, at its start
    inputs: Tensor  # every training sample, float64
    targets: Tensor
    sizes: list[int]  # n_i, client after client


class Invited(NamedTuple):
    """The shared randomness of a round."""

    sampled: list[int]  # the cohort in the order of sampling
    batches: dict[int, list[list[int]]]  # the samples of each mini-batch of each client


Schedule = Callable[[int, list[int]], Invited]  # of the round, and the batches every client has taken before it


class Answer(NamedTuple):
    """What a client comes back with."""

    d: Named  # x_t - x_i^K
    buffers: Named
    steps: int


class After(NamedTuple):
    """A round's outcome."""

    model: Named  # a state dict
    gradients: int  # computed by all clients
    dropped: list[int]
    facts: dict[str, float]


class FedAvg:
    """Local SGD and a weighted mean; the other algorithms override what they change."""

    defaults: dict[str, Any] = {}

    def __init__(self, problem: Problem, weights: str = "uniform", **options: Any) -> None:
        common = dict(lr=0.1, weight_decay=0.0, clip=0.0, optimizer="sgd", momentum=0.9, server_lr=1.0)
        unknown = set(options) - set(common) - set(self.defaults)
        assert not unknown, f"the reference does not know {unknown}"
        self.option = common | self.defaults | options
        self.problem, self.weights = problem, weights
        self.module = copy.deepcopy(problem.module)
        self.x: Named = {n: p.detach().clone() for n, p in self.module.named_parameters()}
        self.buffers: Named = {n: b.clone() for n, b in self.module.named_buffers()}
        self.taken = [0] * len(problem.sizes)  # batches
        self.raw: dict[int, Named] = {}  # mean loss gradient over each client's last round, for tests

    # The clients' side.
    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.module(inputs), targets)

    def correct(self, client: int) -> None:
        """Change the gradients in the module before the optimiser sees them."""

    def train(self, client: int, batches: list[list[int]]) -> Answer:
        """A round of one client, on the module itself."""
        with torch.no_grad():
            for name, parameter in self.module.named_parameters():
                parameter.copy_(self.x[name])
            for name, buffer in self.module.named_buffers():
                buffer.copy_(self.buffers[name])
        self.module.train()
        lr, decay, momentum = (self.option[n] for n in ("lr", "weight_decay", "momentum"))
        weights = list(self.module.parameters())
        if self.option["optimizer"] == "adam":
            optimizer: Any = torch.optim.Adam(weights, lr, (momentum, 0.999), eps=1e-8, weight_decay=decay)
        else:
            own = momentum if self.option["optimizer"] == "momentum" else 0.0
            optimizer = torch.optim.SGD(weights, lr, momentum=own, weight_decay=decay)
        total = {n: torch.zeros_like(p) for n, p in self.x.items()}
        for batch in batches:
            optimizer.zero_grad()
            self.loss(self.problem.inputs[batch], self.problem.targets[batch]).backward()
            for name, parameter in self.module.named_parameters():
                total[name] += parameter.grad
            self.correct(client)
            if self.option["clip"]:
                nn.utils.clip_grad_norm_(weights, self.option["clip"])
            optimizer.step()
        end = {n: p.detach() for n, p in self.module.named_parameters()}
        self.trained = {n: g / len(batches) for n, g in total.items()}
        d = {n: self.x[n] - end[n] for n in self.x}
        return Answer(d, {n: b.clone() for n, b in self.module.named_buffers()}, len(batches))

    def keep(self, client: int, answer: Answer) -> None:
        """The client's own state after a round that counts."""

    # The server's side.
    def step(self, mean: Named, answers: dict[int, Answer], sampled: list[int]) -> Named:
        """The direction of the server's model: x <- x - eta_g direction."""
        return mean

    def facts(self) -> dict[str, float]:
        return {}

    def round(self, invited: Invited) -> After:
        answers, gradients = {}, 0
        for client in sorted(invited.sampled):
            answer = self.train(client, invited.batches[client])
            gradients += answer.steps
            if all(bool(torch.isfinite(t).all()) for t in (*answer.d.values(), *answer.buffers.values())):
                answers[client] = answer
                self.raw[client] = self.trained
        for client, answer in answers.items():
            self.keep(client, answer)
            self.taken[client] += answer.steps
        if answers:
            share = {i: float(self.problem.sizes[i]) if self.weights == "size" else 1.0 for i in answers}
            share = {i: s / sum(share.values()) for i, s in share.items()}
            mean = {n: sum(share[i] * answers[i].d[n] for i in answers) for n in self.x}
            direction = self.step(mean, answers, [i for i in invited.sampled if i in answers])
            self.x = {n: self.x[n] - self.option["server_lr"] * direction[n] for n in self.x}
            for name in self.buffers:
                theirs = {i: answers[i].buffers[name] for i in answers}
                if self.buffers[name].is_floating_point():
                    self.buffers[name] = sum(share[i] * b for i, b in theirs.items())
                else:
                    self.buffers[name] = torch.stack(list(theirs.values())).amax(0)
        model = {n: t.clone() for n, t in (self.x | self.buffers).items()}
        return After(model, gradients, sorted(set(invited.sampled) - set(answers)), self.facts())

    def run(self, schedule: Schedule, rounds: int) -> list[After]:
        return [self.round(schedule(t, list(self.taken))) for t in range(rounds)]


class FedProx(FedAvg):
    """The loss itself has the term mu/2 |x - x_t|^2; autograd does the rest."""

    defaults = dict(mu=0.01)

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        apart = sum((p - self.x[n]).square().sum() for n, p in self.module.named_parameters())
        return super().loss(inputs, targets) + self.option["mu"] / 2 * apart


class FedAvgM(FedAvg):
    """Heavy ball on the server, in parameter or in gradient units."""

    defaults = dict(beta1=0.9, nesterov=False, dampening=0.0, momentum_units="param")

    def __init__(self, problem: Problem, weights: str = "uniform", **options: Any) -> None:
        super().__init__(problem, weights, **options)
        self.m = {n: torch.zeros_like(t) for n, t in self.x.items()}

    def step(self, mean: Named, answers: dict[int, Answer], sampled: list[int]) -> Named:
        beta, unit = self.option["beta1"], 1.0
        if self.option["momentum_units"] == "grad":
            unit = self.option["lr"] * sum(a.steps for a in answers.values()) / len(answers)
        direction = {}
        for name in mean:
            gradient = mean[name] / unit
            self.m[name] = beta * self.m[name] + (1 - self.option["dampening"]) * gradient
            along = gradient + beta * self.m[name] if self.option["nesterov"] else self.m[name]
            direction[name] = unit * along
        return direction


class Scaffold(FedAvgM):
    """Option II. The server's c is not updated but computed: the mean of all N clients' c_i."""

    defaults = FedAvgM.defaults | dict(beta1=0.0)

    def __init__(self, problem: Problem, weights: str = "uniform", **options: Any) -> None:
        super().__init__(problem, weights, **options)
        self.own: dict[int, Named] = {}  # c_i
        self.server = {n: torch.zeros_like(t) for n, t in self.x.items()}  # c

    def of(self, client: int) -> Named:
        return self.own.get(client, {n: torch.zeros_like(t) for n, t in self.x.items()})

    def correct(self, client: int) -> None:
        for name, parameter in self.module.named_parameters():
            parameter.grad += self.server[name] - self.of(client)[name]

    def keep(self, client: int, answer: Answer) -> None:
        before, rate = self.of(client), answer.steps * self.option["lr"]
        self.own[client] = {n: before[n] - self.server[n] + d / rate for n, d in answer.d.items()}

    def step(self, mean: Named, answers: dict[int, Answer], sampled: list[int]) -> Named:
        everybody = len(self.problem.sizes)
        self.server = {n: sum(c[n] for c in self.own.values()) / everybody for n in self.x}
        return super().step(mean, answers, sampled)


class GradMAS(FedAvg):
    """Momentum, a memory of updates by client id, and scipy's nnls for the projection."""

    defaults = dict(beta1=0.5, beta2=0.5, slots=100, rho=0.0, qp_scope="global", order="id")

    def __init__(self, problem: Problem, weights: str = "uniform", **options: Any) -> None:
        super().__init__(problem, weights, **options)
        self.m = {n: torch.zeros_like(t) for n, t in self.x.items()}
        self.memory: dict[int, Named] = {}  # D
        self.buf: list[int] = []  # in the order of insertion
        self.count: dict[int, int] = {}  # c
        self.evictions = self.active = 0

    def mem_red(self, cohort: list[int]) -> set[int]:
        """Who is new after the cohort has been let in."""
        new: set[int] = set()
        for i in cohort if self.option["order"] == "sampling" else sorted(cohort):
            if i not in set(self.buf):
                if len(self.buf) == self.option["slots"]:
                    least = min(self.count[j] for j in set(self.buf) - set(cohort))
                    out = next(j for j in self.buf if j not in cohort and self.count[j] == least)
                    self.buf.remove(out)
                    del self.memory[out], self.count[out]
                    self.evictions += 1
                self.buf.append(i)
                new.add(i)
            self.count[i] = self.count.get(i, 0) + 1
        return new

    def step(self, mean: Named, answers: dict[int, Answer], sampled: list[int]) -> Named:
        m = {n: self.option["beta1"] * self.m[n] + mean[n] for n in mean}
        if self.option["slots"] == 0:
            self.m = m
            return m
        new = self.mem_red(sampled)
        for i in self.buf:
            if i in new:
                self.memory[i] = answers[i].d
                continue
            self.memory[i] = {n: self.option["beta2"] * t for n, t in self.memory[i].items()}
            if i in answers:
                self.memory[i] = {n: t + answers[i].d[n] for n, t in self.memory[i].items()}
        self.active = 0
        scopes: Iterable[list[str]] = [[n] for n in m] if self.option["qp_scope"] == "tensor" else [list(m)]
        self.m = {}
        for names in scopes:
            columns = [joined(self.memory[i], names) for i in self.buf]
            found, active = project(joined(m, names), columns, self.option["rho"])
            self.active += active
            parts = torch.from_numpy(found).split([m[n].numel() for n in names])
            self.m |= {n: part.view(m[n].shape) for n, part in zip(names, parts, strict=True)}
        return self.m

    def facts(self) -> dict[str, float]:
        return {"evictions": self.evictions, "qp_active": self.active, "qp_failed": 0}


def joined(tensors: Named, names: list[str]) -> np.ndarray:
    return np.concatenate([tensors[n].numpy().ravel() for n in names])


def project(p: np.ndarray, columns: list[np.ndarray], rho: float) -> tuple[np.ndarray, int]:
    """The nearest u to p with <u, column> >= rho |p| |column|, and how many multipliers are positive.

    Without a margin it is min_{z >= 0} |Mz + p|. With one it is Lawson and Hanson's least distance programme,
    another non-negative least squares problem. Either answer is checked: feasible, and no other is nearer.
    """
    length = np.linalg.norm(p)
    unit = [c / np.linalg.norm(c) for c in columns if np.any(c != 0)]
    if length == 0 or not unit:
        return p, 0
    M, q = np.stack(unit, axis=1), p / length
    if rho == 0:
        z, _ = nnls(M, -q)
        u = q + M @ z
        assert (M.T @ u >= -1e-11).all() and abs(u @ (q - u)) < 1e-11, "scipy's nnls did not solve this"
        return length * u, int((z > 0).sum())
    needed = rho - M.T @ q
    if (needed <= 0).all():
        return p, 0
    E = np.vstack([M, needed])
    last = np.zeros(len(E))
    last[-1] = 1.0
    y, residual = nnls(E, last)
    assert residual > 1e-6, "no vector meets this margin: not a case for the reference"
    active = y > 0  # their constraints hold with equality: the shortest way there, which loses no digits
    shortest = np.linalg.lstsq(M[:, active].T, needed[active], rcond=None)[0]
    assert (M.T @ shortest >= needed - 1e-11).all(), "scipy's nnls did not solve this"
    return length * (q + shortest), int(active.sum())


ALGORITHMS = {
    "fedavg": FedAvg, "fedprox": FedProx, "fedavgm": FedAvgM, "scaffold": Scaffold, "gradma-s": GradMAS,
}  # fmt: skip
