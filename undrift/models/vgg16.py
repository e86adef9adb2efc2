"""VGG-16 for CIFAR: 13 convolutions, one linear layer, no norm (after Simonyan & Zisserman, ICLR 2015)."""

from __future__ import annotations

from torch import nn

from undrift.models._vgg import VGG16, plain_vgg


def build(shape: tuple[int, ...], classes: int) -> nn.Module:
    return plain_vgg("vgg16", shape, classes, VGG16, batch_norm=False)
