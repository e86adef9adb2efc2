"""DNI: a block does not wait for its error gradient but steps along one that a small network predicts.

Max Jaderberg et al., Decoupled Neural Interfaces using Synthetic Gradients, ICML 2017; the predictor is the thesis' one.

    forward(n)    h_{k+1} = f_k(h_k; x_k);  ê = phi_k(h_{k+1});  a step of x_k along J_x f_k^T ê
    backward(n)   phi_k makes a step along the gradient of (phi_k(h_{k+1}) - e_{k+1})^2, where e_{k+1} comes from the block
                  above, which may have made it from a predicted gradient itself

Differs: the squared error is the mean over the elements, not their sum, whose curvature grows with the size of the
feature map and would make the block's own rate too large for phi.
"""

from __future__ import annotations

from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from undrift.pipeline.block import PipelineBlock, below, optimizer_tensors, restore_optimizer

PREDICTOR = 1 << 32  # a batch number that never occurs, which names the stream of the predictor's first weights


def predictor(h: Tensor) -> nn.Sequential:
    """Two hidden layers as wide as h, with batch norm and ReLU, and an output that begins at zero.

    For images the layers are 5x5 convolutions, for vectors they are linear.
    """
    width = h.shape[1]
    image = h.dim() == 4

    def layer() -> nn.Module:
        return nn.Conv2d(width, width, 5, padding=2) if image else nn.Linear(width, width)

    def norm() -> nn.Module:
        kind = nn.BatchNorm2d if image else nn.BatchNorm1d
        return kind(width, track_running_stats=False)  # phi is used in training only

    last = layer()
    for parameter in last.parameters():
        nn.init.zeros_(parameter)
    return nn.Sequential(layer(), norm(), nn.ReLU(), layer(), norm(), nn.ReLU(), last).to(h)


@final
class SyntheticBlock(PipelineBlock):
    """A block with its predictor phi, which is made when the first output shows its width."""

    def prepare(self) -> None:
        self.phi: nn.Sequential | None = None
        self.phi_optimizer: torch.optim.Optimizer | None = None
        self.waiting: dict[int, tuple[Tensor, Tensor | None]] = {}  # output, and the gradient for the block below

    def predictor(self, h: Tensor) -> nn.Sequential:
        if self.phi is None:
            with self.randomness(PREDICTOR, torch.device("cpu")):
                self.phi = predictor(h)
            self.phi_optimizer = self.make_optimizer(list(self.phi.parameters()))
        return self.phi

    def forward(self, n: int, h: Tensor, target: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        out, loss = super().forward(n, h, target)
        if self.loss is None:
            phi = self.predictor(out)
            with torch.no_grad():
                predicted = phi(out)
            self.waiting[n] = out, super().backward(n, predicted)
        return out, loss

    def backward(self, n: int, error: Tensor | None) -> Tensor | None:
        if self.loss is not None:
            return super().backward(n, error)
        out, own = self.waiting.pop(n)
        phi, optimizer = self.predictor(out), self.phi_optimizer
        assert error is not None and optimizer is not None
        optimizer.zero_grad()
        F.mse_loss(phi(out), error).backward()
        if self.rate is not None:
            for group in optimizer.param_groups:
                group["lr"] = self.rate(n)
        optimizer.step()
        return own

    def held(self) -> list[Tensor]:
        """Besides, what waits for the true error gradient: the output, and the gradient for the block below."""
        return [*super().held(), *(t for pair in self.waiting.values() for t in pair if t is not None)]

    def tensors(self) -> dict[str, Tensor]:
        phi = {} if self.phi is None else {f"phi.{name}": t for name, t in self.phi.state_dict().items()}
        return super().tensors() | phi | optimizer_tensors(self.phi_optimizer, "phi_optimizer.")

    def restore(self, tensors: dict[str, Tensor]) -> None:
        super().restore(tensors)
        stored = below("phi.", tensors)
        if stored:
            first = stored["0.weight"]
            shape = (1, first.shape[0], 1, 1) if first.dim() == 4 else (1, first.shape[0])
            phi = self.predictor(torch.zeros(shape, dtype=first.dtype, device=next(self.module.parameters()).device))
            phi.load_state_dict(stored)
            restore_optimizer(self.phi_optimizer, below("phi_optimizer.", tensors))
