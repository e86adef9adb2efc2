"""W workers train one model with a compressed method: simulated in this process, or as W ranks.

Simulated workers are stacked into one program or trained in turn. A rank runs the same lines as a worker in turn, so
both give the same bits up to the order of sums.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import undrift.data.federation as federation
from undrift.compress import make_compressor
from undrift.core import ranks
from undrift.core.device import pick_device
from undrift.core.errors import BadSetting
from undrift.core.forms import plain_forms
from undrift.core.streams import Purpose, fold, stream
from undrift.data.federation import Split
from undrift.data.load import load_dataset
from undrift.dataparallel.def_ import Detached, GroupRates
from undrift.dataparallel.methods import make_method
from undrift.dataparallel.parallel_config import ParallelConfig
from undrift.dataparallel.workers import Ranks, SimulatedWorkers
from undrift.jobs.protocol import InMemory
from undrift.jobs.registry import build_model
from undrift.jobs.start import compiles
from undrift.oracle.identity import identity
from undrift.oracle.layers import Context
from undrift.oracle.net import Net
from undrift.oracle.oracle import Oracle
from undrift.round.record import RoundRecord, write_record
from undrift.simulate.evaluate import accuracy, means, sample_scores, weights_of
from undrift.simulate.graphs import fuse, record_graph
from undrift.simulate.work import mini_batch

STATISTICS_BATCH = 500  # samples in a batch that recomputes BatchNorm's statistics


class WorkerGradient(NamedTuple):
    """The results of one worker, or of stacked workers."""

    gradient: Tensor  # [..., d]
    loss: Tensor  # [..., 1]
    buffers: Tensor  # [..., Q] BatchNorm's statistics


class ParallelTraining(InMemory):
    """A data-parallel run in memory. `rounds()` advances it; `tensors()` is its checkpoint."""

    def __init__(self, config: ParallelConfig) -> None:
        device = ranks.device_of_rank(pick_device(config.device))
        data = federation.federate(load_dataset(config.dataset), "iid", 1, config.seed, device, config.val_fraction)
        module = build_model(config.model, data.shape, data.classes, config.seed, data.train.targets.dim() - 1)
        net = Net(module, F.cross_entropy, torch.float64 if config.dtype == "float64" else torch.float32)
        workers = Ranks() if ranks.count() > 1 else SimulatedWorkers(config.workers)
        if isinstance(workers, Ranks):
            workers.agree(asdict(config))
        self.method: Any = make_method(config.method, config.lam, config.average_every)
        sizes = net.layout.sizes
        self.compressor = make_compressor(config.compressor, config.block, config.ratio, config.seed, sizes)
        self.method.check(self.compressor)
        self.config, self.net, self.data = config, net.to(device), data
        self.workers, self.metrics, self.device = workers, {"accuracy": accuracy}, device
        self.compute_stacked: Callable[..., WorkerGradient] = self.compute
        self.recording: Callable[[], tuple[Tensor, Tensor]] | None = None
        self.total = workers.count * config.batch
        if len(data.members) < self.total:
            raise BadSetting(
                f"{workers.count} workers with batches of {config.batch} need {self.total} training samples at least, "
                f"there are {len(data.members)}; lower workers or batch"
            )
        self.per_pass = len(data.members) // self.total  # iterations; a last short batch is left out
        self.steps = config.steps or self.per_pass
        self.stacked = config.execution == "stacked"
        on_device = isinstance(workers, SimulatedWorkers) and data.train.held is not None
        self.replay = config.replay and self.stacked and on_device
        self.compile = compiles(config, config.rounds * self.steps) and self.replay and device.type == "cuda"
        self.t = 0
        self.diverged = False
        x0, buffers = (v.to(device) for v in net.start())
        self.vectors = self.method.start(x0, workers)
        self.buffers = buffers.expand(*workers.lead, len(buffers)).clone()  # [..., Q]
        self.z = x0.expand(*workers.lead, len(x0)).clone()  # [..., d] where gradients are taken
        self.ids = torch.arange(workers.count, device=device)
        self.order: tuple[int, Tensor] = (-1, data.members)
        # The samples of an iteration and its keys for dropout and augmentation: a CUDA graph reads the same addresses.
        self.samples = torch.zeros(workers.count, config.batch, dtype=torch.int64, device=device)
        self.keys = self.ids.expand(2, -1).clone()

    def rows(self, iteration: int) -> Tensor:
        """[W, B] the samples of every worker in an iteration; every pass shuffles anew."""
        visit, place = divmod(iteration, self.per_pass)
        if visit != self.order[0]:
            members = self.data.members
            words = fold(
                stream(self.config.seed, Purpose.BATCHES, visit), torch.arange(len(members), device=self.device)
            )
            self.order = visit, members[words.argsort(stable=True)]
        return self.order[1][place * self.total : (place + 1) * self.total].view(self.workers.count, self.config.batch)

    def gradients(self, iteration: int) -> tuple[Tensor, Tensor]:
        """The gradients [..., d] of every worker at its point, and the losses [..., 1]."""
        self.samples.copy_(self.rows(iteration))
        for place, purpose in enumerate((Purpose.DROPOUT, Purpose.AUGMENT)):
            self.keys[place] = fold(stream(self.config.seed, purpose, iteration), self.ids)
        if self.replay and self.recording is None:
            try:
                if self.compile:
                    self.compute_stacked = fuse(self.compute, *self.inputs())
                self.recording = record_graph(self.play, [self.buffers], self.device)
            except RuntimeError as error:  # `recorded` has restored what it changed
                warnings.warn(f"gradients are not replayed, because they could not be recorded: {error}", stacklevel=2)
                self.replay, self.compute_stacked = False, self.compute
        return self.play() if self.recording is None else self.recording()

    def compute(
        self, ids: Tensor, rows: Tensor, dropout: Tensor, augment: Tensor, z: Tensor, buffers: Tensor
    ) -> WorkerGradient:
        """The gradient of a worker, or of stacked workers, at z."""
        batch = mini_batch(self.net, self.data, ids, rows, None, dropout, augment)
        oracle = Oracle(self.net, batch, buffers)
        return WorkerGradient(oracle.grad(z), oracle.loss, oracle.buffers)

    def inputs(self) -> tuple[Tensor, ...]:
        """The arguments of `compute` for all workers of this process."""
        return self.ids, self.samples, *self.keys, self.z, self.buffers

    def play(self) -> tuple[Tensor, Tensor]:
        """Compute one iteration from `inputs`; a CUDA graph can record it."""
        if isinstance(self.workers, Ranks):
            ids, rows, dropout, augment = (t[self.workers.rank] for t in self.inputs()[:4])
            g, loss, after = self.compute(ids, rows, dropout, augment, self.z, self.buffers)
        elif self.stacked:
            g, loss, after = self.compute_stacked(*self.inputs())
        else:
            each = [self.compute(*(t[k] for t in self.inputs())) for k in range(self.workers.count)]
            g, loss, after = (torch.stack(parts) for parts in zip(*each, strict=True))
        self.buffers.copy_(after)
        return g, loss

    def round(self, last: bool = False) -> RoundRecord:
        """One round of iterations; the last round is always evaluated."""
        began, sent = time.perf_counter(), self.workers.sent
        losses = torch.zeros((), dtype=torch.float64, device=self.device)
        for n in range(self.steps):
            iteration = self.t * self.steps + n
            g, loss = self.gradients(iteration)
            rates = self.rates(n, slice(0, g.shape[-1]))
            if not self.method.decoupled:
                g.add_(self.z, alpha=self.config.weight_decay)
            self.method.step(self.vectors, g, [rates], iteration, self.compressor, self.workers)
            self.method.point(self.vectors, self.z)
            losses += loss.double().mean()
        sent = self.workers.sent - sent
        self.t += 1
        train_loss = float(self.workers.mean((losses / self.steps).expand(*self.workers.lead, 1).clone()))
        self.diverged = not train_loss < float("inf")
        facts = {name: float(self.workers.mean(value)) for name, value in self.method.facts(self.vectors).items()}
        scores = self.evaluate() if last or self.t % self.config.eval_every == 0 else {}
        numbers = {"train_loss": train_loss} | scores | facts
        workers = self.workers.count
        return write_record(self.t, began, numbers, workers, bytes_up=sent, gradients=self.steps * workers)

    def rates(self, n: int, part: slice) -> GroupRates:
        config = self.config
        return GroupRates(part, self.rate(n), config.momentum, config.momentum2, config.epsilon, config.weight_decay)

    def rate(self, n: int) -> float:
        """The learning rate of iteration n of this round."""
        return self.config.schedule.rate(self.config.lr, self.t, self.t + n / self.steps)

    def rounds(self, most: int, last: bool = False) -> list[RoundRecord]:
        """The next round."""
        with plain_forms(self.config.execution == "debug"):
            return [self.round(last and most == 1)]

    def evaluate(self) -> dict[str, float]:
        """Scores of the model on test and validation samples, of x and y where they differ, and the workers' spread."""
        data, point = self.data, self.method.returns
        scores: dict[str, float] = {}
        for which in ("x", "y") if isinstance(self.method, Detached) else (point,):
            x, buffers = self.weights(which)

            def score(split: Split, rows: Tensor, x: Tensor = x, buffers: Tensor = buffers) -> dict[str, float]:
                scores = sample_scores(self.net, x, buffers, split, data.transform, self.metrics, rows)
                return means(scores, weights_of(self.net, split, rows))

            tested = score(data.test, torch.arange(len(data.test), device=self.device))
            if isinstance(self.method, Detached):
                scores |= {f"{which}_{name}": value for name, value in tested.items()}
            if which == point:
                held_out = score(data.train, torch.from_numpy(data.validation).to(self.device))
                scores |= tested | {f"val_{name}": value for name, value in held_out.items()}
        apart = (self.z - self.workers.mean(self.z.clone())).square().sum(-1, keepdim=True)
        return scores | {"consistency": float(self.workers.mean(apart))}

    @torch.no_grad()
    def weights(self, which: str) -> tuple[Tensor, Tensor]:
        """The model x or y [d] and its BatchNorm statistics [Q]."""
        x = self.method.model(self.vectors, self.workers, which)
        buffers = self.workers.mean(self.buffers.clone())
        if self.net.buffer_layout.names and self.config.statistics:
            key = torch.zeros((), dtype=torch.int64, device=self.device)
            for rows in self.data.members.split(STATISTICS_BATCH)[: self.config.statistics]:
                inputs = self.data.transform(self.data.train.take(rows), self.net.dtype)
                _, buffers = self.net(x, buffers, inputs, Context(None, key, dropout=False))
        return x, buffers

    def tensors(self) -> dict[str, Tensor]:
        """A checkpoint: workers are rows, so that simulated workers and ranks can go on from either."""
        vectors = self.vectors._asdict() | {"buffers": self.buffers}
        return {n: self.workers.all_rows(v) if n in (*self.method.own, "buffers") else v for n, v in vectors.items()}

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
        return {name: tensor.cpu() for name, tensor in self.net.state_dict(*self.weights(self.method.returns)).items()}

    def choices(self) -> dict[str, Any]:
        return {"compile": "on" if self.compile else "off"} if self.device.type == "cuda" else {}

    def about(self) -> dict[str, Any]:
        return {"parameters": self.net.layout.entries, "task": identity(self.net, self.data)}
