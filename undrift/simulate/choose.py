"""Which way of asking suits a model: counted on the first cohort."""

from __future__ import annotations

import ctypes
import sys
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from undrift.algorithms.base import Algorithm
from undrift.core.device import available_memory, total_memory
from undrift.core.errors import ClientFailed
from undrift.core.trees import State
from undrift.oracle.net import Net
from undrift.oracle.oracle import stacks_in_a_thread, task_loss
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
