"""W workers train one model with a compressed method: all of them in this process, or this process is one of W ranks.

Simulated workers are stacked into one program or trained one after another; a rank does what a worker in turn does, with the
same lines, so that both give the same bits up to the order of sums.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from undrift.compress import Compressor
from undrift.core.errors import BadSetting
from undrift.core.schedule import Schedule
from undrift.core.streams import Purpose, fold, stream
from undrift.data.federation import Federation
from undrift.dataparallel.def_ import Detached, Rates
from undrift.dataparallel.methods import Method
from undrift.dataparallel.workers import Ranks, SimulatedWorkers
from undrift.jobs.protocol import InMemory
from undrift.oracle.net import Context, Net
from undrift.oracle.oracle import Oracle
from undrift.round.record import RoundRecord, write_record
from undrift.simulate.evaluate import Metric, means, sample_scores
from undrift.simulate.graphs import fused, recorded
from undrift.simulate.work import mini_batch

STATISTICS_BATCH = 500  # samples of a batch from which BatchNorm's statistics are taken anew


@dataclass(frozen=True)
class ParallelPlan:
    """How the workers train, apart from the method."""

    batch: int  # of each worker
    steps: int  # iterations of a round; 0: a pass over the training samples
    seed: int
    lr: float
    momentum: float
    weight_decay: float
    schedule: Schedule = Schedule()
    eval_every: int = 1
    statistics: int = 0  # batches from which BatchNorm's statistics are taken anew before a test; 0: the workers' mean
    stacked: bool = False  # simulated workers as one program
    replay: bool = False  # which is replayed as a CUDA graph
    compile: bool = False  # and compiled


class Found(NamedTuple):
    """Of a worker, or of stacked ones: the gradient [..., d], the loss [..., 1], BatchNorm's statistics [..., Q]."""

    gradient: Tensor
    loss: Tensor
    buffers: Tensor


class ParallelTraining(InMemory):
    """A run in memory. `rounds()` advances it; `tensors()` is all that a checkpoint needs."""

    def __init__(
        self,
        method: Method,
        compressor: Compressor,
        net: Net,
        data: Federation,
        plan: ParallelPlan,
        workers: SimulatedWorkers | Ranks,
        metrics: Mapping[str, Metric],
        device: torch.device,
    ) -> None:
        method.check(compressor)
        self.method: Any = method
        self.compressor, self.net, self.data, self.plan = compressor, net.to(device), data, plan
        self.workers, self.metrics, self.device = workers, metrics, device
        here = isinstance(workers, SimulatedWorkers) and data.train.held is not None  # all of it on the device
        self.replay = plan.replay and plan.stacked and here
        self.compile = plan.compile and self.replay and device.type == "cuda"
        self.together: Callable[..., Found] = self.of
        self.recording: Callable[[], tuple[Tensor, Tensor]] | None = None
        self.total = workers.count * plan.batch
        if len(data.members) < self.total:
            raise BadSetting(
                f"{workers.count} workers with batches of {plan.batch} need {self.total} training samples at least, "
                f"there are {len(data.members)}; lower workers or batch"
            )
        self.per_pass = len(data.members) // self.total  # iterations; a last batch that is not full is left out
        self.steps = plan.steps or self.per_pass
        self.t = 0
        self.diverged = False
        x0, buffers = (v.to(device) for v in net.start())
        self.vectors = self.method.start(x0, workers)
        self.buffers = buffers.expand(*workers.lead, len(buffers)).clone()  # [..., Q] of each worker
        self.z = x0.expand(*workers.lead, len(x0)).clone()  # where gradients are taken
        self.ids = torch.arange(workers.count, device=device)
        self.order: tuple[int, Tensor] = (-1, data.members)
        # What an iteration is told, in the same place each time: its samples and the keys of its random numbers.
        self.told = (
            torch.zeros(workers.count, plan.batch, dtype=torch.int64, device=device),
            self.ids.expand(2, -1).clone(),
        )

    def rows(self, iteration: int) -> Tensor:
        """[W, B] the samples of every worker in an iteration: each pass deals all samples out anew."""
        visit, place = divmod(iteration, self.per_pass)
        if visit != self.order[0]:
            members = self.data.members
            words = fold(stream(self.plan.seed, Purpose.BATCHES, visit), torch.arange(len(members), device=self.device))
            self.order = visit, members[words.argsort(stable=True)]
        found = self.order[1][place * self.total : (place + 1) * self.total]
        return found.view(self.workers.count, self.plan.batch)

    def gradients(self, iteration: int) -> tuple[Tensor, Tensor]:
        """The gradients [..., d] of every worker at its point, and the losses [..., 1]."""
        rows, keys = self.told
        rows.copy_(self.rows(iteration))
        for place, purpose in enumerate((Purpose.DROPOUT, Purpose.AUGMENT)):
            keys[place] = fold(stream(self.plan.seed, purpose, iteration), self.ids)
        if self.replay and self.recording is None:
            try:
                self.record()
            except RuntimeError as error:  # what was changed has been put back
                warnings.warn(f"gradients are not replayed, because they could not be recorded: {error}", stacklevel=2)
                self.replay, self.together = False, self.of
        return self.play() if self.recording is None else self.recording()

    def record(self) -> None:
        """Make `play` a CUDA graph."""
        if self.compile:
            self.together = fused(self.of, *self.inputs())
        self.recording = recorded(self.play, [self.buffers], self.device)

    def of(self, ids: Tensor, rows: Tensor, dropout: Tensor, augment: Tensor, z: Tensor, buffers: Tensor) -> Found:
        """What a worker finds at its point z, or stacked ones at theirs."""
        batch = mini_batch(self.net, self.data, ids, rows, None, dropout, augment)
        oracle = Oracle(self.net, batch, buffers)
        return Found(oracle.grad(z), oracle.loss, oracle.buffers)

    def inputs(self) -> tuple[Tensor, ...]:
        """What `of` asks for, of all workers here."""
        rows, (dropout, augment) = self.told
        return self.ids, rows, dropout, augment, self.z, self.buffers

    def play(self) -> tuple[Tensor, Tensor]:
        """The gradients and losses of the iteration that `told` describes; on a GPU it can be recorded as a graph."""
        if isinstance(self.workers, Ranks):
            ids, rows, dropout, augment = (t[self.workers.rank] for t in self.inputs()[:4])
            g, loss, after = self.of(ids, rows, dropout, augment, self.z, self.buffers)
        elif self.plan.stacked:
            g, loss, after = self.together(*self.inputs())
        else:
            each = [self.of(*(t[k] for t in self.inputs())) for k in range(self.workers.count)]
            g, loss, after = (torch.stack(parts) for parts in zip(*each, strict=True))
        self.buffers.copy_(after)
        return g, loss

    def round(self, last: bool = False) -> RoundRecord:
        """One round of iterations; `last` asks for an evaluation whatever the interval is."""
        began, sent = time.perf_counter(), self.workers.sent
        losses = torch.zeros((), dtype=torch.float64, device=self.device)
        for n in range(self.steps):
            iteration = self.t * self.steps + n
            g, loss = self.gradients(iteration)
            g.add_(self.z, alpha=self.plan.weight_decay)
            rates = Rates(slice(0, g.shape[-1]), self.rate(n), self.plan.momentum)
            self.method.step(self.vectors, g, [rates], iteration, self.compressor, self.workers)
            self.method.point(self.vectors, self.z)
            losses += loss.double().mean()
        sent = self.workers.sent - sent
        self.t += 1
        train_loss = float(self.workers.mean((losses / self.steps).expand(*self.workers.lead, 1).clone()))
        self.diverged = not train_loss < float("inf")
        facts = {name: float(value) for name, value in self.method.facts(self.vectors).items()}
        scores: dict[str, float] = {}
        if last or self.t % self.plan.eval_every == 0:
            scores = self.evaluate()
        numbers = {"train_loss": train_loss} | scores | facts
        return write_record(
            self.t, began, numbers, self.workers.count, bytes_up=sent, gradients=self.steps * self.workers.count
        )

    def rate(self, n: int) -> float:
        """The rate of iteration n of this round."""
        return self.plan.schedule.rate(self.plan.lr, self.t, self.t + n / self.steps)

    def rounds(self, most: int, last: bool = False) -> list[RoundRecord]:
        """The next round."""
        return [self.round(last and most == 1)]

    def evaluate(self) -> dict[str, float]:
        """The model's scores on the test samples, those of x and of y where they differ, and how far apart the points are."""
        point = self.method.returns
        scores: dict[str, float] = {}
        for which in ("x", "y") if isinstance(self.method, Detached) else (point,):
            x, buffers = self.at(which)
            found = self.tested(x, buffers)
            scores |= (
                {f"{which}_{name}": value for name, value in found.items()} if isinstance(self.method, Detached) else {}
            )
            if which == point:
                validation = torch.from_numpy(self.data.validation).to(self.device)
                held_out = sample_scores(
                    self.net, x, buffers, self.data.train, self.data.transform, self.metrics, validation
                )
                scores |= found | {f"val_{name}": value for name, value in means(held_out).items()}
        apart = (self.z - self.workers.mean(self.z.clone())).square().sum(-1, keepdim=True)
        return scores | {"consistency": float(self.workers.mean(apart))}

    def tested(self, x: Tensor, buffers: Tensor) -> dict[str, float]:
        test, rows = self.data.test, torch.arange(len(self.data.test), device=self.device)
        return means(sample_scores(self.net, x, buffers, test, self.data.transform, self.metrics, rows))

    @torch.no_grad()
    def at(self, which: str) -> tuple[Tensor, Tensor]:
        """The model x or y [d] and BatchNorm's statistics [Q] for it."""
        x = self.method.returned(self.vectors, self.workers, which)
        buffers = self.workers.mean(self.buffers.clone())
        if self.net.buffer_layout.names and self.plan.statistics:
            key = torch.zeros((), dtype=torch.int64, device=self.device)
            for rows in self.data.members.split(STATISTICS_BATCH)[: self.plan.statistics]:
                inputs = self.data.transform(self.data.train.take(rows), self.net.dtype)
                _, buffers = self.net(x, buffers, inputs, Context(None, key, dropout=False))
        return x, buffers

    # What a checkpoint holds: the vectors of all workers as rows, so that simulated workers and ranks can go on from either.
    def tensors(self) -> dict[str, Tensor]:
        found = self.vectors._asdict() | {"buffers": self.buffers}
        return {n: self.workers.all_rows(v) if n in (*self.method.own, "buffers") else v for n, v in found.items()}

    def restore(self, tensors: dict[str, Tensor], t: int) -> None:
        for name, vector in (self.vectors._asdict() | {"buffers": self.buffers}).items():
            stored = tensors[name]
            if name in (*self.method.own, "buffers") and isinstance(self.workers, Ranks):
                stored = stored[self.workers.rank]
            if stored.shape != vector.shape:
                raise ValueError(f"{name} is {list(stored.shape)}, not {list(vector.shape)}")
            vector.copy_(stored)
        self.method.point(self.vectors, self.z)
        self.t = t

    def model(self) -> dict[str, Tensor]:
        """The method's model as a plain state dict on the CPU."""
        return {name: tensor.cpu() for name, tensor in self.net.state_dict(*self.at(self.method.returns)).items()}

    def choices(self) -> dict[str, Any]:
        return {"compile": "on" if self.compile else "off"} if self.device.type == "cuda" else {}

    def about(self) -> dict[str, Any]:
        return {"parameters": self.net.layout.entries}
