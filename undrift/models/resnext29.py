"""ResNeXt-29, 8x64d, for CIFAR: bottlenecks in 8 groups, batch norm (Xie et al., CVPR 2017)."""

from __future__ import annotations

from torch import nn

from undrift.models._blocks import convolution, image_shape
from undrift.models._bottleneck import bottleneck_block
from undrift.models._resnet import residual_network


def block(channels_in: int, channels_out: int, stride: int) -> nn.Module:
    # 8 groups of 64 channels where the block is 256 wide, and in proportion further up
    return bottleneck_block(channels_in, channels_out, stride, inner=2 * channels_out, groups=8)


def build(shape: tuple[int, ...], classes: int) -> nn.Module:
    channels, _, _ = image_shape("resnext29", shape)
    stem = nn.Sequential(convolution(channels, 64, kernel=3), nn.BatchNorm2d(64), nn.ReLU())
    # Depth 29 = 9 * 3 + 2: three stages of three blocks.
    return residual_network(stem, 64, (256, 512, 1024), 3, block, [], classes)
