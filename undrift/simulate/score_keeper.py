"""What is scored of a run between its rounds, and when: its model on test, validation and the clients' own samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from undrift.core.errors import BadSetting
from undrift.round.record import RoundRecord
from undrift.simulate.evaluate import (
    MOST_CLASSES,
    ClientScores,
    Metric,
    Metrics,
    accuracy,
    client_scores,
    forgetting,
    group_means,
    means,
    of_samples,
    round_values,
    sample_scores,
    weights_of,
)
from undrift.simulate.graphs import record_graph
from undrift.simulate.personal_scores import Scored, own_scores


class ScoreKeeper:
    """Scores a run every `every` rounds, on the clients' training samples every `clients_every`, and after its last round."""

    def __init__(self, metrics: Metrics, every: int, clients_every: int, seed: int, classes: int) -> None:
        taken = [name for name in metrics if name in RoundRecord._fields and name != "accuracy"]
        if taken:
            raise BadSetting(
                f"a metric cannot be called {taken[0]!r}, which the record uses itself; give it another name"
            )
        self.metrics: Mapping[str, Metric] = of_samples(metrics)  # those of single samples
        self.every, self.clients_every, self.seed = every, clients_every, seed
        self.class_best = torch.full((classes,), -1.0, dtype=torch.float64)  # accuracy so far; -1: none
        self.clients: tuple[ClientScores, int] | None = None  # the last scores of clients, and their round
        self.graph: tuple[Tensor, Tensor, Callable[[], dict[str, Tensor]]] | None = (
            None  # scores on test as a CUDA graph, with its inputs
        )

    def until_due(self, t: int) -> int:
        """Rounds from round t up to the next scores."""
        return min(every - t % every for every in (self.every, self.clients_every) if every)

    def scores(self, run: Scored, cohort: Tensor, last: bool, replays: bool) -> dict[str, Any]:
        """What is due after a round in which `cohort` took part; `replays`: a GPU replays its rounds as graphs."""
        data, due = run.data, last or run.t % self.every == 0
        scores: dict[str, Any] = {}
        if due:
            scores |= self.test_scores(run, replays) | validation_scores(run)
        if due and data.held_out:
            scores |= own_scores(run, last)
        due = last or (self.clients_every > 0 and run.t % self.clients_every == 0)
        if due and len(data.train):  # none here where each client has its own
            scores |= self.score_clients(run, cohort).numbers
        return scores

    def test_scores(self, run: Scored, replays: bool) -> dict[str, Any]:
        """Means over the test samples, for each class too, and what the model has forgotten of its classes."""
        data, rows = run.data, torch.arange(len(run.data.test), device=run.state.x.device)
        tested, weight = self.score_test(run, rows, replays), weights_of(run.net, data.test, rows)
        scores: dict[str, Any] = dict(means(tested, weight))
        if "accuracy" in tested and data.test.labelled:
            group = data.test.targets.clamp(min=0)  # what has no label weighs nothing
            now = group_means(tested["accuracy"], group, data.classes, weight).cpu()
            lost, self.class_best = forgetting(self.class_best, now)
            scores |= {} if lost.isnan() else {"forgetting": float(lost)}
            scores |= {"class_accuracies": round_values(now)} if data.classes <= MOST_CLASSES else {}
        return scores

    def score_test(self, run: Scored, rows: Tensor, replays: bool) -> dict[str, Tensor]:
        """The scores of these test samples; a CUDA graph where rounds are replayed and nothing of the user's is called."""
        data, device = run.data, run.state.x.device

        def play(x: Tensor, buffers: Tensor) -> dict[str, Tensor]:
            return sample_scores(run.net, x, buffers, data.test, data.transform, run.metrics, rows)

        ours = run.net.loss is F.cross_entropy and all(metric is accuracy for metric in run.metrics.values())
        if not (replays and ours) or data.test.held is None or device.type != "cuda":
            return play(run.state.x, run.state.buffers)
        if self.graph is None:
            at = run.state.x.clone(), run.state.buffers.clone()
            self.graph = *at, record_graph(lambda: play(*at), [], device)
        x, buffers, replay = self.graph
        x.copy_(run.state.x)
        buffers.copy_(run.state.buffers)
        return replay()

    def score_clients(self, run: Scored, cohort: Tensor) -> ClientScores:
        """How the server's model does on the clients' training samples."""
        where = run.net, run.state.x, run.state.buffers
        scores = client_scores(*where, run.data, self.metrics, cohort, self.seed)
        self.clients = scores, run.t
        return scores

    def client_rows(self, run: Scored) -> list[dict[str, Any]]:
        """What is known of each client: its samples, and how the server's model does on them."""
        data = run.data
        if not len(data.train):
            return []
        scores, t = self.clients or (None, 0)
        if scores is None or t != run.t:
            scores = self.score_clients(run, torch.zeros(0, dtype=torch.int64, device=run.state.x.device))
        values = {name: value.tolist() for name, value in scores.each.items()}
        names = {"name": [data.site_names[id] for id in scores.ids]} if data.site_names else {}
        columns = {"client": scores.ids.tolist()} | names | {"samples": data.sizes[scores.ids].tolist()} | values
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def validation_scores(run: Scored) -> dict[str, float]:
    """Means over the validation samples of the whole federation, as val_METRIC."""
    data, rows = run.data, torch.from_numpy(run.data.validation).to(run.state.x.device)
    where = run.net, run.state.x, run.state.buffers
    scores = sample_scores(*where, data.train, data.transform, run.metrics, rows)
    return {f"val_{name}": mean for name, mean in means(scores, weights_of(run.net, data.train, rows)).items()}
