"""ResNet-1001 for CIFAR: pre-activation bottlenecks, batch norm (He et al., ECCV 2016)."""

from __future__ import annotations

from torch import nn

from undrift.models._bottleneck import preactivation_resnet


def build(shape: tuple[int, ...], classes: int) -> nn.Module:
    return preactivation_resnet("resnet1001", shape, classes, depth=1001)
