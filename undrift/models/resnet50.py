"""ResNet-50 for ImageNet, batch norm, projection shortcuts (He et al., CVPR 2016)."""

from undrift.models._bottleneck import imagenet_resnet

build = imagenet_resnet("resnet50", (3, 4, 6, 3), bottleneck=True)
