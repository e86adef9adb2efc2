"""ResNet-98 for CIFAR, batch norm, parameter-free shortcuts (He et al., CVPR 2016)."""

from __future__ import annotations

from torch import nn

from undrift.models._resnet import cifar_resnet


def build(shape: tuple[int, ...], classes: int) -> nn.Module:
    return cifar_resnet("resnet98", shape, classes, depth=98, norm=nn.BatchNorm2d)
