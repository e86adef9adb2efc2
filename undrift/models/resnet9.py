"""ResNet-9 for CIFAR at half its width: few and wide convolutions, made for a dozen passes.

After David Page, How to Train Your ResNet, 2018. Differs: half the width, the mean over the image instead of the largest entry,
and images are halved before a layer is normalised, which costs a quarter.
"""

from __future__ import annotations

from torch import Tensor, nn

from undrift.models._blocks import Blocks, convolution, global_pooling, he_initialised, image_shape


def layer(channels_in: int, channels_out: int, halved: bool = False) -> nn.Sequential:
    pooled = [nn.MaxPool2d(2)] if halved else []
    return nn.Sequential(
        convolution(channels_in, channels_out, kernel=3), *pooled, nn.BatchNorm2d(channels_out), nn.ReLU()
    )


class Residual(nn.Module):
    """x + two layers of x."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.residual = nn.Sequential(layer(channels, channels), layer(channels, channels))

    def forward(self, inputs: Tensor) -> Tensor:
        change: Tensor = self.residual(inputs)
        return inputs + change


def build(shape: tuple[int, ...], classes: int, width: int = 32) -> nn.Module:
    channels, _, _ = image_shape("resnet9", shape)
    w = width
    return he_initialised(
        Blocks(
            {
                "stem": layer(channels, w),
                "stage1": nn.Sequential(layer(w, 2 * w, halved=True), Residual(2 * w)),
                "stage2": layer(2 * w, 4 * w, halved=True),
                "stage3": nn.Sequential(layer(4 * w, 8 * w, halved=True), Residual(8 * w), *global_pooling()),
                "head": nn.Linear(8 * w, classes),
            }
        )
    )
