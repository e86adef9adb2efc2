"""LeNet-5 with ReLU and max-pooling, for 28x28 or 32x32 images (after LeCun et al., Proc. IEEE 1998)."""

from __future__ import annotations

from torch import nn

from undrift.models._blocks import Blocks
from undrift.models._lenet import FINAL_AREA, channels_and_padding


def build(shape: tuple[int, ...], classes: int) -> nn.Module:
    channels, padding = channels_and_padding("lenet5", shape)
    blocks = {
        "conv1": nn.Sequential(nn.Conv2d(channels, 6, 5, padding=padding), nn.ReLU(), nn.MaxPool2d(2)),
        "conv2": nn.Sequential(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        "fc1": nn.Sequential(nn.Flatten(), nn.Linear(16 * FINAL_AREA, 120), nn.ReLU()),
        "fc2": nn.Sequential(nn.Linear(120, 84), nn.ReLU()),
        "head": nn.Linear(84, classes),
    }
    return Blocks(blocks)
