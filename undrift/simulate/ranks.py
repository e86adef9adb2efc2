"""Several processes for one run, as torchrun starts them: each trains a part of every cohort and knows all the answers.

Every rank holds the same simulation. The ranks exchange what the clients would send and keep, so that each of them takes
the server's step by itself. An exchange begins with `all_well`, where a rank that has failed says so; no other rank then
waits for it in vain.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from undrift.algorithms.base import Algorithm
from undrift.data.batches import Table
from undrift.errors import BadSetting, LostRank, OtherRankFailed, UndriftError
from undrift.round import Answers
from undrift.simulate.execute import Execution, Pool, RoundWork, Stacked
from undrift.vec import map_leaves

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
    with _exchange():
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
def _exchange() -> Iterator[None]:
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
        with _exchange():
            dist.broadcast_object_list(said, src=0)
    return said[0]


def agreed(name: str, chunk: int, device: torch.device, choose: Callable[[str, int], Execution]) -> Execution:
    """The execution that rank 0 chooses, on every rank."""
    if count() == 1:
        return choose(name, chunk)
    if rank():
        return choose(*first_rank_says((name, chunk)))
    chosen = choose(name, chunk)
    if isinstance(chosen, Stacked) and chunk == 0 and device.type == "cpu":  # the ranks of a machine share its memory
        chosen.chunk = max(1, chosen.chunk // int(os.environ.get("LOCAL_WORLD_SIZE", count())))
    first_rank_says((chosen.name, chosen.chunk if isinstance(chosen, Stacked) else 1))
    return chosen


def over_ranks(execution: Execution) -> Execution | Sharded:
    """The execution as it is, or divided among the ranks where there are several."""
    return execution if count() == 1 else Sharded(execution)


class Sharded:
    """An execution of which each rank does a part; all ranks get all the answers."""

    def __init__(self, execution: Execution) -> None:
        self.execution = execution

    def __call__(self, alg: Algorithm, down: Any, client: Any, buffers: Tensor, work: RoundWork) -> Answers:
        down, buffers = _from_first_rank(down, buffers)

        def train(part: slice, mine: RoundWork) -> Answers:
            return self.execution(alg, down, map_leaves(lambda t: t[part], client), buffers, mine)

        return self.divided(work, train)

    def measure(self, alg: Algorithm, down: Any, buffers: Tensor, work: RoundWork) -> Tensor:
        """The first exchange: what every client measures [S, P]."""
        down, buffers = _from_first_rank(down, buffers)
        return self.divided(work, lambda part, mine: self.execution.measure(alg, down, buffers, mine))

    def divided(self, work: RoundWork, do: Callable[[slice, RoundWork], T]) -> T:
        """What `do` answers for the whole cohort, from its answers for each rank's part."""
        # Stacked clients cost the same, because they are padded; in a pool each costs what it has to do.
        cost = work.table.count.sum(1) if isinstance(self.execution, Pool) else np.ones_like(work.table.steps)
        sizes = shares(cost, count()).tolist()
        start = sum(sizes[: rank()])
        # A rank without clients does the work of the first one, to know an answer's shape, and sends nothing of it.
        part = slice(start, start + sizes[rank()]) if sizes[rank()] else slice(0, 1)
        table = Table(work.table.index[part], work.table.count[part], work.table.steps[part])
        mine = replace(work, ids=work.ids[part], table=table, gradients=0)
        answers = do(part, mine)
        work.gradients += all_well(mine.gradients if sizes[rank()] else 0)
        with _exchange():
            return map_leaves(lambda t: _gathered(t, sizes), answers)


def shares(cost: NDArray[np.int64], ranks: int) -> NDArray[np.int64]:
    """How many clients each rank gets, one after another, so that the ranks' costs are about equal.

    >>> shares(np.array([1, 1, 1, 1, 1]), 2), shares(np.array([9, 1, 1, 1, 1, 1]), 2), shares(np.array([1]), 3)
    (array([2, 3]), array([1, 5]), array([0, 1, 0]))
    """
    middle = 2 * np.cumsum(cost) - cost  # twice the middle of each client's stretch of the whole cost
    return np.bincount(middle * ranks // (2 * cost.sum()), minlength=ranks)


def _from_first_rank(down: Any, buffers: Tensor) -> tuple[Any, Tensor]:
    """Rank 0's message to the clients, so that differences in rounding between the ranks' servers cannot add up."""

    def sent(leaf: Tensor) -> Tensor:
        leaf = leaf.clone(memory_format=torch.contiguous_format)
        if leaf.numel():
            dist.broadcast(leaf, src=0)
        return leaf

    all_well()
    with _exchange():
        return map_leaves(sent, down), sent(buffers)


def _gathered(leaf: Tensor, sizes: list[int]) -> Tensor:
    """The rows [S, ...] of all ranks, from the rows of this one."""
    if not leaf.shape[1:].numel():
        return leaf.new_zeros((sum(sizes), *leaf.shape[1:]))
    padded = leaf.new_zeros((max(sizes), *leaf.shape[1:]))  # all ranks send the same number of bytes
    padded[: sizes[rank()]] = leaf[: sizes[rank()]]
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
