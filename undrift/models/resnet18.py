"""ResNet-18 for ImageNet, batch norm, projection shortcuts (He et al., CVPR 2016)."""

from __future__ import annotations

from torch import nn

from undrift.models._bottleneck import imagenet_resnet


def build(shape: tuple[int, ...], classes: int) -> nn.Module:
    return imagenet_resnet("resnet18", shape, classes, (2, 2, 2, 2), bottleneck=False)
