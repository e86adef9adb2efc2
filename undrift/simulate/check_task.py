"""What cannot be right in a user's model, loss and labels, found on the first cohort before the first round."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from undrift.core.errors import BadData, BadSetting, UndriftError
from undrift.oracle.layers import Context
from undrift.oracle.losses import IGNORED, classes_first
from undrift.oracle.net import Net
from undrift.oracle.segmentation import dice_loss
from undrift.oracle.tasks import LOSSES
from undrift.simulate.work import LocalWork

SPREAD = 32  # samples, from all over the training set, on which a loss is looked at


def check_task(net: Net, x: Tensor, buffers: Tensor, work: LocalWork) -> None:
    """Refuse or warn of what cannot be right."""
    where = net, x, buffers, work
    check_blocks(*where)
    check_labels(*where)
    check_loss(*where)
    check_repeatable(*where)
    check_outputs(*where)


@contextlib.contextmanager
def blame(what: str) -> Iterator[None]:
    """Say of whatever the user's function raises that it was theirs."""
    try:
        yield
    except (UndriftError, torch.cuda.OutOfMemoryError):
        raise
    except Exception as error:
        raise BadSetting(f"{what}: {type(error).__name__}: {error}") from error


def blame_model(work: LocalWork) -> contextlib.AbstractContextManager[None]:
    return blame(f"the model failed on samples of shape {list(work.data.shape)}")


def blame_score(name: str, outputs: Tensor, targets: Tensor) -> contextlib.AbstractContextManager[None]:
    who = "the loss" if name == "loss" else f"metric {name!r}"
    return blame(f"{who} failed on outputs {list(outputs.shape)} and targets {list(targets.shape)}")


def check_repeatable(net: Net, x: Tensor, buffers: Tensor, work: LocalWork) -> None:
    """Refuse a model that draws random numbers outside our streams, or keeps what one client leaves for the next."""

    def passes() -> tuple[Tensor, Tensor]:
        oracle, _ = next(work.steps(0, 1))
        oracle.buffers = buffers
        return oracle.grad(x), net(x, buffers, oracle.batch.inputs[:1], None)[0]

    with blame_model(work):
        first, shared = passes(), net.shared_buffers()  # after a first pass, which may fill a cache
        before = {name: buffer.clone() for name, buffer in shared.items()}
        second = passes()
    for name, buffer in shared.items():
        if not torch.equal(buffer, before[name]):
            raise BadSetting(
                f"the model writes its buffer {name} in every pass, which all clients would share in whatever order they run; "
                "put that layer in evaluation mode (.eval()), as spectral norm needs it, or use a stateless one"
            )
    least = 1e-5 if x.device.type == "cpu" else 0.01  # a GPU's sums may differ in their last digits, a mask in many
    if any((a - b).norm() > least * a.norm() for a, b in zip(first, second, strict=True)):
        raise BadSetting(
            "the model gives two different answers on one batch, so it draws random numbers that cannot be seeded "
            "(functional dropout?) or keeps a state of its own; use nn.Dropout modules and stateless layers"
        )


def check_labels(net: Net, x: Tensor, buffers: Tensor, work: LocalWork) -> None:
    """Refuse class labels that the model has no output for."""
    train, test = work.data.train.targets, work.data.test.targets
    if train.is_floating_point() and not (net.of_batch or net.loss in LOSSES.values()):
        warn_of_broadcasting(net, x, buffers, work)
    if net.loss is not F.cross_entropy or train.is_floating_point():
        return
    oracle, _ = next(work.steps(0, 1))
    with blame_model(work):
        outputs, _ = net(x, buffers, oracle.batch.inputs[:1], None)
    outputs = classes_first(outputs, oracle.batch.targets[:1])
    trained, tested = (t[(t != IGNORED) & (t != net.ignored)] for t in (train.flatten(), test.flatten()))
    if not len(trained):
        raise BadData(f"no label of the training samples counts: all are {net.ignored}")
    used = torch.cat([trained, tested])
    if outputs.dim() < 2 or int(used.min()) < 0 or int(used.max()) >= outputs.shape[1]:
        raise BadData(
            f"the labels run from {int(used.min())} to {int(used.max())}, but the model's output is {list(outputs.shape[1:])}; "
            "labels must be 0 .. classes - 1, with one output for each"
        )


def check_blocks(net: Net, x: Tensor, buffers: Tensor, work: LocalWork) -> None:
    """Refuse a module of the user's whose named blocks, one after another, do not give its outputs."""
    named: Any = getattr(net.original, "blocks", None)
    if not isinstance(named, tuple):
        return
    oracle, _ = next(work.steps(0, 1))
    inputs = oracle.batch.inputs[:1]
    with blame_model(work):
        outputs, _ = net(x, buffers, inputs, None)
        last = net.trace(x, buffers, inputs, None)[0][-1]
    if last.shape != outputs.shape or not torch.allclose(last, outputs, rtol=1e-3, atol=1e-5, equal_nan=True):
        raise BadSetting(f"the model's blocks ({', '.join(named)}), one after another, do not give its outputs")


def warn_of_broadcasting(net: Net, x: Tensor, buffers: Tensor, work: LocalWork) -> None:
    """Warn where outputs and targets are numbers of different shapes, so that a loss or a metric may compare each with all."""
    oracle, _ = next(work.steps(0, 1))
    with blame_model(work):
        outputs, _ = net(x, buffers, oracle.batch.inputs[:1], None)
    here, there = list(outputs.shape[1:]), list(work.data.train.targets.shape[1:])
    if here != there:
        warnings.warn(
            f"the model's outputs are {here} a sample and the targets {there}: a loss or a metric may broadcast one against "
            "the other; give both the same shape",
            stacklevel=2,
        )


def check_loss(net: Net, x: Tensor, buffers: Tensor, work: LocalWork) -> None:
    """Warn where the loss of a mini-batch is not the mean of its samples' losses, which is what is trained.

    Class weights in a mean cancel for a single sample, and what compares samples with one another finds none to compare with.
    """
    if net.of_batch or net.loss in (F.cross_entropy, dice_loss, *LOSSES.values()):
        return
    train = work.data.train
    rows = torch.linspace(0, len(train) - 1, min(SPREAD, len(train)), device=train.targets.device).long()
    targets = train.targets[rows]
    rows, targets = rows[full := net.label_shares(targets) == 1], targets[full]
    targets = targets.to(net.dtype) if targets.is_floating_point() else targets
    if len(rows) < 2:
        return
    with blame_model(work), torch.no_grad():
        outputs, _ = net(x, buffers, work.data.transform(train.take(rows), net.dtype), None)
        outputs = classes_first(outputs, targets)
    with blame_score("loss", outputs, targets), torch.no_grad():
        single = net.sample_losses(outputs, targets).mean()
    try:
        with torch.no_grad():
            whole = torch.as_tensor(net.loss(outputs, targets)).mean()
    except Exception:  # it takes single samples alone
        return
    if not torch.isclose(whole, single, rtol=1e-3, atol=1e-6, equal_nan=True):
        warnings.warn(
            f"the loss of {len(rows)} samples together is {float(whole):.4g}, the mean of their single losses "
            f"{float(single):.4g}: it is called for each sample by itself, where class weights cancel, a sum is no mean, and "
            "samples cannot be compared; give it reduction='none', or mark one that needs the whole mini-batch with batch_loss",
            stacklevel=2,
        )


def check_outputs(net: Net, x: Tensor, buffers: Tensor, work: LocalWork) -> None:
    """Warn of parameters that are never trained, and of probabilities where cross-entropy takes numbers before the softmax."""
    oracle, _ = next(work.steps(int(work.table.count[:, 0].argmax()), 1))
    inputs, targets, real, key, _ = oracle.batch
    with blame_model(work):
        outputs, _ = net(x, buffers, inputs, None)
        idle = net.unused_parameters(x, buffers, inputs, Context(real, key))
    if idle:
        named = ", ".join(idle[:4]) + (", ..." if len(idle) > 4 else "")
        warnings.warn(
            f"the model's outputs do not depend on {len(idle)} of its parameters ({named}), which are therefore not trained; "
            "leave them out, or set requires_grad to False, if that is meant",
            stacklevel=2,
        )
    shares = classes_first(outputs.detach(), targets)
    if net.loss is not F.cross_entropy or shares.dim() < 2 or shares.shape[1] < 2 or len(shares) < 2:
        return
    if bool((shares >= 0).all()) and bool(torch.isclose(shares.sum(1), torch.ones_like(shares[:, 0]), atol=1e-4).all()):
        warnings.warn(
            "the model's outputs look like probabilities, but cross-entropy takes the numbers before the softmax; leave the "
            "softmax out",
            stacklevel=2,
        )
