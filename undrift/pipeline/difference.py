"""The distance between a block's gradient and backpropagation's (thesis, Lemma 1.4.1 and Fig. 4, top left).

For a probed batch every block also keeps the graph of its forward, with its parameters x_k^{t_k} at that time. BP's
error gradients go down through these graphs in parallel to the real ones.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import functional_call

from undrift.pipeline.block import PipelineBlock, require_target


class Probe:
    """Batch n in one block under backpropagation at the forward parameters."""

    def __init__(self, block: PipelineBlock, n: int, h: Tensor, target: Tensor | None) -> None:
        """Create this before the block forwards the batch; it leaves the running statistics alone."""
        self.h = h.detach().clone().requires_grad_(block.sends_error(h))
        self.weights = {
            name: p.detach().clone().requires_grad_() for name, p in block.module.named_parameters() if p.requires_grad
        }
        with block.seed_dropout(n, h.device), block.freeze_statistics():
            self.out: Tensor = functional_call(block.module, self.weights, (self.h,))
        if block.loss is not None:
            self.out = block.loss(self.out, require_target(target))

    def difference(self, block: PipelineBlock, error: Tensor | None) -> tuple[float, Tensor | None]:
        """|grad_{x_k} - G_{x_k}| / d_k after the backward, for d_k parameters; BP's error gradient for below."""
        if self.out.requires_grad:
            torch.autograd.backward(self.out, error)
        squares = [
            (weight.grad - parameter.grad).square().sum()
            for weight, parameter in zip(self.weights.values(), block.trained, strict=True)
            if weight.grad is not None and parameter.grad is not None
        ]
        count = sum(parameter.numel() for parameter in block.trained)
        return float(torch.stack(squares).sum().sqrt()) / count if squares else 0.0, self.h.grad
