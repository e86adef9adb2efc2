"""Cross-entropy and its gradient for transposed outputs of stacked clients on a GPU, in one kernel."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from undrift.core.forms import faster
from undrift.kernels import devices
from undrift.kernels.chain import transposed_cross_entropy
from undrift.kernels.launch import allocate, launch, tl, triton

MOST = 16384  # outputs of a client, which one program holds


def serves(outputs: Tensor, targets: Tensor, real: Tensor | None) -> bool:
    if not devices.gpu(outputs.device) or outputs.dtype != torch.float32 or not outputs.numel():
        return False
    return bool(math.prod(map(triton.next_power_of_2, outputs.shape[1:])) <= MOST)


@faster(transposed_cross_entropy, when=serves)
def transposed_cross_entropy_gpu(outputs: Tensor, targets: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
    """An invalid label makes the loss and the sample's gradient NaN, where the plain form ends the program."""
    loss, d = torch.ops.undrift.cross_entropy(outputs, targets, real)
    return loss, d


if triton is not None:
    IGNORED = tl.constexpr(-100)  # the label of samples that do not count

    @triton.jit  # type: ignore[untyped-decorator]
    def _cross_entropy(  # type: ignore[no-untyped-def]
        outputs, targets, real, loss, d, classes, batch, REAL: tl.constexpr, CLASSES: tl.constexpr, BATCH: tl.constexpr
    ):
        client = tl.program_id(0).to(tl.int64)
        c, b = tl.arange(0, CLASSES)[:, None], tl.arange(0, BATCH)
        at, inside = client * classes * batch + c * batch + b[None, :], (c < classes) & (b < batch)[None, :]
        z = tl.load(outputs + at, mask=inside, other=0.0)
        z = tl.where(c < classes, z, float("-inf"))
        z -= tl.max(z, 0)[None, :]
        e = tl.exp(z)
        total = tl.sum(e, 0)
        label = tl.load(targets + client * batch + b, mask=b < batch, other=IGNORED)
        present = tl.where(label != IGNORED, 1.0, 0.0)
        if REAL:
            present = tl.where(tl.load(real + client * batch + b, mask=b < batch, other=0.0) > 0.0, present, 0.0)
        share = present / tl.maximum(tl.sum(present, 0), 1.0)
        own = c == label[None, :]
        # NaN for an invalid label.
        share = tl.where((present == 0.0) | ((label >= 0) & (label < classes)), share, float("nan"))
        lost = (tl.log(total) - tl.sum(tl.where(own, z, 0.0), 0)) * share
        tl.store(loss + client, tl.sum(tl.where(share == 0.0, 0.0, lost), 0))
        tl.store(d + at, (e / total[None, :] - tl.where(own, 1.0, 0.0)) * share[None, :], mask=inside)

    @torch.library.custom_op("undrift::cross_entropy", mutates_args=())
    def _op(outputs: Tensor, targets: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
        outputs, targets = outputs.contiguous(), targets.contiguous()
        real = None if real is None else real.to(outputs.dtype).contiguous()
        clients, classes, batch = outputs.shape
        loss, d = allocate(outputs, clients), allocate(outputs, *outputs.shape)
        CLASSES, BATCH = triton.next_power_of_2(classes), triton.next_power_of_2(batch)
        launch(
            _cross_entropy, (clients,), outputs, targets, real, loss, d, classes, batch,
            REAL=real is not None, CLASSES=CLASSES, BATCH=BATCH,
        )  # fmt: skip
        return loss, d

    _op.register_fake(lambda outputs, *_: (outputs.new_empty(len(outputs)), outputs.new_empty(outputs.shape)))
