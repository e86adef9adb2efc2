"""Which way of asking suits a model: checked and timed on the first cohort."""

from __future__ import annotations

import contextlib
import ctypes
import sys
import time
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from undrift.algorithms.base import Algorithm
from undrift.core.device import available_memory
from undrift.core.errors import BadData, BadSetting, ClientFailed, UndriftError
from undrift.core.trees import State
from undrift.oracle.net import Net
from undrift.oracle.oracle import stacks_in_a_thread, task_loss
from undrift.simulate.graphs import rehearsal
from undrift.simulate.here import Execution, OneByOne, Pool, Stacked
from undrift.simulate.work import LocalWork

CACHE = 2 << 20  # bytes


def keep_freed_memory() -> None:
    """Let glibc reuse large blocks instead of handing them back to the kernel and faulting every page in again.

    On vectors of 10 MB that made `x - lr * g` nearly twenty times faster here. Elsewhere than glibc it does nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
        mallopt(M_MMAP_THRESHOLD, 1 << 30)
        mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)


def bytes_per_client(net: Net, x: Tensor, buffers: Tensor, work: LocalWork) -> int:
    """What one stacked client holds during a step: activations kept for the backward pass, and a few vectors like x."""
    saved = 0

    def count(t: Tensor) -> Tensor:
        nonlocal saved
        saved += t.numel() * t.element_size()
        return t

    with torch.autograd.graph.saved_tensors_hooks(count, lambda t: t):
        oracle, _ = next(work.steps(0, 1))
        oracle.buffers = buffers
        oracle.grad(x, task_loss)  # recorded by autograd, so that it can be counted
    return 2 * saved + 10 * x.numel() * x.element_size()


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
    """Refuse class labels that the model has no output for."""
    train, test = work.data.train.targets, work.data.test.targets
    if net.loss is not F.cross_entropy or train.is_floating_point():
        return
    oracle, _ = next(work.steps(0, 1))
    with blame_model(work):
        outputs, _ = net(x, buffers, oracle.batch.inputs[:1], None)
    used = torch.cat([train.flatten(), test.flatten()])
    used = used[used != -100]  # cross-entropy's own mark for "no label"
    if outputs.dim() < 2 or int(used.min()) < 0 or int(used.max()) >= outputs.shape[1]:
        raise BadData(
            f"the labels run from {int(used.min())} to {int(used.max())}, but the model's output is {list(outputs.shape[1:])}; "
            "labels must be 0 .. classes - 1, with one output for each"
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
    """The execution named, or by `auto` the faster one, timed on two steps of the first cohort."""
    device = x.device
    if name == "debug":
        return OneByOne()
    if chunk == 0:
        chunk = max(1, int(0.5 * available_memory(device) / bytes_per_client(net, x, buffers, work)))
    stacked = Stacked(chunk)
    if name == "stacked":
        return stacked
    # Two or so vectors of a thread fit in its core's own cache.
    group = max(1, CACHE // (len(x) * x.element_size())) if stacks_in_a_thread(net) else 1
    pool = Pool(device, group)
    if name == "pool":
        return pool

    def seconds(execution: Execution) -> float:
        before = time.perf_counter()
        execution.train(alg, down, client, buffers, work, limit=min(2, int(work.table.steps.min())))
        return time.perf_counter() - before

    try:
        with rehearsal(device):
            seconds(stacked)  # warms up
    except ClientFailed as failure:  # vmap has no rule for something the model does
        if failure.client is not None or not isinstance(failure.error, RuntimeError):
            raise
        return pool
    if device.type == "cuda":
        return stacked
    seconds(pool)
    # In turns, so that a busy moment meets both; and the kind of model decides unless the other way is clearly faster, so
    # that noise in the timing changes no results.
    both = [(seconds(stacked), seconds(pool)) for _ in range(3)]
    ratio = min(p for _, p in both) / min(s for s, _ in both)
    convolutional = any(isinstance(m, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) for m in net.original.modules())
    grouped = convolutional and work.mapped  # in C, each thread has a client in either way
    return pool if ratio < (1.6 if grouped else 0.6) else stacked
