"""Metrics over a whole set of samples, which no mean over samples gives: F1, AUC, calibration, perplexity.

Each has `reset`, `update(outputs, targets)` for a batch, and `compute`; so have torchmetrics' objects, which may be given too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor

from undrift.core.errors import BadSetting, UnknownName
from undrift.oracle.tasks import concordance

BINS = 15  # bins of confidence, for calibration


class WholeMetric(Protocol):
    """Sees all samples, batch by batch, and then gives one number."""

    def reset(self) -> None: ...

    def update(self, outputs: Tensor, targets: Tensor) -> None: ...

    def compute(self) -> Any: ...


def is_whole(metric: object) -> TypeGuard[WholeMetric]:
    return all(callable(getattr(metric, name, None)) for name in ("reset", "update", "compute"))


class Kept:
    """Keeps the outputs [n, C] and labels [n] of all batches."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.outputs: list[Tensor] = []
        self.targets: list[Tensor] = []

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.outputs.append(outputs.detach().double())
        self.targets.append(targets)

    def all(self) -> tuple[Tensor, Tensor]:
        return torch.cat(self.outputs), torch.cat(self.targets)


class F1(Kept):
    """The harmonic mean of precision and recall, averaged over the classes that occur or are guessed.

    >>> metric = F1()
    >>> metric.update(torch.tensor([[0.0, 1.0], [0.0, 1.0], [1.0, 0.0]]), torch.tensor([1, 0, 0]))
    >>> metric.compute()
    0.6666666666666666
    """

    def compute(self) -> float:
        outputs, targets = self.all()
        said, classes = outputs.argmax(1), outputs.shape[1]
        right = torch.bincount(targets[said == targets], minlength=classes).double()
        there = (torch.bincount(said, minlength=classes) + torch.bincount(targets, minlength=classes)).double()
        return float((2 * right / there)[there > 0].mean())


class AUC(Kept):
    """The area under the ROC curve of each class against the others, averaged over the classes; of two classes, of the second.

    >>> metric = AUC()
    >>> metric.update(torch.tensor([[0.0, 1.0], [0.0, 3.0], [0.0, 2.0]]), torch.tensor([0, 1, 0]))
    >>> metric.compute()
    1.0
    """

    def compute(self) -> float:
        outputs, targets = self.all()
        scores, areas = outputs.softmax(1), []
        for k in range(1 if outputs.shape[1] == 2 else 0, outputs.shape[1]):
            mine = targets == k
            count = int(mine.sum())
            if not 0 < count < len(targets):
                continue
            _, place, ties = scores[:, k].unique(return_inverse=True, return_counts=True)  # sorted
            rank = (ties.cumsum(0) - (ties - 1) / 2.0)[place]  # from 1, the mean of those that are equal
            areas.append(float((rank[mine].sum() - count * (count + 1) / 2) / (count * (len(targets) - count))))
        return sum(areas) / len(areas) if areas else float("nan")


class Calibration(Kept):
    """The expected calibration error: how far the confidence is from the accuracy, over bins of the confidence.

    >>> metric = Calibration()
    >>> metric.update(torch.tensor([[0.0, 50.0], [0.0, 50.0]]), torch.tensor([1, 0]))
    >>> round(metric.compute(), 6)
    0.5
    """

    def compute(self) -> float:
        outputs, targets = self.all()
        confidence, said = outputs.softmax(1).max(1)
        group = (confidence * BINS).long().clamp(max=BINS - 1)
        gap = confidence.new_zeros(BINS).index_add(0, group, confidence - (said == targets).double())
        return float(gap.abs().sum() / len(targets))


class Perplexity:
    """exp of the mean cross-entropy over all labels.

    >>> metric = Perplexity()
    >>> metric.update(torch.zeros(3, 4), torch.tensor([0, 1, 2]))
    >>> metric.compute()
    4.0
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.total, self.labels = 0.0, 0

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.total += float(F.cross_entropy(outputs.double(), targets, reduction="sum"))
        self.labels += len(targets)

    def compute(self) -> float:
        return float(torch.tensor(self.total / self.labels, dtype=torch.float64).exp())


class Bits(Perplexity):
    """The mean cross-entropy over all labels in bits: of a model of characters, bits per character.

    >>> metric = Bits()
    >>> metric.update(torch.zeros(3, 4), torch.tensor([0, 1, 2]))
    >>> metric.compute()
    2.0
    """

    def compute(self) -> float:
        return self.total / self.labels / math.log(2)


class CIndex(Kept):
    """The c-index of risks [n, 1] for survival targets [n, 2], event and time.

    >>> metric = CIndex()
    >>> metric.update(torch.tensor([[2.0], [1.0]]), torch.tensor([[1.0, 5.0], [0.0, 7.0]]))
    >>> metric.compute()
    1.0
    """

    def compute(self) -> float:
        outputs, targets = self.all()
        return concordance(outputs.flatten(), targets)


BUILT_IN = {"f1": F1, "auc": AUC, "calibration": Calibration, "perplexity": Perplexity, "bits": Bits, "c_index": CIndex}


def metrics_of(given: Mapping[str, Any] | Sequence[str] | None) -> dict[str, Any]:
    """The user's metrics by name; a text names one of those above."""
    if isinstance(given, str):
        raise BadSetting(f"metrics takes a list of names, or a mapping from names to functions, not {given!r}")
    named: dict[str, Any] = {}
    for name, metric in (
        {} if given is None else given if isinstance(given, Mapping) else {n: n for n in given}
    ).items():
        if isinstance(metric, str):
            if metric not in BUILT_IN:
                raise UnknownName("metric", metric, BUILT_IN)
            metric = BUILT_IN[metric]()
        if not callable(metric) and not is_whole(metric):
            raise BadSetting(
                f"metric {name!r} must be a function of (outputs, targets), or have reset, update and compute"
            )
        named[name] = metric
    return named


def number_of(name: str, metric: WholeMetric) -> float:
    """What the metric says of all that it has seen."""
    value = torch.as_tensor(metric.compute())
    if value.numel() != 1:
        raise BadSetting(f"metric {name!r} gives {list(value.shape)} numbers, not one; let it average over the classes")
    return float(value)
