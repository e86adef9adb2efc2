"""DNI: a block steps along an error gradient that a small network predicts, instead of waiting for the real one.

Max Jaderberg et al., Decoupled Neural Interfaces using Synthetic Gradients, ICML 2017; the predictor is the thesis'.

    forward(n)    h_{k+1} = f_k(h_k; x_k);  ê = phi_k(h_{k+1});  a step of x_k along J_x f_k^T ê
    backward(n)   phi_k makes a step along the gradient of (phi_k(h_{k+1}) - e_{k+1})^2; the block above may have
                  computed e_{k+1} from a predicted gradient itself

Differs: the squared error is a mean over the elements, not a sum. The curvature of a sum grows with the feature map and
would make the block's rate too large for phi.
"""

from __future__ import annotations

from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from undrift.pipeline.block import PipelineBlock, optimizer_tensors, restore_optimizer, strip_prefix

PREDICTOR = 1 << 32  # an impossible batch number, for the stream of the predictor's first weights


def predictor(h: Tensor) -> nn.Sequential:
    """Two hidden layers as wide as h with batch norm and ReLU, and a zero output layer; 5x5 convolutions for images."""
    width, image = h.shape[1], h.dim() == 4

    def layer() -> nn.Module:
        return nn.Conv2d(width, width, 5, padding=2) if image else nn.Linear(width, width)

    def norm() -> nn.Module:  # without statistics: phi is used in training only
        return (nn.BatchNorm2d if image else nn.BatchNorm1d)(width, track_running_stats=False)

    last = layer()
    for parameter in last.parameters():
        nn.init.zeros_(parameter)
    return nn.Sequential(layer(), norm(), nn.ReLU(), layer(), norm(), nn.ReLU(), last).to(h)


@final
class SyntheticBlock(PipelineBlock):
    """A block with its predictor phi, which is built for the width of the first output."""

    def prepare(self) -> None:
        self.phi: nn.Sequential | None = None
        self.phi_optimizer: torch.optim.Optimizer | None = None
        self.waiting: dict[int, tuple[Tensor, Tensor | None]] = {}  # output, and gradient for the block below

    def predictor(self, h: Tensor) -> nn.Sequential:
        """phi, built on first use."""
        if self.phi is None:
            with self.seed_dropout(PREDICTOR, torch.device("cpu")):
                self.phi = predictor(h)
            self.phi_optimizer = self.make_optimizer(list(self.phi.parameters()))
        return self.phi

    def forward(self, n: int, h: Tensor, target: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        out, loss = super().forward(n, h, target)
        if self.loss is None:
            with torch.no_grad():
                predicted = self.predictor(out)(out)
            self.waiting[n] = out, super().backward(n, predicted)
        return out, loss

    def backward(self, n: int, error: Tensor | None) -> Tensor | None:
        if self.loss is not None:
            return super().backward(n, error)
        out, below = self.waiting.pop(n)
        phi, optimizer = self.predictor(out), self.phi_optimizer
        assert error is not None and optimizer is not None
        optimizer.zero_grad()
        F.mse_loss(phi(out), error).backward()
        self.step(optimizer, n)
        return below

    def stored_tensors(self) -> list[Tensor]:
        """Also outputs that wait for their error gradient, and gradients for the block below."""
        return [*super().stored_tensors(), *(t for pair in self.waiting.values() for t in pair if t is not None)]

    def tensors(self) -> dict[str, Tensor]:
        phi = {} if self.phi is None else {f"phi.{name}": t for name, t in self.phi.state_dict().items()}
        return super().tensors() | phi | optimizer_tensors(self.phi_optimizer, "phi_optimizer.")

    def restore(self, tensors: dict[str, Tensor]) -> None:
        super().restore(tensors)
        stored = strip_prefix("phi.", tensors)
        if stored:
            first = stored["0.weight"]
            shape = (1, first.shape[0], 1, 1) if first.dim() == 4 else (1, first.shape[0])
            phi = self.predictor(torch.zeros(shape, dtype=first.dtype, device=next(self.module.parameters()).device))
            phi.load_state_dict(stored)
            restore_optimizer(self.phi_optimizer, strip_prefix("phi_optimizer.", tensors))
