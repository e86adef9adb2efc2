"""DDG: every block steps along the backpropagation gradient of an earlier batch, whose graph it has kept.

Zhouyuan Huo, Bin Gu, Qian Yang, Heng Huang, Decoupled Parallel Backpropagation with Convergence Guarantee, ICML 2018.

    x_k^{t+1} = x_k^t - alpha grad_{x_k} f(x^{t-d}; batch t-d),  d = K - 1 - k

Differs: the authors' code changes the weights of a kept graph in place, so that its Jacobians see the current weights.
Here a graph keeps its own weights, and the gradient is exactly the delayed one.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor
from torch.func import functional_call

from undrift.pipeline.block import PipelineBlock, by_batch, strip_prefix


@final
class StashingBlock(PipelineBlock):
    """A block that keeps the graph and a copy of the weights of each batch under way."""

    def prepare(self) -> None:
        self.stashed: dict[int, dict[str, Tensor]] = {}  # the weights of each batch's forward

    def forward(self, n: int, h: Tensor, target: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        if self.m == 0:
            return super().forward(n, h, target)
        self.stashed[n] = {name: p.detach().clone() for name, p in self.module.named_parameters() if p.requires_grad}
        return self.build_graph(n, h).detach(), None

    def build_graph(self, n: int, h: Tensor) -> Tensor:
        """Build batch n's graph under its stashed weights, and return its output."""
        h = h.detach().requires_grad_(self.sends_error(h))
        for weight in self.stashed[n].values():
            weight.requires_grad_()
        with self.seed_dropout(n, h.device):
            out: Tensor = functional_call(self.module, self.stashed[n], (h,))
        self.graphs[n] = h, out
        return out

    def backward(self, n: int, error: Tensor | None) -> Tensor | None:
        if self.m == 0:
            return super().backward(n, error)
        h, out = self.graphs.pop(n)
        if out.requires_grad:  # false in a first block without parameters
            torch.autograd.backward(out, error)
        weights = self.stashed.pop(n)
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad:
                parameter.grad = weights[name].grad
        self.update(n)
        return h.grad

    def stored_tensors(self) -> list[Tensor]:
        """Inputs and weights, without the activations inside the graph."""
        return [*super().stored_tensors(), *(w for weights in self.stashed.values() for w in weights.values())]

    def tensors(self) -> dict[str, Tensor]:
        named = super().tensors() | {f"input.{n}": h.detach() for n, (h, _) in self.graphs.items()}
        for n, weights in self.stashed.items():
            named |= {f"stash.{n}.{name}": weight.detach() for name, weight in weights.items()}
        return named

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Load `tensors`; graphs are rebuilt from stored inputs and weights."""
        super().restore(tensors)
        self.inputs, self.graphs, self.stashed = {}, {}, {}
        for n, h in by_batch("input.", tensors).items():
            self.stashed[n] = {name: w.detach().clone() for name, w in strip_prefix(f"stash.{n}.", tensors).items()}
            with self.freeze_statistics():
                self.build_graph(n, h)
