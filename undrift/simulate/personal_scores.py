"""Scores on what each client holds out of its own samples: of the server's model, of its personal model, of the super model."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from undrift.algorithms.base import Algorithm
from undrift.algorithms.personal import Served
from undrift.core.trees import State, map_leaves
from undrift.data.batches import Plan
from undrift.data.federation import Federation, HeldOut
from undrift.oracle.losses import classes_first
from undrift.oracle.net import Net
from undrift.personal.choosing import Choice, Gamma, best_gamma, best_gammas, choose
from undrift.round.order import ServerState
from undrift.simulate.evaluate import Metrics, group_means, means, of_samples, sample_scores, weights_of
from undrift.simulate.whole_metrics import is_whole, number_of
from undrift.simulate.work import LocalWhole

T = TypeVar("T")
MOST_CROSSED = 20  # sites, up to which every personal model is tried on every site at the end of a run


class Scores(NamedTuple):
    """How samples [n] do: metrics of single samples, and the outputs, where a metric sees many samples together."""

    each: dict[str, Tensor]  # [n] under each metric's name
    outputs: Tensor | None  # [n, ...]


class Scored(Protocol):
    """What is asked of a run whose clients are scored."""

    t: int
    alg: Algorithm
    net: Net
    data: Federation
    state: ServerState
    metrics: Metrics

    @property
    def plan(self) -> Plan: ...

    def serving(self) -> tuple[Algorithm, State, State]:
        """The algorithm, what would go down to everybody now, and everybody's state."""


def own_scores(run: Scored, last: bool) -> dict[str, Any]:
    """Means over clients of what serves them as own_METRIC (val_own_METRIC on validation samples), and every site's scores
    of all that there is under `sites`.
    """
    data, alg = run.data, run.alg
    most = max(int(own.owners.max()) for own in data.held_out.values()) + 1
    served = personal_models(run) if alg.personalises else []
    shared = Served(run.state.x, run.state.buffers)
    found: dict[str, Any] = {}
    table: dict[str, Any] = {}
    gamma: Gamma = max(float(getattr(alg, "gamma", 0.0)), 0.0)
    each = getattr(alg, "thresholds", "one") == "each"
    for name in sorted(data.held_out, reverse=True):  # validation before the others: the threshold comes from there
        own, sites = data.held_out[name], 1 if name == "unseen" else most
        kinds = {"global": scores_of(run, own, shared)}
        if served and name != "unseen":
            kinds["personal"] = by_owner(run, own, [served[i] for i in range(sites)])
        if alg.chooses:
            if name == "val" and tunes(run):
                gamma = tune_threshold(run, own, shared, served, each)
            kinds["super"], choice = super_scores(run, own, shared, served, gamma)
            table.setdefault("chosen", {})[name] = count_choices(own, choice, sites, len(served) + 1)
            if last and name == "unseen" and alg.chooses == "threshold":
                table["unseen_thresholds"] = thresholds(run, own, shared, served)
        scored = {k: site_scores(run, own, s, sites) for k, s in kinds.items()}
        table[name] = {k: {m: v.tolist() for m, v in s.items()} for k, s in scored.items()}
        best = list(kinds)[-1]  # the super model, else the personal one, else the server's
        prefix = "" if name == "test" else f"{name}_"
        found |= {f"{prefix}own_{m}": float(v.nanmean()) for m, v in scored[best].items()}
        found |= {f"{prefix}own_{m}_all": value for m, value in whole_scores(run, own, kinds[best]).items()}
    if alg.chooses == "threshold":
        found["gamma"] = gamma
    if last and served and most <= MOST_CROSSED and "test" in data.held_out:
        for name in ("test", "unseen"):
            if name in data.held_out:
                own = data.held_out[name]
                crossed = [scores_of(run, own, model) for model in served]
                whole = [whole_scores(run, own, scores) for scores in crossed]
                table["crossed_all" if name == "test" else "crossed_unseen"] = list_by_metric(whole)
                if name == "test":
                    by_site = list_by_metric([site_scores(run, own, scores, most) for scores in crossed])
                    table["crossed"] = {m: [each.tolist() for each in of_models] for m, of_models in by_site.items()}
    return found | {"sites": table}


def list_by_metric(of_models: list[dict[str, T]]) -> dict[str, list[T]]:
    """Each metric's values of all models."""
    return {name: [values[name] for values in of_models] for name in of_models[0]}


def together(run: Scored, own: HeldOut, outputs: Tensor | None, some: Tensor) -> dict[str, float]:
    """What the metrics say that see many samples together, of some samples; NaN where they see none."""
    found = {}
    for name, metric in run.metrics.items():
        if is_whole(metric) and outputs is not None:
            metric.reset()
            if len(some):
                metric.update(outputs[some], own.split.targets[own.rows[some]])
            found[name] = number_of(name, metric) if len(some) else float("nan")
    return found


def site_scores(run: Scored, own: HeldOut, scores: Scores, sites: int) -> dict[str, Tensor]:
    """[sites] of each metric."""
    weight = weights_of(run.net, own.split, own.rows)
    found = {name: group_means(values, own.owners, sites, weight) for name, values in scores.each.items()}
    members = [(own.owners == k).nonzero().squeeze(-1) for k in range(sites)]
    each = list_by_metric([together(run, own, scores.outputs, some) for some in members])
    return found | {name: torch.tensor(values, dtype=torch.float64) for name, values in each.items()}


def whole_scores(run: Scored, own: HeldOut, scores: Scores) -> dict[str, float]:
    """Each metric over all samples."""
    every = torch.arange(len(own.rows), device=own.rows.device)
    return means(scores.each, weights_of(run.net, own.split, own.rows)) | together(run, own, scores.outputs, every)


def count_choices(own: HeldOut, choice: Choice, sites: int, models: int) -> list[list[int]]:
    """[sites][models] how often which model was chosen for a site's samples."""
    counts = torch.zeros(sites, models, dtype=torch.int64)
    counts.index_put_((own.owners.cpu(), choice.model.cpu()), torch.ones(len(own.rows), dtype=torch.int64), True)
    return counts.tolist()


def thresholds(run: Scored, own: HeldOut, shared: Served, served: list[Served]) -> dict[str, Any]:
    """Without a threshold, and with the one that is best on these samples themselves: gamma, the choices and the scores."""
    found = {}
    for name, gamma in (("none", 0.0), ("best", tune_threshold(run, own, shared, served, each=False))):
        scores, choice = super_scores(run, own, shared, served, gamma)
        each = whole_scores(run, own, scores)
        found[name] = {"gamma": gamma, "chosen": count_choices(own, choice, 1, len(served) + 1)[0], "scores": each}
    return found


def tunes(run: Scored) -> bool:
    """Whether the threshold is tuned on validation samples."""
    return run.alg.chooses == "threshold" and getattr(run.alg, "gamma", 0.0) < 0


def personal_models(run: Scored) -> list[Served]:
    """The model that serves each client now."""
    data, device = run.data, run.state.x.device
    alg, down, clients = run.serving()
    ids = torch.arange(data.clients, device=device)
    start, sizes = (torch.from_numpy(np.asarray(v)).to(device) for v in (data.start, data.sizes))
    found = []
    for i in range(data.clients):
        width = min(run.plan.batch, int(data.sizes[i]))
        batches = -(-int(data.sizes[i]) // width)
        whole = LocalWhole(run.net, data, ids[i], start[i], sizes[i], width, batches, run.state.buffers)
        found.append(alg.serves(down, map_leaves(lambda t, i=i: t[i], clients), whole))
    return found


def scores_of(run: Scored, own: HeldOut, model: Served, some: Tensor | None = None) -> Scores:
    """The scores of one model on the samples, or on some of them."""
    rows, owners = (own.rows, own.owners) if some is None else (own.rows[some], own.owners[some])
    metrics = of_samples(run.metrics)
    each = sample_scores(run.net, *model, own.split, run.data.transform, metrics, rows, owners)
    whole = len(metrics) < len(run.metrics)
    return Scores(each, outputs_of(run, run.net, model, own, rows, owners) if whole else None)


@torch.no_grad()
def outputs_of(
    run: Scored, net: Net, model: Served, own: HeldOut, rows: Tensor, owners: Tensor, batch: int = 1000
) -> Tensor:
    """[n, ...] what a model says of the samples."""
    found = []
    for some, holders in zip(rows.split(batch), owners.split(batch), strict=True):
        inputs = run.data.transform(own.split.take(some), net.dtype, clients=holders)
        found.append(classes_first(net(*model, inputs, None)[0], own.split.targets[some]))
    return torch.cat(found)


def by_model(run: Scored, own: HeldOut, models: list[Served], which: Tensor) -> Scores:
    """The scores of each sample under the model that `which` [n] names for it."""
    found: dict[str, Tensor] = {}
    outputs: Tensor | None = None
    for k in which.unique().tolist():
        some = (which == k).nonzero().squeeze(-1)
        each, said = scores_of(run, own, models[k], some)
        for name, values in each.items():
            found.setdefault(name, values.new_zeros(len(own.rows)))[some] = values
        if said is not None:
            outputs = said.new_zeros(len(own.rows), *said.shape[1:]) if outputs is None else outputs
            outputs[some] = said
    return Scores(found, outputs)


def by_owner(run: Scored, own: HeldOut, models: list[Served]) -> Scores:
    return by_model(run, own, models, own.owners)


def selector_outputs(run: Scored, own: HeldOut) -> Tensor:
    """[n, m] what the selector says of each sample."""
    selector = run.alg.selector(run.state.companion)
    return outputs_of(run, run.net.networks["selector"], selector, own, own.rows, own.owners)


def tune_threshold(run: Scored, own: HeldOut, shared: Served, served: list[Served], each: bool) -> Gamma:
    """The threshold with the best client-average score, or `each` client's model's."""
    choice = choose("threshold", selector_outputs(run, own), 0.0)
    metric = next(iter(of_samples(run.metrics)), "loss")
    preferred = choice.weights.argmax(-1)
    personal = by_model(run, own, served, preferred).each[metric]
    of_server = scores_of(run, own, shared).each[metric]
    labels = weights_of(run.net, own.split, own.rows)
    weight = labels / torch.bincount(own.owners, labels).clamp(min=1e-300)[own.owners]
    sign = -1.0 if metric == "loss" else 1.0
    if each:
        return best_gammas(preferred, len(served), choice.confidence, sign * personal, sign * of_server, weight)
    return best_gamma(choice.confidence, sign * personal, sign * of_server, weight)


def super_scores(
    run: Scored, own: HeldOut, shared: Served, served: list[Served], gamma: Gamma
) -> tuple[Scores, Choice]:
    """The scores of the models that the selector chooses, or mixes."""
    choice = choose(run.alg.chooses, selector_outputs(run, own), gamma)
    if not run.alg.selects(run.t):  # the selector has not learned anything yet: the server's model serves
        return scores_of(run, own, shared), choice._replace(model=torch.zeros_like(choice.model))
    if run.alg.chooses != "mix":
        return by_model(run, own, [shared, *served], choice.model), choice
    return mixed_scores(run, own, [shared, *served], choice.weights), choice


@torch.no_grad()
def mixed_scores(run: Scored, own: HeldOut, models: list[Served], weights: Tensor, batch: int = 200) -> Scores:
    """The scores of the mixture of all models' probabilities."""
    net = run.net
    found: dict[str, list[Tensor]] = {}
    said, metrics = list[Tensor](), of_samples(run.metrics)
    for at in range(0, len(own.rows), batch):
        rows, owners, weight = (t[at : at + batch] for t in (own.rows, own.owners, weights))
        inputs = run.data.transform(own.split.take(rows), net.dtype, clients=owners)
        mixed, targets = torch.zeros((), device=rows.device), own.split.targets[rows]
        for k, model in enumerate(models):
            p = net.probabilities(net(*model, inputs, None)[0], targets)
            mixed = mixed + weight[:, k].view(-1, *(1,) * (p.dim() - 1)) * p
        found.setdefault("loss", []).append(net.mixed_losses(mixed, targets).double())
        outputs = (
            mixed - 0.5 if own.split.targets.dim() > 1 else mixed
        )  # metrics see where an output is above 0, or largest
        said += [outputs] if len(metrics) < len(run.metrics) else []
        for name, metric in metrics.items():
            found.setdefault(name, []).append(torch.as_tensor(metric(outputs, targets)).double())
    return Scores({name: torch.cat(values) for name, values in found.items()}, torch.cat(said) if said else None)
