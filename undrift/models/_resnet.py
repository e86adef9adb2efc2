"""Residual networks: the layout all of them share, their blocks, and the two kinds of shortcut."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.nn import functional

from undrift.models._blocks import Blocks, Builder, convolution, global_pooling, image_shape, initialise

Norm = Callable[[int], nn.Module]
Layers = Callable[[int, int, int], nn.Module]  # called with (channels in, channels out, stride)


def group_norm(groups: int) -> Norm:
    """A GroupNorm of that many groups, for any number of channels."""
    return lambda channels: nn.GroupNorm(groups, channels)


class ZeroPadShortcut(nn.Module):
    """Option A of He et al.: take every stride-th pixel and fill the new channels with zeros."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.new_channels = channels_out - channels_in
        self.stride = stride

    def forward(self, inputs: Tensor) -> Tensor:
        kept = inputs[:, :, :: self.stride, :: self.stride]
        return functional.pad(kept, (0, 0, 0, 0, 0, self.new_channels))


def projection_shortcut(norm: Norm) -> Layers:
    """Option B of He et al.: a 1x1 convolution with normalisation."""
    return lambda channels_in, channels_out, stride: nn.Sequential(
        convolution(channels_in, channels_out, kernel=1, stride=stride), norm(channels_out)
    )


class Residual(nn.Module):
    """relu(residual(x) + shortcut(x)); the sum lies in memory as the residual does, which need not be copied."""

    def __init__(self, residual: nn.Sequential, shortcut: nn.Module) -> None:
        super().__init__()
        self.residual = residual
        self.shortcut = shortcut

    def forward(self, inputs: Tensor) -> Tensor:
        return functional.relu(self.residual(inputs) + self.shortcut(inputs))


def basic_block(norm: Norm, shortcut: Layers) -> Layers:
    """Residual blocks with two 3x3 convolutions."""

    def block(channels_in: int, channels_out: int, stride: int) -> Residual:
        residual = nn.Sequential(
            *(convolution(channels_in, channels_out, kernel=3, stride=stride), norm(channels_out), nn.ReLU()),
            *(convolution(channels_out, channels_out, kernel=3), norm(channels_out)),
        )
        same_shape = stride == 1 and channels_in == channels_out
        return Residual(residual, nn.Identity() if same_shape else shortcut(channels_in, channels_out, stride))

    return block


class Preactivation(nn.Module):
    """x + residual(relu(norm(x))); where the shape changes, shortcut(relu(norm(x))) takes the place of x."""

    def __init__(self, channels_in: int, channels_out: int, stride: int, residual: nn.Sequential) -> None:
        super().__init__()
        self.same_shape = stride == 1 and channels_in == channels_out
        self.activation = nn.Sequential(nn.BatchNorm2d(channels_in), nn.ReLU())
        self.residual = residual
        if not self.same_shape:
            self.shortcut = convolution(channels_in, channels_out, kernel=1, stride=stride)

    def forward(self, inputs: Tensor) -> Tensor:
        activated: Tensor = self.activation(inputs)
        kept: Tensor = inputs if self.same_shape else self.shortcut(activated)
        change: Tensor = self.residual(activated)
        return kept + change


def residual_network(
    stem: nn.Module,
    stem_width: int,
    widths: Sequence[int],
    blocks_per_stage: int | Sequence[int],
    block: Layers,
    closing: Sequence[nn.Module],
    classes: int,
) -> Blocks:
    """Stem, stages, linear classifier. Each stage but the first halves the image.

    `blocks_per_stage` is one number for all stages or one for each. The last stage ends in the closing layers and global pooling.
    """
    if isinstance(blocks_per_stage, int):
        blocks_per_stage = [blocks_per_stage] * len(widths)
    blocks: dict[str, nn.Module] = {"stem": stem}
    channels = stem_width
    for number, width in enumerate(widths, start=1):
        layers: list[nn.Module] = []
        for position in range(blocks_per_stage[number - 1]):
            stride = 2 if number > 1 and position == 0 else 1
            layers.append(block(channels, width, stride))
            channels = width
        if number == len(widths):
            layers.extend([*closing, *global_pooling()])
        blocks[f"stage{number}"] = nn.Sequential(*layers)
    blocks["head"] = nn.Linear(channels, classes)
    return initialise(Blocks(blocks))


def basic_resnet(model: str, widths: Sequence[int], blocks_per_stage: int, norm: Norm, shortcut: Layers) -> Builder:
    """A network of basic blocks behind a 3x3 stem as wide as the first stage."""

    def build(shape: tuple[int, ...], classes: int) -> Blocks:
        channels, _, _ = image_shape(model, shape)
        stem = nn.Sequential(convolution(channels, widths[0], kernel=3), norm(widths[0]), nn.ReLU())
        return residual_network(stem, widths[0], widths, blocks_per_stage, basic_block(norm, shortcut), [], classes)

    return build


def cifar_resnet(model: str, depth: int, norm: Norm = nn.BatchNorm2d) -> Builder:
    """The CIFAR form of He et al., 6n + 2 layers deep: three stages of n basic blocks, option A shortcuts."""
    return basic_resnet(model, (16, 32, 64), (depth - 2) // 6, norm, ZeroPadShortcut)
