"""`undrift pipe`: from settings to records and a trained model, in one process or one a block."""

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
import torch.nn.functional as F
from torch import Tensor, nn

import undrift.data.federation as federation
from undrift.core import ranks
from undrift.core.device import arithmetic, pick_device
from undrift.core.errors import BadSetting
from undrift.data.dataset import Dataset
from undrift.data.load import load_dataset
from undrift.dataparallel.methods import number_or_auto
from undrift.dataparallel.optimizer import DEF
from undrift.jobs.course import Progress, Result
from undrift.jobs.protocol import InMemory
from undrift.jobs.registry import build_model
from undrift.jobs.start import start
from undrift.pipeline.dsp import whole_model
from undrift.pipeline.feed import Feed
from undrift.pipeline.links import Group
from undrift.pipeline.methods import METHODS, Engine, engine, schedule_of
from undrift.pipeline.micro import MicroBatches
from undrift.pipeline.processes import Processes
from undrift.pipeline.resolve import cut_names, resolved
from undrift.pipeline.settings import PipeConfig, from_mapping, plain
from undrift.pipeline.split import Part, parts
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

    def build(given: dict[str, Any]) -> tuple[PipeConfig, AbstractContextManager[Training]]:
        chosen = from_mapping(given)
        with arithmetic(chosen.precision, chosen.deterministic):  # layers are timed
            training = Training(chosen, load_dataset(chosen.dataset), say)
        return training.config, training.guarded()

    # One process or one a block: the bits are the same.
    return start(config, settings, build, out, resume, progress, plain=plain, alike=("threads",))


class Training(InMemory):
    """A run in memory. `round()` advances it; `tensors()` is all that a checkpoint needs."""

    def __init__(self, config: PipeConfig, dataset: Dataset, say: Callable[[str], None] = lambda text: None) -> None:
        self.device = ranks.device_of_rank(pick_device(config.device))
        if self.device.type == "cpu":
            keep_freed_memory()
        dtype = torch.float64 if config.dtype == "float64" else torch.float32
        data = federation.federate(dataset, "iid", 1, config.seed, self.device, config.val_fraction)
        self.feed = Feed(data, config.batch, config.replicas, config.seed, dtype)
        model = build_model(config.model, data.shape, data.classes, config.seed).to(self.device, dtype)
        self.parameters = sum(p.numel() for p in model.parameters())
        config = resolved(config, model, self.feed, say)
        self.config, self.t = config, 0
        self.steps = config.steps or self.feed.per_pass
        method = METHODS[config.method]
        schedule = schedule_of(config.method, config.blocks, config.queues)
        self.probe = self.steps - 1 - schedule.backward_lag[0]  # of a round, so that it is through when the round ends
        if config.differences and self.probe < 0:
            raise BadSetting(
                f"differences need rounds of more than {schedule.backward_lag[0]} batches, which the queues hold, "
                f"not {self.steps}; raise steps"
            )
        self.parts: list[Part] = parts(model, cut_names(config.cuts))

        def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
            nesterov = config.nesterov and config.momentum > 0
            return torch.optim.SGD(parameters, config.lr, config.momentum, 0, config.weight_decay, nesterov)

        def detached(parameters: list[nn.Parameter], group: Group) -> torch.optim.Optimizer:
            lam, rates = number_or_auto(config.lam), (config.lr, config.momentum, config.weight_decay)
            return DEF(parameters, *rates, config.ratio, lam, seed=config.seed, group=group)

        joint = detached if config.reduce == "def" and config.replicas > 1 else None
        found = engine(
            method.block, self.parts, schedule, optimizer, F.cross_entropy, lambda n: config.rate(n, self.steps),
            config.seed, self.device, config.replicas, joint,
        )  # fmt: skip
        micro = config.method in ("gpipe", "1f1b")
        self.engine: Engine = MicroBatches(found, config.method, config.micro, F.cross_entropy) if micro else found
        grid = found.grid if isinstance(found, Processes) else None
        self.replica = 0 if grid is None else grid.d
        self.needs = {"inputs": grid is None or grid.k == 0, "targets": grid is None or grid.k == config.blocks - 1}
        self.guard = found.guarded if isinstance(found, Processes) else contextlib.nullcontext
        self.diverged = False

    @contextlib.contextmanager
    def guarded(self) -> Iterator[Training]:
        """The run, while whatever happens to it is felt by the other ranks."""
        with self.guard():
            yield self

    def rounds(self, most: int, last: bool = False) -> list[RoundRecord]:
        """The next round."""
        record = self.round(last and most == 1)
        loss = record.train_loss  # None while the first batches are on their way up
        self.diverged = loss is not None and not math.isfinite(loss)
        return [record]

    def round(self, last: bool = False) -> RoundRecord:
        """One round of batches; `last` asks for an evaluation whatever the interval is."""
        began, engine = time.perf_counter(), self.engine
        before = engine.bytes_up, engine.bytes_down
        engine.stored = [(0, 0)] * len(engine.stored)
        loss, losses = torch.zeros((), dtype=torch.float64, device=self.device), 0
        for place in range(self.steps):
            n = self.t * self.steps + place
            x, y = self.feed.take(n, self.replica, **self.needs)
            found = engine.step(x, y, self.config.differences and place == self.probe)  # type: ignore[arg-type]
            if found is not None:
                loss, losses = loss + found, losses + 1
        self.t += 1
        each = shared(
            {
                "bytes": (engine.bytes_up - before[0], engine.bytes_down - before[1]),
                "loss": (float(loss), losses),
                "stored": engine.stored,
                "differences": engine.differences,
            }
        )
        count = sum(facts["loss"][1] for facts in each)
        more = self.evaluated() if last or self.t % self.config.eval_every == 0 else {}
        stored = [max(facts["stored"][k] for facts in each) for k in range(len(engine.stored))]
        more |= {f"stored_tensors_{k}": tensors for k, (tensors, _) in enumerate(stored)}
        more |= {f"stored_bytes_{k}": size for k, (_, size) in enumerate(stored)}
        different = {k: value for facts in each for k, value in facts["differences"].items()}
        more |= {f"gradient_difference_{k}": different[k] for k in sorted(different)}
        more["train_loss"] = sum(facts["loss"][0] for facts in each) / count if count else None
        bytes_up, bytes_down = (sum(facts["bytes"][way] for facts in each) for way in (0, 1))
        replicas = self.config.replicas
        return write_record(
            self.t, began, more, replicas, bytes_down=bytes_down, bytes_up=bytes_up, gradients=self.steps * replicas
        )

    def evaluated(self) -> dict[str, Any]:
        """Scores on the test set and, where there is one, on the validation set."""
        found: dict[str, Any] = dict(self.engine.evaluate(self.feed.test(**self.needs)))
        if len(self.feed.data.validation):
            scores = self.engine.evaluate(self.feed.validation(**self.needs))
            found |= {f"val_{name}": value for name, value in scores.items()}
        return found

    def tensors(self) -> dict[str, Tensor]:
        return self.engine.tensors()

    def restore(self, tensors: dict[str, Tensor], round: int) -> None:
        self.engine.restore(tensors)
        self.t = round

    def model(self) -> dict[str, Tensor]:
        return whole_model(self.parts, self.engine.model())

    def about(self) -> dict[str, Any]:
        return {"parameters": self.parameters}


def shared(facts: dict[str, Any]) -> list[dict[str, Any]]:
    """The facts of every rank, on every rank."""
    ranks.all_well()
    if ranks.count() == 1:
        return [facts]
    each: list[Any] = [None] * ranks.count()
    dist.all_gather_object(each, facts)
    return each
