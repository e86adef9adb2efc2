"""The one loop: drives a run to its end and writes its records and checkpoints."""

from __future__ import annotations

import base64
import platform
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from undrift.core import ranks, stopping
from undrift.core.errors import BadRunFolder, BadSetting
from undrift.core.version import __version__
from undrift.jobs.config import JobConfig
from undrift.jobs.curves import Curves
from undrift.jobs.divergence import Best, ours, trouble
from undrift.jobs.folder import RunFolder
from undrift.jobs.protocol import Run
from undrift.jobs.stop_at import parse_stop
from undrift.jobs.tracking import Tracking
from undrift.kernels import choices
from undrift.kernels.native import library
from undrift.round.record import RoundRecord

BRIEF = 5.0  # seconds of rounds at a time: between them a signal is seen
Progress = Callable[[dict[str, Any], int], None]  # called with each record and the number of rounds asked for
C = TypeVar("C", bound=JobConfig)
R = TypeVar("R", bound=Run, covariant=True)


@dataclass(frozen=True, repr=False)
class Result(Generic[C]):
    """The result of a run."""

    records: list[dict[str, Any]]  # one for each round, as in rounds.jsonl
    model: dict[str, Tensor]  # a plain state_dict: of the last round, or of the best one if the run has diverged
    config: C
    folder: Path | None
    stopped: str  # why it ended: "rounds", "time", "patience", "diverged", "break" or a number of --stop-at, such as "accuracy"
    about: dict[str, Any]  # what was found in the data and chosen by the run, as in run.toml
    model_round: int  # the round after which the model was so
    client_rows: list[dict[str, Any]] = field(default_factory=list)
    personal_models: list[dict[str, Tensor]] = field(
        default_factory=list
    )  # one for each client, in a run with personal models

    def frame(self) -> Any:
        """The records as a pandas DataFrame, with the round as its index."""
        return data_frame("result.frame()", self.records, "round")

    def clients(self) -> Any:
        """A row for each client, as a pandas DataFrame: its samples, and how the server's model does on them.

        Of more than 10,000 clients there are the 10,000 that are scored. There are none where clients are on other machines.
        """
        return data_frame("result.clients()", self.client_rows, "client")

    def report(self, out: str | Path) -> Path:
        """Write the page of `undrift report` for this run."""
        from undrift.report import page

        def usual(command: str, algorithm: str) -> dict[str, Any]:
            return asdict(type(self.config)())

        if self.folder is None:
            raise BadSetting("the report is made of a run's folder; give out= to the run")
        page.write([self.folder], Path(out), None, usual)
        return Path(out)

    def __repr__(self) -> str:
        """How the run ended, in one line."""
        score = "" if self.accuracy is None else f", accuracy {self.accuracy:.4f}"
        where = "" if self.folder is None else f", in {self.folder}"
        return f"<undrift.Result: {self._ending()}{score}{where}>"

    def _ending(self) -> str:
        return f"{len(self.records)} rounds, stopped by {self.stopped}; the model is that of round {self.model_round}"

    def _repr_html_(self) -> str:
        """What a notebook shows: how the run ended, its curves, and its last scored rounds."""
        from html import escape

        curves = Curves()
        for record in self.records:
            curves.take(record)
        image = base64.b64encode(curves._repr_png_()).decode() if curves.points else ""
        alt = f"curves of {', '.join(curves.points)}"
        picture = (
            f'<img style="max-width: 100%" src="data:image/png;base64,{image}" alt="{escape(alt)}">' if image else ""
        )
        shown = ("round", "loss", "accuracy", "train_loss", "dropped", "seconds")
        scored = [record for record in self.records if record["loss"] is not None] or self.records
        rows = "".join(
            "<tr>" + "".join(f"<td>{escape(as_cell(record.get(name)))}</td>" for name in shown) + "</tr>"
            for record in scored[-12:]
        )
        head = "".join(f"<th>{name}</th>" for name in shown)
        return f"<p>{escape(self._ending())}</p>{picture}<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"

    @property
    def accuracy(self) -> float | None:
        """The last accuracy measured."""
        return next((r["accuracy"] for r in reversed(self.records) if r.get("accuracy") is not None), None)


def data_frame(who: str, rows: list[dict[str, Any]], index: str) -> Any:
    """A pandas DataFrame of these rows."""
    try:
        import pandas
    except ImportError as error:
        raise BadSetting(f"{who} needs pandas; pip install pandas") from error
    return pandas.DataFrame(rows).set_index(index) if rows else pandas.DataFrame()


def as_cell(value: Any) -> str:
    """A number of the record as text; four digits are enough to look at.

    >>> as_cell(0.123456), as_cell(12), as_cell(None)
    ('0.1235', '12', '')
    """
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


class Course(Generic[R, C]):
    """A run with its records, its folder and its progress."""

    def __init__(
        self, run: R, config: C, folder: RunFolder | None, resume: bool, progress: Progress | None = None
    ) -> None:
        self.run, self.config, self.folder, self.progress = run, config, folder, progress
        self.stop, self.elapsed = parse_stop(config.stop_at), 0.0
        self.records: list[dict[str, Any]] = []
        self.said: set[str] = set()  # warnings
        self.kernels = choices.choices_made()
        checkpoint = folder.load(config.rounds) if folder is not None and resume else None
        tensors, facts = checkpoint or ({}, {"round": 0, "seconds": 0.0})
        self.tracking = Tracking(
            config.track if ranks.rank() == 0 else "", folder.path if folder else None, facts["round"]
        )
        self.best, tensors = Best(tensors, facts.get("best")), ours(tensors)
        run.place(folder.path if folder else None, tensors, facts["round"])
        if folder is not None and not resume:
            folder.create(self.toml())
        elif folder is not None:
            self.check_task(folder)
            if checkpoint is not None:
                try:
                    run.restore(tensors, facts["round"])
                except (KeyError, ValueError, RuntimeError) as error:
                    raise BadRunFolder(f"the checkpoint in {folder.path} is of another run: {error}") from error
                self.elapsed = facts["seconds"]
            folder.cut_back()
            ranks.all_well()  # every rank has read the checkpoint, and rank 0 has cut the records back to it
            self.records = folder.records()
            self.write_settings(folder)
        self.began = time.perf_counter() - self.elapsed
        self.saved, self.seconds_saving = run.t, 0.0
        self.seconds = stopping.GRACE  # how long a round takes; unknown at first
        self.reached = self.stop_reason(self.records[-1] if self.records else {})  # empty while the run goes on
        self.leaves_model = True  # whether the end is written to the folder
        if facts.get("stopped") == "diverged":
            self.reached = "diverged"

    def check_task(self, folder: RunFolder) -> None:
        """Refuse to go on with other data, another model or another loss than the run began with."""
        what = {
            "samples": "the samples", "holdings": "who holds which samples", "layers": "the model's layers",
            "frozen": "the model's frozen tensors", "loss": "the loss",
        }  # fmt: skip
        before = folder.settings().get("made", {}).get("task", {})
        for name, now in self.run.about().get("task", {}).items():
            if before.get(name, now) != now:
                raise BadRunFolder(
                    f"{folder.path} holds another run: {what[name]} changed since it began; give it what it began with, or "
                    "choose another --out"
                )

    def ahead(self) -> tuple[int, bool]:
        """Count the next rounds, up to a checkpoint and a few seconds long; 0 at the end. Also say whether the run ends there."""
        left, every = self.config.rounds - self.run.t, self.config.checkpoint_every
        if left <= 0 or self.reached:
            return 0, True
        brief = max(1, int(BRIEF / max(self.seconds, 1e-9)))
        count = min(left, every - self.run.t % every, brief)
        return count, count == left

    def take(self, new: list[RoundRecord]) -> None:
        """Write down new rounds, and a checkpoint when it is due."""
        run, folder = self.run, self.folder
        for record in (r.as_dict() for r in new):
            self.records.append(record)
            self.elapsed = time.perf_counter() - self.began
            if self.stop and record["loss"] is not None:
                self.look_for_stops(record)
            if self.stop or run.enough:
                self.reached = self.stop_reason(record)
            if folder is not None:
                if record["round"] == 1:
                    self.write_settings(folder)  # now the execution is chosen
                folder.append(record)
            if self.progress is not None and ranks.rank() == 0:
                self.progress(record, self.config.rounds)
            self.look_for_trouble()
        self.track()
        self.best.see(self.records[-1], run.model)
        self.seconds = new[-1].seconds
        due = run.t % self.config.checkpoint_every == 0 and run.t < self.config.rounds and not self.reached
        if folder is not None and due:
            self.save(folder, {"finished": False})

    def look_for_trouble(self) -> None:
        """Warn when something goes wrong for the first time, and end a run that has diverged."""
        what, ends = trouble(self.records, bool(self.best.model))
        if self.run.diverged:
            what, ends = "the training loss is not finite", True
        what, ends = ranks.first_rank_says((what, ends))
        if ends and self.reached != "diverged":
            self.reached = "diverged"
            what += f": the run has diverged and ends; {self.best}; {self.config.advice()}"
        if what and what not in self.said and ranks.rank() == 0:
            warnings.warn(f"round {self.records[-1]['round']}: {what}", stacklevel=2)
        self.said.add(what)

    def look_for_stops(self, record: Mapping[str, Any]) -> None:
        """Warn once of each condition to stop at that the first scored round knows nothing of."""
        for stop in self.stop.values():
            told = stop.unknown(record)
            if stop.name not in self.said and told and ranks.rank() == 0:
                warnings.warn(told, stacklevel=2)
            self.said.add(stop.name)

    def track(self) -> None:
        """Tell the trackers what is new."""
        if self.folder is not None:
            self.tracking.send(self.folder.run, self.toml, self.records)

    def write_settings(self, folder: RunFolder) -> None:
        """Write run.toml with what is chosen by now."""
        self.kernels = choices.choices_made()
        folder.write_settings(self.toml())

    def save(self, folder: RunFolder, facts: dict[str, Any]) -> None:
        """Write a checkpoint, and let the run know."""
        began = time.perf_counter()
        if choices.choices_made() != self.kernels:  # for sizes that came up since
            self.write_settings(folder)
        facts = {"round": self.run.t, "seconds": self.elapsed} | self.best.facts() | facts
        folder.save(self.run.tensors() | self.best.tensors(), facts)
        self.run.after_checkpoint()
        self.saved, self.seconds_saving = self.run.t, time.perf_counter() - began

    def keep(self) -> None:
        """Write a checkpoint if there is none of this round."""
        if self.folder is not None and self.saved < self.run.t:
            self.save(self.folder, {"finished": False})

    @property
    def slow(self) -> bool:
        """Whether a signal could not wait for a round's end, and a checkpoint takes little time beside a round."""
        return self.seconds > max(stopping.GRACE, 10 * self.seconds_saving)

    def leave(self) -> Result[C]:
        """Write a checkpoint, from which the run can go on; the result is what there is so far."""
        self.keep()
        about = self.run.about() | self.run.choices()
        folder = self.folder.path if self.folder else None
        return Result(self.records, self.run.model(), self.config, folder, "break", about, self.run.t)

    def end(self) -> Result[C]:
        """Write the model and the last checkpoint."""
        run, folder, stopped = self.run, self.folder, self.reached or "rounds"
        model, of = run.model(), run.t
        if stopped == "diverged" and self.best.model:
            model, of = self.best.model, self.best.round
        extras = run.extras(self.config.as_toml(), self.records) if self.leaves_model else None
        last = self.saved < run.t or (folder is not None and not folder.is_finished())
        if folder is not None and self.leaves_model and ranks.first_rank_says(last):
            self.save(folder, {"finished": False})  # a model without a checkpoint could not be resumed
            model_sum = folder.write_model(model)
            if ranks.rank() == 0:
                run.leave(folder.path, model)
            if extras is not None:
                folder.write_super(*extras)
            self.save(folder, {"finished": True, "stopped": stopped, "model": model_sum})
        about = run.about() | run.choices()
        path, rows = folder.path if folder else None, run.client_rows() if self.leaves_model else []
        personal = [] if extras is None else models_of_clients(extras.tensors)
        result = Result(self.records, model, self.config, path, stopped, about, of, rows, personal)
        self.track()  # also a finished run, whose tracker is new
        self.tracking.end(stopped, lambda: result.report(self.tracking.folder / "report.html"))
        return result

    def stop_reason(self, record: Mapping[str, Any]) -> str:
        """Why the run stops after this record; empty if it does not. Rank 0 decides."""
        met = [stop.name for stop in self.stop.values() if stop.is_reached(record, self.elapsed)]
        reason = "patience" if self.run.enough else met[0] if met else ""
        return ranks.first_rank_says(reason)

    def toml(self) -> dict[str, Any]:
        """The content of run.toml: every resolved setting, and under [made] versions and machine."""
        settings = self.config.as_toml() | self.run.choices()
        made = {
            "undrift": __version__, "commit": commit(), "python": platform.python_version(), "torch": torch.__version__,
            "numpy": np.__version__, "device": str(self.run.device), "threads": torch.get_num_threads(),
            "ranks": ranks.count(),
        } | self.run.about()  # fmt: skip
        if self.run.device.type == "cpu":
            made["native"] = library() is not None  # whether the C kernels were built
        if self.kernels:
            made["kernels"] = self.kernels
        return settings | {"set": settings.pop("set", {}), "made": made}


def models_of_clients(tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """The state dicts of clients 1, 2, ... among those of a super model, on the CPU."""
    found: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        owner, _, inner = name.partition(".")
        if owner.startswith("client"):
            found.setdefault(int(owner.removeprefix("client")), {})[inner] = tensor.cpu()
    return [found[number] for number in sorted(found)]


def drive(course: Course[Run, C], beside: Sequence[Course[Any, Any]] = ()) -> Result[C]:
    """Run all rounds that are left; `beside` are runs of the same process that wait for their turn."""
    for _ in stretches(course, beside):
        pass
    if not course.reached:
        pause([course, *beside])  # the end may take long
    return course.end()


def stretches(course: Course[Run, C], beside: Sequence[Course[Any, Any]] = ()) -> Iterator[list[dict[str, Any]]]:
    """Run all rounds that are left, and give the new records after each few of them."""
    while (ahead := course.ahead())[0]:
        pause([course, *beside])
        before = len(course.records)
        course.take(course.run.rounds(*ahead))
        yield course.records[before:]


def pause(courses: Sequence[Course[Any, Any]]) -> None:
    """Between two rounds: stop if a signal asks for it, after a checkpoint, which slow rounds get anyway. All ranks agree."""
    asked, slow = ranks.any_of(bool(stopping.stop_signal()), any(course.slow for course in courses))
    stopped = stopping.notice() if asked else None
    if asked or slow:
        for course in courses:
            course.keep()
    if stopped is not None:
        raise stopped


def commit() -> str:
    """The commit of the checkout that this package runs from; empty for an installed one."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return ""
    git = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return git.stdout.strip()
