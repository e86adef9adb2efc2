"""Shared parts of the models: named blocks, convolutions and their initialisation, the check of the shape."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import TypeVar, final

from torch import Tensor, nn

from undrift.core.errors import BadSetting

Model = TypeVar("Model", bound=nn.Module)


@final
class Blocks(nn.Sequential):
    """Named blocks that run one after another. The last is the classifier; a model can be split between any two."""

    def __init__(self, blocks: Mapping[str, nn.Module]) -> None:
        super().__init__(OrderedDict(blocks))

    def features(self, inputs: Tensor) -> Tensor:
        """The input of the last block, flattened to [batch, h]."""
        hidden = inputs
        for block in list(self)[:-1]:
            hidden = block(hidden)
        return hidden.flatten(1)


Builder = Callable[[tuple[int, ...], int], Blocks]  # called with (shape of an input, classes)


def convolution(channels_in: int, channels_out: int, kernel: int, stride: int = 1, bias: bool = False) -> nn.Conv2d:
    """A convolution that keeps the image size, up to its stride."""
    return nn.Conv2d(channels_in, channels_out, kernel, stride=stride, padding=kernel // 2, bias=bias)


def initialise(model: Model) -> Model:
    """Draw the convolutions as in He et al. (ICCV 2015): variance 2 / (kernel^2 * channels_out), biases zero.

    PyTorch's default shrinks the signal at every layer: a deep network without normalisation hardly sees its input.
    """
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return model


def global_pooling() -> list[nn.Module]:
    """The mean over the image of each channel, as [batch, channels]."""
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten()]


def image_shape(model: str, shape: tuple[int, ...]) -> tuple[int, int, int]:
    """(channels, height, width); BadSetting where the shape is not that of an image."""
    if len(shape) != 3:
        raise BadSetting(f"model {model!r} needs images (channels, height, width), got {shape}; 'mlp' takes any shape")
    channels, height, width = shape
    return channels, height, width
