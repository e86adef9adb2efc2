"""Wide ResNet 28-10 with batch norm, pre-activation, no dropout (Zagoruyko & Komodakis, BMVC 2016)."""

from __future__ import annotations

from torch import nn

from undrift.models._blocks import convolution, image_shape
from undrift.models._resnet import Preactivation, residual_network


def block(channels_in: int, channels_out: int, stride: int) -> nn.Module:
    residual = nn.Sequential(
        *(convolution(channels_in, channels_out, kernel=3, stride=stride), nn.BatchNorm2d(channels_out), nn.ReLU()),
        convolution(channels_out, channels_out, kernel=3),
    )
    return Preactivation(channels_in, channels_out, stride, residual)


def build(shape: tuple[int, ...], classes: int) -> nn.Module:
    channels, _, _ = image_shape("wrn28-10", shape)
    # Depth 28 = 6 * 4 + 4: three stages of four blocks; width 10 times (16, 32, 64).
    closing = [nn.BatchNorm2d(640), nn.ReLU()]
    return residual_network(convolution(channels, 16, kernel=3), 16, (160, 320, 640), 4, block, closing, classes)
