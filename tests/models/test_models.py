"""The models: their sizes against independent counts, their blocks, and that they run under vmap."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.func import functional_call, stack_module_state, vmap

import undrift.models._blocks
from undrift.core.errors import BadSetting, UnknownName
from undrift.models import gradma_nn, resnet9
from undrift.models._blocks import Blocks
from undrift.models._resnet import ZeroPadShortcut

MNIST, CIFAR, IMAGENET = (1, 28, 28), (3, 32, 32), (3, 224, 224)

# Parameters for 10 classes at the native shape. In the formulas a k x k convolution from a to b channels
# counts k*k*a*b (+ b with bias), a linear layer a*b + b, a normalisation of c channels 2c.
#
# logreg        784*10 + 10
# mlp           784*200 + 200 + 2*(200*200 + 200) + 200*10 + 10 = 157,000 + 80,400 + 2,010
# gradma-nn     157,000 + 400 + (200*100 + 100) + 200 + 1,010
# lenet5        (25*3*6 + 6) + (25*6*16 + 16) + (400*120 + 120) + (120*84 + 84) + (84*10 + 10)
#               = 456 + 2,416 + 48,120 + 10,164 + 850
# gradma-lenet5 (25*3*32 + 32) + 64 + (25*32*64 + 64) + 128 + (1600*512 + 512) + 1,024
#               + (512*128 + 128) + 256 + 1,290
#               = 2,432 + 64 + 51,264 + 128 + 819,712 + 1,024 + 65,664 + 256 + 1,290
# vgg11         convolutions 9*(3*64 + 64*128 + 128*256 + 256*256 + 256*512 + 3*512*512) = 9,217,728,
#               their biases 64 + 128 + 2*256 + 4*512 = 2,752, linear 5,130
# gradma-vgg11  9,217,728 + 2,752 + batch norm 2*2,752 + (512*128 + 128) + 1,290
# vgg16         convolutions 9*(3*64 + 64*64 + 64*128 + 128*128 + 128*256 + 2*256*256 + 256*512 + 5*512*512)
#               = 14,710,464, biases 2*64 + 2*128 + 3*256 + 6*512 = 4,224, linear 5,130
# vgg16-bn      vgg16 + 2*4,224
# resnet6n+2    9*(3*16 + 2n*16*16 + 16*32 + (2n-1)*32*32 + 32*64 + (2n-1)*64*64)
#               + 2*(16 + 2n*(16 + 32 + 64)) + 650 = 97,216 n - 21,926
#               (0.27M, 0.85M and 1.7M for 20, 56 and 110 layers in He et al., table 6)
# resnet18      stem 1,728 + 128; stages 147,968 + 525,568 + 2,099,712 + 8,393,728; linear 5,130
# wrn28-10      9*(3*16 + 16*160 + 7*160*160 + 160*320 + 7*320*320 + 320*640 + 7*640*640) = 36,196,272,
#               shortcuts 16*160 + 160*320 + 320*640 = 258,560,
#               norms 2*((16 + 7*160) + (160 + 7*320) + (320 + 7*640) + 640) = 17,952, linear 6,410
#               (36.5M in Zagoruyko & Komodakis, table 4)
# vgg19         vgg16 + convolutions 9*(256*256 + 2*512*512) = 5,308,416 and their biases 256 + 2*512
# resnet98      97,216*16 - 21,926 (6n + 2 layers, n = 16)
# resnet9n+2    pre-activation bottlenecks of w = 16, 32, 64 inside and 4w outside: a block 4w -> 4w has
#               4w*w + 9w*w + 4w*w weights and 2*(4w + w + w) in norms, 17w^2 + 12w; the first of a stage comes from v
#               channels and has vw + 9w^2 + 4w^2 + 4vw weights with its shortcut and 2*(v + w + w) in norms; v = 16, 64, 128.
#               stem 432, last norm 512, linear 2,570:
#               (n - 1)*(4,544 + 17,792 + 70,400) + (4,704 + 23,808 + 94,720) + 432 + 512 + 2,570 = 92,736 n + 34,010
#               (1.7M and 10.2M for 164 and 1001 layers in He et al., ECCV 2016, tables 1 and 4)
# resnext29     a block from v to c channels with 2c inside, in 8 groups: v*2c + 9*(2c)^2/8 + 2c*c weights and 2*(2c + 2c + c)
#               in norms; the first of a stage also vc + 2c in its shortcut. With c = 256: 478,208 + 2*559,616 (v = 64, 256);
#               c = 512: 2,103,296 + 2*2,233,344; c = 1024: 8,400,896 + 2*8,923,136. Stem 1,728 + 128, linear 10,250
#               (34.4M in Xie et al., table 7)
# resnet9       a layer from a to b channels has 9 a b + 2 b: 3 to 32, 32 to 64, 64 to 64 twice, 64 to 128, 128 to 256, 256 to 256
#               twice: 928 + 18,560 + 73,984 + 73,984 + 295,424 + 1,180,672; linear 2,570
# resnet18, 50, 101   torchvision's 11,689,512, 25,557,032 and 44,549,160 with 990 classes less
MODELS: dict[str, tuple[tuple[int, ...], int, list[str]]] = {
    "logreg": (MNIST, 7_850, []),
    "mlp": (MNIST, 239_410, ["hidden1", "hidden2", "hidden3"]),
    "gradma-nn": (MNIST, 178_710, ["hidden1", "hidden2"]),
    "lenet5": (CIFAR, 62_006, ["conv1", "conv2", "fc1", "fc2"]),
    "gradma-lenet5": (CIFAR, 941_834, ["conv1", "conv2", "fc1", "fc2"]),
    "gradma-vgg11": (CIFAR, 9_292_938, ["stage1", "stage2", "stage3", "stage4", "stage5", "hidden"]),
    "vgg11": (CIFAR, 9_225_610, ["stage1", "stage2", "stage3", "stage4", "stage5"]),
    "vgg16": (CIFAR, 14_719_818, ["stage1", "stage2", "stage3", "stage4", "stage5"]),
    "vgg16-bn": (CIFAR, 14_728_266, ["stage1", "stage2", "stage3", "stage4", "stage5"]),
    "resnet9": (CIFAR, 1_646_122, ["stem", "stage1", "stage2", "stage3"]),
    "resnet20": (CIFAR, 269_722, ["stem", "stage1", "stage2", "stage3"]),
    "resnet20-gn": (CIFAR, 269_722, ["stem", "stage1", "stage2", "stage3"]),
    "resnet56-gn": (CIFAR, 853_018, ["stem", "stage1", "stage2", "stage3"]),
    "resnet110": (CIFAR, 1_727_962, ["stem", "stage1", "stage2", "stage3"]),
    "resnet18-gn": (CIFAR, 11_173_962, ["stem", "stage1", "stage2", "stage3", "stage4"]),
    "resnet98": (CIFAR, 1_533_530, ["stem", "stage1", "stage2", "stage3"]),
    "resnet164": (CIFAR, 1_703_258, ["stem", "stage1", "stage2", "stage3"]),
    "resnet1001": (CIFAR, 10_327_706, ["stem", "stage1", "stage2", "stage3"]),
    "resnext29": (CIFAR, 34_426_698, ["stem", "stage1", "stage2", "stage3"]),
    "vgg19": (CIFAR, 20_029_514, ["stage1", "stage2", "stage3", "stage4", "stage5"]),
    "resnet18": (IMAGENET, 11_181_642, ["stem", "stage1", "stage2", "stage3", "stage4"]),
    "resnet50": (IMAGENET, 23_528_522, ["stem", "stage1", "stage2", "stage3", "stage4"]),
    "resnet101": (IMAGENET, 42_520_650, ["stem", "stage1", "stage2", "stage3", "stage4"]),
    "wrn28-10": (CIFAR, 36_479_194, ["stem", "stage1", "stage2", "stage3"]),
}
every_model = pytest.mark.parametrize("name", MODELS)


def build(name: str, shape: tuple[int, ...], classes: int = 10) -> Blocks:
    model = importlib.import_module(f"undrift.models.{name.replace('-', '_')}").build(shape, classes)
    assert isinstance(model, Blocks)
    return model


def small_shape(name: str) -> tuple[int, ...]:
    """A shape at which running the model costs little."""
    return (3, 8, 8) if name.startswith(("resne", "wrn")) else MODELS[name][0]


def test_the_table_names_every_model() -> None:
    files = Path(undrift.models._blocks.__file__).parent.glob("*.py")
    # test_sites.py, test_models_of_text.py
    tested_elsewhere = {"unet", "small-cnn", "picture-statistics", "gpt", "lstm", "bag-of-words"}
    named = {file.stem.replace("_", "-") for file in files if not file.stem.startswith("_")}
    assert named - tested_elsewhere == set(MODELS)


@every_model
def test_parameters_blocks_and_logits_at_the_native_shape(name: str) -> None:
    shape, parameters, blocks = MODELS[name]
    with torch.device("meta"):
        model = build(name, shape)
        logits = model(torch.zeros(2, *shape))
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert [block for block, _ in model.named_children()] == [*blocks, "head"]
    assert logits.shape == (2, 10)


def test_lenet5_on_28x28_has_the_classic_count() -> None:
    assert sum(parameter.numel() for parameter in build("lenet5", MNIST).parameters()) == 61_706


@pytest.mark.parametrize("shape", [(1, 28, 28), (1, 8, 8), (3, 64, 64), (4, 33, 47)])
@pytest.mark.parametrize("name", ["logreg", "mlp", "gradma-nn", "resnet20", "resnet18-gn", "wrn28-10"])
def test_other_image_sizes_and_classes(name: str, shape: tuple[int, ...]) -> None:
    with torch.device("meta"):
        assert build(name, shape, classes=7)(torch.zeros(3, *shape)).shape == (3, 7)


@pytest.mark.parametrize("name", ["vgg11", "vgg16", "vgg16-bn", "gradma-vgg11"])
def test_vgg_takes_larger_images(name: str) -> None:
    with torch.device("meta"):
        assert build(name, (1, 64, 50))(torch.zeros(2, 1, 64, 50)).shape == (2, 10)


@pytest.mark.parametrize("name", ["logreg", "mlp", "gradma-nn"])
def test_feature_vectors(name: str) -> None:
    assert build(name, (60,))(torch.zeros(2, 60)).shape == (2, 10)


@every_model
def test_the_last_block_on_the_features_gives_the_logits(name: str) -> None:
    torch.manual_seed(0)
    shape = small_shape(name)
    model = build(name, shape).eval()
    inputs = torch.randn(2, *shape)
    with torch.no_grad():
        features = model.features(inputs)
        assert features.ndim == 2
        torch.testing.assert_close(model[-1](features), model(inputs))


@every_model
def test_gradient_reaches_every_parameter(name: str) -> None:
    torch.manual_seed(0)
    shape = small_shape(name)
    model = build(name, shape)
    loss = nn.functional.cross_entropy(model(torch.randn(4, *shape)), torch.arange(4))
    # Raises where a parameter is no part of the loss.
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    for (parameter_name, parameter), gradient in zip(model.named_parameters(), gradients, strict=True):
        # A bias in front of a batch norm is part of the loss, and its gradient is zero.
        assert parameter.ndim == 1 or gradient.abs().max() > 0, parameter_name


@pytest.mark.parametrize(
    ("name", "shape"), [("mlp", (1, 8, 8)), ("lenet5", MNIST), ("vgg11", CIFAR), ("resnet20-gn", (3, 8, 8))]
)
def test_vmap_over_two_models_equals_the_loop(name: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    models: list[nn.Module] = [build(name, shape), build(name, shape)]
    inputs = torch.randn(2, 3, *shape)
    stacked, _ = stack_module_state(models)
    together = vmap(lambda parameters, x: functional_call(models[0], parameters, (x,)))(stacked, inputs)
    apart = torch.stack([model(x) for model, x in zip(models, inputs, strict=True)])
    torch.testing.assert_close(together, apart, rtol=1e-4, atol=1e-5)


def test_the_zero_padding_shortcut() -> None:
    inputs = torch.arange(2 * 3 * 3.0).reshape(1, 2, 3, 3)
    expected = torch.zeros(1, 4, 2, 2)
    expected[0, 0] = torch.tensor([[0.0, 2.0], [6.0, 8.0]])
    expected[0, 1] = torch.tensor([[9.0, 11.0], [15.0, 17.0]])
    assert torch.equal(ZeroPadShortcut(2, 4, stride=2)(inputs), expected)


def test_vgg16_without_norm_sees_its_input() -> None:
    """With PyTorch's default initialisation the logits of different images differ by less than 1e-6."""
    torch.manual_seed(0)
    with torch.no_grad():
        assert build("vgg16", CIFAR)(torch.randn(4, *CIFAR)).std(0).mean() > 1e-3


def test_no_module_works_in_place() -> None:
    for name in MODELS:
        with torch.device("meta"):
            model = build(name, MODELS[name][0])
        assert not any(getattr(module, "inplace", False) for module in model.modules()), name


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [
        ("lenet5", (3, 64, 64), "28x28 or 32x32, got 64x64"),
        ("gradma-lenet5", (3, 30, 32), "28x28 or 32x32, got 30x32"),
        ("vgg11", (1, 28, 28), "at least 32x32, got 28x28"),
        ("gradma-vgg11", (3, 64, 31), "at least 32x32, got 64x31"),
        ("resnet20", (60,), r"\(channels, height, width\), got \(60,\)"),
        ("wrn28-10", (32, 32), r"\(channels, height, width\), got \(32, 32\)"),
    ],
)
def test_a_wrong_size_is_refused(name: str, shape: tuple[int, ...], said: str) -> None:
    with pytest.raises(BadSetting, match=said):
        build(name, shape)


def test_resnet9_has_two_norms_and_suggests_the_nearest() -> None:
    grouped = resnet9.build((3, 8, 8), 10, width=8, norm="group")
    kinds = {type(layer) for layer in grouped.modules()}
    assert nn.GroupNorm in kinds
    assert nn.BatchNorm2d not in kinds
    assert grouped(torch.zeros(2, 3, 8, 8)).shape == (2, 10)
    with pytest.raises(UnknownName, match="group"):
        resnet9.build((3, 8, 8), 10, norm="grup")


def test_gradmas_network_without_batch_norm_is_the_same_otherwise() -> None:
    plain, usual = gradma_nn.build((1, 28, 28), 10, norm="none"), gradma_nn.build((1, 28, 28), 10)
    assert not list(plain.buffers()) and len(list(usual.buffers())) == 6
    assert sum(p.numel() for p in usual.parameters()) - sum(p.numel() for p in plain.parameters()) == 2 * (200 + 100)
    with pytest.raises(UnknownName, match="unknown norm of gradma-nn 'batsh'; did you mean 'batch'"):
        gradma_nn.build((1, 28, 28), 10, norm="batsh")
