"""ResNet-20 for CIFAR with GroupNorm of 8 groups (He et al., CVPR 2016; Wu & He, ECCV 2018)."""

from undrift.models._resnet import cifar_resnet, group_norm

build = cifar_resnet("resnet20-gn", depth=20, norm=group_norm(8))
