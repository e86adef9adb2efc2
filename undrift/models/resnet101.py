"""ResNet-101 for ImageNet, batch norm, projection shortcuts (He et al., CVPR 2016)."""

from undrift.models._bottleneck import imagenet_resnet

build = imagenet_resnet("resnet101", (3, 4, 23, 3), bottleneck=True)
