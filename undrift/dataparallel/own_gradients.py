"""Hooks with which DistributedDataParallel leaves every rank its own gradients, in place of their means."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel


def keep_gradients(ddp: DistributedDataParallel) -> None:
    """Let every rank keep its own gradients. DDP allows one hook, and another optimizer's is the same."""
    if (keep_local, None) not in ddp._comm_hooks:
        ddp.register_comm_hook(None, keep_local)


def keep_gradients_of_active(module: nn.Module, inputs: object) -> None:
    """A forward hook for a module: the same for a DDP that has been put around it and is at work now."""
    ddp = DistributedDataParallel._active_ddp_module
    if ddp is not None and not ddp._comm_hooks:
        keep_gradients(ddp)


def keep_local(state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """A communication hook for DDP: every rank keeps its own gradients."""
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


# torch reads the hook's annotations, which `from __future__ import annotations` turns into text.
keep_local.__annotations__ = {"bucket": GradBucket, "return": torch.futures.Future[Tensor]}
