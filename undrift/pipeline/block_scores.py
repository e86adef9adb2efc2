"""ScoreSums of a pipeline on held-out samples."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from undrift.pipeline.block import Loss, PipelineBlock


class ScoreSums:
    """The mean loss over samples and, for class labels, the accuracy."""

    def __init__(self, loss: Loss | None) -> None:
        assert loss is not None, "the last block has the loss"
        self.loss, self.samples = loss, 0
        self.sums: dict[str, Tensor] = {}

    def add(self, outputs: Tensor, targets: Tensor) -> None:
        """Count one batch; `loss` is its mean over samples."""
        found = {"loss": self.loss(outputs, targets).double() * len(targets)}
        if outputs.dim() == 2 and targets.dim() == 1 and not targets.is_floating_point():
            found["accuracy"] = (outputs.argmax(1) == targets).sum().double()
        self.samples += len(targets)
        self.sums = {name: self.sums.get(name, 0.0) + value for name, value in found.items()}

    def means(self) -> dict[str, float]:
        return {name: float(value) / self.samples for name, value in self.sums.items()}


@contextlib.contextmanager
def evaluation(blocks: Sequence[PipelineBlock]) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards every layer is in the mode it was in."""
    modes = [(layer, layer.training) for block in blocks for layer in block.module.modules()]
    for block in blocks:
        block.module.eval()
    try:
        with contextlib.ExitStack() as stack, torch.no_grad():
            for block in blocks:
                stack.enter_context(block.shown())
            yield
    finally:
        for layer, training in modes:
            layer.training = training
