"""Ranks compare their settings at the start: a difference would not fail later, it would train nonsense."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from undrift.core.errors import BadSetting
from undrift.dataparallel.workers import Ranks


def agree(workers: Ranks, facts: Mapping[str, object]) -> None:
    """Raise on every rank where one has another value than rank 0, and say what and who."""
    if not workers.joined:
        return
    everybody: list[Any] = [None] * workers.count
    workers.together(lambda: dist.all_gather_object(everybody, dict(facts), group=workers.group))
    first = everybody[0]
    for rank, other in enumerate(everybody):
        for name in {**first, **other}:
            if first.get(name) != other.get(name):
                raise BadSetting(
                    f"the ranks disagree on {name}: it is {_shown(first, name)} on rank 0 and {_shown(other, name)} on "
                    f"rank {rank}; give all ranks the same settings, model and checkpoint"
                )


def _shown(facts: Mapping[str, object], name: str) -> str:
    return str(facts[name]) if name in facts else "absent"
