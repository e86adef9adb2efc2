"""Weights & Biases: in the project of WANDB_PROJECT or `undrift`; `WANDB_MODE=offline` keeps the files in the run's folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import wandb

from undrift.jobs.tracking import PROJECT, Scores, Tracked

PATIENCE = 30.0  # seconds for an answer or a login


class Tracker:
    """The run in W&B, under its own id."""

    def __init__(self, run: Tracked) -> None:
        begun = any((run.folder / "wandb").glob(f"*run-*-{run.id}"))
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=run.id,
            name=run.name,
            group=run.group,
            resume="allow",
            dir=str(run.folder),
            config=dict(run.settings),
            reinit="create_new",  # packed runs are open at the same time
            settings=wandb.Settings(
                silent=True, console="off", login_timeout=PATIENCE, init_timeout=PATIENCE, x_disable_stats=True
            ),
        )
        if self.run.offline:
            self.reached = run.round if begun else 0  # what was written before lies in the files of then
        else:
            self.reached = max(0, self.run.step - 1)

    def add(self, scores: Sequence[Scores]) -> None:
        for round, numbers in scores:
            self.run.log(numbers, step=round)

    def end(self, stopped: str, report: Path | None) -> None:
        self.run.summary["stopped"] = stopped
        if report is not None:
            artifact = wandb.Artifact(f"report-{self.run.id}", type="report")
            artifact.add_file(str(report))
            self.run.log_artifact(artifact)
        self.run.finish(exit_code=0 if report is not None else 1)
