"""`undrift tune`: picks settings by successive halving on validation samples, in packed runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import tomli_w

from undrift.core.errors import BadSetting
from undrift.core.files import make_folder, writing
from undrift.jobs.batch import Batch, Run, Say
from undrift.jobs.config import FIELDS
from undrift.jobs.plain_values import as_type, read_toml
from undrift.jobs.results import Line, Results
from undrift.jobs.sweep import KINDS, Job, plan

SEEDS = (100,)  # apart from those of final runs
RUNGS = (0.1, 0.25, 1.0)
KEEP = 4
VALIDATION = 0.1
T = TypeVar("T")


@dataclass
class Spent:
    """What a search cost."""

    runs: int = 0
    rounds: int = 0
    whole: float = 0.0  # in runs of full length
    seconds: float = 0.0

    def add(self, lines: Sequence[Line | None], rounds: int) -> None:
        """Count trials; `rounds` is the length of a full run."""
        for line in filter(None, lines):
            self.runs, self.rounds, self.seconds = (
                self.runs + 1,
                self.rounds + line["rounds"],
                self.seconds + line["seconds"],
            )
            self.whole += line["rounds"] / max(rounds, 1)

    def __str__(self) -> str:
        return f"{self.runs} trials, {self.rounds} rounds, as many as {self.whole:.1f} full runs, {self.seconds:.1f} s"


def halve(
    candidates: Sequence[T],
    rounds: int,
    score: Callable[[list[T], int], list[float | None]],
    rungs: Sequence[float] = RUNGS,
    keep: int = KEEP,
) -> T | None:
    """The best candidate: all run for the first share of the rounds, one in `keep` of them for the next, and so on.

    `score` runs candidates for so many rounds; among equals the first is better. None, as after a run that diverged,
    drops a candidate out; where all that went on drop out, the next best go on in their place. So what is picked has a
    score at the last rung; where nothing has, None is picked. A single candidate needs no trial.

    >>> asked = []
    >>> def score(some, rounds):
    ...     asked.append((len(some), rounds))
    ...     return [-abs(value - 11) for value in some]
    >>> halve(list(range(64)), 100, score), asked
    (11, [(64, 10), (16, 25), (4, 100)])
    """

    def best(left: list[T], shares: Sequence[float]) -> T | None:
        scores = score(left, max(1, math.ceil(shares[0] * rounds - 1e-9)))
        known = [(worth, each) for worth, each in zip(scores, left, strict=True) if worth is not None]
        order = [each for _, each in sorted(known, key=lambda pair: pair[0], reverse=True)]
        if len(shares) == 1:
            return order[0] if order else None
        many = -(-len(left) // keep)
        for n in range(0, len(order), many):
            found = best(order[n : n + many], shares[1:])
            if found is not None:
                return found
        return None

    return candidates[0] if len(candidates) == 1 else best(list(candidates), rungs)


def trial_score(line: Line | None, take: str = "last") -> float | None:
    """What a trial is judged by: its last or best score on validation samples, or the loss where nothing else is known.

    With `own_test` it is that of the models that serve the clients, on what each one holds out under the trial's own seed.
    """
    scores = {} if line is None or line["stopped"] == "diverged" else line["scores"]
    own = ("own_dice", "own_accuracy") if line is not None and line["settings"].get("own_test") else ()
    for name in ("val_own_dice", "val_own_accuracy", *own, "val_dice", "val_accuracy"):
        if name in scores:
            return float(scores[name][take])
    return -float(scores["val_loss"][take]) if "val_loss" in scores else None


def mean_score(lines: Sequence[Line | None], take: str = "last") -> float | None:
    """The mean over seeds; None if one of them has no score."""
    scores = [trial_score(line, take) for line in lines]
    known = [score for score in scores if score is not None]
    return sum(known) / len(known) if known and len(known) == len(scores) else None


def tune(
    file: Path, out: Path, say: Say, pack: bool | None = None, device: str = "", **options: Any
) -> dict[str, dict[str, Any]]:
    """Pick the settings of every algorithm of a sweep's file over its grid; write NAME.toml and tuned.toml to `out`.

    `options` are `rungs`, `keep` and `validation`. Returns what was picked for each algorithm.
    """
    settings = read_toml(file)
    sweep = settings.get("sweep", {})
    jobs, _ = plan(file)
    seeds = sorted({job.config.seed for job in jobs}) if "seeds" in sweep else list(SEEDS)
    rungs, keep = options.get("rungs", RUNGS), options.get("keep", KEEP)
    if not rungs or not all(0 < share <= 1 for share in rungs) or list(rungs) != sorted(set(rungs)):
        shown = ",".join(f"{share:g}" for share in rungs)
        raise BadSetting(f"rungs are rising shares of the rounds, such as 0.1,0.25,1, not {shown or 'nothing'}")
    if keep < 2:
        raise BadSetting(f"keep must be at least 2, not {keep}: one in so many settings goes on")
    first = jobs[0].config.seed
    varied = {**sweep.get("grid", {})}
    batch, picked, lost = Batch(Results(out, "trials"), say, pack, device), {}, list[str]()
    for name in dict.fromkeys(_name(job) for job in jobs):
        own = [job for job in jobs if _name(job) == name and job.config.seed == first]
        grid = varied | sweep.get("only", {}).get(name, {})
        spent = Spent()

        def score(some: list[Job], rounds: int, spent: Spent = spent) -> list[float | None]:
            runs = [_trial(job, seed, rounds, options.get("validation", VALIDATION)) for job in some for seed in seeds]
            lines = batch.do(runs)
            spent.add(lines, some[0].config.rounds)
            return [mean_score(lines[n : n + len(seeds)]) for n in range(0, len(lines), len(seeds))]

        best = halve(own, own[0].config.rounds, score, rungs, keep)
        if best is None:
            lost.append(name)
            say(f"{name}: nothing is picked, every setting diverged or failed; {len(own)} settings, {spent}")
            continue
        picked[name] = {n: _value(best, n) for n in grid}
        say(f"{name}: {_describe(picked[name])}; {len(own)} settings, {spent}")
        _write(out / f"{name.replace('/', '_').replace(':', '_')}.toml", _alone(settings, best, picked[name]))
    if lost:
        raise BadSetting(
            f"every setting of {', '.join(lost)} diverged or failed with some seed, so {out / 'tuned.toml'} is not "
            "written; add smaller rates to the grid"
        )
    _write(out / "tuned.toml", settings | {"sweep": _sweep(sweep, picked)})
    return picked


def _name(job: Job) -> str:
    config: Any = job.config
    return str(config.algorithm if job.kind == "algorithm" else config.method)


def _trial(job: Job, seed: int, rounds: int, validation: float) -> Run:
    held_out = job.config.val_fraction or validation
    config = replace(job.config, seed=seed, rounds=rounds, val_fraction=held_out)
    command = "run" if job.kind == "algorithm" else "dp"
    return Run(command, config, {"suite": "tune", "column": "trial", "row": _name(job), "trial": True})


def _value(job: Job, name: str) -> Any:
    if job.kind == "algorithm" and name not in FIELDS:
        return job.config.set[name]
    value = getattr(job.config, name)
    return as_type(name, float(value), float) if name == "lam" and value != "auto" else value


def _alone(settings: dict[str, Any], best: Job, picked: dict[str, Any]) -> dict[str, Any]:
    """A file of settings for one method, which run, dp and sweep take."""
    top = {n: v for n, v in settings.items() if n not in ("sweep", "set", "algorithm", "method")}
    known = KINDS[best.kind].fields
    fields = {n: v for n, v in {**settings.get("set", {}), **picked}.items() if n not in known}
    top |= {n: v for n, v in picked.items() if n in known}
    return {best.kind: _name(best), **top, "set": fields}


def _sweep(sweep: dict[str, Any], picked: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The [sweep] table with what was picked in place of the grids; its seeds are left to be chosen."""
    kept = {n: v for n, v in sweep.items() if n not in ("grid", "only", "seeds")}
    named = {} if "algorithms" in kept or "methods" in kept else {"algorithms": list(picked)}
    return kept | named | {"seeds": [0, 1, 2], "only": {n: fields for n, fields in picked.items() if fields}}


def _describe(fields: dict[str, Any]) -> str:
    return ", ".join(f"{n} = {v}" for n, v in fields.items()) or "nothing to pick"


def _write(file: Path, content: dict[str, Any]) -> None:
    with writing(file):
        make_folder(file.parent)
        file.write_text(tomli_w.dumps(content), encoding="utf-8")
