"""ResNet-9 for CIFAR at half its width, resnet9(width=32, norm=batch): few and wide convolutions, made for a dozen passes.

norm is batch or group. After David Page, How to Train Your ResNet, 2018. Differs: half the width; mean instead of max pooling at
the end; images are halved before a layer is normalised, which costs a quarter.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from undrift.core.errors import UnknownName
from undrift.models._blocks import Blocks, convolution, global_pooling, image_shape, initialise
from undrift.models._resnet import group_norm

NORMS: dict[str, Callable[[int], nn.Module]] = {"batch": nn.BatchNorm2d, "group": group_norm(8)}


def layer(norm: str, channels_in: int, channels_out: int, halve: bool = False) -> nn.Sequential:
    pool = [nn.MaxPool2d(2)] if halve else []
    return nn.Sequential(convolution(channels_in, channels_out, kernel=3), *pool, NORMS[norm](channels_out), nn.ReLU())


class Residual(nn.Module):
    """x + two layers of x."""

    def __init__(self, norm: str, channels: int) -> None:
        super().__init__()
        self.residual = nn.Sequential(layer(norm, channels, channels), layer(norm, channels, channels))

    def forward(self, inputs: Tensor) -> Tensor:
        change: Tensor = self.residual(inputs)
        return inputs + change


def build(shape: tuple[int, ...], classes: int, width: int = 32, norm: str = "batch") -> nn.Module:
    channels, _, _ = image_shape("resnet9", shape)
    if norm not in NORMS:
        raise UnknownName("norm of resnet9", norm, NORMS)
    w = width
    blocks = {
        "stem": layer(norm, channels, w),
        "stage1": nn.Sequential(layer(norm, w, 2 * w, halve=True), Residual(norm, 2 * w)),
        "stage2": layer(norm, 2 * w, 4 * w, halve=True),
        "stage3": nn.Sequential(layer(norm, 4 * w, 8 * w, halve=True), Residual(norm, 8 * w), *global_pooling()),
        "head": nn.Linear(8 * w, classes),
    }
    return initialise(Blocks(blocks))
