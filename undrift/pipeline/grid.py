"""D x K processes: K blocks, D replicas of each. Rank d K + k holds block k of replica d."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from undrift.core import ranks
from undrift.core.errors import BadSetting
from undrift.pipeline.links import translate_errors


@dataclass
class Grid:
    """The place of this process, and its process groups."""

    blocks: int
    replicas: int
    k: int
    d: int
    activations: Any  # the K processes of the replica
    gradients: Any  # the same processes
    twins: Any  # the D processes that hold block k
    ends: Any = None  # the first and the last process, if these share parameters
    everyone: Any = None  # all processes, if they bound the length of their gradients together

    @classmethod
    def make(cls, blocks: int, replicas: int = 1) -> Grid:
        """Create the groups; all processes must call this."""
        world, rank = ranks.count(), ranks.rank()
        if world != blocks * replicas:
            raise BadSetting(
                f"{replicas} x {blocks} blocks need {blocks * replicas} processes, and there are {world}; "
                f"start with torchrun --nproc-per-node {blocks * replicas}, or without torchrun for a simulation"
            )
        rows = [[d * blocks + k for k in range(blocks)] for d in range(replicas)]
        columns = [[d * blocks + k for d in range(replicas)] for k in range(blocks)]
        activations, gradients, twins = (  # every rank makes all groups, in one order
            [dist.new_group(members, timeout=ranks.SILENCE) for members in groups] for groups in (rows, rows, columns)
        )
        d, k = divmod(rank, blocks)
        return cls(blocks, replicas, k, d, activations[d], gradients[d], twins[k])

    def join(self, ends: bool, everyone: bool) -> None:
        """Create further groups for blocks without replicas; all processes must call this."""
        last = self.blocks - 1
        self.ends = dist.new_group([0, last], timeout=ranks.SILENCE) if ends else None
        self.everyone = dist.new_group(timeout=ranks.SILENCE) if everyone else None
        if self.k not in (0, last):
            self.ends = None

    def rank_of(self, k: int) -> int:
        """The rank of this replica's block k."""
        return self.d * self.blocks + k

    def cut(self) -> None:
        """Close the connections, so that neighbours stop waiting: gloo closes a group when nothing refers to it."""
        for name in ("activations", "gradients", "twins", "ends", "everyone"):
            group = getattr(self, name)
            setattr(self, name, None)
            if group is not None:
                dist.destroy_process_group(group)
            del group


def average_gradients(parameters: list[nn.Parameter], grid: Grid) -> None:
    """Average the gradients over the block's replicas in one all-reduce."""
    grads = [p.grad for p in parameters if p.grad is not None]
    if not grads:
        return
    flat = torch.cat([g.reshape(-1) for g in grads])
    with translate_errors():
        dist.all_reduce(flat, group=grid.twins)
    flat /= grid.replicas
    for grad, part in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
        grad.copy_(part.view_as(grad))
