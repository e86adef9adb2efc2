"""VGG-11 for CIFAR: 8 convolutions, one linear layer, no norm (after Simonyan & Zisserman, ICLR 2015)."""

from __future__ import annotations

from torch import nn

from undrift.models._vgg import VGG11, plain_vgg


def build(shape: tuple[int, ...], classes: int) -> nn.Module:
    return plain_vgg("vgg11", shape, classes, VGG11, batch_norm=False)
