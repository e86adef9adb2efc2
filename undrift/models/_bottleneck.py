"""Residual blocks of three convolutions, 1x1, 3x3 and 1x1, and the networks built of them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from undrift.models._blocks import Blocks, Builder, convolution, image_shape
from undrift.models._resnet import Preactivation, Residual, basic_block, projection_shortcut, residual_network


def bottleneck_block(channels_in: int, channels_out: int, stride: int, inner: int = 0, groups: int = 1) -> Residual:
    """A residual block with `inner` channels, in `groups`, in the middle; by default a quarter of `channels_out`.

    A block that halves the image does so in its 3x3 convolution.
    """
    inner = inner or channels_out // 4
    middle = nn.Conv2d(inner, inner, 3, stride=stride, padding=1, groups=groups, bias=False)
    residual = nn.Sequential(
        *(convolution(channels_in, inner, kernel=1), nn.BatchNorm2d(inner), nn.ReLU()),
        *(middle, nn.BatchNorm2d(inner), nn.ReLU()),
        *(convolution(inner, channels_out, kernel=1), nn.BatchNorm2d(channels_out)),
    )
    same_shape = stride == 1 and channels_in == channels_out
    project = projection_shortcut(nn.BatchNorm2d)
    return Residual(residual, nn.Identity() if same_shape else project(channels_in, channels_out, stride))


def preactivation_bottleneck(channels_in: int, channels_out: int, stride: int) -> Preactivation:
    inner = channels_out // 4
    residual = nn.Sequential(
        *(convolution(channels_in, inner, kernel=1), nn.BatchNorm2d(inner), nn.ReLU()),
        *(convolution(inner, inner, kernel=3, stride=stride), nn.BatchNorm2d(inner), nn.ReLU()),
        convolution(inner, channels_out, kernel=1),
    )
    return Preactivation(channels_in, channels_out, stride, residual)


def preactivation_resnet(model: str, depth: int) -> Builder:
    """The CIFAR form of He et al., ECCV 2016, 9n + 2 layers deep: three stages of n bottlenecks."""

    def build(shape: tuple[int, ...], classes: int) -> Blocks:
        channels, _, _ = image_shape(model, shape)
        closing = [nn.BatchNorm2d(256), nn.ReLU()]
        stem = convolution(channels, 16, kernel=3)
        return residual_network(stem, 16, (64, 128, 256), (depth - 2) // 9, preactivation_bottleneck, closing, classes)

    return build


def imagenet_resnet(model: str, blocks_per_stage: Sequence[int], bottleneck: bool = False) -> Builder:
    """The ImageNet form of He et al., CVPR 2016: a 7x7 stem and max-pooling quarter the image before four stages."""
    norm = nn.BatchNorm2d
    block = bottleneck_block if bottleneck else basic_block(norm, projection_shortcut(norm))
    widths = (256, 512, 1024, 2048) if bottleneck else (64, 128, 256, 512)

    def build(shape: tuple[int, ...], classes: int) -> Blocks:
        channels, _, _ = image_shape(model, shape)
        stem = [
            convolution(channels, 64, kernel=7, stride=2),
            norm(64),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2, padding=1),
        ]
        return residual_network(nn.Sequential(*stem), 64, widths, blocks_per_stage, block, [], classes)

    return build
