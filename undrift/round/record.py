"""The record of what a round did: one line of rounds.jsonl."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, NamedTuple


class RoundRecord(NamedTuple):
    """One line of rounds.jsonl."""

    round: int
    loss: float | None  # on the test set, in rounds that were evaluated
    accuracy: float | None
    bytes_down: int
    bytes_up: int
    gradients: int  # mini-batch gradients that the clients computed
    consistency: float
    seconds: float
    train_loss: float | None  # mean over the cohort and its local steps; None where a pipeline has only been filled
    clients: int  # that were invited
    dropped: int  # who failed to answer, or whose update was not finite
    more: dict[str, Any]  # other metrics, validation scores, the algorithm's own facts

    def as_dict(self) -> dict[str, Any]:
        flat = self._asdict() | self.more
        del flat["more"]
        return flat

    def with_numbers(self, numbers: Mapping[str, float]) -> RoundRecord:
        """The record with what the device has to tell of the round."""
        rest = dict(numbers)
        loss, consistency = rest.pop("train_loss"), rest.pop("consistency")
        return self._replace(train_loss=loss, consistency=consistency, more=rest | self.more)

    def with_scores(self, scores: Mapping[str, Any]) -> RoundRecord:
        """The record with what an evaluation found."""
        rest = {name: value for name, value in scores.items() if name not in ("loss", "accuracy")}
        return self._replace(loss=scores.get("loss"), accuracy=scores.get("accuracy"), more=rest | self.more)


def write_record(
    round: int,
    began: float,
    numbers: Mapping[str, Any],
    clients: int,
    dropped: int = 0,
    bytes_down: int = 0,
    bytes_up: int = 0,
    gradients: int = 0,
) -> RoundRecord:
    """The record of a round that began at a moment of `time.perf_counter`; `numbers` has all that has no place of its own.

    >>> write_record(1, 0.0, {"train_loss": 0.5, "accuracy": 0.9, "qp_active": 3}, clients=10).more
    {'qp_active': 3}
    """
    rest = dict(numbers)
    return RoundRecord(
        round,
        rest.pop("loss", None),
        rest.pop("accuracy", None),
        bytes_down,
        bytes_up,
        gradients,
        rest.pop("consistency", float("nan")),
        time.perf_counter() - began,
        rest.pop("train_loss", None),
        clients,
        dropped,
        rest,
    )
