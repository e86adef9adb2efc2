"""ResNet-18 with a 3x3 stem and GroupNorm of 2 groups (He et al., CVPR 2016; Wu & He, ECCV 2018)."""

from undrift.models._resnet import basic_resnet, group_norm, projection_shortcut

build = basic_resnet("resnet18-gn", (64, 128, 256, 512), 2, group_norm(2), projection_shortcut(group_norm(2)))
