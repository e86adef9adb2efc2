"""Fill in open settings (blocks, queues, cuts), and print the timeline that follows from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch.nn.functional as F
from torch import nn

from undrift.core import ranks
from undrift.core.errors import BadSetting
from undrift.pipeline.engines import METHODS, schedule_of
from undrift.pipeline.feed import Feed
from undrift.pipeline.pipe_config import PipeConfig
from undrift.pipeline.split import balance_model

MOST_CELLS = 1_000_000  # cells in a printed timeline
TIMED = 32  # samples to time layers on: enough for their proportions


def resolve(config: PipeConfig, model: nn.Module, feed: Feed, say: Callable[[str], None]) -> PipeConfig:
    """Fill in the number of blocks, the queues and the cuts."""
    blocks = count_blocks(config)
    if ranks.count() == 1 and config.replicas > 1:
        raise BadSetting(f"{config.replicas} replicas need their own processes: start with torchrun, or leave it out")
    queues = str(schedule_of("dsp", blocks, config.queues)) if config.method == "dsp" else ""
    cuts = config.cuts
    if not cuts and blocks > 1:
        inputs, targets = feed.take(0)
        assert inputs is not None and targets is not None
        replays = METHODS[config.method].replays
        balance = balance_model(model, blocks, inputs[:TIMED], targets[:TIMED], F.cross_entropy, replays, times=3)
        if ranks.rank() == 0:
            say(str(balance))
        cuts = ",".join(map(str, balance.cuts))
    return replace(config, blocks=blocks, queues=queues, cuts=cuts)


def count_blocks(config: PipeConfig) -> int:
    """K: as given, from the queues or the cuts, or the number of processes, or 3."""
    pieces = len(parse_cuts(config.cuts)) + 1
    if config.method == "bp":
        return 1
    if config.queues:
        blocks = schedule_of("dsp", 0, config.queues).blocks
    elif config.blocks or config.cuts:
        blocks = config.blocks or pieces
    else:
        blocks = ranks.count() // config.replicas if ranks.count() > 1 else 3
    if config.cuts and pieces != blocks:
        raise BadSetting(f"the cuts {config.cuts} make {pieces} blocks, not {blocks}; K blocks need K - 1 cuts")
    return blocks


def parse_cuts(text: str) -> list[int | str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def timeline(config: PipeConfig, batches: int) -> str:
    """The work of each block at each timestamp for so many batches, as text."""
    if batches < 1:
        raise BadSetting(f"schedule must be at least 1 batch, not {batches}")
    if config.method in ("gpipe", "1f1b"):
        raise BadSetting(f"{config.method} follows PyTorch's own schedule, which has no timeline; try another method")
    schedule = schedule_of(config.method, count_blocks(config), config.queues)
    if (batches + schedule.m[0]) * schedule.blocks > MOST_CELLS:
        raise BadSetting(f"the timeline of {batches} batches has more than {MOST_CELLS} cells; print fewer batches")
    return schedule.text(batches)
