"""A local round of stacked clients with nothing around it: stock vmap(grad), torch.compile, one CUDA graph.

    python benchmarks/bare.py           # needs a GPU

5 local steps, batch 64, S clients with weights of their own, then the mean; inputs are floats that lie ready on the device.
This is what a framework that wastes nothing costs; benchmarks/gpu.py compares undrift with it.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap

from undrift.models import mlp, resnet20_gn

STEPS, BATCH, LR, SHAPE = 5, 64, 0.1, (3, 32, 32)


def lenet(first: int, second: int) -> nn.Module:
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, first, 5), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Conv2d(first, second, 5), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Flatten(), nn.Linear(second * 25, 120), nn.ReLU()),
        nn.Sequential(nn.Linear(120, 84), nn.ReLU()),
        nn.Linear(84, 10),
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: mlp.build(SHAPE, 10),
    "lenet 6/16": lambda: lenet(6, 16),
    "lenet 32/64": lambda: lenet(32, 64),
    "resnet20-gn": lambda: resnet20_gn.build(SHAPE, 10),
}


def bare_round(module: nn.Module, clients: int, compiled: bool) -> Callable[[], None]:
    """A captured local round."""
    module = module.cuda()
    start, _ = stack_module_state([module] * clients)
    start = {name: tensor.detach().clone() for name, tensor in start.items()}
    x = torch.randn(STEPS, clients, BATCH, *SHAPE, device="cuda")
    y = torch.randint(0, 10, (STEPS, clients, BATCH), device="cuda")

    def loss(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(module, weights, (x,)), y)

    gradient = vmap(grad(loss))
    gradient = torch.compile(gradient, dynamic=False) if compiled else gradient
    mean = {name: tensor[0].clone() for name, tensor in start.items()}

    def local_round() -> None:
        weights = {name: tensor.expand(clients, *tensor.shape) for name, tensor in mean.items()}
        for k in range(STEPS):
            found = gradient(weights, x[k], y[k])
            weights = {name: torch.sub(w, found[name], alpha=LR) for name, w in weights.items()}
        for name, w in weights.items():
            mean[name].copy_(w.mean(0))

    return capture(local_round)


def capture(play: Callable[[], None]) -> Callable[[], None]:
    """`play` as a CUDA graph."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            play()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        play()
    return graph.replay


def milliseconds(play: Callable[[], None], least: float = 0.4) -> float:
    """The median over blocks of rounds, each long enough to be timed."""
    play()
    torch.cuda.synchronize()
    times, began = [], time.perf_counter()
    while time.perf_counter() - began < least or len(times) < 5:
        block = time.perf_counter()
        for _ in range(5):
            play()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - block) / 5 * 1e3)
    return statistics.median(times)


def tensor_cores() -> None:
    """As the comparison wants it: TF32 on, convolutions timed."""
    torch.backends.cuda.matmul.fp32_precision = torch.backends.cudnn.conv.fp32_precision = "tf32"
    torch.backends.cudnn.benchmark = True


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a GPU")
    tensor_cores()
    for name, build in MODELS.items():
        for clients in (10, 100):
            plain, fused = (milliseconds(bare_round(build(), clients, compiled)) for compiled in (False, True))
            print(f"{name:12} S={clients:3}  graph {plain:7.2f} ms   compile + graph {fused:7.2f} ms", flush=True)
