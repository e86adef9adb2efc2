"""U-Net for segmentation: unet(width=16, depth=4, norm=group); norm is group, batch, instance or none.

Ronneberger, Fischer, Brox: U-Net: Convolutional Networks for Biomedical Image Segmentation. MICCAI 2015. Here
convolutions keep the image size, and the path up repeats pixels before a convolution.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from undrift.core.errors import BadSetting, UnknownName
from undrift.models._blocks import convolution, image_shape, initialise

NORMS = ("group", "batch", "instance", "none")


def build(shape: tuple[int, ...], classes: int, width: int = 16, depth: int = 4, norm: str = "group") -> nn.Module:
    """`classes` outputs for every pixel; `depth` halvings of the image, `width` channels that double at each."""
    channels, height, breadth = image_shape("unet", shape)
    if norm not in NORMS:
        raise UnknownName("norm of unet", norm, NORMS)
    if width < 1 or depth < 1:
        raise BadSetting(f"unet needs a width and a depth of at least 1, not width={width}, depth={depth}")
    if height % 2**depth or breadth % 2**depth:
        raise BadSetting(
            f"unet halves the image {depth} times, so its sides must be multiples of {2**depth}, not {height}x{breadth}; "
            "use a smaller depth, such as unet(depth=2), or resize the images"
        )
    model = UNet(channels, classes, width, depth, norm)
    return initialise(model) if norm == "none" else model


class UNet(nn.Module):
    """A path down and a path up; at every size, the path up also gets the output of the path down."""

    def __init__(self, channels: int, classes: int, width: int, depth: int, norm: str) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        self.down = nn.ModuleList(
            two_convolutions(before, after, norm) for before, after in zip([channels, *widths], widths, strict=False)
        )
        self.enlarge = nn.ModuleList(convolution(2 * w, w, 3, bias=True) for w in reversed(widths[:-1]))
        self.up = nn.ModuleList(two_convolutions(2 * w, w, norm) for w in reversed(widths[:-1]))
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        h, skips = inputs, []
        for level, block in enumerate(self.down):
            h = block(h if level == 0 else nn.functional.max_pool2d(h, 2))
            skips.append(h)
        skips.pop()
        for enlarge, block in zip(self.enlarge, self.up, strict=True):
            h = enlarge(nn.functional.interpolate(h, scale_factor=2.0, mode="nearest"))
            h = block(torch.cat([skips.pop(), h], 1))
        outputs: Tensor = self.head(h)
        return outputs


def two_convolutions(channels_in: int, channels_out: int, norm: str) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (channels_in, channels_out):
        layers += [convolution(channels, channels_out, 3, bias=norm == "none"), *normalisation(norm, channels_out)]
        layers.append(nn.ReLU())
    return nn.Sequential(*layers)


def normalisation(norm: str, channels: int) -> list[nn.Module]:
    if norm == "group":
        groups = next(g for g in (8, 4, 2, 1) if (channels % g == 0 and channels >= 2 * g) or g == 1)
        return [nn.GroupNorm(groups, channels)]
    if norm == "batch":
        return [nn.BatchNorm2d(channels)]
    return [nn.InstanceNorm2d(channels, affine=True)] if norm == "instance" else []
