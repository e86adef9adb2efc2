"""D x K processes: K blocks, D replicas of each. Rank d K + k holds block k of replica d."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from undrift.core import ranks
from undrift.core.errors import BadSetting
from undrift.pipeline.links import on_the_wire


@dataclass
class Grid:
    """This process's place, and the groups that it talks in."""

    blocks: int
    replicas: int
    k: int
    d: int
    activations: Any  # the K processes of the replica
    gradients: Any  # the same ones
    twins: Any  # the D processes that hold block k

    @classmethod
    def make(cls, blocks: int, replicas: int = 1) -> Grid:
        """All processes call this together."""
        world, rank = ranks.count(), ranks.rank()
        if world != blocks * replicas:
            times = f"{replicas} replicas of " if replicas > 1 else ""
            raise BadSetting(
                f"{times}{blocks} blocks need {blocks * replicas} processes, and there are {world}; "
                f"start with torchrun --nproc-per-node {blocks * replicas}, or without torchrun for a simulation"
            )
        rows = [[d * blocks + k for k in range(blocks)] for d in range(replicas)]
        columns = [[d * blocks + k for d in range(replicas)] for k in range(blocks)]
        made = [
            [dist.new_group(members, timeout=ranks.SILENCE) for members in which] for which in (rows, rows, columns)
        ]  # every rank makes all groups, in one order
        k, d = rank % blocks, rank // blocks
        return cls(blocks, replicas, k, d, made[0][d], made[1][d], made[2][k])

    def rank_of(self, k: int) -> int:
        """The rank of this replica's block k."""
        return self.d * self.blocks + k

    def cut(self) -> None:
        """Close the connections of this process, so that its neighbours wait no longer.

        Gloo closes a group's sockets when nothing refers to it any more: not the grid, no link, no message under way.
        """
        for name in ("activations", "gradients", "twins"):
            group = getattr(self, name)
            setattr(self, name, None)
            if group is not None:
                dist.destroy_process_group(group)
            del group


def mean_of_gradients(parameters: list[nn.Parameter], grid: Grid) -> None:
    """Each gradient becomes the mean over the block's replicas: one all-reduce of all of them."""
    grads = [p.grad for p in parameters if p.grad is not None]
    if not grads:
        return
    flat = torch.cat([g.reshape(-1) for g in grads])
    with on_the_wire():
        dist.all_reduce(flat, group=grid.twins)
    flat /= grid.replicas
    parts: tuple[Tensor, ...] = flat.split([g.numel() for g in grads])
    for grad, part in zip(grads, parts, strict=True):
        grad.copy_(part.view_as(grad))
