"""ResNet-56 for CIFAR with GroupNorm of 8 groups (He et al., CVPR 2016; Wu & He, ECCV 2018)."""

from __future__ import annotations

from torch import nn

from undrift.models._resnet import cifar_resnet, group_norm


def build(shape: tuple[int, ...], classes: int) -> nn.Module:
    return cifar_resnet("resnet56-gn", shape, classes, depth=56, norm=group_norm(8))
