"""Functions made fast on a GPU: fused by torch.compile; recorded once as a CUDA graph and replayed."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from undrift.core.trees import leaves, map_leaves
from undrift.kernels.launch import rehearsal as rehearsal
from undrift.kernels.launch import silence as silence

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

    with rehearsal(device):
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


def fused(play: Callable[..., T], *given: Any) -> Callable[..., T]:
    """`play` compiled for states like those given: a function of states that returns a state and changes nothing."""
    made: list[T] = []

    def flat(*tensors: Tensor) -> list[Tensor]:
        rest = iter(tensors)
        made[:] = [play(*(map_leaves(lambda _: next(rest), state) for state in given))]
        return leaves(made[0])

    graph = make_fx(flat)(*leaves(given))
    fast = torch.compile(graph, dynamic=False, options={"max_pointwise_cat_inputs": 32})
    form = made[0]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")  # the precision was chosen
        fast(*leaves(given))

    def compiled(*states: Any) -> T:
        results = iter(fast(*leaves(states)))
        return map_leaves(lambda _: next(results), form)

    return compiled
