"""The algorithms a second time, as plainly as they can be written, for the package to be held against.

One client after another, a module's own named tensors in dicts, autograd and torch.optim for the local steps,
float64. Nothing here comes from the package. What both sides share is handed in: who takes part in a round,
and which samples are in which mini-batch.
"""

from __future__ import annotations

import copy
import math
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


class Muon(torch.optim.AdamW):
    """AdamW, but matrices move along their momentum, whose singular values a polynomial moves five times."""

    def step(self, closure: Any = None) -> None:
        (group,) = self.param_groups
        lr, mu, decay = group["lr"], group["betas"][0], group["weight_decay"]
        starts = {p: p.detach().clone() for p in group["params"] if p.dim() > 1}
        super().step()
        with torch.no_grad():
            for p, start in starts.items():
                ahead = mu * self.state[p]["exp_avg"] + (1 - mu) * p.grad
                u, s, v = torch.linalg.svd(ahead.flatten(1) / ahead.norm(), full_matrices=False)
                for _ in range(5):
                    s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
                moved = 0.2 * math.sqrt(max(ahead.flatten(1).shape)) * (u * s) @ v
                p.copy_(start - lr * decay * start - lr * moved.view_as(p))


class FedAvg:
    """Local SGD and a weighted mean; the other algorithms override what they change."""

    defaults: dict[str, Any] = {}
    gradients_a_step = 1

    def __init__(self, problem: Problem, weights: str = "uniform", **options: Any) -> None:
        common = dict(lr=0.1, weight_decay=0.0, clip=0.0, optimizer="sgd", momentum=0.9, server_lr=1.0)
        common |= dict(lr_decay=1.0, lr_drops=(), lr_drop=0.1, warm_steps=0, cosine_steps=0)
        unknown = set(options) - set(common) - set(self.defaults)
        assert not unknown, f"the reference does not know {unknown}"
        self.option = common | self.defaults | options
        self.problem, self.weights = problem, weights
        self.module = copy.deepcopy(problem.module)
        self.x: Named = {n: p.detach().clone() for n, p in self.module.named_parameters()}
        self.buffers: Named = {n: b.clone() for n, b in self.module.named_buffers()}
        self.taken = [0] * len(problem.sizes)  # batches
        self.raw: dict[int, Named] = {}  # mean loss gradient over each client's last round, for tests
        self.t = 0
        self.rate: float = self.option["lr"]  # eta_l of this round
        self.share: dict[int, float] = {}  # w_i of those who answered

    # The clients' side.
    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.module(inputs), targets)

    def zeros(self) -> Named:
        return {n: torch.zeros_like(t) for n, t in self.x.items()}

    def here(self) -> Named:
        """The module's parameters now."""
        return {n: p.detach().clone() for n, p in self.module.named_parameters()}

    def put(self, point: Named) -> None:
        with torch.no_grad():
            for name, parameter in self.module.named_parameters():
                parameter.copy_(point[name])

    def elsewhere(self, point: Named, batch: list[int]) -> Named:
        """The loss gradient at another point, on a copy: the module and its running statistics stay as they are."""
        other = copy.deepcopy(self.module)
        other.load_state_dict(point, strict=False)
        losses = F.cross_entropy(other(self.problem.inputs[batch]), self.problem.targets[batch])
        return dict(zip(point, torch.autograd.grad(losses, list(other.parameters())), strict=True))

    def first(self, client: int) -> Named:
        """x_i^0."""
        return self.x

    def ready(self, client: int, optimizer: torch.optim.Optimizer) -> None:
        """Before the first step."""

    def gradient(self, client: int, batch: list[int]) -> None:
        """Leave the gradients of a mini-batch in the module."""
        self.loss(self.problem.inputs[batch], self.problem.targets[batch]).backward()

    def correct(self, client: int) -> None:
        """Change the gradients in the module before the optimiser sees them."""

    def stepped(self, client: int, optimizer: torch.optim.Optimizer) -> None:
        """After a step."""

    def update(self, client: int) -> Named:
        """What the server averages."""
        return {n: self.x[n] - end for n, end in self.here().items()}

    def train(self, client: int, batches: list[list[int]]) -> Answer:
        """A round of one client, on the module itself."""
        self.put(self.first(client))
        with torch.no_grad():
            for name, buffer in self.module.named_buffers():
                buffer.copy_(self.buffers[name])
        self.module.train()
        weights = list(self.module.parameters())
        optimizer = self.base_optimizer(weights)
        total = self.zeros()
        self.ready(client, optimizer)
        for k, batch in enumerate(batches):
            for group in optimizer.param_groups:
                group["lr"] = self.rate * self.share_of_rate(k)
            optimizer.zero_grad()
            self.gradient(client, batch)
            for name, parameter in self.module.named_parameters():
                total[name] += parameter.grad
            self.correct(client)
            if self.option["clip"]:
                nn.utils.clip_grad_norm_(weights, self.option["clip"])
            optimizer.step()
            self.stepped(client, optimizer)
        self.trained = {n: g / len(batches) for n, g in total.items()}
        return Answer(self.update(client), {n: b.clone() for n, b in self.module.named_buffers()}, len(batches))

    def base_optimizer(self, weights: list[nn.Parameter]) -> torch.optim.Optimizer:
        decay, momentum, name = self.option["weight_decay"], self.option["momentum"], self.option["optimizer"]
        adams = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "muon": Muon}
        if name in adams:
            return adams[name](weights, self.rate, (momentum, 0.999), eps=1e-8, weight_decay=decay)
        own = 0.0 if name == "sgd" else momentum
        return torch.optim.SGD(weights, self.rate, momentum=own, nesterov=name == "nesterov", weight_decay=decay)

    def share_of_rate(self, k: int) -> float:
        """Of the round's rate, in its step k: a straight rise, then half a cosine."""
        warm, falling = self.option["warm_steps"], self.option["cosine_steps"]
        if k < warm:
            return float((k + 1) / warm)
        return 0.5 + 0.5 * math.cos(math.pi * min(1.0, (k - warm) / falling)) if falling else 1.0

    def keep(self, client: int, answer: Answer) -> None:
        """The client's own state after a round that counts."""

    # The server's side.
    def step(self, mean: Named, answers: dict[int, Answer], sampled: list[int]) -> Named:
        """The direction of the server's model: x <- x - eta_g direction."""
        return mean

    def moved(self, before: Named, answers: dict[int, Answer]) -> None:
        """After the server's step, from the model before it."""

    def facts(self) -> dict[str, float]:
        return {}

    def round(self, invited: Invited) -> After:
        drops = sum(self.t >= drop for drop in self.option["lr_drops"])
        self.rate = self.option["lr"] * self.option["lr_decay"] ** self.t * self.option["lr_drop"] ** drops
        self.t += 1
        self.invited = invited
        answers, gradients = {}, 0
        for client in sorted(invited.sampled):
            answer = self.train(client, invited.batches[client])
            gradients += answer.steps * self.gradients_a_step
            if all(bool(torch.isfinite(t).all()) for t in (*answer.d.values(), *answer.buffers.values())):
                answers[client] = answer
                self.raw[client] = self.trained
        for client, answer in answers.items():
            self.keep(client, answer)
            self.taken[client] += answer.steps
        if answers:
            share = {i: float(self.problem.sizes[i]) if self.weights == "size" else 1.0 for i in answers}
            share = {i: s / sum(share.values()) for i, s in share.items()}
            self.share = share
            mean = {n: sum(share[i] * answers[i].d[n] for i in answers) for n in self.x}
            direction = self.step(mean, answers, [i for i in invited.sampled if i in answers])
            before = self.x
            self.x = {n: self.x[n] - self.option["server_lr"] * direction[n] for n in self.x}
            self.moved(before, answers)
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
            unit = self.rate * mean_steps(answers)
        direction = {}
        for name in mean:
            gradient = mean[name] / unit
            self.m[name] = beta * self.m[name] + (1 - self.option["dampening"]) * gradient
            along = gradient + beta * self.m[name] if self.option["nesterov"] else self.m[name]
            direction[name] = unit * along
        return direction


class Scaffold(FedAvgM):
    """Option II. The server's c is not updated but computed: the mean of all N clients' c_i."""

    defaults = FedAvgM.defaults | dict(beta1=0.0, lr=0.05)

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
        before, rate = self.of(client), answer.steps * self.rate
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


def mean_steps(answers: dict[int, Answer]) -> float:
    """The K of those who answered."""
    return sum(a.steps for a in answers.values()) / len(answers)


class FedProxM(FedProx, FedAvgM):
    """FedProx's loss, FedAvgM's server."""

    defaults = FedProx.defaults | FedAvgM.defaults


class FedAdam(FedAvg):
    """Reddi et al.'s server, written with Delta = -d as in their paper."""

    defaults = dict(server_lr=0.1, beta1=0.9, beta2=0.99, tau=1e-3, v0="zero", bias_correction=False)

    def __init__(self, problem: Problem, weights: str = "uniform", **options: Any) -> None:
        super().__init__(problem, weights, **options)
        start = self.option["tau"] ** 2 if self.option["v0"] == "tau2" else 0.0
        self.m, self.v = self.zeros(), {n: torch.full_like(t, start) for n, t in self.x.items()}
        self.count = 0

    def second(self, v: Tensor, delta: Tensor) -> Tensor:
        return self.option["beta2"] * v + (1 - self.option["beta2"]) * delta**2

    def step(self, mean: Named, answers: dict[int, Answer], sampled: list[int]) -> Named:
        beta1, beta2, scale = self.option["beta1"], self.option["beta2"], 1.0
        self.count += 1
        if self.option["bias_correction"]:
            scale = (1 - beta2**self.count) ** 0.5 / (1 - beta1**self.count)
        direction = {}
        for name, d in mean.items():
            delta = -d
            self.m[name] = beta1 * self.m[name] + (1 - beta1) * delta
            self.v[name] = self.second(self.v[name], delta)
            direction[name] = -scale * self.m[name] / (self.v[name] ** 0.5 + self.option["tau"])
        return direction


class DPFTRL(FedAvg):
    """Every point from where the tree began, by the sums of all directions since."""

    defaults = dict(beta1=0.9, tree=1024)

    def __init__(self, problem: Problem, weights: str = "uniform", **options: Any) -> None:
        super().__init__(problem, weights, **options)
        self.start, self.since = dict(self.x), list[Named]()

    def step(self, mean: Named, answers: dict[int, Answer], sampled: list[int]) -> Named:
        if len(self.since) == self.option["tree"]:
            self.start, self.since = dict(self.x), []
        self.since.append(mean)
        direction = {}
        for name in mean:
            sums = torch.stack([d[name] for d in self.since]).cumsum(0)
            v = sum(self.option["beta1"] ** age * s for age, s in enumerate(reversed(sums)))
            direction[name] = (self.x[name] - self.start[name]) / self.option["server_lr"] + v
        return direction


class FedYogi(FedAdam):
    def second(self, v: Tensor, delta: Tensor) -> Tensor:
        """Element by element: v comes nearer to Delta^2 by (1 - beta_2) Delta^2."""
        change = (1 - self.option["beta2"]) * delta**2
        return torch.where(v > delta**2, v - change, torch.where(v < delta**2, v + change, v))


class FedAdagrad(FedAdam):
    defaults = FedAdam.defaults | dict(beta1=0.0)

    def second(self, v: Tensor, delta: Tensor) -> Tensor:
        return v + delta**2


class FedSAM(FedAvg):
    """The gradient at x + rho u / (|u| + 1e-7) in place of u, the gradient at x."""

    defaults = dict(radius=0.1)
    gradients_a_step = 2

    def gradient(self, client: int, batch: list[int]) -> None:
        super().gradient(client, batch)
        u = {n: p.grad.clone() for n, p in self.module.named_parameters() if p.grad is not None}
        length = np.linalg.norm(joined(u, list(u)))
        point = {n: x + self.option["radius"] * u[n] / (length + 1e-7) for n, x in self.here().items()}
        sharp = self.elsewhere(point, batch)
        for name, parameter in self.module.named_parameters():
            parameter.grad = sharp[name]


class FedCM(FedAvg):
    """The mean step of the last round, in gradient units, mixed into every gradient."""

    defaults = dict(alpha=0.1)

    def __init__(self, problem: Problem, weights: str = "uniform", **options: Any) -> None:
        super().__init__(problem, weights, **options)
        self.delta = self.zeros()

    def correct(self, client: int) -> None:
        alpha = self.option["alpha"]
        for name, parameter in self.module.named_parameters():
            parameter.grad = alpha * parameter.grad + (1 - alpha) * self.delta[name]

    def step(self, mean: Named, answers: dict[int, Answer], sampled: list[int]) -> Named:
        self.delta = {n: d / (mean_steps(answers) * self.rate) for n, d in mean.items()}
        return mean


class MoFedSAM(FedSAM, FedCM):
    """FedSAM's gradient in FedCM's step."""

    defaults = FedSAM.defaults | FedCM.defaults


def momentum_buffers(module: nn.Module, optimizer: torch.optim.Optimizer) -> Named:
    """What torch.optim.SGD holds as b."""
    return {n: optimizer.state[p]["momentum_buffer"].clone() for n, p in module.named_parameters()}


class FedAvgLMZ(FedAvg):
    """torch.optim.SGD with momentum, new in every round."""

    defaults = dict(optimizer="momentum")


class FedAvgLM(FedAvg):
    """The same, but it starts from the cohort's mean buffer of the round before."""

    defaults = dict(optimizer="momentum")

    def __init__(self, problem: Problem, weights: str = "uniform", **options: Any) -> None:
        super().__init__(problem, weights, **options)
        self.b = self.zeros()
        self.ends: dict[int, Named] = {}

    def ready(self, client: int, optimizer: torch.optim.Optimizer) -> None:
        super().ready(client, optimizer)
        for name, parameter in self.module.named_parameters():
            optimizer.state[parameter]["momentum_buffer"] = self.b[name].clone()

    def stepped(self, client: int, optimizer: torch.optim.Optimizer) -> None:
        super().stepped(client, optimizer)
        self.ends[client] = momentum_buffers(self.module, optimizer)

    def moved(self, before: Named, answers: dict[int, Answer]) -> None:
        self.b = {n: sum(self.share[i] * self.ends[i][n] for i in answers) for n in self.x}


class FedAvgSLMZ(FedAvgLMZ, FedAvgM):
    defaults = FedAvgM.defaults | FedAvgLMZ.defaults | dict(momentum_units="grad", momentum=0.6, beta1=0.6)


class FedAvgSLM(FedAvgLM, FedAvgM):
    defaults = FedAvgM.defaults | FedAvgLM.defaults | dict(momentum_units="grad", momentum=0.6, beta1=0.6)


class FedDyn(FedAvg):
    """lambda_i (or h_i = -lambda_i / alpha) by client; the server's h is not updated but computed: the mean of all N."""

    defaults = dict(alpha=0.1, form="paper")

    def __init__(self, problem: Problem, weights: str = "uniform", **options: Any) -> None:
        super().__init__(problem, weights, **options)
        self.own: dict[int, Named] = {}
        self.h = self.zeros()
        self.training = 0

    def ready(self, client: int, optimizer: torch.optim.Optimizer) -> None:
        self.training = client

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """f_i(x) - <lambda_i, x> + alpha/2 |x - x_t|^2, or f_i(x) + alpha/2 |x - x_t + h_i|^2."""
        own, alpha, added = self.own.get(self.training, self.zeros()), self.option["alpha"], torch.zeros(())
        for name, x in self.module.named_parameters():
            if self.option["form"] == "scaled":
                added = added + alpha / 2 * (x - self.x[name] + own[name]).square().sum()
            else:
                added = added - (own[name] * x).sum() + alpha / 2 * (x - self.x[name]).square().sum()
        return super().loss(inputs, targets) + added

    def keep(self, client: int, answer: Answer) -> None:
        own = self.own.get(client, self.zeros())
        rise = -1.0 if self.option["form"] == "scaled" else self.option["alpha"]
        self.own[client] = {n: own[n] + rise * d for n, d in answer.d.items()}

    def step(self, mean: Named, answers: dict[int, Answer], sampled: list[int]) -> Named:
        everybody = len(self.problem.sizes)
        self.h = {n: sum(own[n] for own in self.own.values()) / everybody for n in self.x}
        scale = -1.0 if self.option["form"] == "scaled" else 1 / self.option["alpha"]
        return {n: d + scale * self.h[n] for n, d in mean.items()}


class MIFA(FedAvg):
    """The table of everybody's last updates, summed anew in every round."""

    defaults: dict[str, Any] = dict(wait=False)

    def __init__(self, problem: Problem, weights: str = "uniform", **options: Any) -> None:
        super().__init__(problem, weights, **options)
        self.table: dict[int, Named] = {}  # G_i

    def keep(self, client: int, answer: Answer) -> None:
        self.table[client] = answer.d

    def step(self, mean: Named, answers: dict[int, Answer], sampled: list[int]) -> Named:
        everybody = len(self.problem.sizes)
        if self.option["wait"] and len(self.table) < everybody:
            return super().step(self.zeros(), answers, sampled)
        D = {n: sum(G[n] for G in self.table.values()) / everybody for n in self.x}
        return super().step(D, answers, sampled)


class MIFAM(MIFA, FedAvgM):
    defaults = MIFA.defaults | FedAvgM.defaults | dict(beta1=0.5)


class FedMIM(FedAvg):
    """Every delta is kept; a_t and b_t are summed anew at each step."""

    defaults = dict(alpha=(0.6, 0.3), beta=(0.9, 0.1), downlink="broadcast")

    def __init__(self, problem: Problem, weights: str = "uniform", **options: Any) -> None:
        super().__init__(problem, weights, **options)
        self.deltas: list[Named] = []  # delta_1, delta_2, ...

    def inertia(self, weights: tuple[float, ...]) -> Named:
        """sum_j weight_j delta_{t+1-j}: the first weight goes with the newest."""
        found = self.zeros()
        for weight, delta in zip(weights, reversed(self.deltas), strict=False):
            found = {n: found[n] + weight * delta[n] for n in found}
        return found

    def gradient(self, client: int, batch: list[int]) -> None:
        x, b = self.here(), self.inertia(self.option["beta"])
        self.put({n: x[n] - b[n] for n in x})
        super().gradient(client, batch)
        self.put(x)

    def correct(self, client: int) -> None:
        """x_i^{k+1} = x_i^k - a_t - A eta_l g: only A g is clipped."""
        for parameter in self.module.parameters():
            parameter.grad *= 1 - sum(self.option["alpha"])

    def stepped(self, client: int, optimizer: torch.optim.Optimizer) -> None:
        a, x = self.inertia(self.option["alpha"]), self.here()
        self.put({n: x[n] - a[n] for n in x})

    def moved(self, before: Named, answers: dict[int, Answer]) -> None:
        self.deltas.append({n: (before[n] - self.x[n]) / mean_steps(answers) for n in self.x})


class DOMO(FedAvgM):
    """D_i from the buffers, and M_t kept by the server. What is averaged is eta_l K D_i = eta_l sum_k b."""

    defaults = FedAvgM.defaults | dict(
        optimizer="momentum", momentum=0.6, beta=0.9, buffers="reset", momentum_units="grad"
    )

    def __init__(self, problem: Problem, weights: str = "uniform", **options: Any) -> None:
        super().__init__(problem, weights, **options)
        self.b, self.sums = self.zeros(), self.zeros()
        self.ends: dict[int, Named] = {}

    def first(self, client: int) -> Named:
        K = np.mean([len(batches) for batches in self.invited.batches.values()])
        return {n: x - self.rate * self.option["beta"] * K * self.m[n] for n, x in self.x.items()}

    def ready(self, client: int, optimizer: torch.optim.Optimizer) -> None:
        self.sums = self.zeros()
        if self.option["buffers"] == "average":
            for name, parameter in self.module.named_parameters():
                optimizer.state[parameter]["momentum_buffer"] = self.b[name].clone()

    def stepped(self, client: int, optimizer: torch.optim.Optimizer) -> None:
        self.ends[client] = momentum_buffers(self.module, optimizer)
        self.sums = {n: s + self.ends[client][n] for n, s in self.sums.items()}

    def update(self, client: int) -> Named:
        return {n: self.rate * s for n, s in self.sums.items()}

    def moved(self, before: Named, answers: dict[int, Answer]) -> None:
        self.b = {n: sum(self.share[i] * self.ends[i][n] for i in answers) for n in self.x}


class DOMOS(DOMO):
    def first(self, client: int) -> Named:
        return self.x

    def stepped(self, client: int, optimizer: torch.optim.Optimizer) -> None:
        super().stepped(client, optimizer)
        self.put({n: x - self.rate * self.option["beta"] * self.m[n] for n, x in self.here().items()})


class GradMAW(FedAvg):
    """Three gradients on one mini-batch, and scipy's nnls for the projection."""

    defaults: dict[str, Any] = dict(prev="last_local", prev_first="current", qp_scope="global", rho=0.0)
    gradients_a_step = 3

    def __init__(self, problem: Problem, weights: str = "uniform", **options: Any) -> None:
        super().__init__(problem, weights, **options)
        self.start = self.x
        self.last: dict[int, Named] = {}  # x'
        self.before: Named = {}  # x_i^{k-1}
        self.bent = 0  # how often a projection changed a gradient, for tests
        self.active_in: dict[int, list[int]] = {}  # constraints active in each step of a client's last round

    def ready(self, client: int, optimizer: torch.optim.Optimizer) -> None:
        self.active_in[client] = []
        self.before = self.x
        if self.option["prev"] == "last_local":
            self.before = self.last.get(client, self.start if self.option["prev_first"] == "x0" else self.x)

    def gradient(self, client: int, batch: list[int]) -> None:
        now = self.here()
        super().gradient(client, batch)
        g = {n: p.grad.clone() for n, p in self.module.named_parameters() if p.grad is not None}
        away = {n: now[n] - self.x[n] for n in now}
        rows = [self.elsewhere(self.before, batch), self.elsewhere(self.x, batch), away]
        self.active_in[client].append(0)
        for names in [[n] for n in g] if self.option["qp_scope"] == "tensor" else [list(g)]:
            p, M = joined(g, names), [joined(row, names) for row in rows]
            if not all(np.isfinite(v).all() for v in (p, *M)):
                continue  # a bad sample: the answer will not be finite
            found, active = project(p, M, self.option["rho"])
            self.bent += active > 0
            self.active_in[client][-1] += active
            parts = torch.from_numpy(found).split([g[n].numel() for n in names])
            g |= {n: part.view(g[n].shape) for n, part in zip(names, parts, strict=True)}
        for name, parameter in self.module.named_parameters():
            parameter.grad = g[name].clone()
        self.before = now

    def keep(self, client: int, answer: Answer) -> None:
        self.last[client] = {n: self.x[n] - d for n, d in answer.d.items()}

    def facts(self) -> dict[str, float]:
        each = [sum(self.active_in[i]) / len(self.active_in[i]) for i in self.share]
        return super().facts() | {"local_qp_active": sum(each) / len(each)}


class GradMA(GradMAW, GradMAS):
    """GradMA-W's clients, GradMA-S's server."""

    defaults = GradMAW.defaults | GradMAS.defaults


class FedNova(FedAvg):
    """The paper's a_i as a list: how often each gradient of a round counts in d_i / eta_l."""

    @staticmethod
    def a(steps: int, momentum: float) -> list[float]:
        """A gradient stays in the buffer, a little less in each step that follows."""
        return [sum(momentum**later for later in range(steps - k)) for k in range(steps)]

    def step(self, mean: Named, answers: dict[int, Answer], sampled: list[int]) -> Named:
        mu, optimizer = self.option["momentum"], self.option["optimizer"]
        tau = {i: sum(self.a(answer.steps, mu if optimizer != "sgd" else 0.0)) for i, answer in answers.items()}
        if optimizer == "nesterov":  # each step is along the gradient and mu times the buffer
            tau = {i: answers[i].steps + mu * tau[i] for i in answers}
        effective = sum(self.share[i] * tau[i] for i in answers)
        return {n: effective * sum(self.share[i] / tau[i] * answers[i].d[n] for i in answers) for n in mean}


class FedExP(FedAvg):
    """Whole vectors in numpy."""

    defaults = dict(eps=1e-3)

    def __init__(self, problem: Problem, weights: str = "uniform", **options: Any) -> None:
        super().__init__(problem, weights, **options)
        self.longer: list[float] = []

    def step(self, mean: Named, answers: dict[int, Answer], sampled: list[int]) -> Named:
        names = list(mean)
        each = sum(self.share[i] * np.linalg.norm(joined(answers[i].d, names)) ** 2 for i in answers)
        self.longer.append(max(1.0, each / (2 * np.linalg.norm(joined(mean, names)) ** 2 + 2 * self.option["eps"])))
        return {n: self.longer[-1] * d for n, d in mean.items()}

    def facts(self) -> dict[str, float]:
        return {"extrapolation": self.longer[-1]}


class DiLoCo(FedAvgM):
    """Each client has its own AdamW from its first round on; torch.optim.SGD with Nesterov's momentum is the server."""

    defaults = dict(lr=0.002, optimizer="adamw", keep_moments=True, beta1=0.9, nesterov=True, server_lr=0.7)

    def __init__(self, problem: Problem, weights: str = "uniform", **options: Any) -> None:
        super().__init__(problem, weights, **options)
        self.kept: dict[int, list[Any]] = {}

    def ready(self, client: int, optimizer: torch.optim.Optimizer) -> None:
        for parameter, state in zip(self.module.parameters(), self.kept.get(client, []), strict=False):
            optimizer.state[parameter] = copy.deepcopy(state)

    def stepped(self, client: int, optimizer: torch.optim.Optimizer) -> None:
        self.kept[client] = [copy.deepcopy(optimizer.state[p]) for p in self.module.parameters()]

    def step(self, mean: Named, answers: dict[int, Answer], sampled: list[int]) -> Named:
        if not hasattr(self, "outer"):
            self.ahead = {n: nn.Parameter(t.clone()) for n, t in self.x.items()}
            rate, mu = self.option["server_lr"], self.option["beta1"]
            self.outer = torch.optim.SGD(self.ahead.values(), rate, momentum=mu, nesterov=self.option["nesterov"])
        for name, weight in self.ahead.items():
            weight.grad = mean[name].clone()
        self.outer.step()
        return {n: (self.x[n] - w.detach()) / self.option["server_lr"] for n, w in self.ahead.items()}


class SparseLoCo(DiLoCo):
    """Entry by entry: the largest of each chunk, in four bins whose means travel."""

    defaults = dict(
        lr=0.002, optimizer="adamw", keep_moments=True, ratio=64.0, chunk=4096, beta=0.95, bits=2, server_lr=1.0
    )

    def __init__(self, problem: Problem, weights: str = "uniform", **options: Any) -> None:
        FedAvg.__init__(self, problem, weights, **options)
        self.kept = {}
        self.owed: dict[int, np.ndarray] = {}
        self.left: dict[int, np.ndarray] = {}

    def update(self, client: int) -> Named:
        d = joined(super().update(client), list(self.x))
        d = np.concatenate([d, np.zeros(-len(d) % 8)])  # the package's vectors are that long
        e = self.option["beta"] * self.owed.get(client, np.zeros(len(d))) + d
        size = min(self.option["chunk"], len(e))
        sent = np.zeros(-(-len(e) // size) * size)
        sent[: len(e)] = e
        for begin in range(0, len(sent), size):
            part = sent[begin : begin + size]
            chosen = np.argsort(-np.abs(part), kind="stable")[: math.ceil(size / self.option["ratio"])]
            values = in_four_bins(part[chosen]) if self.option["bits"] else part[chosen].copy()
            part[:] = 0.0
            part[chosen] = values
        self.left[client] = e - sent[: len(e)]
        return parted(sent, self.x)

    def keep(self, client: int, answer: Answer) -> None:
        self.owed[client] = self.left[client]

    def step(self, mean: Named, answers: dict[int, Answer], sampled: list[int]) -> Named:
        return mean


class StreamingDiLoCo(DiLoCo):
    """Every client has a model of its own, and every fragment an outer momentum of its own."""

    defaults = dict(
        lr=0.002, optimizer="adamw", keep_moments=True, fragments=4, delay=1, alpha=0.5, beta=0.9, server_lr=0.7
    )

    def __init__(self, problem: Problem, weights: str = "uniform", **options: Any) -> None:
        FedAvg.__init__(self, problem, weights, **options)
        self.kept = {}
        self.own: dict[int, tuple[int, Named]] = {}
        self.m, self.turn, self.k = self.zeros(), 0, 0
        entries = sum(t.numel() for t in self.x.values())
        length = math.ceil((entries + -entries % 8) / self.option["fragments"])
        self.fragment = parted(np.arange(entries) // length, self.x)

    def there(self, client: int) -> bool:
        return client in self.own and self.own[client][0] == self.turn

    def first(self, client: int) -> Named:
        return self.own[client][1] if self.there(client) else self.x

    def ready(self, client: int, optimizer: torch.optim.Optimizer) -> None:
        super().ready(client, optimizer)
        self.k = 0

    def gradient(self, client: int, batch: list[int]) -> None:
        if self.k == self.option["delay"]:
            self.arrive(client)
        self.k += 1
        super().gradient(client, batch)

    def arrive(self, client: int) -> None:
        if not self.there(client) or not self.turn:
            return
        last, alpha = (self.turn - 1) % self.option["fragments"], self.option["alpha"]
        with torch.no_grad():
            for n, p in self.module.named_parameters():
                p.copy_(torch.where(self.fragment[n] == last, alpha * p + (1 - alpha) * self.x[n], p))

    def update(self, client: int) -> Named:
        if self.k <= self.option["delay"]:
            self.arrive(client)
        self.end = self.here()
        now = self.turn % self.option["fragments"]
        return {n: torch.where(self.fragment[n] == now, self.x[n] - end, 0.0) for n, end in self.end.items()}

    def train(self, client: int, batches: list[list[int]]) -> Answer:
        answer = super().train(client, batches)
        self.ends = getattr(self, "ends", {}) | {client: self.end}
        return answer

    def keep(self, client: int, answer: Answer) -> None:
        self.own[client] = (self.turn + 1, self.ends[client])

    def step(self, mean: Named, answers: dict[int, Answer], sampled: list[int]) -> Named:
        now, beta, direction = self.turn % self.option["fragments"], self.option["beta"], {}
        for n, d in mean.items():
            here = self.fragment[n] == now
            self.m[n] = torch.where(here, beta * self.m[n] + d, self.m[n])
            direction[n] = torch.where(here, d + beta * self.m[n], 0.0)
        self.turn += 1
        return direction


def in_four_bins(values: np.ndarray) -> np.ndarray:
    """Each value as the mean of its bin; the bins are 1.5 deviations wide, and the third one lies around the mean."""
    deviation = values.std(ddof=1) if len(values) > 1 else 0.0
    if deviation == 0:
        return np.full(len(values), values.mean())
    bins = np.clip(np.rint((values - values.mean()) / (1.5 * deviation)) + 2, 0, 3)
    return np.array([values[bins == own].mean() for own in bins])


def parted(v: np.ndarray, like: Named) -> Named:
    """A long vector as tensors with these names and shapes."""
    ends = np.cumsum([t.numel() for t in like.values()])
    return {
        n: torch.from_numpy(v[end - t.numel() : end].copy()).view(t.shape)
        for (n, t), end in zip(like.items(), ends, strict=True)
    }


class FedACG(FedAvg):
    """In the authors' signs: Delta_i = x_i^K - y_t, and the momentum is added. The loss has the proximal term."""

    defaults = dict(lam=0.85, beta=0.01)

    def __init__(self, problem: Problem, weights: str = "uniform", **options: Any) -> None:
        super().__init__(problem, weights, **options)
        self.momentum = self.zeros()

    def ahead(self) -> Named:
        return {n: x + self.option["lam"] * self.momentum[n] for n, x in self.x.items()}

    def first(self, client: int) -> Named:
        return self.ahead()

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        y = self.ahead()
        apart = sum((p - y[n]).square().sum() for n, p in self.module.named_parameters())
        return super().loss(inputs, targets) + self.option["beta"] / 2 * apart

    def update(self, client: int) -> Named:
        y = self.ahead()
        return {n: y[n] - end for n, end in self.here().items()}

    def step(self, mean: Named, answers: dict[int, Answer], sampled: list[int]) -> Named:
        self.momentum = {n: self.option["lam"] * m - mean[n] for n, m in self.momentum.items()}
        return {n: -m for n, m in self.momentum.items()}


class FedVARP(FedAvg):
    """The server's table of y, with a zero for everybody at first."""

    def __init__(self, problem: Problem, weights: str = "uniform", **options: Any) -> None:
        super().__init__(problem, weights, **options)
        self.y = [self.zeros() for _ in problem.sizes]

    def step(self, mean: Named, answers: dict[int, Answer], sampled: list[int]) -> Named:
        v = {}
        for n in mean:
            news = torch.stack([answer.d[n] - self.y[i][n] for i, answer in answers.items()]).mean(0)
            v[n] = news + torch.stack([y[n] for y in self.y]).mean(0)
        for i, answer in answers.items():
            self.y[i] = answer.d
        return v


class ScaffoldM(FedAvg):
    """c_i by client; c is not updated but computed: the mean of all N clients' c_i."""

    defaults = dict(beta=0.2)

    def __init__(self, problem: Problem, weights: str = "uniform", **options: Any) -> None:
        super().__init__(problem, weights, **options)
        self.own: dict[int, Named] = {}
        self.g = self.zeros()

    def correct(self, client: int) -> None:
        beta, own = self.option["beta"], self.own.get(client, self.zeros())
        for name, parameter in self.module.named_parameters():
            c = sum((c[name] for c in self.own.values()), torch.zeros(())) / len(self.problem.sizes)
            parameter.grad = beta * (parameter.grad - own[name] + c) + (1 - beta) * self.g[name]

    def moved(self, before: Named, answers: dict[int, Answer]) -> None:
        for i in answers:
            self.own[i] = self.raw[i]
        mean = {n: sum(self.share[i] * answers[i].d[n] for i in answers) for n in self.x}
        self.g = {n: d / (mean_steps(answers) * self.rate) for n, d in mean.items()}


class FedLESAM(FedAvg):
    """Every model that was ever sent is kept, by round; x_old is looked up."""

    defaults: dict[str, Any] = dict(radius=0.1, before="client")

    def __init__(self, problem: Problem, weights: str = "uniform", **options: Any) -> None:
        super().__init__(problem, weights, **options)
        self.sent: list[Named] = []
        self.visits: dict[int, int] = {}  # the round of each client's last visit

    def gradient(self, client: int, batch: list[int]) -> None:
        old = self.visits.get(client, self.t - 1)
        if self.option["before"] == "server":
            old = max(0, self.t - 2)
        past = self.sent[old] if old < len(self.sent) else self.x
        u = {n: past[n] - x for n, x in self.x.items()}
        length = np.linalg.norm(joined(u, list(u)))
        here = self.here()
        self.put({n: x + self.option["radius"] * u[n] / (length + 1e-7) for n, x in here.items()})
        super().gradient(client, batch)
        self.put(here)

    def moved(self, before: Named, answers: dict[int, Answer]) -> None:
        while len(self.sent) < self.t:
            self.sent.append(before)
        self.visits |= dict.fromkeys(answers, self.t - 1)


class FedGamma(FedSAM, Scaffold):
    """FedSAM's gradient in SCAFFOLD's step."""

    defaults = Scaffold.defaults | FedSAM.defaults


class FedSpeed(FedAvg):
    """The correction is in the loss, as in the paper's Lagrangian; x_hat_i = x_i^K - lam G_i goes up."""

    defaults: dict[str, Any] = dict(alpha=1.0, radius=0.1, lam=10.0, normalize=True, correct="cohort")
    gradients_a_step = 2

    def __init__(self, problem: Problem, weights: str = "uniform", **options: Any) -> None:
        super().__init__(problem, weights, **options)
        self.G: dict[int, Named] = {}

    def gradient(self, client: int, batch: list[int]) -> None:
        alpha, G, here = self.option["alpha"], self.G.get(client, self.zeros()), self.here()
        super().gradient(client, batch)
        g1 = {n: p.grad.clone() for n, p in self.module.named_parameters() if p.grad is not None}
        length = np.linalg.norm(joined(g1, list(g1))) + 1e-7 if self.option["normalize"] else 1.0
        g2 = self.elsewhere({n: x + self.option["radius"] / length * g1[n] for n, x in here.items()}, batch)
        for name, parameter in self.module.named_parameters():
            held = (here[name] - self.x[name]) / self.option["lam"]
            parameter.grad = (1 - alpha) * g1[name] + alpha * g2[name] - G[name] + held

    def keep(self, client: int, answer: Answer) -> None:
        G = self.G.get(client, self.zeros())
        self.G[client] = {n: G[n] - (-d) / self.option["lam"] for n, d in answer.d.items()}

    def step(self, mean: Named, answers: dict[int, Answer], sampled: list[int]) -> Named:
        lam, everybody = self.option["lam"], len(self.problem.sizes)
        if self.option["correct"] == "all":
            return {n: d + lam * sum(G[n] for G in self.G.values()) / everybody for n, d in mean.items()}
        ends = {i: {n: self.x[n] - d - lam * self.G[i][n] for n, d in a.d.items()} for i, a in answers.items()}
        return {n: self.x[n] - sum(self.share[i] * ends[i][n] for i in answers) for n in mean}


class FedSMOO(FedDyn):
    """FedDyn's loss at a point uphill of the gradient less the duals."""

    defaults: dict[str, Any] = dict(alpha=0.1, radius=0.1, dual="paper", form="paper")
    gradients_a_step = 2

    def __init__(self, problem: Problem, weights: str = "uniform", **options: Any) -> None:
        super().__init__(problem, weights, **options)
        self.mu: dict[int, Named] = {}
        self.s, self.s_k, self.mu_k = self.zeros(), self.zeros(), self.zeros()
        self.sent: dict[int, Named] = {}
        self.ends: dict[int, Named] = {}

    def ready(self, client: int, optimizer: torch.optim.Optimizer) -> None:
        super().ready(client, optimizer)
        self.mu_k = self.mu.get(client, self.zeros())

    def gradient(self, client: int, batch: list[int]) -> None:
        here, mine = self.here(), self.h_of(client)
        FedAvg.loss(self, self.problem.inputs[batch], self.problem.targets[batch]).backward()
        v = {n: p.grad - self.mu_k[n] - self.s[n] for n, p in self.module.named_parameters() if p.grad is not None}
        length = np.linalg.norm(joined(v, list(v))) + 1e-7
        self.s_k = {n: self.option["radius"] / length * t for n, t in v.items()}
        self.mu_k = {n: m + self.s_k[n] - self.s[n] for n, m in self.mu_k.items()}
        g = self.elsewhere({n: x + self.s_k[n] for n, x in here.items()}, batch)
        for name, parameter in self.module.named_parameters():
            parameter.grad = g[name] - mine[name] + self.option["alpha"] * (here[name] - self.x[name])

    def h_of(self, client: int) -> Named:
        return self.own.get(client, self.zeros())

    def update(self, client: int) -> Named:
        less = 1 if self.option["dual"] == "paper" else 0
        self.sent[client] = {n: m - less * self.s_k[n] for n, m in self.mu_k.items()}
        self.ends[client] = self.mu_k
        return super().update(client)

    def keep(self, client: int, answer: Answer) -> None:
        super().keep(client, answer)
        self.mu[client] = self.ends[client]

    def moved(self, before: Named, answers: dict[int, Answer]) -> None:
        total = {n: sum(self.sent[i][n] for i in answers) / len(answers) for n in self.x}
        length = np.linalg.norm(joined(total, list(total))) + 1e-7
        self.s = {n: self.option["radius"] / length * t for n, t in total.items()}


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


class FFALoRA(FedAvg):
    """Of each adapter only B moves; what is frozen in the module stays, too."""

    def __init__(self, problem: Problem, weights: str = "uniform", **options: Any) -> None:
        super().__init__(problem, weights, **options)
        self.frozen = {n for n, p in self.module.named_parameters() if not p.requires_grad}

    def fixed(self) -> set[str]:
        return self.frozen | {n for n in self.x if "lora_A" in n.split(".")}

    def gradient(self, client: int, batch: list[int]) -> None:
        super().gradient(client, batch)
        for name, parameter in self.module.named_parameters():
            if name in self.fixed():
                parameter.grad = torch.zeros_like(parameter)

    def stepped(self, client: int, optimizer: torch.optim.Optimizer) -> None:
        self.put(self.here() | {n: self.x[n] for n in self.fixed()})


class RoLoRA(FFALoRA):
    """B in the first round, A in the second, and so on."""

    def fixed(self) -> set[str]:
        factor = "lora_A" if self.t % 2 else "lora_B"  # t counts this round already
        return self.frozen | {n for n in self.x if factor in n.split(".")}


ALGORITHMS = {
    "fedavg": FedAvg, "fedprox": FedProx, "fedavgm": FedAvgM, "scaffold": Scaffold, "gradma-s": GradMAS,
    "fedproxm": FedProxM, "dp-ftrl": DPFTRL, "fedadam": FedAdam, "fedyogi": FedYogi, "fedadagrad": FedAdagrad, "fedsam": FedSAM,
    "fedcm": FedCM, "mofedsam": MoFedSAM, "fedavglm": FedAvgLM, "fedavglm-z": FedAvgLMZ, "fedavgslm": FedAvgSLM,
    "fedavgslm-z": FedAvgSLMZ, "feddyn": FedDyn, "mifa": MIFA, "mifam": MIFAM, "fedmim": FedMIM, "domo": DOMO,
    "domo-s": DOMOS, "gradma-w": GradMAW, "gradma": GradMA, "fednova": FedNova, "fedexp": FedExP, "fedacg": FedACG,
    "diloco": DiLoCo,
    "fedvarp": FedVARP, "scaffold-m": ScaffoldM, "fedlesam": FedLESAM, "fedgamma": FedGamma, "fedspeed": FedSpeed,
    "fedsmoo": FedSMOO, "ffa-lora": FFALoRA, "rolora": RoLoRA, "sparseloco": SparseLoCo,
    "streaming-diloco": StreamingDiLoCo,
}  # fmt: skip


def active_sets(G: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, list[set[int]]]:
    """Lawson and Hanson's method as in their book: min z'Gz / 2 + b'z over z >= 0, and the sets for which it solves."""
    z, passive, visited = np.zeros(len(b)), set[int](), list[set[int]]()
    while True:
        slope = {j: float(G[j] @ z + b[j]) for j in range(len(b)) if j not in passive}
        if not slope or min(slope.values()) >= -1e-12:
            return z, visited
        passive.add(min(slope, key=lambda j: slope[j]))
        while True:
            visited.append(set(passive))
            some, s = sorted(passive), np.zeros(len(b))
            s[some] = np.linalg.lstsq(G[np.ix_(some, some)], -b[some], rcond=None)[0]
            if all(s[j] > 0 for j in some):
                z = s
                break
            step = min(z[j] / (z[j] - s[j]) for j in some if s[j] <= 0)
            z = z + step * (s - z)
            passive = {j for j in some if z[j] > 1e-12}
