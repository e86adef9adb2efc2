"""ResNet-164 for CIFAR: pre-activation bottlenecks, batch norm (He et al., ECCV 2016)."""

from undrift.models._bottleneck import preactivation_resnet

build = preactivation_resnet("resnet164", depth=164)
