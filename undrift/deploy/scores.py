"""Scores that clients give the global and their own model on samples that they hold out; the best round; when to stop.

The letter of this exchange goes to every client, not to a cohort alone. What comes back are a few numbers, in the clear; so a
private or secure run has no such exchange.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from undrift.core.trees import Nothing, State
from undrift.deploy.messages import Fact, Letter, Refused
from undrift.jobs.stop_at import is_share

SCORE = "score"  # the exchange
KINDS = ("global", "personal")  # the server's model, and the one that serves the client
LARGEST = 1e9  # largest score, and number of samples, that is believed


class Scoring(NamedTuple):
    """The arrays of the server's letter: its model, and what a client needs to make its own."""

    x: State
    down: State
    buffers: State
    reply: State = Nothing()  # the server's reply to the client's last round


class Marks(NamedTuple):
    """What one client says."""

    scores: dict[str, dict[str, float]]  # by kind and metric
    weight: float  # how many samples the scores are means over


def tell_scores(scores: Mapping[str, Mapping[str, float]], weight: float) -> dict[str, Fact]:
    """The facts of a client's answer."""
    facts: dict[str, Fact] = {
        f"score.{kind}.{metric}": v for kind, of in scores.items() for metric, v in of.items() if math.isfinite(v)
    }
    return facts | {"weight": weight}


def read_scores(letter: Letter, kinds: Sequence[str], metrics: Sequence[str]) -> Marks:
    """What a client says, which must be numbers under known names."""

    def number(name: str, least: float = 0.0, most: float = LARGEST) -> float:
        value = letter.number(name)
        if not least <= value <= most:
            raise Refused(f"{name} is {value:g}, not between {least:g} and {most:g}")
        return value

    def score(kind: str, metric: str) -> float:
        name = f"score.{kind}.{metric}"
        return number(name, most=1.0) if is_share(metric) else number(name, -LARGEST)

    return Marks({kind: {m: score(kind, m) for m in metrics} for kind in kinds}, number("weight"))


def gather_scores(marks: Sequence[Marks | None], kinds: Sequence[str], metrics: Sequence[str]) -> dict[str, Any]:
    """Scores for the record as a simulation has them: means over clients, over all samples, and of every site.

    >>> gather_scores([Marks({"global": {"loss": 1.0}}, 3.0), Marks({"global": {"loss": 3.0}}, 1.0)], ["global"], ["loss"])
    {'own_loss': 2.0, 'own_loss_all': 1.5, 'sites': {'test': {'global': {'loss': [1.0, 3.0]}}}}
    """
    if not any(marks):
        return {}
    table = {k: {m: [math.nan if s is None else s.scores[k][m] for s in marks] for m in metrics} for k in kinds}
    weight = torch.tensor([0.0 if s is None else s.weight for s in marks], dtype=torch.float64)
    found: dict[str, Any] = {}
    for m in metrics:
        each = torch.tensor(table[kinds[-1]][m], dtype=torch.float64)
        found[f"own_{m}"] = float(each.nanmean())
        found[f"own_{m}_all"] = float((each.nan_to_num() * weight).sum() / weight.sum()) if weight.sum() else math.nan
    return found | {"sites": {"test": table}}


class Best:
    """The best round so far by the clients' scores."""

    def __init__(self, metric: str, patience: int) -> None:
        self.metric, self.patience = metric, patience  # rounds without a better score, after which it is enough; 0: any
        self.score, self.round, self.now = -math.inf, 0, 0

    def take(self, round: int, scores: Mapping[str, Any]) -> bool:
        """Take in the scores of a round, and return whether it is the best so far."""
        value = float(scores.get(f"own_{self.metric}", math.nan))
        value, self.now = -value if self.metric == "loss" else value, round
        if not value > self.score:
            return False
        self.score, self.round = value, round
        return True

    @property
    def enough(self) -> bool:
        """Whether the run should end: it has not become better for long."""
        return bool(self.patience and self.round and self.now - self.round >= self.patience)

    def tensors(self) -> dict[str, Tensor]:
        return {"best": torch.tensor([self.score, self.round, self.now], dtype=torch.float64)}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        if "best" in tensors:
            score, round, now = tensors["best"].tolist()
            self.score, self.round, self.now = score, int(round), int(now)
