"""MLflow: where MLFLOW_TRACKING_URI says, in the experiment of MLFLOW_EXPERIMENT_NAME or `undrift`."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from mlflow.entities import Metric, Param, Run, RunTag
from mlflow.tracking import MlflowClient

from undrift.jobs.tracking import PROJECT, Scores, Tracked

MOST_METRICS, MOST_PARAMS, LONGEST = 1000, 100, 500  # that MLflow takes at once, and of a text
PATIENCE = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}  # a run must not wait for minutes


class Tracker:
    """The run in MLflow, found again by the tag `undrift.run`. A parameter cannot change, so new values become tags."""

    def __init__(self, run: Tracked) -> None:
        for name, value in PATIENCE.items():
            os.environ.setdefault(name, value)
        self.client = MlflowClient()
        experiment = self.experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT))
        found = self.client.search_runs([experiment], f"tags.`undrift.run` = '{run.id}'", max_results=1)
        tags = {"undrift.run": run.id, "undrift.group": run.group}
        at: Run = found[0] if found else self.client.create_run(experiment, run_name=run.name, tags=tags)
        self.id: str = at.info.run_id
        self.client.update_run(self.id, status="RUNNING")
        self.reached = int(at.data.metrics.get("round", 0))
        settings, known = {n: str(v)[:LONGEST] for n, v in run.settings.items()}, at.data.params
        new = [Param(n, v) for n, v in settings.items() if n not in known]
        for part in batches(new, MOST_PARAMS):
            self.client.log_batch(self.id, params=part)
        changed = [RunTag(n, v) for n, v in settings.items() if known.get(n, v) != v]
        for part in batches(changed, MOST_PARAMS):
            self.client.log_batch(self.id, tags=part)

    def experiment(self, name: str) -> str:
        """The id of an experiment; another process of a sweep may make it at the same moment."""
        found = self.client.get_experiment_by_name(name)
        if found is None:
            try:
                return str(self.client.create_experiment(name))
            except Exception:
                found = self.client.get_experiment_by_name(name)
                if found is None:
                    raise
        return str(found.experiment_id)

    def add(self, scores: Sequence[Scores]) -> None:
        now = int(time.time() * 1000)
        rows = [
            Metric(name, value, now, round)
            for round, numbers in scores
            for name, value in (
                numbers | {"round": float(round)}
            ).items()  # `round` is the last of each: how far it came
        ]
        for part in batches(rows, MOST_METRICS):
            self.client.log_batch(self.id, metrics=part)

    def end(self, stopped: str, report: Path | None) -> None:
        self.client.set_tag(self.id, "stopped", stopped)
        if report is not None:
            self.client.log_artifact(self.id, str(report))
        self.client.set_terminated(self.id, "FINISHED" if report is not None else "KILLED")


def batches(rows: list, most: int) -> Iterator[list]:  # type: ignore[type-arg]
    """The rows in parts of at most so many."""
    rest = iter(rows)
    while part := list(itertools.islice(rest, most)):
        yield part
