"""Residual blocks of three convolutions, 1x1, 3x3 and 1x1, and the networks built of them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional

from undrift.models._blocks import Blocks, convolution, image_shape
from undrift.models._resnet import BasicBlock, projection_shortcut, residual_network


class Bottleneck(nn.Module):
    """relu(shortcut(x) + residual(x)) with `inner` channels, in `groups`, in the middle of the residual.

    A block that halves the image does so in its 3x3 convolution.
    """

    def __init__(self, channels_in: int, channels_out: int, stride: int, inner: int, groups: int = 1) -> None:
        super().__init__()
        middle = nn.Conv2d(inner, inner, 3, stride=stride, padding=1, groups=groups, bias=False)
        self.residual = nn.Sequential(
            *(convolution(channels_in, inner, kernel=1), nn.BatchNorm2d(inner), nn.ReLU()),
            *(middle, nn.BatchNorm2d(inner), nn.ReLU()),
            *(convolution(inner, channels_out, kernel=1), nn.BatchNorm2d(channels_out)),
        )
        same_shape = stride == 1 and channels_in == channels_out
        project = projection_shortcut(nn.BatchNorm2d)
        self.shortcut = nn.Identity() if same_shape else project(channels_in, channels_out, stride)

    def forward(self, inputs: Tensor) -> Tensor:
        return functional.relu(self.shortcut(inputs) + self.residual(inputs))


class PreactivationBottleneck(nn.Module):
    """x + residual(relu(norm(x))); where the shape changes, shortcut(relu(norm(x))) takes the place of x."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        inner = channels_out // 4
        self.same_shape = stride == 1 and channels_in == channels_out
        self.activation = nn.Sequential(nn.BatchNorm2d(channels_in), nn.ReLU())
        self.residual = nn.Sequential(
            *(convolution(channels_in, inner, kernel=1), nn.BatchNorm2d(inner), nn.ReLU()),
            *(convolution(inner, inner, kernel=3, stride=stride), nn.BatchNorm2d(inner), nn.ReLU()),
            convolution(inner, channels_out, kernel=1),
        )
        if not self.same_shape:
            self.shortcut = convolution(channels_in, channels_out, kernel=1, stride=stride)

    def forward(self, inputs: Tensor) -> Tensor:
        activated: Tensor = self.activation(inputs)
        kept: Tensor = inputs if self.same_shape else self.shortcut(activated)
        change: Tensor = self.residual(activated)
        return kept + change


def preactivation_resnet(model: str, shape: tuple[int, ...], classes: int, depth: int) -> Blocks:
    """The CIFAR form of He et al., ECCV 2016, 9n + 2 layers deep: three stages of n bottlenecks."""
    channels, _, _ = image_shape(model, shape)
    closing = [nn.BatchNorm2d(256), nn.ReLU()]
    stem = convolution(channels, 16, kernel=3)
    return residual_network(stem, 16, (64, 128, 256), (depth - 2) // 9, PreactivationBottleneck, closing, classes)


def imagenet_resnet(
    model: str, shape: tuple[int, ...], classes: int, blocks_per_stage: Sequence[int], bottleneck: bool
) -> Blocks:
    """The ImageNet form of He et al., CVPR 2016: a 7x7 stem and max-pooling quarter the image before four stages."""
    channels, _, _ = image_shape(model, shape)
    stem = nn.Sequential(
        *(convolution(channels, 64, kernel=7, stride=2), nn.BatchNorm2d(64), nn.ReLU()),
        nn.MaxPool2d(3, stride=2, padding=1),
    )

    def block(channels_in: int, channels_out: int, stride: int) -> nn.Module:
        if bottleneck:
            return Bottleneck(channels_in, channels_out, stride, inner=channels_out // 4)
        return BasicBlock(channels_in, channels_out, stride, nn.BatchNorm2d, projection_shortcut(nn.BatchNorm2d))

    widths = (256, 512, 1024, 2048) if bottleneck else (64, 128, 256, 512)
    return residual_network(stem, 64, widths, blocks_per_stage, block, [], classes)
