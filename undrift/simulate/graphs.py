"""CUDA graphs: a function recorded once and replayed without the host."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
WARM_UPS = 2


def recorded(play: Callable[[], T], changed: Sequence[Tensor], device: torch.device) -> Callable[[], T]:
    """`play` as a CUDA graph, whose results lie in the same place each time; without a GPU, itself.

    To record it is to play it, so the tensors that it changes are put back.
    """
    before = [t.clone() for t in changed]

    def once() -> T:
        try:
            return play()
        finally:
            for tensor, old in zip(changed, before, strict=True):
                tensor.copy_(old)

    once()
    if device.type != "cuda":
        return play
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(WARM_UPS):
            once()
    torch.cuda.current_stream().wait_stream(aside)
    gc.collect()  # a graph that is thrown away during a recording spoils it
    gc.disable()
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # records, and changes nothing
            results = play()
    finally:
        gc.enable()

    def replay(_: object = play) -> T:  # the graph reads tensors that only `play` may hold
        graph.replay()
        return results

    return replay
