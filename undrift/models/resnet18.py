"""ResNet-18 for ImageNet, batch norm, projection shortcuts (He et al., CVPR 2016)."""

from undrift.models._bottleneck import imagenet_resnet

build = imagenet_resnet("resnet18", (2, 2, 2, 2))
