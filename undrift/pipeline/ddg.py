"""DDG: every block steps along the backpropagation gradient of an earlier batch, from the graph kept since then.

Zhouyuan Huo, Bin Gu, Qian Yang and Heng Huang, Decoupled Parallel Backpropagation with Convergence Guarantee, ICML 2018.

    x_k^{t+1} = x_k^t - alpha grad_{x_k} f(x^{t-d}; batch t-d),  d = K - 1 - k

Differs: the authors' code keeps the graph but changes the weights in place, so that its Jacobians see the weights of now.
Here a graph keeps the weights it was made with, and the gradient is exactly the delayed one.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor
from torch.func import functional_call

from undrift.pipeline.block import PipelineBlock, below, by_batch


@final
class StashingBlock(PipelineBlock):
    """A block that keeps, for each batch under way, its whole graph and a copy of the weights."""

    def prepare(self) -> None:
        self.stashed: dict[int, dict[str, Tensor]] = {}  # the weights of each batch's forward

    def forward(self, n: int, h: Tensor, target: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        if self.m == 0:
            return super().forward(n, h, target)
        self.stashed[n] = {name: p.detach().clone() for name, p in self.module.named_parameters() if p.requires_grad}
        out = self.graph(n, h)
        return out.detach(), None

    def graph(self, n: int, h: Tensor) -> Tensor:
        """Batch n's graph under its stashed weights."""
        h = h.detach().requires_grad_(self.sends_error(h))
        for weight in self.stashed[n].values():
            weight.requires_grad_()
        with self.randomness(n, h.device):
            out: Tensor = functional_call(self.module, self.stashed[n], (h,))
        self.graphs[n] = h, out
        return out

    def backward(self, n: int, error: Tensor | None) -> Tensor | None:
        if self.m == 0:
            return super().backward(n, error)
        h, out = self.graphs.pop(n)
        if out.requires_grad:  # not in a first block that has nothing to train
            torch.autograd.backward(out, error)
        weights = self.stashed.pop(n)
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad:
                parameter.grad = weights[name].grad
        self.update(n)
        return h.grad

    def held(self) -> list[Tensor]:
        """Inputs and weights; the activations inside the graph come on top."""
        return [*super().held(), *(w for weights in self.stashed.values() for w in weights.values())]

    def tensors(self) -> dict[str, Tensor]:
        named = super().tensors() | {f"input.{n}": h.detach() for n, (h, _) in self.graphs.items()}
        stashed = {
            f"stash.{n}.{name}": w.detach() for n, weights in self.stashed.items() for name, w in weights.items()
        }
        return named | stashed

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """A graph cannot be stored: it is made again from the stored input and weights."""
        super().restore(tensors)
        self.inputs, self.graphs, self.stashed = {}, {}, {}
        for n, h in by_batch("input.", tensors).items():
            self.stashed[n] = {name: w.detach().clone() for name, w in below(f"stash.{n}.", tensors).items()}
            with self.untracked():
                self.graph(n, h)
