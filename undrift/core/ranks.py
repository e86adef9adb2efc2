"""Several processes for one run, as torchrun starts them.

Every exchange begins with `all_well`, where a rank that has failed says so; no other rank then waits for it in vain.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import broadcast as copy_from

from undrift.core.errors import BadSetting, LostRank, OtherRankFailed, UndriftError
from undrift.core.trees import map_leaves

T = TypeVar("T")
SILENCE = timedelta(minutes=30)  # a rank that lets the others wait longer than this has failed

_joined = False  # inside `joined`, so that an error is told to the other ranks once


def asked() -> int:
    """How many processes the environment says there are."""
    text = os.environ.get("WORLD_SIZE") or "1"
    if not text.isdigit() or text == "0":
        raise BadSetting(f"WORLD_SIZE must be the number of processes, not {text!r}; start them with torchrun")
    return int(text)


def count() -> int:
    """How many ranks there are."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """This process's number among them."""
    return dist.get_rank() if count() > 1 else 0


def speaks() -> bool:
    """Whether this process tells the user of an error that other ranks know too: one on each machine does."""
    return (os.environ.get("WORLD_SIZE") or "1") == "1" or os.environ.get("LOCAL_RANK", "0") == "0"


def device_of_rank(device: torch.device) -> torch.device:
    """The rank's own GPU where the run is on GPUs."""
    if device.type != "cuda" or count() == 1:
        return device
    local, there = int(os.environ.get("LOCAL_RANK", rank())), torch.cuda.device_count()
    if local >= there:
        raise BadSetting(
            f"each process needs a GPU of its own, and there are {there}; "
            f"start with --nproc-per-node {there}, or use --device cpu"
        )
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


@contextlib.contextmanager
def joined() -> Iterator[None]:
    """Be one of the ranks that torchrun started, if it did: whatever one of them raises here ends it on all."""
    global _joined
    if _joined or (asked() == 1 and count() == 1):
        yield
        return
    if count() == 1:
        _start()
    _joined = True
    try:
        yield
        all_well()  # a rank that fails at its very end is heard too
    except (LostRank, OtherRankFailed):
        raise
    except Exception as error:
        with contextlib.suppress(LostRank):
            all_well(failed=str(error) if isinstance(error, UndriftError) else f"{type(error).__name__}: {error}")
        raise
    finally:
        _joined = False


def _start() -> None:
    wanted = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in wanted if name not in os.environ]
    if missing:
        raise BadSetting(
            f"WORLD_SIZE is {asked()}, but there is no {', '.join(missing)}; start several processes with "
            "'torchrun --nproc-per-node N -m undrift run ...', or unset WORLD_SIZE for a single one"
        )
    # torch.func imports this sooner or later. Functions in it take the group as a default if there is one, and would keep
    # its threads alive beyond the end of the interpreter, where they abort the process.
    importlib.import_module("torch._dynamo")
    gpus = torch.cuda.is_available() and dist.is_nccl_available()
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo", timeout=SILENCE)
    except (ValueError, RuntimeError) as error:
        raise BadSetting(f"the {asked()} processes did not find each other: {_first_line(error)}") from error
    atexit.register(dist.destroy_process_group)  # not earlier: a process cannot join a second time


def wait_for_first_rank() -> None:
    """Wait until rank 0 has ended: torchrun ends all as soon as one does, and rank 0 has something to say before."""
    if rank():
        with contextlib.suppress(RuntimeError):
            dist.recv(torch.zeros(1), src=0)


def all_well(number: int = 0, failed: str = "") -> int:
    """The sum of the ranks' numbers, unless one of them failed. Every exchange begins with this."""
    if count() == 1:
        return number
    told = torch.tensor([number, bool(failed)])
    with exchange():
        dist.all_reduce(told)
        total, failures = told.tolist()
        if failures:
            messages: list[Any] = [""] * count()
            dist.all_gather_object(messages, failed)
    if failures and not failed:
        teller = next(r for r, message in enumerate(messages) if message)
        raise OtherRankFailed(f"rank {teller}: {messages[teller]}")
    return int(total)


@contextlib.contextmanager
def exchange() -> Iterator[None]:
    """Whatever breaks off an exchange ends the run: the other ranks cannot be told, since they are inside it too."""
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
    """Rank 0's value, on every rank."""
    all_well()
    said = [value]
    if count() > 1:
        with exchange():
            dist.broadcast_object_list(said, src=0)
    return said[0]


def from_first_rank(state: T) -> T:
    """Rank 0's tensors, on every rank."""

    def sent(leaf: Tensor) -> Tensor:
        leaf = leaf.clone(memory_format=torch.contiguous_format)
        if leaf.numel():
            copy_from(leaf, src=0)
        return leaf

    all_well()
    with exchange():
        return map_leaves(sent, state)


def all_rows(leaf: Tensor, sizes: list[int]) -> Tensor:
    """The rows [S, ...] of all ranks, from the rows of this one."""
    if not leaf.shape[1:].numel():
        return leaf.new_zeros((sum(sizes), *leaf.shape[1:]))
    padded = leaf.new_zeros((max(sizes), *leaf.shape[1:]))  # all ranks send the same number of bytes
    padded[: sizes[rank()]] = leaf[: sizes[rank()]]
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
