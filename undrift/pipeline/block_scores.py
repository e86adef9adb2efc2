"""Scores of a pipeline on held-out samples."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from undrift.oracle.losses import IGNORED, classes_first
from undrift.pipeline.block import Loss, PipelineBlock


def mean_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """PyTorch's cross-entropy, a mean over labels, but 0 where there is none.

    >>> mean_cross_entropy(torch.zeros(2, 4), torch.tensor([-100, -100]))
    tensor(0.)
    """
    outputs = classes_first(outputs, targets)
    if targets.is_floating_point():
        return F.cross_entropy(outputs, targets)
    return F.cross_entropy(outputs, targets, reduction="sum") / (targets != IGNORED).sum().clamp(min=1)


class ScoreSums:
    """Sums behind the mean loss and, for class labels, the accuracy."""

    def __init__(self, loss: Loss | None) -> None:
        assert loss is not None, "the last block has the loss"
        self.loss, self.samples = loss, 0.0  # without those that have no label
        self.ignored = getattr(loss, "ignore_index", IGNORED)
        self.sums: dict[str, Tensor] = {}

    def add(self, outputs: Tensor, targets: Tensor) -> None:
        """Add one batch; `loss` is a mean over samples, or over the labels that it does not ignore."""
        count = float(len(targets))
        if not targets.is_floating_point():
            count = count * int((targets != self.ignored).sum()) / targets.numel()
        if not count:
            return
        sums = {"loss": self.loss(outputs, targets).double() * count}
        if outputs.dim() == targets.dim() + 1 and targets.dim() in (1, 2) and not targets.is_floating_point():
            right = (classes_first(outputs, targets).argmax(1) == targets) & (targets != self.ignored)
            sums["accuracy"] = right.sum().double() * len(targets) / targets.numel()
        self.samples += count
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
