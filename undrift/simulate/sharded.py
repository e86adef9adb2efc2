"""A cohort divided among the ranks of a run: each trains a part, gets all answers, and takes the server's step itself."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from undrift.algorithms.base import Algorithm
from undrift.core import ranks
from undrift.core.trees import State, map_leaves
from undrift.data.batches import Table
from undrift.round.clients import Answers
from undrift.simulate.here import Execution, Pool, Stacked
from undrift.simulate.work import LocalWork

T = TypeVar("T")


class Message(NamedTuple):
    """What goes down to every client."""

    down: State
    buffers: Tensor


def agree(name: str, chunk: int, device: torch.device, choose: Callable[[str, int], Execution]) -> Execution:
    """The execution that rank 0 chooses, on every rank."""
    if ranks.count() == 1:
        return choose(name, chunk)
    if ranks.rank():
        return choose(*ranks.first_rank_says((name, chunk)))
    chosen = choose(name, chunk)
    if isinstance(chosen, Stacked) and chunk == 0 and device.type == "cpu":  # the ranks of a machine share its memory
        chosen.chunk = max(1, chosen.chunk // int(os.environ.get("LOCAL_WORLD_SIZE", ranks.count())))
    ranks.first_rank_says((chosen.name, chosen.chunk if isinstance(chosen, Stacked) else 1))
    return chosen


def over_ranks(execution: Execution) -> Execution:
    """The execution as it is, or divided among the ranks where there are several."""
    return execution if ranks.count() == 1 else Sharded(execution)


class Sharded:
    """An execution of which each rank does a part; all ranks get all the answers."""

    def __init__(self, execution: Execution) -> None:
        self.execution, self.name = execution, execution.name

    def train(
        self, alg: Algorithm, down: State, client: State, buffers: Tensor, work: LocalWork, limit: int | None = None
    ) -> Answers:
        down, buffers = ranks.from_first_rank(Message(down, buffers))

        def some(part: slice, mine: LocalWork) -> Answers:
            return self.execution.train(alg, down, map_leaves(lambda t: t[part], client), buffers, mine)

        return self.divide(work, some)

    def measure(self, alg: Algorithm, down: State, buffers: Tensor, work: LocalWork) -> Tensor:
        down, buffers = ranks.from_first_rank(Message(down, buffers))
        return self.divide(work, lambda part, mine: self.execution.measure(alg, down, buffers, mine))

    def divide(self, work: LocalWork, do: Callable[[slice, LocalWork], T]) -> T:
        """What `do` answers for the whole cohort, from its answers for each rank's part."""
        # Stacked clients cost the same, because they are padded; in a pool each costs what it has to do.
        cost = work.table.count.sum(1) if isinstance(self.execution, Pool) else np.ones_like(work.table.steps)
        sizes = shares(cost, ranks.count()).tolist()
        start = sum(sizes[: ranks.rank()])
        # A rank without clients does the work of the first one, to know an answer's shape, and sends nothing of it.
        part = slice(start, start + sizes[ranks.rank()]) if sizes[ranks.rank()] else slice(0, 1)
        table = Table(work.table.index[part], work.table.count[part], work.table.steps[part])
        mine = replace(work, ids=work.ids[part], table=table, gradients=0)
        answers = do(part, mine)
        work.gradients += ranks.all_well(mine.gradients if sizes[ranks.rank()] else 0)
        with ranks.exchange():
            return map_leaves(lambda t: ranks.all_rows(t, sizes), answers)


def shares(cost: NDArray[np.int64], among: int) -> NDArray[np.int64]:
    """How many clients each rank gets, one after another, so that the ranks' costs are about equal.

    >>> shares(np.array([1, 1, 1, 1, 1]), 2), shares(np.array([9, 1, 1, 1, 1, 1]), 2), shares(np.array([1]), 3)
    (array([2, 3]), array([1, 5]), array([0, 1, 0]))
    """
    middle = 2 * np.cumsum(cost) - cost  # twice the middle of each client's stretch of the whole cost
    return np.bincount(middle * among // (2 * cost.sum()), minlength=among)
