"""Wide ResNet 28-10 with batch norm, pre-activation, no dropout (Zagoruyko & Komodakis, BMVC 2016)."""

from __future__ import annotations

from torch import Tensor, nn

from undrift.models._blocks import convolution, image_shape
from undrift.models._resnet import residual_network


class PreactivationBlock(nn.Module):
    """x + residual(relu(norm(x))); where the shape changes, shortcut(relu(norm(x))) takes the place of x."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.same_shape = stride == 1 and channels_in == channels_out
        self.activation = nn.Sequential(nn.BatchNorm2d(channels_in), nn.ReLU())
        self.residual = nn.Sequential(
            convolution(channels_in, channels_out, kernel=3, stride=stride),
            nn.BatchNorm2d(channels_out),
            nn.ReLU(),
            convolution(channels_out, channels_out, kernel=3),
        )
        if not self.same_shape:
            self.shortcut = convolution(channels_in, channels_out, kernel=1, stride=stride)

    def forward(self, inputs: Tensor) -> Tensor:
        activated: Tensor = self.activation(inputs)
        kept: Tensor = inputs if self.same_shape else self.shortcut(activated)
        change: Tensor = self.residual(activated)
        return kept + change


def build(shape: tuple[int, ...], classes: int) -> nn.Module:
    channels, _, _ = image_shape("wrn28-10", shape)
    # Depth 28 = 6 * 4 + 4: three stages of four blocks; width 10 times (16, 32, 64).
    return residual_network(
        stem=convolution(channels, 16, kernel=3),
        stem_width=16,
        widths=(160, 320, 640),
        blocks_per_stage=4,
        block=PreactivationBlock,
        closing=[nn.BatchNorm2d(640), nn.ReLU()],
        classes=classes,
    )
