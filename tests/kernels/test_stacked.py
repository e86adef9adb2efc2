"""Wide convolutions and norms over stacked clients beside PyTorch's: on a GPU, or in Triton's interpreter, on small sizes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from undrift.kernels import conv_stacked_gpu
from undrift.kernels.conv_stacked_gpu import convolution
from undrift.kernels.norm_stacked_gpu import to_batch, to_groups
from undrift.oracle.layers import normalise

GPU = torch.cuda.is_available()
pytestmark = [pytest.mark.cuda] if GPU else []
HALF = torch.bfloat16 if GPU else torch.float16  # the interpreter has no products in bfloat16
ROUNDED = 4e-3 if GPU else 1e-3  # how far results in half precision may be off
SINGLE = 1e-3 if GPU else 1e-6  # and those in float32, whose products are TF32 on a GPU


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    with torch.device("cuda" if GPU else "cpu"):
        yield


def gap(found: Tensor, exact: Tensor) -> float:
    return ((found.double() - exact).norm() / exact.norm()).item()


# clients, samples, channels, side, filters, k, stride, padding
SHAPES = [
    (2, 3, 16, 6, 16, 3, 1, 1),
    (2, 3, 16, 7, 32, 3, 2, 1),  # rows and columns of two kinds, and a last one that no filter meets
    (2, 2, 32, 6, 48, 1, 2, 0),  # three of four inputs meet no filter
    (1, 2, 3, 9, 16, 7, 2, 3),  # several taps in a step
    (1, 2, 48, 5, 16, 5, 1, 2),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "biased, shared, dtype", [(True, False, torch.float32), (False, True, torch.float32), (True, False, HALF)]
)
@pytest.mark.parametrize("apart", [False, True])
def test_a_wide_convolution(
    shape: tuple[int, ...], biased: bool, shared: bool, dtype: torch.dtype, apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs, gradients, and the gradients of these; filters and their gradients are float32 whatever the inputs are."""
    S, B, C, side, N, k, stride, padding = shape
    kind = conv_stacked_gpu.Apart if apart else conv_stacked_gpu.Blocks
    every = conv_stacked_gpu.forms
    monkeypatch.setattr(conv_stacked_gpu, "forms", lambda *given: [f for f in every(*given) if isinstance(f, kind)])
    torch.manual_seed(0)
    entries = N * C * k * k
    x = torch.randn(S, B, C, side, side).to(dtype).requires_grad_()
    v = (torch.randn(1 if shared else S, entries + N + 3) / (C * k * k) ** 0.5).to(dtype).float().expand(S, -1)
    v = v.requires_grad_()

    def of(form: str, x: Tensor, v: Tensor) -> Tensor:
        w, b = v[:entries].view(N, C, k, k), v[entries : entries + N] if biased else None
        return convolution(x, w, b, stride, padding) if form == "fast" else torch.conv2d(x, w, b, stride, padding)

    made = torch.vmap(of, (None, 0, 0))("fast", x, v)
    exact_x, exact_v = (t.detach().double().requires_grad_() for t in (x, v))
    exact = torch.vmap(of, (None, 0, 0))("plain", exact_x, exact_v)
    near = ROUNDED if dtype is HALF else SINGLE
    whole = near if apart or biased else 1e-5  # cuDNN rounds filters' gradients, PyTorch those of a bias
    assert made.dtype == dtype and made.stride(2) == 1 and gap(made, exact) < near
    d = torch.randn_like(made)
    found = torch.autograd.grad(made, (x, v), d, create_graph=True)
    wanted = torch.autograd.grad(exact, (exact_x, exact_v), d.double(), create_graph=True)
    assert [t.dtype for t in found] == [dtype, torch.float32]
    assert gap(found[0], wanted[0]) < near and gap(found[1], wanted[1]) < whole
    if dtype is HALF:
        return
    again, once_more = (
        torch.autograd.grad(
            sum((g * t.to(g.dtype)).sum() for g, t in zip(of, (x.detach(), v.detach()), strict=True)), at
        )
        for of, at in ((found, (x, v)), (wanted, (exact_x, exact_v)))
    )
    for one, other in zip(again, once_more, strict=True):
        assert gap(one, other) < 2 * SINGLE


@pytest.mark.parametrize("sizes", [(2, 3, 16, 5, 8), (2, 2, 64, 4, 2), (1, 3, 32, 9, 1), (2, 2, 16, 3, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_group_norm(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    S, B, C, side, groups = sizes
    torch.manual_seed(0)
    x = (3 + torch.randn(S, B, C, side, side)).to(dtype).requires_grad_()
    w, b = (torch.randn(S, C, requires_grad=True) for _ in range(2))
    exact = [t.detach().double().requires_grad_() for t in (x, w, b)]
    made = to_groups(x, w, b, groups, 1e-5)[0]
    wanted = torch.vmap(lambda x, w, b: F.group_norm(x, groups, w, b, 1e-5))(*exact)
    check(made, (x, w, b), wanted, exact, dtype)


@pytest.mark.parametrize("sizes", [(2, 3, 16, 5), (1, 9, 48, 8), (2, 2, 144, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("masked", [False, True])
def test_batch_norm(sizes: tuple[int, ...], dtype: torch.dtype, masked: bool) -> None:
    """The statistics leave out samples that are not real; a client without any has none."""
    S, B, C, side = sizes
    torch.manual_seed(0)
    x = (3 + torch.randn(S, B, C, side, side)).to(dtype).requires_grad_()
    w, b = (torch.randn(S, C, requires_grad=True) for _ in range(2))
    real = (torch.arange(B) < 2 - torch.arange(S).unsqueeze(1)).float() if masked else None
    exact = [t.detach().double().requires_grad_() for t in (x, w, b)]
    made, *found = to_batch(x, real, w, b, 1e-5)
    plain = torch.vmap(lambda x, real, w, b: normalise(x, real, w, b, 1e-5), (0, None if real is None else 0, 0, 0))
    wanted, *statistics = plain(exact[0], real, *exact[1:])
    for one, other in zip(found, statistics, strict=True):
        torch.testing.assert_close(one.flatten(), other.detach().float().flatten())
    check(made, (x, w, b), wanted, exact, dtype)


def check(made: Tensor, at: tuple[Tensor, ...], wanted: Tensor, exact: list[Tensor], dtype: torch.dtype) -> None:
    """The outputs and the gradients, and the gradients of these."""
    near = ROUNDED if dtype is HALF else 1e-6
    assert made.dtype == dtype and gap(made, wanted) < near
    d = torch.randn_like(made)
    for one, other in zip(
        torch.autograd.grad(made, at, d, retain_graph=True),
        torch.autograd.grad(wanted, exact, d.double(), retain_graph=True),
        strict=True,
    ):
        assert gap(one, other) < near
    if dtype is HALF:
        return
    twice = [
        torch.autograd.grad(torch.autograd.grad(y, x, d.to(y.dtype), create_graph=True)[0].square().sum(), x[:2])
        for y, x in ((made, at), (wanted, exact))
    ]
    for one, other in zip(*twice, strict=True):
        assert gap(one, other) < 1e-5
