"""Small pipelines for one process or several: `torchrun .. -m tests.pipeline.cases FILE BLOCKS` saves what they give."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import undrift
from undrift.core import ranks
from undrift.pipeline import SUM
from undrift.pipeline.engines import METHODS, Engine, build_engine, schedule_of
from undrift.pipeline.micro import MicroBatches
from undrift.pipeline.split import ModelPart

BATCHES, STOP, FLUSH = 22, 9, 17  # a state is taken after STOP batches, and the queues are emptied after FLUSH
CASES = [
    *("bp-k", "fr", "ddg", "dni", "dsp 1,1,0;4,2,0", "dsp 3,3,0;10,5,0", "dsp 1,1,0;5,3,1"),
    *("dsp nesterov", "dsp sum", "bp-k plain", "dsp float32", "gpipe 4", "1f1b 4", "gpipe 1", "1f1b 3 whole"),
]


def modules(blocks: int, plain: bool = False, dtype: torch.dtype = torch.float64) -> list[nn.Module]:
    """Linear layers, BatchNorm and dropout (unless plain); a block with neither parameters of its own nor a cut in between."""
    torch.manual_seed(0)

    def extra(width: int) -> list[nn.Module]:
        return [] if plain else [nn.BatchNorm1d(width), nn.Dropout(0.2)]

    made: list[nn.Module] = [nn.Sequential(nn.Linear(6, 8), *extra(8), nn.Tanh())]
    made += [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), *extra(8)) for _ in range(blocks - 2)]
    return [block.to(dtype) for block in [*made, nn.Sequential(nn.Linear(8, 7), *extra(7), nn.ReLU(), nn.Linear(7, 4))]]


def batches(count: int = BATCHES, dtype: torch.dtype = torch.float64, seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(12, 6, generator=draw, dtype=dtype), torch.randint(4, (12,), generator=draw)) for _ in range(count)
    ]


def factor(n: int) -> float:
    return 1.0 if n < 12 else 0.2


def rate(n: int) -> float:
    """The rate of an optimiser that begins with 0.1."""
    return 0.1 * factor(n)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-2)


def nesterov(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-2, nesterov=True)


def unified(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return SUM(parameters, lr=0.1, beta=0.8, s=1.0)


def plain_sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


class Joint(torch.optim.SGD):
    """Momentum SGD that takes the mean of the gradients over its group by itself, and trains twice what it shows."""

    def __init__(self, parameters: list[nn.Parameter], group: Any) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9, weight_decay=1e-2)
        self.group = group

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                dist.all_reduce(parameter.grad, group=self.group)
                parameter.grad /= 2
        return super().step(closure)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        change = [p for group in self.param_groups for p in group["params"]]
        before = [p.detach().clone() for p in change]
        with torch.no_grad():
            for p in change:
                dist.all_reduce(p, group=self.group)  # all replicas have to come here
        yield
        with torch.no_grad():
            for p, old in zip(change, before, strict=True):
                p.copy_(old)


def detached(parameters: list[nn.Parameter], group: Any) -> torch.optim.Optimizer:
    return undrift.DEF(parameters, 0.1, 0.9, 1e-2, ratio=4, lam=0.3, compressor="rbgs", seed=5, group=group)


def uncompressed(parameters: list[nn.Parameter], group: Any) -> torch.optim.Optimizer:
    return undrift.DEF(parameters, 0.1, 0.9, 1e-2, ratio=1, lam=0.3, group=group)


def build(case: str, blocks: int, replicas: int = 1) -> Engine:
    """The engine that a case's name says."""
    method, _, how = case.partition(" ")
    optimizer = {"nesterov": nesterov, "sum": unified, "plain": plain_sgd}.get(how, sgd)
    dtype = torch.float32 if how == "float32" else torch.float64
    micro = int(how[0]) if how[:1].isdigit() and ";" not in how else 0
    plain = how == "plain" or (micro > 0 and not how.endswith("whole"))  # without BatchNorm and dropout
    schedule = schedule_of(method, blocks, how if ";" in how else "")
    cpu, kind = torch.device("cpu"), METHODS[method].block
    joint = {"joint": Joint, "def": detached, "def 1": uncompressed}.get(how)
    plain = plain or how.startswith("def")
    made = modules(blocks, plain, dtype)
    split = [ModelPart(nn.Sequential(module), (str(k),)) for k, module in enumerate(made)]
    found = build_engine(kind, split, schedule, optimizer, F.cross_entropy, factor, 0, cpu, replicas, joint)
    return MicroBatches(found, method, micro, F.cross_entropy) if micro else found


def outcome(case: str, blocks: int) -> dict[str, Any]:
    """Everything that a case computes, as rank 0 knows it; with a new engine from the middle on, made from the state."""
    dtype = torch.float32 if case.endswith("float32") else torch.float64
    fed, run = batches(dtype=dtype), build(case, blocks)
    losses: list[Tensor | None] = []
    found: dict[str, Any] = {}
    for n, (x, y) in enumerate(fed):
        if n == STOP:
            found["stopped"] = {name: t.clone() for name, t in run.tensors().items()}
            found["scores"] = run.evaluate(fed[:3])
            state = ranks.first_rank_says(found["stopped"])
            run = build(case, blocks)
            run.restore({name: t.clone() for name, t in state.items()})
        # the first one is under way when the state is taken
        probe = n in (STOP - 3, STOP) and not case.startswith(("gpipe", "1f1b"))
        losses.append(run.step(x, y, probe=probe))
        if n == FLUSH:
            run.flush()
    losses += run.flush()
    found["tensors"] = {name: t.clone() for name, t in run.tensors().items()}
    found["differences"], found["losses"] = dict(run.differences), losses
    found["bytes"] = run.bytes_up, run.bytes_down
    return found


def replicated(case: str, blocks: int, replicas: int) -> dict[str, Any]:
    """The state of a run in which every replica has batches of its own."""
    run = build(case, blocks, replicas)
    for x, y in batches(seed=1 + ranks.rank() // blocks):
        run.step(x, y)
    run.flush()
    return {"tensors": run.tensors(), "model": run.model(), "scores": run.evaluate(batches(2))}


def main() -> None:
    torch.set_num_threads(1)
    with ranks.join():
        path, blocks, replicas = Path(sys.argv[1]), int(sys.argv[2]), int((*sys.argv[3:], 1)[0])
        if replicas > 1:
            joined = ("bp-k plain", "dsp plain", "dsp", "dsp joint", "dsp def", "dsp def 1")
            found = {case: replicated(case, blocks, replicas) for case in joined}
        else:
            found = {case: outcome(case, blocks) for case in CASES}
        torch.save(found, f"{path}.{ranks.rank()}")


if __name__ == "__main__":
    main()
