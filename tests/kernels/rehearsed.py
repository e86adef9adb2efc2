"""Run by test_rehearsal, without a GPU: Triton's compiler works for the GPU that it is told of, and no kernel is launched."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from undrift.algorithms.gradient_memory.memory import Memory
from undrift.kernels import consistency_gpu, conv_gpu, cross_entropy_gpu, dense_step_gpu, launch, memory_gpu


class Absent:
    """A GPU of the kind of an H200 that is not there."""

    def get_current_device(self) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_stream(self, device: int) -> int:
        return 0


made: list[str] = []


def make(self: launch.Rehearsal, kernel: Any, grid: tuple[int, ...], given: Any, sizes: dict[str, Any]) -> None:
    """Compiles; there is nothing to load it into."""
    kernel.warmup(*given, grid=grid, **sizes)
    made.append(kernel.fn.__name__)


def program() -> list[torch.Tensor]:
    """A first step, in which clients share their vector, and a second one, each with a backward pass in a thread of its own; then
    what else there is."""
    S, B, results = 3, 4, []
    x, vectors = torch.randn(S, B, 2, 9, 9), torch.randn(S, 100)
    for of in (vectors[:1].expand(S, -1), vectors):
        w, b = of[:, :54].view(S, 3, 2, 3, 3).detach().requires_grad_(), of[:, 54:57].detach()
        y = torch.ops.undrift.stacked_few_channels(x, w, b, 1)
        backward = threading.Thread(target=y.sum().backward)
        backward.start()
        backward.join()
        results += [y, w.grad]
    memory, place = memory_gpu.mem_red_gpu(Memory.empty(8, torch.zeros(1), 1), torch.arange(5))
    results += [memory.ids, memory.age, memory.uses, memory.since, memory.evictions, place]
    results += [consistency_gpu.spread(torch.randn(2, S, 50), torch.rand(2, S, 1))]
    labels = torch.zeros(S, B, dtype=torch.int64)
    results += cross_entropy_gpu.transposed_cross_entropy_gpu(torch.randn(S, 5, B), labels, None)
    outs, back = [torch.randn(S, 6, B)], [torch.randn(S, 5, B)]
    for rate in (0.1, torch.rand(S)):
        results += [dense_step_gpu.dense_step_gpu(torch.randn(S, 50), rate, outs, back, [True])]
    return results


def main() -> None:
    driver.set_active(Absent())
    launch.Rehearsal.make = make  # type: ignore[method-assign]
    with launch.rehearsal(torch.device("cuda:0")):
        mine = launch.current.get()
        results = program()
    assert mine is not None and launch.current.get() is None
    assert not any(t.any() for t in results), "what no kernel has made is zero"
    wanted = ["_cross_entropy", "_filters", "_forward", "_mem_red", "_spread", "_step", "_step"]
    assert sorted(made) == wanted, made  # each once: a second step, or another thread, asks for the same

    # The program's own tensors and numbers find their kernels ready.
    def held() -> int:
        return sum(len(kernel.device_caches[0][0]) for kernel in {kernel for kernel, *_ in mine.asked})

    def ready(kernel: Any, grid: tuple[int, ...], *given: Any, **sizes: Any) -> None:
        kernel.warmup(*given, grid=grid, **sizes)

    assert held() == len(wanted)
    for room in (conv_gpu, memory_gpu, consistency_gpu, cross_entropy_gpu, dense_step_gpu):
        room.launch = ready
    program()
    assert held() == len(wanted), "a stand-in is no substitute for what it stands for"

    # What cannot be compiled does not end the rehearsal, but is told when it is launched.
    # Blocks of six entries, where Triton wants a power of two.
    consistency_gpu.launch, consistency_gpu.ENTRIES = launch.launch, 24
    rows, share = torch.randn(1, 3, 50), torch.rand(1, 3, 1)
    with launch.rehearsal(torch.device("cuda:0")):
        consistency_gpu.spread(rows, share)
    consistency_gpu.launch = ready
    with pytest.raises(Exception, match="power of 2"):
        consistency_gpu.spread(rows, share)


if __name__ == "__main__":
    main()
