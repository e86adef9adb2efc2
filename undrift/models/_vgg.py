"""The VGG networks (Simonyan & Zisserman, ICLR 2015) in their CIFAR form."""

from __future__ import annotations

from torch import nn

from undrift.core.errors import BadSetting
from undrift.models._blocks import Blocks, Builder, convolution, global_pooling, image_shape, initialise

Widths = tuple[tuple[int, ...], ...]  # channels of every convolution, stage by stage

VGG11: Widths = ((64,), (128,), (256, 256), (512, 512), (512, 512))
VGG16: Widths = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
VGG19: Widths = ((64, 64), (128, 128), (256,) * 4, (512,) * 4, (512,) * 4)


def vgg_stages(model: str, shape: tuple[int, ...], widths: Widths, batch_norm: bool) -> dict[str, nn.Module]:
    """The stages by name: 3x3 convolutions, then max-pooling; the last ends in [batch, channels].

    At 32x32 five halvings leave one pixel; the global pooling is for larger images.
    """
    channels, height, width = image_shape(model, shape)
    smallest = 2 ** len(widths)
    if min(height, width) < smallest:
        raise BadSetting(
            f"model {model!r} halves the image {len(widths)} times and needs at least {smallest}x{smallest}, "
            f"got {height}x{width}; enlarge the images or try 'resnet20-gn', which takes any image size"
        )
    stages: dict[str, nn.Module] = {}
    for number, stage_widths in enumerate(widths, start=1):
        layers: list[nn.Module] = []
        for channels_out in stage_widths:
            norm = [nn.BatchNorm2d(channels_out)] if batch_norm else []
            layers += [convolution(channels, channels_out, kernel=3, bias=True), *norm, nn.ReLU()]
            channels = channels_out
        layers += [nn.MaxPool2d(2), *(global_pooling() if number == len(widths) else [])]
        stages[f"stage{number}"] = nn.Sequential(*layers)
    return stages


def plain_vgg(model: str, widths: Widths, batch_norm: bool = False) -> Builder:
    """The stages and one linear layer."""

    def build(shape: tuple[int, ...], classes: int) -> Blocks:
        stages = vgg_stages(model, shape, widths, batch_norm)
        return initialise(Blocks({**stages, "head": nn.Linear(widths[-1][-1], classes)}))

    return build
