"""VGG-11 for CIFAR: 8 convolutions, one linear layer, no norm (after Simonyan & Zisserman, ICLR 2015)."""

from undrift.models._vgg import VGG11, plain_vgg

build = plain_vgg("vgg11", VGG11)
