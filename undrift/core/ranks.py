"""Exchange between the processes of a run that torchrun started.

Every exchange begins with `all_well`, where a failed rank reports its error, so that no other rank waits for it. PyTorch is
imported where something is exchanged: the command line also asks here, and its help must not take seconds.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from undrift.core.errors import BadSetting, LostRank, OtherRankFailed, UndriftError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

T = TypeVar("T")
SILENCE = timedelta(minutes=30)  # a rank that is silent for longer has failed

_joined = False  # True inside `join`, so that an error is reported to the other ranks once


def world_size() -> int:
    """The number of processes according to the environment."""
    text = os.environ.get("WORLD_SIZE") or "1"
    if not text.isdigit() or text == "0":
        raise BadSetting(f"WORLD_SIZE must be the number of processes, not {text!r}; start them with torchrun")
    return int(text)


def count() -> int:
    """The number of ranks."""
    dist = sys.modules.get("torch.distributed")  # without it this process has joined nobody
    return int(dist.get_world_size()) if dist and dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """The number of this process among the ranks."""
    return int(sys.modules["torch.distributed"].get_rank()) if count() > 1 else 0


def speaks() -> bool:
    """Whether this process prints errors that all ranks share: one on each machine does."""
    return (os.environ.get("WORLD_SIZE") or "1") == "1" or os.environ.get("LOCAL_RANK", "0") == "0"


def device_of_rank(device: torch.device) -> torch.device:
    """The GPU of this rank, if the run uses GPUs."""
    if device.type != "cuda" or count() == 1:
        return device
    import torch

    local, gpus = int(os.environ.get("LOCAL_RANK", rank())), torch.cuda.device_count()
    if local >= gpus:
        raise BadSetting(
            f"each process needs a GPU of its own, and there are {gpus}; "
            f"start with --nproc-per-node {gpus}, or use --device cpu"
        )
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


@contextlib.contextmanager
def join() -> Iterator[None]:
    """Join the ranks that torchrun started, if any. An exception of one rank ends the block on all."""
    global _joined
    if _joined or (world_size() == 1 and count() == 1):
        yield
        return
    if count() == 1:
        _start()
    _joined = True
    try:
        yield
        all_well()  # also reports a rank that fails at its very end
    except (LostRank, OtherRankFailed):
        raise
    except Exception as error:
        with contextlib.suppress(LostRank):
            all_well(failed=str(error) if isinstance(error, UndriftError) else f"{type(error).__name__}: {error}")
        raise
    finally:
        _joined = False


def _start() -> None:
    import torch
    import torch.distributed as dist

    missing = [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise BadSetting(
            f"WORLD_SIZE is {world_size()}, but there is no {', '.join(missing)}; start several processes with "
            "'torchrun --nproc-per-node N -m undrift run ...', or unset WORLD_SIZE for a single one"
        )
    # torch.func imports this later anyway. Imported after the group exists, its functions would keep the group as a default, and
    # the group's threads would abort the process at the end of the interpreter.
    importlib.import_module("torch._dynamo")
    gpus = torch.cuda.is_available() and dist.is_nccl_available()
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo", timeout=SILENCE)
    except (ValueError, RuntimeError) as error:
        raise BadSetting(f"the {world_size()} processes did not find each other: {_first_line(error)}") from error
    atexit.register(dist.destroy_process_group)  # not earlier: a process cannot join a second time


def wait_for_first_rank() -> None:
    """Wait until rank 0 ends: torchrun ends all ranks as soon as one ends, and rank 0 prints last."""
    if rank():
        import torch
        import torch.distributed as dist

        with contextlib.suppress(RuntimeError):
            dist.recv(torch.zeros(1), src=0)


def all_well(number: int = 0, failed: str = "") -> int:
    """Return the sum of the ranks' numbers, or raise if a rank failed. Every exchange begins with this."""
    if count() == 1:
        return number
    import torch
    import torch.distributed as dist

    report = torch.tensor([number, bool(failed)])
    with exchange():
        dist.all_reduce(report)
        total, failures = report.tolist()
        if failures:
            messages: list[Any] = [""] * count()
            dist.all_gather_object(messages, failed)
    if failures and not failed:
        source = next(r for r, message in enumerate(messages) if message)
        raise OtherRankFailed(f"rank {source}: {messages[source]}")
    return int(total)


def any_of(*facts: bool) -> list[bool]:
    """Whether each of some facts is true on any rank."""
    if count() == 1:
        return list(facts)
    total = all_well(sum(fact << 20 * place for place, fact in enumerate(facts)))  # 20 bits count a million ranks
    return [bool(total >> 20 * place & 0xFFFFF) for place in range(len(facts))]


@contextlib.contextmanager
def exchange() -> Iterator[None]:
    """End the run if an exchange breaks off: the other ranks are inside it too and cannot be told."""
    try:
        yield
    except RuntimeError as error:
        raise LostRank(
            f"rank {rank()} lost touch with the other processes of the run ({_first_line(error)}); "
            "if one of them was ended, go on with --resume"
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].partition(". ")[0]


def first_rank_says(value: T) -> T:
    """Return rank 0's value on every rank."""
    all_well()
    values = [value]
    if count() > 1:
        import torch.distributed as dist

        with exchange():
            dist.broadcast_object_list(values, src=0)
    return values[0]


def from_first_rank(state: T) -> T:
    """Return rank 0's tensors on every rank."""
    import torch
    from torch.distributed import broadcast as copy_from

    from undrift.core.trees import map_leaves

    def receive(leaf: Tensor) -> Tensor:
        leaf = leaf.clone(memory_format=torch.contiguous_format)
        if leaf.numel():
            copy_from(leaf, src=0)
        return leaf

    all_well()
    with exchange():
        return map_leaves(receive, state)


def all_rows(leaf: Tensor, sizes: list[int]) -> Tensor:
    """Gather the rows [S, ...] of all ranks."""
    import torch
    import torch.distributed as dist

    if not leaf.shape[1:].numel():
        return leaf.new_zeros((sum(sizes), *leaf.shape[1:]))
    padded = leaf.new_zeros((max(sizes), *leaf.shape[1:]))  # all ranks send the same number of bytes
    padded[: sizes[rank()]] = leaf[: sizes[rank()]]
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
