"""ResNet-18 with a 3x3 stem and GroupNorm of 2 groups (He et al., CVPR 2016; Wu & He, ECCV 2018)."""

from __future__ import annotations

from torch import nn

from undrift.models._resnet import basic_resnet, group_norm, projection_shortcut


def build(shape: tuple[int, ...], classes: int) -> nn.Module:
    norm = group_norm(2)
    return basic_resnet("resnet18-gn", shape, classes, (64, 128, 256, 512), 2, norm, projection_shortcut(norm))
