"""ResNet-20 for CIFAR, batch norm, parameter-free shortcuts (He et al., CVPR 2016)."""

from undrift.models._resnet import cifar_resnet

build = cifar_resnet("resnet20", depth=20)
