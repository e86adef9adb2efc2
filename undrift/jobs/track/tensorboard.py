"""TensorBoard: files of events in the run's folder; look at them with `tensorboard --logdir runs`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from undrift.jobs.tracking import Scores, Tracked


class Tracker:
    """The run in TensorBoard's files. Those of rounds that a resumed run does again are hidden."""

    def __init__(self, run: Tracked) -> None:
        folder = run.folder / "tensorboard"
        self.reached = run.round if list(folder.glob("events*")) else 0
        self.writer = SummaryWriter(str(folder), purge_step=self.reached + 1)
        table = "".join(f"| {name} | {json.dumps(value)} |\n" for name, value in run.settings.items())
        self.writer.add_text("settings", f"| setting | value |\n| --- | --- |\n{table}", self.reached + 1)
        if not self.reached:
            plain = {n: v if isinstance(v, bool | int | float) else str(v) for n, v in run.settings.items()}
            for summary in hparams(plain, {"accuracy": 0, "loss": 0}):
                self.writer._get_file_writer().add_summary(summary)

    def add(self, scores: Sequence[Scores]) -> None:
        for round, numbers in scores:
            for name, value in numbers.items():
                self.writer.add_scalar(name, value, round)
        self.writer.flush()  # before the checkpoint, so that nothing is missing after a kill

    def end(self, stopped: str, report: Path | None) -> None:
        where = f"; the report is {report}" if report else ""
        self.writer.add_text("end", f"stopped by {stopped}{where}", self.reached)
        self.writer.close()
