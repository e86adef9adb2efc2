"""VGG-16 for CIFAR: 13 convolutions, one linear layer, batch norm (after Simonyan & Zisserman, ICLR 2015)."""

from undrift.models._vgg import VGG16, plain_vgg

build = plain_vgg("vgg16-bn", VGG16, batch_norm=True)
