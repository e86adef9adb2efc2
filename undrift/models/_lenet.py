"""The image sizes that the LeNets accept."""

from __future__ import annotations

from undrift.core.errors import BadSetting
from undrift.models._blocks import image_shape

# 32 -> 28 -> 14 -> 10 -> 5 through two rounds of 5x5 convolution and halving.
FINAL_AREA = 5 * 5


def channels_and_padding(model: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """The input channels and the padding of the first convolution, which brings 28x28 images to 32x32."""
    channels, height, width = image_shape(model, shape)
    paddings = {(32, 32): 0, (28, 28): 2}
    if (height, width) not in paddings:
        raise BadSetting(
            f"model {model!r} needs 28x28 or 32x32, got {height}x{width}; resize the images or try 'resnet20-gn'"
        )
    return channels, paddings[height, width]
