"""Segmentation as a task: the Dice loss and the Dice score of nested structures.

A mask [H, W] holds whole numbers: 0 is background, and structure c = 0, 1, ... is where the mask is above c, so a later structure
lies inside an earlier one (the cup inside the disc). A model has one output channel, before the sigmoid, for each structure.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

SMOOTH = 1e-5  # epsilon of the soft Dice


def structures_of(masks: Tensor, count: int) -> Tensor:
    """Masks [B, H, W] as one plane of zeros and ones for each structure [B, C, H, W].

    >>> structures_of(torch.tensor([[[0, 1, 2]]]), 2)
    tensor([[[[False,  True,  True]],
    <BLANKLINE>
             [[False, False,  True]]]])
    """
    return masks.unsqueeze(1) > torch.arange(count, device=masks.device).view(1, -1, 1, 1)


def soft_dice_loss(probability: Tensor, masks: Tensor) -> Tensor:
    """[B] the mean over structures of 1 - (2 sum p y + eps) / (sum p + sum y + eps), for probabilities [B, C, H, W]."""
    y = structures_of(masks, probability.shape[1]).to(probability.dtype)
    both, all_ = (probability * y).sum((-2, -1)), (probability + y).sum((-2, -1))
    return (1 - (2 * both + SMOOTH) / (all_ + SMOOTH)).mean(1)


def dice_loss(outputs: Tensor, masks: Tensor) -> Tensor:
    """[B] the soft Dice loss of outputs [B, C, H, W] before the sigmoid."""
    return soft_dice_loss(outputs.sigmoid(), masks)


def dice_scores(outputs: Tensor, masks: Tensor) -> Tensor:
    """[B, C] the Dice score of each structure, binarised at 0.5; 1 if mask and prediction are both empty.

    >>> dice_scores(torch.tensor([[[[9.0, 9.0, -9.0]]]]), torch.tensor([[[1, 0, 0]]]))
    tensor([[0.6667]])
    """
    return overlap(outputs > 0, structures_of(masks, outputs.shape[1]))


def overlap(predicted: Tensor, true: Tensor) -> Tensor:
    """[B, C] 2 |a and b| / (|a| + |b|) of planes [B, C, H, W] of zeros and ones."""
    both, sizes = (predicted & true).sum((-2, -1)), predicted.sum((-2, -1)) + true.sum((-2, -1))
    return torch.where(sizes > 0, 2 * both / sizes.clamp(min=1), 1.0)


def metrics(structures: tuple[str, ...]) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """The mean Dice score as `dice`, and with several structures each one's score as `dice_NAME`."""
    each = {f"dice_{name}": lambda o, m, c=c: dice_scores(o, m)[:, c] for c, name in enumerate(structures)}
    return {"dice": lambda o, m: dice_scores(o, m).mean(1)} | (each if len(structures) > 1 else {})
