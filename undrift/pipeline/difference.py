"""How far a block's gradient is from backpropagation's (thesis, Lemma 1.4.1 and Fig. 4, top left).

For a probed batch every block also keeps the graph of its forward, with the parameters x_k^{t_k} of that moment. When
the error gradients come down, BP's chain goes through these graphs beside the real one.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import functional_call

from undrift.pipeline.block import PipelineBlock


class Probe:
    """Batch n in one block, as backpropagation at the forward parameters would see it."""

    def __init__(self, block: PipelineBlock, n: int, h: Tensor, target: Tensor | None) -> None:
        """To be made before the block forwards the batch: what is computed here is not tracked."""
        self.h = h.detach().clone().requires_grad_(block.sends_error(h))
        self.weights = {
            name: p.detach().clone().requires_grad_() for name, p in block.module.named_parameters() if p.requires_grad
        }
        with block.randomness(n, h.device), block.untracked():
            self.out: Tensor = functional_call(block.module, self.weights, (self.h,))
        if block.loss is not None:
            self.out = block.loss(self.out, block.wanted(target))

    def difference(self, block: PipelineBlock, error: Tensor | None) -> tuple[float, Tensor | None]:
        """|grad_{x_k} - G_{x_k}| / d_k after the block's backward, and BP's error gradient for the block below.

        d_k is the number of the block's parameters, the thesis' "regarding the number of parameters".
        """
        if self.out.requires_grad:
            torch.autograd.backward(self.out, error)
        apart = [
            (weight.grad - parameter.grad).square().sum()
            for weight, parameter in zip(self.weights.values(), block.trained, strict=True)
            if weight.grad is not None and parameter.grad is not None
        ]
        count = sum(parameter.numel() for parameter in block.trained)
        return float(torch.stack(apart).sum().sqrt()) / count if apart else 0.0, self.h.grad
