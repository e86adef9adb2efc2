"""DSP from Eq. (1-6) of the thesis, with every version of every block's parameters kept and nothing queued.

Batch n's gradient for block k is computed from the definition: forward parameters x_j^{t_j} with t_j = n + F_j up to the
block's input, backward parameters x_j^{t_{2K-1-j}} with t_{2K-1-j} = n + F_j + m_j from the loss down to the block.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from undrift.core.streams import Purpose, stream

State = dict[str, Tensor]


class Reference:
    """The run of all batches through blocks with output queues p and staleness m."""

    def __init__(
        self,
        modules: list[nn.Module],
        p: tuple[int, ...],
        m: tuple[int, ...],
        batches: list[list[tuple[Tensor, Tensor]]],  # [n][d]: a batch for each of the replicas
        loss: Any,
        rates: list[float],
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        s: float | None = None,  # of SUM, Eq. (1-4), with beta = momentum; None: torch's momentum
        seed: int = 0,
    ) -> None:
        K = len(modules)
        self.modules, self.batches, self.loss, self.seed = copy.deepcopy(modules), batches, loss, seed
        self.F = [sum(p[:k]) for k in range(K)]
        self.B = [self.F[k] + m[k] for k in range(K)]
        self.x: list[list[State]] = [[dict(f.named_parameters())] for f in self.modules]  # [k][t]
        self.x = [[{n: w.detach().clone() for n, w in versions[0].items()}] for versions in self.x]
        self.gradients: dict[tuple[int, int], State] = {}  # [n, k], the mean over replicas
        self.momentum, self.nesterov, self.weight_decay, self.rates = momentum, nesterov, weight_decay, rates
        self.s, self.velocity = s, [State() for _ in modules]
        self.outputs: dict[tuple[int, int, int], Tensor] = {}
        for t in range(len(batches) + max(self.B)):
            for k in range(K):  # running statistics follow the forwards, batch after batch
                if 0 <= t - self.F[k] < len(batches):
                    for d in range(len(batches[0])):
                        self.h(k + 1, t - self.F[k], d)
            new = []
            for k in range(K):
                n = t - self.B[k]
                if 0 <= n < len(batches):
                    each = [self.gradient(k, n, d)[0] for d in range(len(batches[n]))]
                    new.append(self.updated(k, n, t, each))
                else:
                    new.append(self.x[k][t])
            for k in range(K):
                self.x[k].append(new[k])

    def updated(self, k: int, n: int, t: int, each: list[State]) -> State:
        """x_k^{t+1}: momentum SGD with the mean of the replicas' gradients of batch n."""
        G = {name: sum((g[name] for g in each[1:]), each[0][name]) / len(each) for name in each[0]}
        self.gradients[n, k] = G = G if len(each) > 1 else each[0]
        after, velocity = {}, self.velocity[k]
        for name, w in self.x[k][t].items():
            g = torch.add(G[name], w, alpha=self.weight_decay) if self.weight_decay else G[name]
            if self.s is not None:
                g = G[name] + self.weight_decay * w
                y, y_s = w - self.rates[n] * g, w - self.s * self.rates[n] * g
                after[name] = y + self.momentum * (y_s - velocity.get(name, w))  # the first time w is x^0
                velocity[name] = y_s
                continue
            if self.momentum:
                v = velocity[name] = velocity[name] * self.momentum + g if name in velocity else g
                g = torch.add(g, v, alpha=self.momentum) if self.nesterov else v
            after[name] = torch.add(w, g, alpha=-self.rates[n])
        return after

    def version(self, k: int, t: int, d: int) -> State:
        """The parameters of block k at timestamp t, in replica d."""
        return self.x[k][t]

    def h(self, k: int, n: int, d: int = 0) -> Tensor:
        """h_k of batch n, under the forward parameters; computed once, which tracks the statistics once."""
        if k == 0:
            return self.batches[n][d][0]
        if (k, n, d) not in self.outputs:
            below = self.h(k - 1, n, d)
            with torch.no_grad():
                x = self.version(k - 1, n + self.F[k - 1], d)
                self.outputs[k, n, d] = self.call(self.modules[k - 1], k - 1, n, x, below)
        return self.outputs[k, n, d]

    def call(self, module: nn.Module, k: int, n: int, x: State, h: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(stream(self.seed, Purpose.DROPOUT, n, k) >> 1)
            out: Tensor = functional_call(module, x, (h,))
        return out

    def gradient(self, k: int, n: int, d: int) -> tuple[State, Tensor]:
        """G_{x_k} and the error gradient for h_k, of batch n under the backward parameters."""
        K = len(self.modules)
        if k == K - 1:
            out = self.h(K, n, d).clone().requires_grad_()
            (error,) = torch.autograd.grad(self.loss(out, self.batches[n][d][1]), out)
        else:
            error = self.gradient(k + 1, n, d)[1]
        x = {name: w.clone().requires_grad_() for name, w in self.version(k, n + self.B[k], d).items()}
        h = self.h(k, n, d).clone().requires_grad_()
        again = self.call(copy.deepcopy(self.modules[k]), k, n, x, h)  # a copy: its statistics are thrown away
        *grads, below = torch.autograd.grad(again, [*x.values(), h], error)
        return dict(zip(x, grads, strict=True)), below

    def parameters(self) -> list[State]:
        """After the last batch's last backward."""
        return [versions[-1] for versions in self.x]
