"""VGG-19 for CIFAR: 16 convolutions, one linear layer, no norm (after Simonyan & Zisserman, ICLR 2015)."""

from undrift.models._vgg import VGG19, plain_vgg

build = plain_vgg("vgg19", VGG19)
