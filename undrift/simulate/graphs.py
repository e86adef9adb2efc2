"""Functions made fast on a GPU: fused by torch.compile; recorded once as CUDA graphs and replayed."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from undrift.core.trees import leaves, map_leaves
from undrift.kernels.launch import rehearsal as rehearsal

T = TypeVar("T")
WARM_UPS = 2


class Recording(Generic[T]):
    """A function recorded as CUDA graphs: one, or several with something that the host does in between.

    Its results lie in the same place each time. Without a GPU the function itself is called. To record it is to run it, so
    the tensors that it changes are put back.
    """

    def __init__(self, function: Callable[[Recording[T]], T], changed: Sequence[Tensor], device: torch.device) -> None:
        self.function, self.changed, self.device = function, changed, device
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self.between: list[Callable[[], None]] = []  # what the host does after each graph but the last
        self.capture: Any = None  # the graph under way
        self.results: T | None = None

    def rehearse(self) -> None:
        """A trial run, in which kernels are compiled side by side."""
        with rehearsal(self.device):
            self.once()

    def once(self) -> None:
        before = [t.clone() for t in self.changed]
        try:
            self.function(self)
        finally:
            for tensor, old in zip(self.changed, before, strict=True):
                tensor.copy_(old)

    def record(self) -> None:
        """Record the graphs; without a GPU there are none."""
        if self.device.type != "cuda":
            return
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(WARM_UPS):
                self.once()
        torch.cuda.current_stream().wait_stream(aside)
        gc.collect()  # a graph that is thrown away during a recording spoils it
        gc.disable()
        try:
            self.begin_graph()
            try:
                self.results = self.function(self)  # records, and changes nothing
            finally:
                self.end_graph()
        finally:
            gc.enable()

    def begin_graph(self) -> None:
        graph = torch.cuda.CUDAGraph()
        self.capture = torch.cuda.graph(graph)
        self.capture.__enter__()
        self.graphs.append(graph)

    def end_graph(self) -> None:
        capture, self.capture = self.capture, None
        if capture is not None:
            capture.__exit__(None, None, None)

    def host(self, action: Callable[[], None], instead: Callable[[], None]) -> None:
        """Called by the function: here the host does `action` at each replay; in a trial run `instead`."""
        if self.capture is not None:
            self.end_graph()
            self.between.append(action)
            self.begin_graph()
        elif self.device.type == "cuda":
            instead()
        else:
            action()

    def __call__(self) -> T:
        if not self.graphs:
            return self.function(self)
        for graph, action in zip(self.graphs, [*self.between, None], strict=True):
            graph.replay()
            if action is not None:
                action()
        return self.results  # type: ignore[return-value]


def record_graph(play: Callable[[], T], changed: Sequence[Tensor], device: torch.device) -> Callable[[], T]:
    """`play` as a CUDA graph, whose results lie in the same place each time; without a GPU, itself."""
    recording = Recording(lambda _: play(), changed, device)
    recording.rehearse()
    recording.record()
    return recording


def fuse(play: Callable[..., T], *given: Any) -> Callable[..., T]:
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

    def run_compiled(*states: Any) -> T:
        results = iter(fast(*leaves(states)))
        return map_leaves(lambda _: next(results), form)

    return run_compiled
