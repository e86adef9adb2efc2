"""GradMA's VGG-11 with batch norm and a 128-unit hidden layer with dropout (Luo et al., CVPR 2023)."""

from __future__ import annotations

from torch import nn

from undrift.models._blocks import Blocks
from undrift.models._vgg import VGG11, vgg_stages


def build(shape: tuple[int, ...], classes: int) -> nn.Module:
    stages = vgg_stages("gradma-vgg11", shape, VGG11, batch_norm=True)
    hidden = nn.Sequential(nn.Linear(512, 128), nn.ReLU(), nn.Dropout(0.5))
    return Blocks({**stages, "hidden": hidden, "head": nn.Linear(128, classes)})
