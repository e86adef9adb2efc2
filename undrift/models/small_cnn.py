"""Small convolutional classifier for images of any size: small-cnn(width=16); FedSM's quick model selector."""

from __future__ import annotations

from torch import nn

from undrift.models._blocks import Blocks, convolution, global_pooling, image_shape, initialise


def build(shape: tuple[int, ...], classes: int, width: int = 16) -> nn.Module:
    channels, _, _ = image_shape("small-cnn", shape)
    stages: dict[str, nn.Module] = {}
    for number, out in enumerate((width, 2 * width, 4 * width), start=1):
        layers: list[nn.Module] = [convolution(channels, out, kernel=3, stride=2, bias=True), nn.ReLU()]
        stages[f"stage{number}"] = nn.Sequential(*layers, *(global_pooling() if number == 3 else []))
        channels = out
    return initialise(Blocks({**stages, "head": nn.Linear(channels, classes)}))
