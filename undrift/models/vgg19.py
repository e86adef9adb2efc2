"""VGG-19 for CIFAR: 16 convolutions, one linear layer, no norm (after Simonyan & Zisserman, ICLR 2015)."""

from __future__ import annotations

from torch import nn

from undrift.models._vgg import VGG19, plain_vgg


def build(shape: tuple[int, ...], classes: int) -> nn.Module:
    return plain_vgg("vgg19", shape, classes, VGG19, batch_norm=False)
