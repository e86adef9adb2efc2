"""GradMA's wider LeNet-5 with batch norm and dropout, for 28x28 or 32x32 images (Luo et al., CVPR 2023)."""

from __future__ import annotations

from torch import nn

from undrift.models._blocks import Blocks
from undrift.models._lenet import FINAL_AREA, channels_and_padding


def build(shape: tuple[int, ...], classes: int) -> nn.Module:
    channels, padding = channels_and_padding("gradma-lenet5", shape)
    blocks = {
        "conv1": nn.Sequential(
            nn.Conv2d(channels, 32, 5, padding=padding), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)
        ),
        "conv2": nn.Sequential(nn.Conv2d(32, 64, 5), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)),
        "fc1": nn.Sequential(
            nn.Flatten(), nn.Linear(64 * FINAL_AREA, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Dropout(0.5)
        ),
        "fc2": nn.Sequential(nn.Linear(512, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.5)),
        "head": nn.Linear(128, classes),
    }
    return Blocks(blocks)
