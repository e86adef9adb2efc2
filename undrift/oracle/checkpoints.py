"""Gradient checkpointing in a model's code: what the backward pass computes again is what the forward pass computed.

torch.utils.checkpoint runs a part of the model again while gradients are taken. By then the pass is over: the module has its
own tensors again in place of the client's vector, and padding and dropout streams are gone. So inside a pass that part is
wrapped to run in the pass as it was when the part began. Reentrant checkpoints are taken as the other kind, which gives the same
gradients. Outside of passes PyTorch's checkpoints are as they were.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils import checkpoint

Part = Callable[..., Any]  # a part of a model
REENTRANT, OTHER = "CheckpointFunction", "_checkpoint_without_reentrant_generator"


class _Pass(threading.local):
    again: Callable[[Part], Part] | None = None  # makes a part run as in the pass that this thread is in


inside = _Pass()


_reentrant: Any = getattr(checkpoint, REENTRANT)
_other: Any = getattr(checkpoint, OTHER)


class Reentrant:
    """In the place of torch's autograd function for reentrant checkpoints."""

    @staticmethod
    def apply(part: Part, keep_random: bool, *inputs: Any) -> Any:
        if inside.again is None:
            return _reentrant.apply(part, keep_random, *inputs)
        return checkpoint.checkpoint(part, *inputs, use_reentrant=False, preserve_rng_state=keep_random)


def other(part: Part, *settings: Any, **named: Any) -> Iterator[None]:
    """In the place of torch's generator for the other checkpoints; `part` is what it calls in the backward pass."""
    steps: Iterator[None] = _other(part if inside.again is None else inside.again(part), *settings, **named)
    return steps


def install() -> None:
    """Let PyTorch's checkpoints look whether they are inside a pass."""
    setattr(checkpoint, REENTRANT, Reentrant)
    setattr(checkpoint, OTHER, other)
