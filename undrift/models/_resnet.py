"""Residual networks: the layout all of them share, the basic block, and its two kinds of shortcut."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.nn import functional

from undrift.models._blocks import Blocks, convolution, global_pooling, he_initialised, image_shape

Norm = Callable[[int], nn.Module]
# Both are called with (channels in, channels out, stride).
ResidualBlock = Callable[[int, int, int], nn.Module]
Shortcut = Callable[[int, int, int], nn.Module]


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


def projection_shortcut(norm: Norm) -> Shortcut:
    """Option B of He et al.: a 1x1 convolution with normalisation."""
    return lambda channels_in, channels_out, stride: nn.Sequential(
        convolution(channels_in, channels_out, kernel=1, stride=stride), norm(channels_out)
    )


class BasicBlock(nn.Module):
    """relu(shortcut(x) + residual(x)) with two 3x3 convolutions in the residual."""

    def __init__(self, channels_in: int, channels_out: int, stride: int, norm: Norm, shortcut: Shortcut) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            convolution(channels_in, channels_out, kernel=3, stride=stride),
            norm(channels_out),
            nn.ReLU(),
            convolution(channels_out, channels_out, kernel=3),
            norm(channels_out),
        )
        same_shape = stride == 1 and channels_in == channels_out
        self.shortcut = nn.Identity() if same_shape else shortcut(channels_in, channels_out, stride)

    def forward(self, inputs: Tensor) -> Tensor:
        return functional.relu(self.shortcut(inputs) + self.residual(inputs))


def residual_network(
    stem: nn.Module,
    stem_width: int,
    widths: Sequence[int],
    blocks_per_stage: int | Sequence[int],
    block: ResidualBlock,
    closing: Sequence[nn.Module],
    classes: int,
) -> Blocks:
    """Stem, stages, linear classifier; each stage but the first halves the image.

    The stages have equally many blocks, or as many as a sequence says. The last stage ends in the closing layers and
    global pooling.
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
    return he_initialised(Blocks(blocks))


def basic_resnet(
    model: str,
    shape: tuple[int, ...],
    classes: int,
    widths: Sequence[int],
    blocks_per_stage: int,
    norm: Norm,
    shortcut: Shortcut,
) -> Blocks:
    """A network of basic blocks behind a 3x3 stem as wide as the first stage."""
    channels, _, _ = image_shape(model, shape)
    stem = nn.Sequential(convolution(channels, widths[0], kernel=3), norm(widths[0]), nn.ReLU())

    def block(channels_in: int, channels_out: int, stride: int) -> nn.Module:
        return BasicBlock(channels_in, channels_out, stride, norm, shortcut)

    return residual_network(stem, widths[0], widths, blocks_per_stage, block, [], classes)


def cifar_resnet(model: str, shape: tuple[int, ...], classes: int, depth: int, norm: Norm) -> Blocks:
    """The CIFAR form of He et al., 6n + 2 layers deep: three stages of n basic blocks, option A shortcuts."""
    return basic_resnet(model, shape, classes, (16, 32, 64), (depth - 2) // 6, norm, ZeroPadShortcut)
