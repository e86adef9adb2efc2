"""Scores of a model on held-out samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from undrift.data.augment import Transform
from undrift.data.federation import Split
from undrift.net import Net

Metric = Callable[[Tensor, Tensor], Tensor]


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Whether each sample's largest output is its label; with a label for every pixel, the share that is.

    >>> accuracy(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1]))
    tensor([ True, False])
    """
    right = outputs.argmax(1) == targets
    return right.flatten(1).double().mean(1) if right.dim() > 1 else right


@torch.no_grad()
def evaluate(
    net: Net,
    x: Tensor,
    buffers: Tensor,
    split: Split,
    transform: Transform,
    metrics: Mapping[str, Metric],
    rows: Tensor | None = None,
    batch: int = 1000,
) -> dict[str, float]:
    """The mean loss and metrics in evaluation mode. A metric returns one number a sample, or one for the whole batch."""
    rows = torch.arange(len(split), device=x.device) if rows is None else rows
    if not len(rows):
        return {}
    sums: dict[str, Tensor] = {}
    for part in rows.split(batch):
        outputs, _ = net(x, buffers, transform(split.take(part), net.dtype), None)
        targets = split.targets[part]
        targets = targets.to(net.dtype) if targets.is_floating_point() else targets
        for name, score in (("loss", net.sample_losses), *metrics.items()):
            values = torch.as_tensor(score(outputs, targets)).double()
            total = values.mean() * len(part)  # a batch's own mean counts once for each of its samples
            sums[name] = sums[name] + total if name in sums else total
    return {name: float(total) / len(rows) for name, total in sums.items()}
