"""`undrift pipe`: from settings to records and a trained model, in one process or one a block."""

from __future__ import annotations

import contextlib
import math
import platform
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import undrift.data.federation as federation
from undrift.core import ranks
from undrift.core.arithmetic import arithmetic, pick_device
from undrift.core.errors import BadRunFolder, BadSetting
from undrift.data.dataset import Dataset
from undrift.data.load import load_dataset
from undrift.dataparallel.methods import number_or_auto
from undrift.dataparallel.optimizer import DEF
from undrift.jobs.config import from_toml, parse_stop
from undrift.jobs.folder import ReadOnlyFolder, RunFolder
from undrift.jobs.registry import build_model
from undrift.jobs.run import Progress, Result, check_same_run, commit
from undrift.pipeline.dsp import whole_model
from undrift.pipeline.feed import Feed
from undrift.pipeline.links import Group
from undrift.pipeline.methods import METHODS, Engine, engine, schedule_of
from undrift.pipeline.micro import MicroBatches
from undrift.pipeline.processes import Processes
from undrift.pipeline.resolve import cut_names, resolved
from undrift.pipeline.settings import PipeConfig, as_toml, from_mapping
from undrift.pipeline.split import Part, parts
from undrift.round.record import RoundRecord, write_record
from undrift.simulate.choose import keep_freed_memory


@ranks.joined()
def run_pipe(
    config: PipeConfig | Mapping[str, Any] | str | Path | None = None,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    say: Callable[[str], None] = lambda text: None,
    **settings: Any,
) -> Result:
    """Train a model in blocks. `config` is a PipeConfig, a mapping or a TOML file; `settings` override it.

    >>> result = run_pipe(method="dsp", queues="1,0;2,0", cuts="hidden2", rounds=1, steps=5, batch=32)
    >>> len(result.records), result.records[0]["gradients"]
    (1, 5)
    """
    given: dict[str, Any] = {}
    if isinstance(config, str | Path):
        given = from_toml(Path(config))
    elif config is not None:
        given = asdict(config) if isinstance(config, PipeConfig) else dict(config)
    given = _flat(given) | settings
    folder = None
    if out is not None:
        folder = RunFolder(Path(out)) if ranks.rank() == 0 else ReadOnlyFolder(Path(out))
    if resume:
        if folder is None:
            raise BadSetting("resume needs the run's folder; give --out DIR")
        stored = folder.settings()
        made = stored.pop("made", {})
        check_same_run(folder, _flat(stored), given)
        given = _flat(stored) | given
        if made.get("threads") not in (None, torch.get_num_threads()) and ranks.rank() == 0:
            warnings.warn(
                f"{folder.path} was run on {made['threads']} threads, now there are {torch.get_num_threads()}: "
                "the last digits may differ",
                stacklevel=3,
            )
    chosen = from_mapping(given)
    with arithmetic(chosen.precision, chosen.deterministic):
        training = Training(chosen, load_dataset(chosen.dataset), say)
        ranks.all_well()  # before anything is written
        with contextlib.ExitStack() as stack:
            if folder is not None:
                folder.make(resume)
                stack.enter_context(folder.locked())
            ranks.all_well()  # a folder that rank 0 cannot have: no block may wait for its first batch then
            stack.enter_context(training.guarded())
            return drive(training, folder, resume, progress)


def _flat(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings as run.toml holds them, under the names of the flags."""
    flat = settings | settings.get("set", {})
    if "algorithm" in flat:
        flat["method"] = flat.pop("algorithm")
    return {name: value for name, value in flat.items() if name not in ("set", "command")}


def drive(training: Training, folder: RunFolder | None, resume: bool, progress: Progress | None) -> Result:
    """All rounds from where the run stands to its end, with its records and checkpoints."""
    config, records, elapsed = training.config, [], 0.0
    stop = parse_stop(config.stop_at)
    if folder is not None and not resume:
        folder.create(training.written())
    if folder is not None and resume:
        checkpoint = folder.load(config.rounds)
        if checkpoint is not None:
            tensors, facts = checkpoint
            try:
                training.restore(tensors, facts["round"])
            except (KeyError, ValueError, RuntimeError) as error:
                raise BadRunFolder(f"the checkpoint in {folder.path} is of another run: {error}") from error
            elapsed = facts["seconds"]
        ranks.all_well()  # every rank has read the checkpoint, and rank 0 has cut the records back to it
        records = folder.records()
        folder.write_settings(training.written())
    began, saved = time.perf_counter() - elapsed, training.t
    reached = _reached(stop, records[-1] if records else {}, elapsed)
    while training.t < config.rounds and not reached:
        record = training.round(last=training.t + 1 == config.rounds).as_dict()
        records.append(record)
        elapsed = time.perf_counter() - began
        trained = record["train_loss"]  # None while the first batches are on their way up
        diverged = trained is not None and not math.isfinite(trained)
        reached = "diverged" if diverged else _reached(stop, record, elapsed)
        if folder is not None:
            folder.append(record)
        if progress is not None and ranks.rank() == 0:
            progress(record, config.rounds)
        due = training.t % config.checkpoint_every == 0 and training.t < config.rounds and not reached
        if folder is not None and due:
            folder.save(training.tensors(), {"round": training.t, "seconds": elapsed, "finished": False})
            saved = training.t
    tensors, model = training.tensors(), whole_model(training.parts, training.engine.model())
    if folder is not None and ranks.first_rank_says(saved < training.t or not folder.finished()):
        facts = {"seconds": elapsed, "finished": True, "stopped": reached or "rounds"}
        folder.write_model(model)
        folder.save(tensors, {"round": training.t} | facts)
    chosen: Any = config
    return Result(records, model, chosen, folder.path if folder else None, reached or "rounds")


def _reached(stop: Mapping[str, float], record: Mapping[str, Any], elapsed: float) -> str:
    """Why the run ends here, as rank 0 sees it, or nothing."""
    if not stop:
        return ""
    accurate = "accuracy" in stop and (record.get("accuracy") or 0.0) >= stop["accuracy"]
    late = "time" in stop and elapsed >= stop["time"]
    return ranks.first_rank_says("accuracy" if accurate else "time" if late else "")


class Training:
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
        self.guarded = found.guarded if isinstance(found, Processes) else contextlib.nullcontext

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

    def written(self) -> dict[str, Any]:
        """What run.toml says: every resolved setting, and under [made] what it was made with."""
        from undrift import __version__

        made = {
            "undrift": __version__, "commit": commit(), "python": platform.python_version(), "torch": torch.__version__,
            "numpy": np.__version__, "device": str(self.device), "threads": torch.get_num_threads(),
            "ranks": ranks.count(), "parameters": self.parameters,
        }  # fmt: skip
        return as_toml(self.config) | {"made": made}


def shared(facts: dict[str, Any]) -> list[dict[str, Any]]:
    """The facts of every rank, on every rank."""
    ranks.all_well()
    if ranks.count() == 1:
        return [facts]
    each: list[Any] = [None] * ranks.count()
    dist.all_gather_object(each, facts)
    return each
