"""Which way of asking suits a model: checked and counted on the first cohort."""

from __future__ import annotations

import contextlib
import ctypes
import sys
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from undrift.algorithms.base import Algorithm
from undrift.core.device import available_memory, total_memory
from undrift.core.errors import BadData, BadSetting, ClientFailed, UndriftError
from undrift.core.trees import State
from undrift.oracle.net import IGNORED, Net, classes_first
from undrift.oracle.oracle import stacks_in_a_thread, task_loss
from undrift.oracle.tasks import LOSSES
from undrift.simulate.graphs import rehearsal
from undrift.simulate.here import Execution, OneByOne, Pool, Stacked
from undrift.simulate.work import LocalWork

CACHE = 2 << 20  # bytes
HEAVY = 120_000  # multiply-adds of convolutions for each operation, from which a pool is faster (docs/adr/0027)


def keep_freed_memory() -> None:
    """Let glibc reuse large blocks instead of handing them back to the kernel and faulting every page in again.

    On vectors of 10 MB that made `x - lr * g` nearly twenty times faster here. Elsewhere than glibc it does nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
        mallopt(M_MMAP_THRESHOLD, 1 << 30)
        mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)


class Load(NamedTuple):
    """What one step of one client asks of the machine."""

    bytes: int  # held when clients are stacked: activations kept for the backward pass, and a few vectors like x
    convolved: int  # multiply-adds in the convolutions of the forward pass
    operations: int  # forward and backward


class Counting(TorchDispatchMode):
    """Counts operations, and the multiply-adds of convolutions."""

    convolved = 0
    operations = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to keep its compiler out, PyTorch would import it, which takes seconds

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.operations += 1
        if function is torch.ops.aten.convolution.default:
            self.convolved += result.numel() * args[1][0].numel()
        return result


def load_of(x: Tensor, buffers: Tensor, work: LocalWork) -> Load:
    """The load of the first step of the client that has the most samples in it."""
    saved = 0

    def count(t: Tensor) -> Tensor:
        nonlocal saved
        saved += t.numel() * t.element_size()
        return t

    oracle, _ = next(work.steps(int(work.table.count[:, 0].argmax()), 1))
    oracle.buffers = buffers
    with torch.autograd.graph.saved_tensors_hooks(count, lambda t: t), Counting() as counted:  # type: ignore[no-untyped-call]
        oracle.grad(x, task_loss)  # recorded by autograd, so that it can be counted
    return Load(2 * saved + 10 * x.numel() * x.element_size(), counted.convolved, counted.operations)


def clients_at_a_time(load: Load, device: torch.device, cohort: int) -> int:
    """How many clients are stacked: as many as fit in half of the memory.

    What is free at the moment counts only where that is too little, and then a warning says so.
    """

    def fitting(memory: float) -> int:
        return max(1, int(memory / load.bytes))

    most, free = fitting(0.5 * total_memory(device)), available_memory(device)
    if fitting(0.75 * free) >= min(most, cohort):
        return most
    few = fitting(0.5 * free)
    warnings.warn(
        f"memory is short now: {few} clients are stacked at a time instead of {min(most, cohort)}, and the last digits may "
        "differ from those of a run with more memory; --chunk fixes the number",
        stacklevel=2,
    )
    return few


@contextlib.contextmanager
def blame_model(work: LocalWork) -> Iterator[None]:
    """Say of whatever the user's model or loss raises that it was theirs."""
    try:
        yield
    except UndriftError:
        raise
    except Exception as error:
        shape = list(work.data.shape)
        raise BadSetting(f"the model failed on samples of shape {shape}: {type(error).__name__}: {error}") from error


def check_repeatable(net: Net, x: Tensor, buffers: Tensor, work: LocalWork) -> None:
    """Refuse a model that draws random numbers outside our streams: its runs could not be seeded."""

    def gradient() -> Tensor:
        oracle, _ = next(work.steps(0, 1))
        oracle.buffers = buffers
        return oracle.grad(x)

    with blame_model(work):
        first, second = gradient(), gradient()
    if (first - second).norm() > 0.01 * first.norm():  # a GPU's sums may differ in their last digits, a mask in many
        raise BadSetting(
            "the model gives two different gradients on one batch, so it draws random numbers that cannot be seeded "
            "(functional dropout?) or keeps a state of its own; use nn.Dropout modules and stateless layers"
        )


def check_labels(net: Net, x: Tensor, buffers: Tensor, work: LocalWork) -> None:
    """Refuse class labels that the model has no output for, and blocks that are not the model."""
    check_blocks(net, x, buffers, work)
    train, test = work.data.train.targets, work.data.test.targets
    if train.is_floating_point() and not (net.of_batch or net.loss in LOSSES.values()):
        warn_of_broadcasting(net, x, buffers, work)
    if net.loss is not F.cross_entropy or train.is_floating_point():
        return
    oracle, _ = next(work.steps(0, 1))
    with blame_model(work):
        outputs, _ = net(x, buffers, oracle.batch.inputs[:1], None)
    outputs = classes_first(outputs, oracle.batch.targets[:1])
    used = torch.cat([train.flatten(), test.flatten()])
    used = used[(used != IGNORED) & (used != net.ignored)]  # no labels
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


def choose(
    name: str,
    chunk: int,
    alg: Algorithm,
    down: State,
    client: State,
    net: Net,
    x: Tensor,
    buffers: Tensor,
    work: LocalWork,
) -> Execution:
    """The execution named, or by `auto` the one that suits the model.

    No clock decides: the same command must choose the same on a busy machine, because the two round differently.
    """
    device = x.device
    if name == "debug":
        return OneByOne()
    load = load_of(x, buffers, work)
    stacked = Stacked(chunk or clients_at_a_time(load, device, len(work.ids)))
    if name == "stacked":
        return stacked
    if any(each.checkpoints for each in (net, *net.networks.values())):
        name = "pool"  # stacked clients cannot compute activations again
    # Two or so vectors of a thread fit in its core's own cache.
    group = max(1, CACHE // (len(x) * x.element_size())) if stacks_in_a_thread(net) else 1
    pool = Pool(device, group)
    if name == "pool":
        return pool
    try:
        with rehearsal(device):
            stacked.train(alg, down, client, buffers, work, limit=min(2, int(work.table.steps.min())))
    except ClientFailed as failure:  # vmap has no rule for something the model does
        if failure.client is not None or not isinstance(failure.error, RuntimeError):
            raise
        return pool
    # By vmap, stacked convolutions are grouped ones, which a CPU computes slowly; in C each thread has a client anyway.
    heavy = work.mapped and load.convolved >= HEAVY * load.operations
    return pool if heavy and device.type == "cpu" else stacked
