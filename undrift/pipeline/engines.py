"""The methods of `undrift pipe` by name, and the engines that run their blocks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from undrift.core import ranks
from undrift.core.errors import BadSetting
from undrift.core.streams import Purpose, stream
from undrift.pipeline.block import Loss, MakeOptimizer, PipelineBlock, Rate
from undrift.pipeline.ddg import StashingBlock
from undrift.pipeline.dni import SyntheticBlock
from undrift.pipeline.grid import Grid, average_gradients
from undrift.pipeline.links import Group
from undrift.pipeline.micro import MicroBatches
from undrift.pipeline.processes import Processes
from undrift.pipeline.schedule import Schedule
from undrift.pipeline.simulator import Simulator
from undrift.pipeline.split import ModelPart, shared_parameters

Engine = Simulator | Processes | MicroBatches
Joint = Callable[[list[nn.Parameter], Group], torch.optim.Optimizer]  # for a block's replicas and their group


class PipelineMethod(NamedTuple):
    """A description and a kind of block."""

    about: str
    block: type[PipelineBlock] = PipelineBlock
    replays: bool = False  # whether blocks below the last run their forward twice


METHODS = {
    "bp": PipelineMethod("backpropagation in one process"),
    "bp-k": PipelineMethod("backpropagation through K blocks, one after another"),
    "fr": PipelineMethod("Features Replay (Huo et al., NeurIPS 2018)", replays=True),
    "ddg": PipelineMethod("Decoupled Parallel Backpropagation (Huo et al., ICML 2018)", StashingBlock),
    "dni": PipelineMethod("Decoupled Neural Interfaces (Jaderberg et al., ICML 2017)", SyntheticBlock),
    "gpipe": PipelineMethod("GPipe, PyTorch's own schedule (Huang et al., NeurIPS 2019)"),
    "1f1b": PipelineMethod("one forward, one backward, PyTorch's own schedule (Narayanan et al., SOSP 2019)"),
    "dsp": PipelineMethod("Diversely Stale Parameters (Xu et al., CVPR 2020)", replays=True),
}


def schedule_of(method: str, blocks: int, queues: str = "") -> Schedule:
    """The schedule of a method; only DSP takes `queues`."""
    if queues and method != "dsp":
        raise BadSetting(f"queues are DSP's; {method} has its own")
    if method == "dsp":
        return Schedule.parse(queues) if queues else Schedule.shortest(blocks)
    return Schedule.fr(blocks) if method in ("fr", "ddg") else Schedule.bp(blocks)


def _in_group(joint: Joint, twins: Group, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return joint(parameters, twins)


def build_engine(
    kind: type[PipelineBlock],
    parts: Sequence[ModelPart],
    schedule: Schedule,
    optimizer: MakeOptimizer,
    loss: Loss,
    rate: Rate | None,
    seed: int,
    device: torch.device,
    replicas: int = 1,
    joint: Joint | None = None,
    clip: float = 0.0,
) -> Simulator | Processes:
    """Build all blocks in this process, or this rank's block under torchrun.

    Gradients are averaged over a block's replicas, unless `joint` makes an optimiser that communicates by itself.
    """
    count, tied = len(parts), shared_parameters(parts)
    if tied and (kind is not PipelineBlock or replicas > 1 or joint is not None):
        raise BadSetting(
            f"the first and the last block share parameters {list(tied[0].shape)}, for which only bp-k, fr and dsp without "
            "replicas make one update; give each block its own (for gpt: tied=false)"
        )
    grid = Grid.make(count, replicas) if ranks.count() > 1 else None
    if grid is not None and grid.d:
        seed = stream(seed, Purpose.DROPOUT, grid.d)  # every replica draws its own masks
    if grid is not None and joint is not None:
        optimizer = functools.partial(_in_group, joint, grid.twins)
    late = bool(tied or clip)
    if grid is not None and late:
        grid.join(bool(tied), bool(clip))
    blocks = [
        kind(
            part.module, k, schedule.m[k], optimizer, loss if k == count - 1 else None, rate, seed,
            tied if k in (0, count - 1) else (), late,
        )
        for k, part in enumerate(parts)
        if grid is None or k == grid.k
    ]  # fmt: skip
    if grid is None:
        return Simulator(blocks, schedule, device, clip)
    if replicas > 1 and joint is None:
        blocks[0].reduce = lambda: average_gradients(blocks[0].trained, grid)
    return Processes(blocks[0], schedule, grid, device, clip)
