"""A linear classifier on a few statistics of a picture's colours and edges: picture-statistics.

A selector for sites. It learns in few steps where cameras and scanners differ, because it sees no shapes: of every channel
the mean, the spread, the mean step to the next pixel in both directions, and five quantiles.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from undrift.models._blocks import Blocks, image_shape

QUANTILES = (0.0, 0.1, 0.5, 0.9, 1.0)
LEAST = 1e-3  # below it a spread counts as none


class Statistics(nn.Module):
    """Pictures [B, C, H, W] as nine numbers a channel."""

    def forward(self, x: Tensor) -> Tensor:
        across, down = x[..., 1:] - x[..., :-1], x[..., 1:, :] - x[..., :-1, :]
        values = x.flatten(-2)
        sizes = [values.var(-1, correction=0).sqrt(), across.abs().mean((-2, -1)), down.abs().mean((-2, -1))]
        last = values.shape[-1] - 1
        ordered = values.sort(-1).values[..., [round(q * last) for q in QUANTILES]]
        return torch.cat([values.mean(-1), *((size + LEAST).log() for size in sizes), ordered.flatten(-2)], -1)


def build(shape: tuple[int, ...], classes: int) -> nn.Module:
    channels, _, _ = image_shape("picture-statistics", shape)
    return Blocks({"statistics": Statistics(), "head": nn.Linear((4 + len(QUANTILES)) * channels, classes)})
