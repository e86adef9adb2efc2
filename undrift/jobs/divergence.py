"""Whether a run has diverged, and the best model that it had before."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from undrift.core import ranks

LOST = 3  # rounds in a row: without one finite update they end a run, without an answer they are warned of
FAR = 1e6  # a loss so many times as large as the first one, or as 1, has diverged
SCORES = {
    "accuracy": 1.0,
    "dice": 1.0,
    "c_index": 1.0,
    "loss": -1.0,
}  # the first that a record has says which model is better
PREFIX = "best/"  # the best model's tensors in a checkpoint have names that begin so


def trouble(records: Sequence[Mapping[str, Any]], scored: bool) -> tuple[str, bool]:
    """What is wrong with the last round, and whether it ends the run; ("", False) if nothing is.

    A loss that was never finite, before any round was `scored`, may be the test samples' fault.

    >>> trouble([{"loss": float("nan"), "clients": 10, "dropped": 0}], True)
    ('the loss on the test set is nan', True)
    >>> trouble([{"loss": None, "clients": 10, "dropped": 10, "gradients": 50}], True)
    ("no client's update was finite", False)
    >>> trouble(3 * [{"loss": None, "clients": 2, "dropped": 2, "gradients": 0}], True)
    ('nobody has answered, 3 rounds in a row', False)
    >>> trouble([{"loss": None}, {"loss": 2.3}, {"loss": 1e33, "clients": 10, "dropped": 0}], True)
    ('the loss on the test set is 1e+33, after 2.3 at first', True)
    """
    loss = records[-1]["loss"]
    if loss is not None and not math.isfinite(loss):
        return f"the loss on the test set is {loss}", scored
    if loss is not None:  # in a round without a score there is nothing to look for in all the records before
        first = next(record["loss"] for record in records if record["loss"] is not None)
        if loss > FAR * max(1.0, abs(first)):
            return f"the loss on the test set is {loss:.3g}, after {first:.3g} at first", scored
    alone = [0 < record["clients"] == record["dropped"] and not record["gradients"] for record in records[-LOST:]]
    if len(alone) == LOST and all(alone):
        return f"nobody has answered, {LOST} rounds in a row", False
    lost = [in_vain(record) for record in records[-LOST:]]
    if not lost[-1]:
        return "", False
    ends = len(lost) == LOST and all(lost)
    return f"no client's update was finite{f', {LOST} rounds in a row' if ends else ''}", ends


def in_vain(record: Mapping[str, Any]) -> bool:
    """Whether clients have trained in this round, and no update counted: none was finite."""
    return bool(0 < record["clients"] == record["dropped"] and record["gradients"])


class Best:
    """The model of the round with the best score: on validation samples if there are any, else on the test set."""

    def __init__(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any] | None) -> None:
        """As a checkpoint holds it."""
        found = facts or {"round": 0, "name": "", "score": -math.inf}
        self.round, self.name, self.score = int(found["round"]), str(found["name"]), float(found["score"])
        self.model = {n.removeprefix(PREFIX): t for n, t in tensors.items() if n.startswith(PREFIX)}

    def see(self, record: Mapping[str, Any], model: Callable[[], dict[str, Tensor]]) -> None:
        """Keep the model if the record says that it is the best so far; all ranks agree."""
        scored = [(name, sign) for name, sign in SCORES.items() if record.get(name) is not None]
        if not scored:
            return
        name, sign = scored[0]
        name = f"val_{name}" if record.get(f"val_{name}") is not None else name
        if ranks.first_rank_says(sign * record[name] > self.score):  # NaN is not
            self.round, self.name, self.score = int(record["round"]), name, sign * record[name]
            self.model = {name: tensor.clone() for name, tensor in model().items()}  # a run may go on in place

    def tensors(self) -> dict[str, Tensor]:
        return {PREFIX + name: tensor for name, tensor in self.model.items()}

    def facts(self) -> dict[str, Any]:
        kept = {"round": self.round, "name": self.name, "score": self.score}
        return {"best": kept} if self.model else {}

    def __str__(self) -> str:
        """Which model is kept.

        >>> print(Best({"best/w": Tensor([0.5])}, {"round": 4, "name": "loss", "score": -0.5}))
        the model of round 4 is kept (loss 0.5000)
        """
        if not self.model:
            return "no round before it was scored, so the last model is kept"
        return f"the model of round {self.round} is kept ({self.name} {abs(self.score):.4f})"


def ours(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a checkpoint that are the run's own."""
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(PREFIX)}
