"""The gradient oracle: an algorithm asks it for gradients of the clients' losses, at any point and any number of times.

Only the oracle knows the number of clients: x is [..., P] and so is the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from undrift.core.errors import BadSetting
from undrift.core.forms import plain
from undrift.core.layout import Layout
from undrift.core.vec import descend
from undrift.oracle.layers import Context
from undrift.oracle.losses import classes_first
from undrift.oracle.net import Net

Objective = Callable[..., Tensor]
ASKED = 1 << 25  # numbers of input that are shown to several models at a time


class GradientOracle(Protocol):
    """The interface of an oracle for `local_step`."""

    buffers: Tensor  # [..., Q] BatchNorm's statistics
    loss: Tensor  # [..., 1] loss of the last tracked gradient, which is recorded for the step

    @property
    def layout(self) -> Layout: ...
    @property
    def samples(self) -> Tensor: ...
    def grad(self, x: Tensor, objective: Objective | None = None, *others: Tensor, track: bool = True) -> Tensor: ...
    def grads(self, *points: Tensor) -> list[Tensor]: ...
    def step(self, x: Tensor, rate: float | Tensor) -> Tensor: ...
    def answers(self, ask: Objective, x: Tensor, models: Tensor, statistics: Tensor) -> Tensor: ...
    def at(self, buffers: Tensor) -> GradientOracle: ...
    def other(self, name: str, buffers: Tensor) -> GradientOracle: ...
    def parts(self, count: int) -> Sequence[GradientOracle]: ...


class LocalData(Protocol):
    """The interface for `local_start` and `measure`: all data of a client."""

    @property
    def layout(self) -> Layout: ...
    @property
    def buffers(self) -> Tensor: ...  # [..., Q] BatchNorm's statistics at the start of the round
    def full_grad(self, x: Tensor) -> Tensor: ...


class NoData(NamedTuple):
    """`LocalData` of a client without samples, to find the shapes of a state."""

    buffers: Tensor
    layout: Layout

    def full_grad(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)


class Batch(NamedTuple):
    """One mini-batch of every client; padded samples have real = 0."""

    inputs: Tensor  # [..., B, *shape]
    targets: Tensor  # [..., B, *]
    real: Tensor | None  # [..., B]; None: no sample is padding
    key: Tensor  # [...] dropout stream of the step
    dropout: bool = True


class View:
    """The model inside an objective: a function of a vector [P] and inputs, for one client."""

    def __init__(self, net: Net, task: Net, buffers: Tensor, context: Context, stacked: bool) -> None:
        self.net, self.task, self.buffers, self.context, self.stacked = net, task, buffers, context, stacked
        self.after = buffers

    def __call__(self, x: Tensor, inputs: Tensor) -> Tensor:
        """Outputs in training mode; the running statistics of the last call count."""
        outputs, self.after = self.net(x, self.buffers, inputs, self.context, self.stacked)
        return outputs

    def trace(self, x: Tensor, inputs: Tensor) -> list[Tensor]:
        """The outputs of all blocks in training mode; the last one is the model's output."""
        outputs, self.after = self.net.trace(x, self.buffers, inputs, self.context, self.stacked)
        return outputs

    def onward(self, block: int, x: Tensor, h: Tensor) -> Tensor:
        """Apply the blocks from number `block` on to h, in training mode, without tracking statistics."""
        return self.net.onward(block, x, self.buffers, h, self.context, self.stacked)

    def still_features(self, x: Tensor, buffers: Tensor, inputs: Tensor) -> Tensor:
        """The input [B, h] of the classifier in evaluation mode, with the given statistics."""
        return self.net.trace(x, buffers, inputs, None, self.stacked)[0][-2].flatten(1)

    def still(self, x: Tensor, buffers: Tensor, inputs: Tensor) -> Tensor:
        """Outputs in evaluation mode, with the given statistics."""
        return self.net(x, buffers, inputs, None, self.stacked)[0]

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The task's loss of each sample [B]; where some labels do not count, scaled for a mean over those that do."""
        return self.over_labels(self.net.sample_losses(outputs, targets, self.context.real), targets)

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The task's loss [B, M] of the outputs [B, M, *] of several models, scaled likewise."""
        losses: Tensor = torch.vmap(self.loss, (1, None), 1)(outputs, targets)
        return losses

    def probabilities(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The probability of each class [B, C, *], or of each structure at each pixel."""
        return self.task.probabilities(outputs, targets)

    def by_class(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Outputs as logits [B, C, *] of the classes of labels [B, *]."""
        outputs = classes_first(outputs, targets)
        labels = not targets.is_floating_point() and outputs.dim() == targets.dim() + 1
        if not labels or (targets.dim() > 1 and self.task.loss is not F.cross_entropy):
            raise BadSetting(
                "this method compares the probabilities of classes, so it needs class labels and cross-entropy; use another "
                "method for masks and other targets"
            )
        return outputs

    def over(self, values: Tensor, targets: Tensor) -> Tensor:
        """[B] the mean of a sample's values [B, *] over its labels, scaled like a loss."""
        counted = torch.where(targets == self.task.ignored, 0.0, values)
        return self.over_labels(self.task.mean_over_labels(counted, targets), targets)

    def mixed_loss(self, probabilities: Tensor, targets: Tensor) -> Tensor:
        """The task's loss of each sample [B] for a mixture of probabilities, scaled likewise."""
        return self.over_labels(self.task.mixed_losses(probabilities, targets), targets)

    def over_labels(self, losses: Tensor, targets: Tensor) -> Tensor:
        """Scale losses [B] so that their mean over the real samples is PyTorch's: the mean over all labels that count.

        Where all do, nothing changes. Without any label the losses are 0.
        """
        share, real = self.task.label_shares(targets), self.context.real
        every = torch.ones_like(share) if real is None else real.to(share.dtype)
        counted = (share * every).sum()
        return losses * share * torch.where(counted > 0, every.sum() / torch.where(counted > 0, counted, 1.0), 0.0)


def task_loss(model: View, x: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
    """The objective of a plain gradient: the task's loss of each sample."""
    return model.loss(model(x, inputs), targets)


@dataclass
class Tally:
    """The calls so far."""

    calls: int = 0  # gradients
    mapped: bool = False  # whether vmap was used: it turns stacked convolutions into grouped ones


class Oracle:
    """Gradients on one mini-batch for clients [...]: `lead` is () for a client alone, (S,) for a stacked cohort.

    A tracked call stores its loss and the BatchNorm buffers [..., Q] after it; track=False leaves both unchanged.
    """

    def __init__(self, net: Net, batch: Batch, buffers: Tensor) -> None:
        self.net, self.batch, self.buffers = net, batch, buffers
        self.task = net  # the main network, if `net` is one of its further networks
        self.lead = batch.key.shape
        self.tally = Tally()  # shared with oracles derived from this one
        self.layout = net.layout
        self.loss = torch.zeros((*self.lead, 1), dtype=buffers.dtype, device=buffers.device)

    @property
    def calls(self) -> int:
        return self.tally.calls

    @property
    def samples(self) -> Tensor:
        """[..., 1] the number of real samples in the mini-batch."""
        if self.batch.real is not None:
            return self.batch.real.sum(-1, keepdim=True)
        count = self.batch.inputs.shape[len(self.lead)]
        return torch.full((*self.lead, 1), float(count), dtype=self.loss.dtype, device=self.loss.device)

    def at(self, buffers: Tensor) -> Oracle:
        """The same mini-batch with other BatchNorm statistics, which it updates in `.buffers`."""
        return self._derive(self.net, self.batch, buffers)

    def other(self, name: str, buffers: Tensor) -> Oracle:
        """The same mini-batch for another network, whose loss an objective defines."""
        return self._derive(self.net.networks[name], self.batch, buffers)

    def parts(self, count: int) -> list[Oracle]:
        """Split the mini-batch: part j takes every count-th sample from j on. A part without samples has gradient zero."""
        (inputs, targets, real, key, dropout), dim = self.batch, len(self.lead)
        width = inputs.shape[dim]
        if width < count:
            real = torch.ones(*self.lead, width, dtype=self.loss.dtype, device=inputs.device) if real is None else real
            real = F.pad(real, (0, count - width))
            pads = (t.narrow(dim, 0, 1).expand(*self.lead, count - width, *t.shape[dim + 1 :]) for t in self.batch[:2])
            inputs, targets = (torch.cat(pair, dim) for pair in zip((inputs, targets), pads, strict=True))

        def part(t: Tensor, j: int) -> Tensor:
            return t.index_select(dim, torch.arange(j, t.shape[dim], count, device=t.device))

        masks = [None if real is None else part(real, j) for j in range(count)]
        batches = [Batch(part(inputs, j), part(targets, j), masks[j], key, dropout) for j in range(count)]
        return [self._derive(self.net, batch, self.buffers) for batch in batches]

    def _derive(self, net: Net, batch: Batch, buffers: Tensor) -> Oracle:
        oracle = Oracle(net, batch, buffers.expand(*self.lead, buffers.shape[-1]))
        oracle.tally, oracle.task = self.tally, self.task
        return oracle

    def answers(self, ask: Objective, x: Tensor, models: Tensor, statistics: Tensor) -> Tensor:
        """ask(model, outputs, targets) for each sample [..., B, m], without a gradient.

        The outputs [B, 1 + M, *] are those of x [..., P], with the statistics `buffers`, and of models [..., M, P] that all
        clients share, with their statistics [..., M, Q]; all in evaluation mode.
        """
        x, behind = x.detach().expand(*self.lead, x.shape[-1]), len(self.lead) + 1
        with torch.no_grad():
            own, _ = self._each(lambda model, x, inputs, targets: model.still(x, model.buffers, inputs), x, [])
            outputs = torch.cat([own.unsqueeze(behind), self._shared_outputs(models, statistics)], behind)
            return self._each(lambda model, outputs, inputs, targets: ask(model, outputs, targets), outputs, [])[0]

    def _shared_outputs(self, models: Tensor, statistics: Tensor) -> Tensor:
        """[..., B, M, *]. The samples of stacked clients form one batch, and many models see it at a time."""
        inputs, runs = self.batch.inputs, len(self.lead) - 1

        def one_model(x: Tensor, buffers: Tensor, inputs: Tensor) -> Tensor:
            return self.net(x, buffers, inputs, None, bool(self.lead))[0]

        if not self.lead:
            return torch.stack([one_model(x, own, inputs) for x, own in zip(models, statistics, strict=True)], 1)
        many = torch.vmap(one_model, (0, 0, None), 1, chunk_size=max(1, ASKED // inputs.numel()))
        for _ in range(runs):
            many = torch.vmap(many)
        outputs = many(models.squeeze(runs), statistics.squeeze(runs), inputs.flatten(runs, runs + 1))
        by_client: Tensor = outputs.unflatten(runs, (self.lead[-1], -1))
        return by_client

    def grad(self, x: Tensor, objective: Objective | None = None, *others: Tensor, track: bool = True) -> Tensor:
        """The gradient [..., P] at x [..., P] of the mean over real samples of objective(model, x, inputs, targets, *others).

        The objective sees one client and returns one number per sample; by default it is the task's loss. `others` are
        further vectors [..., P] that it needs, such as the server's model.
        """
        self.tally.calls += 1
        g, losses, after = task_gradient(self, x) if objective is None else self.by_autograd(objective, x, *others)
        if track:
            self.buffers, self.loss = after, losses.unsqueeze(-1)
        return g

    def by_autograd(self, objective: Objective, x: Tensor, *others: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The gradient, every client's mean loss [...], and the buffers [..., Q] after the pass."""
        points = [v.detach().expand(*self.lead, v.shape[-1]) for v in (x, *others)]
        at = points[0].requires_grad_()
        with torch.enable_grad():
            losses, after = self._each(objective, at, points[1:], mean_loss)
            (g,) = torch.autograd.grad(losses.sum(), at)
        return g, losses.detach(), after.detach()

    def step(self, x: Tensor, rate: float | Tensor) -> Tensor:
        """x - rate g(x) for the task's loss and a rate that broadcasts against x [..., P]."""
        return task_step(self, x, rate)

    def grads(self, *points: Tensor) -> list[Tensor]:
        """The gradients at several points on the same mini-batch, with the same dropout mask; the first one is tracked."""
        if not self.lead:
            return [self.grad(x, track=n == 0) for n, x in enumerate(points)]
        # One call for stacked clients, with the points as one more leading dimension.
        many = torch.Size((len(points), *self.lead))
        stacked = torch.stack([x.expand(*self.lead, x.shape[-1]) for x in points])
        inputs, targets, real, key, dropout = self.batch
        inputs, targets, key = (t.expand(len(points), *t.shape) for t in (inputs, targets, key))
        batch = Batch(inputs, targets, None if real is None else real.expand(len(points), *real.shape), key, dropout)
        inner = Oracle(self.net, batch, self.buffers.expand(*many, self.buffers.shape[-1]))
        inner.tally = self.tally
        gradients = inner.grad(stacked)
        self.tally.calls += len(points) - 1
        self.buffers, self.loss = inner.buffers[0], inner.loss[0]
        return list(gradients)

    def _each(
        self,
        ask: Objective,
        x: Tensor,
        others: list[Tensor],
        reduce: Callable[..., Tensor] = lambda values, real: values,
    ) -> tuple[Tensor, Tensor]:
        """reduce(values of `ask`, real) for every client, and its buffers [..., Q], by vmap over all leading dimensions."""
        batch = self.batch

        def one_client(
            x: Tensor,
            buffers: Tensor,
            inputs: Tensor,
            targets: Tensor,
            real: Tensor | None,
            key: Tensor,
            *others: Tensor,
        ) -> tuple[Tensor, Tensor]:
            model = View(self.net, self.task, buffers, Context(real, key, batch.dropout), bool(self.lead))
            return reduce(ask(model, x, inputs, targets, *others), real), model.after

        if not self.lead:
            return one_client(x, self.buffers, *batch[:-1], *others)
        self.tally.mapped = True
        last = len(self.lead) - 1
        flat: list[Any] = [None if t is None else t.flatten(0, last) for t in (x, self.buffers, *batch[:-1], *others)]
        values, after = torch.vmap(one_client, in_dims=tuple(None if t is None else 0 for t in flat))(*flat)
        return values.unflatten(0, self.lead), after.unflatten(0, self.lead)


def mean_loss(losses: Tensor, real: Tensor | None) -> Tensor:
    """The mean over real samples. Padding may hold anything, so it is cut off rather than multiplied by zero."""
    if real is None:
        return losses.mean()
    return torch.where(real > 0, losses, 0.0).sum() / real.sum().clamp(min=1)


@plain
def task_gradient(oracle: Oracle, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient [..., P] of the task's loss at x, the loss [...] itself, and the buffers [..., Q] after the pass."""
    return oracle.by_autograd(task_loss, x)


@plain
def task_step(oracle: Oracle, x: Tensor, rate: float | Tensor) -> Tensor:
    """x - rate g(x) for the task's loss, tracked: `Oracle.step`."""
    return descend(x, rate, oracle.grad(x))


@plain
def stacks_in_a_thread(net: Net) -> bool:
    """Whether a thread runs a few stacked clients faster than one client after another."""
    return False
