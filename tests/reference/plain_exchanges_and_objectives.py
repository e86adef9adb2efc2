"""Methods with exchanges or objectives of their own, as plainly as can be: Mime, MimeLite, SCAFFOLD I, MOON and FedMLB.

As in `plain`: named tensors, autograd, one client at a time. Nothing here comes from the package.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.reference.plain import After, Answer, FedAvg, FedAvgM, Invited, Named, Problem, Scaffold


class Whole(FedAvg):
    """A client's full gradient at x_t: its samples in their order, `batch` at a time in training mode."""

    defaults: dict[str, Any] = dict(batch=0, rows=())  # `rows`: the samples of each client
    passes = 0  # gradients spent on it in this round

    def full(self, client: int) -> Named:
        rows, total = self.option["rows"][client], self.zeros()
        for start in range(0, len(rows), self.option["batch"]):
            batch = rows[start : start + self.option["batch"]]
            for name, g in gradient_at(self.module, self.x, self.problem, batch).items():
                total[name] += g * len(batch) / len(rows)
            self.passes += 1
        return total

    def round(self, invited: Invited) -> After:
        self.passes = 0
        after = super().round(invited)
        return after._replace(gradients=after.gradients + self.passes)


def gradient_at(module: nn.Module, point: Named, problem: Problem, batch: list[int]) -> Named:
    """The gradient of the mean loss over a batch, on a copy in training mode without dropout."""
    other = copy.deepcopy(module).train()
    for part in other.modules():
        if isinstance(part, nn.Dropout):
            part.eval()
    other.load_state_dict(point, strict=False)
    loss = F.cross_entropy(other(problem.inputs[batch]), problem.targets[batch])
    return dict(zip(point, torch.autograd.grad(loss, list(other.parameters())), strict=True))


def finite(tensors: Named) -> bool:
    return all(bool(t.isfinite().all()) for t in tensors.values())


def spoilt(answer: Answer) -> Answer:
    """The answer of a client that sent something else that is not finite: the server drops it."""
    return answer._replace(d={n: t * float("nan") for n, t in answer.d.items()})


class MimeLite(Whole):
    """The server's momentum is mixed into every local gradient, and is made of full gradients at x_t."""

    defaults = Whole.defaults | dict(beta=0.9, ema=True)

    def __init__(self, problem: Problem, weights: str = "uniform", **options: Any) -> None:
        super().__init__(problem, weights, **options)
        self.m = self.zeros()
        self.sent: dict[int, Named] = {}

    def mix(self, g: Tensor, m: Tensor) -> Tensor:
        beta = self.option["beta"]
        return g * (1 - beta) + m * beta if self.option["ema"] else m * beta + g

    def train(self, client: int, batches: list[list[int]]) -> Answer:
        self.sent[client] = self.full(client)
        answer = super().train(client, batches)
        return answer if finite(self.sent[client]) else spoilt(answer)

    def correct(self, client: int) -> None:
        for name, parameter in self.module.named_parameters():
            parameter.grad = self.mix(parameter.grad, self.m[name])

    def step(self, mean: Named, answers: dict[int, Answer], sampled: list[int]) -> Named:
        for name in self.m:
            self.m[name] = self.mix(sum(self.share[i] * self.sent[i][name] for i in answers), self.m[name])
        return mean


class Mime(MimeLite):
    """c first, from all who are invited and send something finite; then g(x_i^k) - g(x_t) + c on one mini-batch."""

    gradients_a_step = 2

    def round(self, invited: Invited) -> After:
        self.sent = {i: self.full(i) for i in sorted(invited.sampled)}
        passes = self.passes
        self.passes = 0
        good = [i for i in self.sent if finite(self.sent[i])]
        weight = {i: self.problem.sizes[i] if self.weights == "size" else 1 for i in good}
        self.c = {n: sum(weight[i] * self.sent[i][n] for i in good) / sum(weight.values()) for n in self.x}
        after = super().round(invited)
        return after._replace(gradients=after.gradients + passes)

    def train(self, client: int, batches: list[list[int]]) -> Answer:
        answer = FedAvg.train(self, client, batches)
        return answer if finite(self.sent[client]) else spoilt(answer)

    def gradient(self, client: int, batch: list[int]) -> None:
        super().gradient(client, batch)
        self.there = gradient_at(self.module, self.x, self.problem, batch)

    def correct(self, client: int) -> None:
        for name, parameter in self.module.named_parameters():
            parameter.grad = parameter.grad + self.c[name] - self.there[name]
        super().correct(client)

    def step(self, mean: Named, answers: dict[int, Answer], sampled: list[int]) -> Named:
        self.m = {n: self.mix(self.c[n], self.m[n]) for n in self.m}
        return mean


class ScaffoldI(Whole, Scaffold):
    """c_i is the full gradient at x_t; the server's c is computed from all c_i."""

    defaults = Scaffold.defaults | Whole.defaults | dict(option=1)

    def train(self, client: int, batches: list[list[int]]) -> Answer:
        self.now = getattr(self, "now", {}) | {client: self.full(client)}
        answer = super().train(client, batches)
        return answer if finite(self.now[client]) else spoilt(answer)

    def keep(self, client: int, answer: Answer) -> None:
        self.own[client] = self.now[client]


class Moon(FedAvg):
    """Cross-entropy of two similarities, to the server's features and to the last local model's."""

    defaults = dict(mu=1.0, temperature=0.5)

    def __init__(self, problem: Problem, weights: str = "uniform", **options: Any) -> None:
        super().__init__(problem, weights, **options)
        self.previous: dict[int, Named] = {}  # state dicts

    def still(self, state: Named) -> nn.Module:
        model = copy.deepcopy(self.module)
        model.load_state_dict(state)
        return model.eval().requires_grad_(False)

    def ready(self, client: int, optimizer: torch.optim.Optimizer) -> None:
        server = self.x | self.buffers
        self.references = [self.still(server), self.still(self.previous.get(client, server))]

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        *body, classifier = self.module
        z = through(body, inputs)
        task = F.cross_entropy(classifier(z), targets)
        others = [through(list(model)[:-1], inputs) for model in self.references]
        logits = torch.stack([cosine(z.flatten(1), other.flatten(1)) for other in others], 1)
        answer = torch.zeros(len(inputs), dtype=torch.int64)
        return task + self.option["mu"] * F.cross_entropy(logits / self.option["temperature"], answer)

    def keep(self, client: int, answer: Answer) -> None:
        self.previous[client] = {n: self.x[n] - d for n, d in answer.d.items()} | answer.buffers


def through(parts: list[nn.Module], h: Tensor) -> Tensor:
    for part in parts:
        h = part(h)
    return h


def cosine(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(1) / (a.norm(dim=1).clamp(min=1e-8) * b.norm(dim=1).clamp(min=1e-8))


class MoonM(Moon, FedAvgM):
    """MOON's loss, FedAvgM's server."""

    defaults = Moon.defaults | FedAvgM.defaults


class FedMLB(FedAvg):
    """Each local block's output also goes through the rest of the server's model, in training mode."""

    defaults = dict(lambda1=1.0, lambda2=1.0, lambda3=1.0, temperature=1.0)

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        frozen = copy.deepcopy(self.module)
        frozen.load_state_dict(self.x, strict=False)
        frozen.requires_grad_(False)
        hidden, h = [], inputs
        for block in self.module:
            h = block(h)
            hidden.append(h)
        q, t = hidden.pop(), self.option["temperature"]
        branches = [through(list(frozen)[m + 1 :], h) for m, h in enumerate(hidden)]
        tasks = [F.cross_entropy(branch, targets) for branch in branches]
        apart = [
            F.kl_div(F.log_softmax(q / t, 1), F.softmax(branch / t, 1), reduction="batchmean") for branch in branches
        ]
        return (
            self.option["lambda1"] * F.cross_entropy(q, targets)
            + self.option["lambda2"] * torch.stack(tasks).mean()
            + self.option["lambda3"] * torch.stack(apart).mean()
        )


class FedNTD(FedAvg):
    """Each sample's logits without the true one, sample by sample; F.kl_div."""

    defaults = dict(beta=1.0, temperature=3.0)

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        server = copy.deepcopy(self.module)
        server.load_state_dict(self.x | self.buffers)
        server.eval().requires_grad_(False)
        q, q_t, tau = self.module(inputs), server(inputs), self.option["temperature"]
        apart = []
        for mine, theirs, true in zip(q, q_t, targets.tolist(), strict=True):
            others = [c for c in range(len(mine)) if c != true]
            near, far = F.log_softmax(mine[others] / tau, 0), F.softmax(theirs[others] / tau, 0)
            apart.append(F.kl_div(near, far, reduction="sum"))
        return F.cross_entropy(q, targets) + self.option["beta"] * torch.stack(apart).mean()


class FedMLBM(FedMLB, FedAvgM):
    """FedMLB's loss, FedAvgM's server."""

    defaults = FedMLB.defaults | FedAvgM.defaults | dict(lr=0.05)


ALGORITHMS: dict[str, type[FedAvg]] = {
    "mimelite": MimeLite,
    "mime": Mime,
    "scaffold": ScaffoldI,
    "moon": Moon,
    "moonm": MoonM,
    "fedmlb": FedMLB,
    "fedmlbm": FedMLBM,
    "fedntd": FedNTD,
}
