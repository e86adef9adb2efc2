"""`undrift pipe`: train a model in blocks, in one process or one per block."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import undrift.data.federation as federation
from undrift.core import ranks
from undrift.core.device import arithmetic, pick_device
from undrift.core.errors import BadSetting
from undrift.data.dataset import Dataset
from undrift.data.load import load_dataset
from undrift.dataparallel.methods import parse_lam
from undrift.dataparallel.optimizer import DEF
from undrift.jobs.course import Progress, Result
from undrift.jobs.protocol import InMemory
from undrift.jobs.registry import build_model
from undrift.jobs.start import start
from undrift.oracle.identity import identity_of_data
from undrift.pipeline.block_scores import mean_cross_entropy
from undrift.pipeline.engines import METHODS, Engine, build_engine, schedule_of
from undrift.pipeline.feed import Feed
from undrift.pipeline.links import Group
from undrift.pipeline.micro import MicroBatches
from undrift.pipeline.pipe_config import PipeConfig, from_mapping, plain
from undrift.pipeline.processes import Processes
from undrift.pipeline.resolve import parse_cuts, resolve
from undrift.pipeline.split import cut_model, join_parts
from undrift.round.record import RoundRecord, write_record
from undrift.simulate.choose import keep_freed_memory


@ranks.join()
def run_pipe(
    config: PipeConfig | Mapping[str, Any] | str | Path | None = None,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    say: Callable[[str], None] = lambda text: None,
    **settings: Any,
) -> Result[PipeConfig]:
    """Train a model in blocks. `config` is a PipeConfig, a mapping or a TOML file; `settings` override it.

    >>> result = run_pipe(method="dsp", queues="1,0;2,0", cuts="hidden2", rounds=1, steps=5, batch=32)
    >>> len(result.records), result.records[0]["gradients"]
    (1, 5)
    """

    def build(given: dict[str, Any]) -> tuple[PipeConfig, AbstractContextManager[PipelineTraining]]:
        chosen = from_mapping(given)
        with arithmetic(chosen.precision, chosen.deterministic):  # as in the run: layers are timed here
            training = PipelineTraining(chosen, load_dataset(chosen.dataset), say)
        return training.config, training.guarding()

    # The number of ranks does not change the bits.
    return start(config, settings, build, out, resume, progress, plain=plain, alike=("threads",))


class PipelineTraining(InMemory):
    """A pipeline run in memory. `rounds()` advances it; `tensors()` is its checkpoint."""

    def __init__(self, config: PipeConfig, dataset: Dataset, say: Callable[[str], None] = lambda text: None) -> None:
        self.device = ranks.device_of_rank(pick_device(config.device))
        if self.device.type == "cpu":
            keep_freed_memory()
        dtype = torch.float64 if config.dtype == "float64" else torch.float32
        data = federation.federate(dataset, "iid", 1, config.seed, self.device, config.val_fraction)
        self.feed = Feed(data, config.batch, config.replicas, config.seed, dtype)
        model = build_model(config.model, data.shape, data.classes, config.seed).to(self.device, dtype)
        self.parameters = sum(p.numel() for p in model.parameters())
        config = resolve(config, model, self.feed, say)
        self.config, self.t = config, 0
        self.steps = config.steps or self.feed.per_pass
        method = METHODS[config.method]
        schedule = schedule_of(config.method, config.blocks, config.queues)
        self.probe = self.steps - 1 - schedule.backward_lag[0]  # the last batch whose backward ends within the round
        if config.differences and self.probe < 0:
            lag = schedule.backward_lag[0]
            raise BadSetting(f"differences need rounds of more than {lag} batches, not {self.steps}; raise steps")
        self.parts = cut_model(model, parse_cuts(config.cuts))

        # Their rate is 1, which config.rate multiplies.
        def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
            nesterov = config.nesterov and config.momentum > 0
            return torch.optim.SGD(parameters, 1.0, config.momentum, 0, config.weight_decay, nesterov)

        def optimizer_of(parameters: list[nn.Parameter], group: Group) -> torch.optim.Optimizer:
            lam, rates = parse_lam(config.lam), (1.0, config.momentum, config.weight_decay)
            return DEF(parameters, *rates, config.ratio, lam, seed=config.seed, group=group)

        joint = optimizer_of if config.reduce == "def" and config.replicas > 1 else None
        engine = build_engine(
            method.block, self.parts, schedule, optimizer, mean_cross_entropy, lambda n: config.rate(n, self.steps),
            config.seed, self.device, config.replicas, joint,
        )  # fmt: skip
        micro = config.method in ("gpipe", "1f1b")
        self.engine: Engine = MicroBatches(engine, config.method, config.micro, mean_cross_entropy) if micro else engine
        grid = engine.grid if isinstance(engine, Processes) else None
        self.replica = 0 if grid is None else grid.d
        self.needs = {"inputs": grid is None or grid.k == 0, "targets": grid is None or grid.k == config.blocks - 1}
        self.guard = engine.guard if isinstance(engine, Processes) else contextlib.nullcontext
        self.diverged = False

    @contextlib.contextmanager
    def guarding(self) -> Iterator[PipelineTraining]:
        """The run, whose errors stop the other ranks."""
        with self.guard():
            yield self

    def rounds(self, most: int, last: bool = False) -> list[RoundRecord]:
        """The next round."""
        record = self.round(last and most == 1)
        loss = record.train_loss  # None while no batch has reached the last block
        self.diverged = loss is not None and not math.isfinite(loss)
        return [record]

    def round(self, last: bool = False) -> RoundRecord:
        """One round of batches; the last round is always evaluated."""
        began, engine = time.perf_counter(), self.engine
        before = engine.bytes_up, engine.bytes_down
        engine.stored = [(0, 0)] * len(engine.stored)
        loss, losses = torch.zeros((), dtype=torch.float64, device=self.device), 0
        for place in range(self.steps):
            n = self.t * self.steps + place
            x, y = self.feed.take(n, self.replica, **self.needs)
            batch_loss = engine.step(x, y, self.config.differences and place == self.probe)  # type: ignore[arg-type]
            if batch_loss is not None:
                loss, losses = loss + batch_loss, losses + 1
        self.t += 1
        sent = engine.bytes_up - before[0], engine.bytes_down - before[1]
        facts = {"bytes": sent, "loss": (float(loss), losses)}
        each = gather_facts(facts | {"stored": engine.stored, "differences": engine.differences})
        count = sum(facts["loss"][1] for facts in each)
        more = self.evaluate() if last or self.t % self.config.eval_every == 0 else {}
        stored = [max(facts["stored"][k] for facts in each) for k in range(len(engine.stored))]
        more |= {f"stored_tensors_{k}": tensors for k, (tensors, _) in enumerate(stored)}
        more |= {f"stored_bytes_{k}": size for k, (_, size) in enumerate(stored)}
        differences = {k: value for facts in each for k, value in facts["differences"].items()}
        more |= {f"gradient_difference_{k}": differences[k] for k in sorted(differences)}
        more["train_loss"] = sum(facts["loss"][0] for facts in each) / count if count else None
        bytes_up, bytes_down = (sum(facts["bytes"][way] for facts in each) for way in (0, 1))
        replicas = self.config.replicas
        return write_record(
            self.t, began, more, replicas, bytes_down=bytes_down, bytes_up=bytes_up, gradients=self.steps * replicas
        )

    def evaluate(self) -> dict[str, Any]:
        """Scores on the test set and, if there is one, on the validation set."""
        scores: dict[str, Any] = dict(self.engine.evaluate(self.feed.evaluation_batches(False, **self.needs)))
        if len(self.feed.data.validation):
            held_out = self.engine.evaluate(self.feed.evaluation_batches(True, **self.needs))
            scores |= {f"val_{name}": value for name, value in held_out.items()}
        return scores

    def tensors(self) -> dict[str, Tensor]:
        return self.engine.tensors()

    def restore(self, tensors: dict[str, Tensor], round: int) -> None:
        self.engine.restore(tensors)
        self.t = round

    def model(self) -> dict[str, Tensor]:
        return join_parts(self.parts, self.engine.model())

    def about(self) -> dict[str, Any]:
        return {"parameters": self.parameters, "task": identity_of_data(self.feed.data)}


def gather_facts(facts: dict[str, Any]) -> list[dict[str, Any]]:
    """The facts of all ranks, on every rank."""
    ranks.all_well()
    if ranks.count() == 1:
        return [facts]
    each: list[Any] = [None] * ranks.count()
    dist.all_gather_object(each, facts)
    return each
