"""The personalisation methods a second time, plainly: modules and torch.optim, one client after another, float64.

Nothing here comes from the package. Handed in are the samples, who takes part in a round, and the rows of every mini-batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

Batches = Callable[[int], dict[int, list[list[int]]]]  # of the round: the rows of each mini-batch of each client


def weights(module: nn.Module) -> Tensor:
    return parameters_to_vector(module.parameters()).detach().clone()


def put(module: nn.Module, vector: Tensor) -> None:
    vector_to_parameters(vector.clone(), module.parameters())


def statistics(module: nn.Module) -> Tensor:
    return torch.cat([b.double().flatten() for b in module.buffers()] or [torch.zeros(0, dtype=torch.float64)])


def put_statistics(module: nn.Module, vector: Tensor) -> None:
    at = 0
    for b in module.buffers():
        b.copy_(vector[at : at + b.numel()].view(b.shape))
        at += b.numel()


def mean(vectors: list[Tensor], share: list[float]) -> Tensor:
    return sum((w * v for w, v in zip(share, vectors, strict=True)), torch.zeros_like(vectors[0]))


class Personal:
    """FedAvg's x, and what a method keeps for every client."""

    def __init__(
        self, module: nn.Module, X: Tensor, Y: Tensor, sizes: list[int], selector: nn.Module | None = None, **o: Any
    ) -> None:
        self.G, self.X, self.Y, self.sizes, self.o = copy.deepcopy(module).double(), X, Y, sizes, o
        for b in self.G.buffers():  # the counters too, since averages of them are compared
            b.data = b.data.double()
        N = len(sizes)
        self.local = [copy.deepcopy(self.G) for _ in range(N)]  # x_i
        self.own = [copy.deepcopy(self.G) for _ in range(N)]  # v_i
        self.opt = [self.optimiser(m) for m in self.local]
        self.own_opt = [self.optimiser(m) for m in self.own]
        self.seen: set[int] = set()
        if selector is not None:
            self.S = copy.deepcopy(selector).double()
            self.s_local = [copy.deepcopy(self.S) for _ in range(N)]
            self.s_opt = [self.optimiser(m, o.get("selector_lr", 1e-3)) for m in self.s_local]
            self.m = torch.zeros_like(weights(self.S))
            self.v = torch.zeros_like(self.m)
            self.n = [0] * N

    def optimiser(self, module: nn.Module, lr: float | None = None) -> torch.optim.Optimizer:
        lr = self.o["lr"] if lr is None else lr
        if self.o.get("optimizer", "sgd") == "adam":
            return torch.optim.Adam(module.parameters(), lr, betas=(0.9, 0.999))
        return torch.optim.SGD(module.parameters(), lr)

    def train(self, module: nn.Module, optimiser: torch.optim.Optimizer, batches: list[list[int]]) -> None:
        for rows in batches:
            optimiser.zero_grad()
            F.cross_entropy(module(self.X[rows]), self.Y[rows]).backward()
            optimiser.step()

    def gradient(self, module: nn.Module, at: Tensor, rows: list[int]) -> Tensor:
        """At any point; the module keeps its parameters."""
        before = weights(module)
        put(module, at)
        grads = torch.autograd.grad(F.cross_entropy(module(self.X[rows]), self.Y[rows]), list(module.parameters()))
        put(module, before)
        return torch.cat([g.flatten() for g in grads])

    def shares(self, cohort: list[int]) -> list[float]:
        size = [self.sizes[i] if self.o.get("weights") == "size" else 1 for i in cohort]
        return [n / sum(size) for n in size]

    def average(self, cohort: list[int]) -> None:
        share = self.shares(cohort)
        put(self.G, mean([weights(self.local[i]) for i in cohort], share))
        put_statistics(self.G, self.mean_statistics([self.local[i] for i in cohort], share))

    def mean_statistics(self, modules: list[nn.Module], share: list[float]) -> Tensor:
        """Counters take the maximum."""
        named = dict(modules[0].named_buffers())
        counter = torch.cat(
            [torch.full((b.numel(),), "tracked" in n) for n, b in named.items()] or [torch.zeros(0).bool()]
        )
        every = [statistics(m) for m in modules]
        return torch.where(counter, torch.stack(every).amax(0), mean(every, share))

    def begin(self, i: int) -> None:
        put(self.local[i], weights(self.G))
        put_statistics(self.local[i], statistics(self.G))

    def pull(self, cohort: list[int]) -> None:
        lam, S = self.o["lam"], len(cohort)
        if S == 1:
            return
        for read, write in ((weights, put), (statistics, put_statistics)):
            old = {i: read(self.own[i]) for i in cohort}
            for i in cohort:
                others = sum(old[j] for j in cohort if j != i)
                write(self.own[i], lam * old[i] + (1 - lam) / (S - 1) * others)

    def serves(self, i: int) -> Tensor:
        return weights(self.own[i])

    def play(self, t: int, batches: dict[int, list[list[int]]]) -> None:
        """A round; a client that comes for the first time begins at the server's model."""
        for i in batches.keys() - self.seen:
            put(self.own[i], weights(self.G))
            put_statistics(self.own[i], statistics(self.G))
        self.seen |= batches.keys()
        self.round(t, batches)

    def round(self, t: int, batches: dict[int, list[list[int]]]) -> None:
        raise NotImplementedError


class Local(Personal):
    def round(self, t: int, batches: dict[int, list[list[int]]]) -> None:
        for i, mine in batches.items():
            self.train(self.own[i], self.own_opt[i], mine)


class SoftPull(Local):
    def round(self, t: int, batches: dict[int, list[list[int]]]) -> None:
        super().round(t, batches)
        share = [1 / len(batches)] * len(batches)
        put(self.G, mean([weights(self.own[i]) for i in batches], share))
        put_statistics(self.G, self.mean_statistics([self.own[i] for i in batches], share))
        self.pull(list(batches))


class FT(Personal):
    def round(self, t: int, batches: dict[int, list[list[int]]]) -> None:
        if t == self.o["begin"]:
            for i in range(len(self.own)):
                put(self.own[i], weights(self.G))
                put_statistics(self.own[i], statistics(self.G))
        for i, mine in batches.items():
            if t < self.o["begin"]:
                self.begin(i)
                self.opt[i] = self.opt[i] if self.o.get("keep_moments") else self.optimiser(self.local[i])
                self.train(self.local[i], self.opt[i], mine)
            else:
                self.own_opt[i] = self.own_opt[i] if self.o.get("keep_moments") else self.optimiser(self.own[i])
                self.train(self.own[i], self.own_opt[i], mine)
        if t < self.o["begin"]:
            self.average(list(batches))

    def serves(self, i: int) -> Tensor:
        return weights(self.own[i])


class APFL(Personal):
    def __init__(self, *given: Any, **o: Any) -> None:
        super().__init__(*given, **o)
        self.lam = [self.o["lam"]] * len(self.own)

    def round(self, t: int, batches: dict[int, list[list[int]]]) -> None:
        for i, mine in batches.items():
            self.begin(i)
            for k, rows in enumerate(mine):
                x, v, lam = weights(self.local[i]), weights(self.own[i]), self.lam[i]
                g = self.gradient(self.own[i], lam * v + (1 - lam) * x, rows)
                if self.o.get("adaptive") and k == 0:
                    slope = float((v - x) @ g) + 0.02 * lam
                    self.lam[i] = min(max(lam - self.o["lam_lr"] * slope, 0.0), 1.0)
                at = 0
                for p in self.own[i].parameters():
                    p.grad = lam * g[at : at + p.numel()].view(p.shape)
                    at += p.numel()
                self.own_opt[i].step()
                self.train(self.local[i], self.opt[i], [rows])
        self.average(list(batches))

    def serves(self, i: int) -> Tensor:
        return self.lam[i] * weights(self.own[i]) + (1 - self.lam[i]) * weights(self.G)


class Ditto(Personal):
    """The proximal term is in the loss of v_i; the server's model does not change during a round."""

    def round(self, t: int, batches: dict[int, list[list[int]]]) -> None:
        for i, mine in batches.items():
            self.begin(i)
            if not self.o.get("keep_moments"):
                self.opt[i], self.own_opt[i] = self.optimiser(self.local[i]), self.optimiser(self.own[i])
            self.train(self.local[i], self.opt[i], mine)
            for rows in mine:
                self.own_opt[i].zero_grad()
                pairs = zip(self.own[i].parameters(), self.G.parameters(), strict=True)
                apart = sum((v - x.detach()).square().sum() for v, x in pairs)
                loss = F.cross_entropy(self.own[i](self.X[rows]), self.Y[rows]) + self.o["lam"] / 2 * apart
                loss.backward()
                self.own_opt[i].step()
        self.average(list(batches))


class Parts(Personal):
    """A client's own tensors are in `own`, by name; the server's model has its own first ones for ever."""

    def mine(self, module: nn.Module) -> set[str]:
        """The names of the tensors that a client keeps: here the last layer's."""
        *_, (last, _) = module.named_children()
        return {n for n, _ in module.named_parameters() if n.startswith(f"{last}.")}

    def joined(self, i: int) -> nn.Module:
        """The server's model with the client's own tensors."""
        found, kept = copy.deepcopy(self.G), dict(self.own[i].named_parameters())
        with torch.no_grad():
            for name, parameter in found.named_parameters():
                if name in self.mine(found):
                    parameter.copy_(kept[name])
        return found

    def fit(self, i: int, mine: list[list[int]]) -> None:
        self.train(self.local[i], self.optimiser(self.local[i]), mine)

    def round(self, t: int, batches: dict[int, list[list[int]]]) -> None:
        for i, mine in batches.items():
            self.local[i] = self.joined(i)
            self.fit(i, mine)
            self.own[i] = copy.deepcopy(self.local[i])
        still = {n: p.detach().clone() for n, p in self.G.named_parameters() if n in self.mine(self.G)}
        self.average(list(batches))
        with torch.no_grad():
            for name, parameter in self.G.named_parameters():
                if name in still:
                    parameter.copy_(still[name])

    def serves(self, i: int) -> Tensor:
        return weights(self.joined(i))


class FedPer(Parts):
    """All of the joined model is trained."""


class FedRep(Parts):
    """Other tensors do not require a gradient, so that the optimiser leaves them alone."""

    def fit(self, i: int, mine: list[list[int]]) -> None:
        head, module = self.mine(self.local[i]), self.local[i]
        for part, rows in ((True, mine[: self.o["head_steps"]]), (False, mine[self.o["head_steps"] :])):
            for name, parameter in module.named_parameters():
                parameter.requires_grad_((name in head) == part)
                parameter.grad = None
            self.train(module, self.optimiser(module), rows)


class FedBN(Parts):
    """Normalisation layers, with their statistics."""

    def mine(self, module: nn.Module) -> set[str]:
        layers = [name for name, part in module.named_modules() if isinstance(part, nn.BatchNorm1d)]
        return {n for n, _ in module.named_parameters() if n.rpartition(".")[0] in layers}

    def joined(self, i: int) -> nn.Module:
        found = super().joined(i)
        put_statistics(found, statistics(self.own[i]))
        return found


class FedBABU(Personal):
    """The head does not require a gradient until clients tune it."""

    def fit(self, module: nn.Module, mine: list[list[int]], head: bool, body: bool) -> None:
        *_, (last, _) = module.named_children()
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(head if name.startswith(f"{last}.") else body)
            parameter.grad = None
        self.train(module, self.optimiser(module), mine)

    def round(self, t: int, batches: dict[int, list[list[int]]]) -> None:
        if t == self.o["begin"]:
            for i in range(len(self.own)):
                put(self.own[i], weights(self.G))
                put_statistics(self.own[i], statistics(self.G))
        for i, mine in batches.items():
            if t < self.o["begin"]:
                self.begin(i)
                self.fit(self.local[i], mine, head=False, body=True)
            else:
                self.fit(self.own[i], mine, head=True, body=self.o.get("tunes") == "all")
        if t < self.o["begin"]:
            self.average(list(batches))


class PerFedAvg(Personal):
    def round(self, t: int, batches: dict[int, list[list[int]]]) -> None:
        alpha, hf, delta = self.o["alpha"], self.o.get("hessian_free", False), self.o.get("delta", 1e-3)
        for i, mine in batches.items():
            self.begin(i)
            w, still = weights(self.local[i]), copy.deepcopy(self.local[i])
            for rows in mine:
                parts = [rows[j :: 3 if hf else 2] for j in range(3)]
                put_statistics(still, statistics(self.local[i]))
                inner = w - alpha * self.gradient(still, w, parts[0])
                r = self.gradient(self.local[i], inner, parts[1])
                if hf:
                    ahead, behind = (self.gradient(still, w + sign * delta * r, parts[2]) for sign in (1, -1))
                    r = r - alpha * (ahead - behind) / (2 * delta)
                w = w - self.o["lr"] * r
            put(self.local[i], w)
        self.average(list(batches))

    def everything(self, i: int) -> list[int]:
        start = sum(self.sizes[:i])
        return list(range(start, start + self.sizes[i]))

    def serves(self, i: int) -> Tensor:
        still = copy.deepcopy(self.G)
        return weights(self.G) - self.o["alpha"] * self.gradient(still, weights(self.G), self.everything(i))


class PFedMe(Personal):
    def round(self, t: int, batches: dict[int, list[list[int]]]) -> None:
        o = self.o
        for i, mine in batches.items():
            w = theta = weights(self.G)
            for rows in mine:
                theta = w if o.get("reset") else theta
                for _ in range(o["inner_steps"]):
                    slope = self.gradient(self.own[i], theta, rows) + o["lam"] * (theta - w)
                    theta = theta - o["inner_lr"] * (slope + o.get("theta_decay", 0.0) * theta)
                w = w - o["lr"] * o["lam"] * (w - theta)
            put(self.local[i], w)
            put(self.own[i], theta)
        cohort = list(batches)
        x, w = weights(self.G), mean([weights(self.local[i]) for i in cohort], self.shares(cohort))
        put(self.G, (1 - o.get("server_lr", 1.0)) * x + o.get("server_lr", 1.0) * w)


class FedSM(Personal):
    def streams(self, batches: dict[int, list[list[int]]]) -> None:
        for i, mine in batches.items():
            self.begin(i)
            self.train(self.local[i], self.opt[i], mine)
            self.train(self.own[i], self.own_opt[i], mine)
        self.average(list(batches))
        self.pull(list(batches))

    def round(self, t: int, batches: dict[int, list[list[int]]]) -> None:
        self.streams(batches)
        cohort, share = list(batches), self.shares(list(batches))
        if self.o.get("selector_weights") == "uniform":
            share = [1 / len(cohort)] * len(cohort)
        steps = [
            self.per_batch(i, batches[i]) if self.o["selector_mode"] == "per_batch" else self.synced(i, batches[i])
            for i in cohort
        ]
        put(self.S, mean([s for s, _, _ in steps], share))
        self.m, self.v = mean([m for _, m, _ in steps], share), mean([v for _, _, v in steps], share)

    def per_batch(self, i: int, batches: list[list[int]]) -> tuple[Tensor, Tensor, Tensor]:
        put(self.s_local[i], weights(self.S))
        for rows in batches:
            self.s_opt[i].zero_grad()
            F.cross_entropy(self.s_local[i](self.X[rows]), torch.full((len(rows),), i)).backward()
            self.s_opt[i].step()
        return weights(self.s_local[i]), self.m, self.v

    def synced(self, i: int, batches: list[list[int]]) -> tuple[Tensor, Tensor, Tensor]:
        every = [row for rows in batches for row in rows]
        loss = F.cross_entropy(self.S(self.X[every]), torch.full((len(every),), i))
        g = torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(self.S.parameters()))])
        if self.o.get("optimizer", "sgd") == "sgd":
            return weights(self.S) - self.o["selector_lr"] * g, self.m, self.v
        m, v, self.n[i] = 0.9 * self.m + 0.1 * g, 0.999 * self.v + 0.001 * g * g, self.n[i] + 1
        step = (m / (1 - 0.9 ** self.n[i])) / ((v / (1 - 0.999 ** self.n[i])).sqrt() + 1e-8)
        return weights(self.S) - self.o["selector_lr"] * step, m, v


class FedSMExtra(FedSM):
    def round(self, t: int, batches: dict[int, list[list[int]]]) -> None:
        if t < self.o["begin"]:
            self.streams(batches)
            return
        models = [copy.deepcopy(m).eval() for m in (self.G, *self.own)]
        for i, mine in batches.items():
            put(self.s_local[i], weights(self.S))
            for rows in mine:
                self.s_opt[i].zero_grad()
                with torch.no_grad():
                    outputs = [m(self.X[rows]) for m in models]
                self.selector_loss(self.s_local[i](self.X[rows]), outputs, self.Y[rows]).backward()
                self.s_opt[i].step()
        put(self.S, mean([weights(self.s_local[i]) for i in batches], self.shares(list(batches))))

    def selector_loss(self, said: Tensor, outputs: list[Tensor], targets: Tensor) -> Tensor:
        losses = torch.stack([F.cross_entropy(h, targets, reduction="none") for h in outputs], 1)
        return F.cross_entropy(said, losses.argmin(1))


class Ensemble(FedSMExtra):
    def selector_loss(self, said: Tensor, outputs: list[Tensor], targets: Tensor) -> Tensor:
        share = said.softmax(1)
        mixed = sum(share[:, k : k + 1] * h.softmax(1) for k, h in enumerate(outputs))
        return F.nll_loss(torch.log(mixed), targets)
