"""Scores of a pipeline on held-out samples."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from undrift.pipeline.block import Loss, PipelineBlock


class ScoreSums:
    """Sums behind the mean loss and, for class labels, the accuracy."""

    def __init__(self, loss: Loss | None) -> None:
        assert loss is not None, "the last block has the loss"
        self.loss, self.samples = loss, 0
        self.sums: dict[str, Tensor] = {}

    def add(self, outputs: Tensor, targets: Tensor) -> None:
        """Add one batch; `loss` is a mean over samples."""
        sums = {"loss": self.loss(outputs, targets).double() * len(targets)}
        if outputs.dim() == 2 and targets.dim() == 1 and not targets.is_floating_point():
            sums["accuracy"] = (outputs.argmax(1) == targets).sum().double()
        self.samples += len(targets)
        self.sums = {name: self.sums.get(name, 0.0) + value for name, value in sums.items()}

    def means(self) -> dict[str, float]:
        return {name: float(value) / self.samples for name, value in self.sums.items()}


@contextlib.contextmanager
def evaluation(blocks: Sequence[PipelineBlock]) -> Iterator[None]:
    """Evaluation mode without gradients; every layer's mode is restored."""
    modes = [(layer, layer.training) for block in blocks for layer in block.module.modules()]
    for block in blocks:
        block.module.eval()
    try:
        with contextlib.ExitStack() as stack, torch.no_grad():
            for block in blocks:
                stack.enter_context(block.show_weights())
            yield
    finally:
        for layer, training in modes:
            layer.training = training
