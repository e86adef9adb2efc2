"""Scores of a model on held-out samples, and on the clients' own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from undrift.core.errors import BadSetting
from undrift.core.streams import Purpose, sample, stream
from undrift.data.augment import Transform
from undrift.data.federation import Federation, Split
from undrift.oracle.losses import IGNORED, classes_first
from undrift.oracle.net import Net
from undrift.simulate.check_task import blame_score
from undrift.simulate.whole_metrics import WholeMetric, is_whole, number_of

Metric = Callable[[Tensor, Tensor], Tensor]
Metrics = Mapping[str, Metric | WholeMetric]
QUANTILES = (0.1, 0.5, 0.9)
TWENTIETHS = tuple(k / 20 for k in range(21))  # how the clients' accuracies are distributed
MOST_OUTPUTS = 1 << 25  # numbers that a model gives at a time for sequences and pictures
MOST_CLASSES = 100  # whose accuracies are recorded one by one
MOST_SCORED = 10_000  # clients whose own samples are scored; of more, that many drawn at random stand for all


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Whether each sample's largest output is its label; with a label for every pixel, the share of the labels that count.

    >>> accuracy(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1]))
    tensor([ True, False])
    """
    if targets.is_floating_point() and targets.shape == outputs.shape:  # probabilities of classes
        targets = targets.argmax(1)
    right = outputs.argmax(1) == targets
    if right.dim() == 1:
        return right
    return right.flatten(1).sum(1).double() / (targets != IGNORED).flatten(1).sum(1).clamp(min=1)


@torch.no_grad()
def sample_scores(
    net: Net,
    x: Tensor,
    buffers: Tensor,
    split: Split,
    transform: Transform,
    metrics: Metrics,
    rows: Tensor,
    owners: Tensor | None = None,
    batch: int = 1000,
) -> dict[str, Tensor]:
    """The loss and metrics [n] of the samples `rows` [n] in evaluation mode; `owners` [n] are the clients who hold them.

    A metric returns one number a sample, or one for the whole batch, which then stands for each of its samples; a whole metric
    gives one number that stands for all samples. Means over samples are weighted by `weights_of`.
    """
    if not len(rows):
        return {}
    whole, apart = {name: metric for name, metric in metrics.items() if is_whole(metric)}, of_samples(metrics)
    found: dict[str, list[Tensor]] = {name: [] for name in ("loss", *apart)}
    for metric in whole.values():
        if isinstance(metric, nn.Module):  # a metric of torchmetrics
            metric.to(x.device)
        metric.reset()
    if split.targets.dim() > 1:  # outputs for every position may be large
        one, _ = net(x, buffers, transform(split.take(rows[:1]), net.dtype), None)
        batch = max(1, min(batch, MOST_OUTPUTS // one.numel()))
    parts = rows.split(batch)
    for part, owner in zip(parts, [None] * len(parts) if owners is None else owners.split(batch), strict=True):
        outputs, _ = net(x, buffers, transform(split.take(part), net.dtype, clients=owner), None)
        targets = split.targets[part]
        outputs = classes_first(outputs, targets)
        targets = targets.to(net.dtype) if targets.is_floating_point() else targets
        marked = torch.where(targets == net.ignored, IGNORED, targets) if net.ignored != IGNORED else targets
        for name, score in (("loss", net.sample_losses), *apart.items()):
            with blame_score(name, outputs, targets):
                values = torch.as_tensor(
                    score(outputs, targets if name == "loss" else marked), device=part.device
                ).double()
            found[name].append(of_each(name, values, outputs, targets))
        for name, metric in whole.items():
            with blame_score(name, outputs, targets):
                metric.update(*keep_labelled(outputs, marked))
    scores = {name: torch.cat(values) for name, values in found.items()}
    return scores | {name: scores["loss"].new_full((len(rows),), number_of(name, m)) for name, m in whole.items()}


def of_samples(metrics: Metrics) -> dict[str, Metric]:
    """The metrics that are functions, without those that see the whole set."""
    return {name: cast(Metric, metric) for name, metric in metrics.items() if not is_whole(metric)}


def of_each(name: str, values: Tensor, outputs: Tensor, targets: Tensor) -> Tensor:
    """A score's values [n], one for each sample; another shape has been computed in another way than was meant."""
    if values.shape == (len(outputs),):
        return values
    if values.dim():
        what = "the loss" if name == "loss" else f"metric {name!r}"
        raise BadSetting(
            f"{what} gives {list(values.shape)} for {len(outputs)} samples, with outputs {list(outputs.shape)} and targets "
            f"{list(targets.shape)}; it must give one number for each sample, or one for the batch"
        )
    return values.expand(len(outputs))


def keep_labelled(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs [m, C] and labels [m] of all that has a label; outputs and targets as they are, if these are no labels.

    >>> keep_labelled(torch.zeros(1, 2, 3), torch.tensor([[1, IGNORED, 0]]))[1]
    tensor([1, 0])
    """
    if targets.is_floating_point() or outputs.dim() != targets.dim() + 1:
        return outputs, targets
    flat, labels = outputs.movedim(1, -1).flatten(0, -2), targets.flatten()
    return flat[labels != IGNORED], labels[labels != IGNORED]


def weights_of(net: Net, split: Split, rows: Tensor) -> Tensor:
    """[n] what samples weigh in means of scores: the shares of their labels that count, so that all labels weigh alike."""
    return net.label_shares(split.targets[rows]).double()


def means(scores: Mapping[str, Tensor], weight: Tensor) -> dict[str, float]:
    """Each score's mean over samples of these weights [n]; nothing where none of them has a label."""
    if len(weight) and not bool((weight > 0).any()):
        return {}
    return {name: float(apply_weight(values, weight).sum() / weight.sum()) for name, values in scores.items()}


def apply_weight(values: Tensor, weight: Tensor) -> Tensor:
    """Values times weights; a score of what weighs nothing may be anything."""
    return torch.where(weight > 0, values * weight, 0.0)


def group_means(values: Tensor, group: Tensor, groups: int, weight: Tensor) -> Tensor:
    """[groups] the mean of the values [n], of these weights [n], in each group; NaN for a group with none.

    >>> group_means(torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0, 0, 2]), 3, torch.tensor([0.5, 1.0, 1.0]))
    tensor([0.3333,    nan, 1.0000])
    """
    zeros = values.new_zeros(groups)
    return zeros.index_add(0, group, apply_weight(values, weight)) / zeros.index_add(0, group, weight.to(values))


def forgetting(best: Tensor, now: Tensor) -> tuple[Tensor, Tensor]:
    """The mean over classes of the best earlier accuracy minus the accuracy now, and the best [C] including now.

    Below zero where the classes have only become better. A best of -1 stands for nothing earlier; with no class left,
    the answer is NaN.

    >>> forgetting(torch.tensor([0.9, 0.5]), torch.tensor([0.6, 0.6]))
    (tensor(0.1000), tensor([0.9000, 0.6000]))
    """
    return (best - now)[best >= 0].mean(), torch.fmax(best, now)


def round_values(values: Tensor) -> list[float | None]:
    """Numbers for a list in the record: four digits are enough for a picture, and JSON knows no NaN.

    >>> round_values(torch.tensor([1 / 3, float("nan")]))
    [0.3333, None]
    """
    return [None if value != value else round(value, 4) for value in values.tolist()]


class ClientScores(NamedTuple):
    """How the server's model does on clients' own training samples."""

    ids: NDArray[np.int64]
    each: dict[str, Tensor]  # [n] of each metric, the mean over the samples of each of these clients
    numbers: dict[str, Any]  # for the record


def client_scores(
    net: Net, x: Tensor, buffers: Tensor, data: Federation, metrics: Mapping[str, Metric], cohort: Tensor, seed: int
) -> ClientScores:
    """How the model does on the clients' own training samples: for the record quantiles of the accuracy, and the
    mean loss over the samples of those who were not in the cohort, which is what a drifting model forgets first.

    Of more than MOST_SCORED clients it is those of a sample, the same one all through a run.
    """
    scored = np.arange(data.clients)
    if data.clients > MOST_SCORED:
        scored = np.sort(sample(stream(seed, Purpose.SCORED), data.clients, MOST_SCORED))
    rows, owners = data.rows_of(scored)
    scores = sample_scores(net, x, buffers, data.train, data.transform, metrics, rows, owners)
    weight = weights_of(net, data.train, rows)
    absent = weight * ~torch.isin(owners, cohort)
    found: dict[str, Any] = {}
    if bool(absent.any()):
        found["absent_loss"] = means({"loss": scores["loss"]}, absent)["loss"]
    place = torch.searchsorted(torch.from_numpy(scored).to(owners.device), owners)
    by_client = {name: group_means(values, place, len(scored), weight) for name, values in scores.items()}
    if "accuracy" in by_client:
        each = by_client["accuracy"]
        levels = each.nanquantile(each.new_tensor(QUANTILES)).tolist()
        found |= {f"client_accuracy_p{100 * q:.0f}": level for q, level in zip(QUANTILES, levels, strict=True)}
        found["client_accuracies"] = round_values(each.nanquantile(each.new_tensor(TWENTIETHS)))
    return ClientScores(scored, by_client, found)
