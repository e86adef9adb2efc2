"""The gradient oracle: what an algorithm may ask about the clients' losses, at any point and as often as it likes.

An algorithm is handed an oracle, not a gradient; extrapolated points, previous models and proximal points are then
ordinary calls. The oracle alone knows how many clients there are: x is [..., P] and so is the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from undrift.core.forms import plain
from undrift.core.layout import Layout
from undrift.core.vec import descend
from undrift.oracle.net import Context, Net

Objective = Callable[..., Tensor]


class GradientOracle(Protocol):
    """What `local_step` may use."""

    buffers: Tensor  # [..., Q] BatchNorm's statistics
    loss: Tensor  # [..., 1] of the last tracked gradient: the step's loss in the record

    @property
    def layout(self) -> Layout: ...

    @property
    def samples(self) -> Tensor: ...

    def grad(self, x: Tensor, objective: Objective | None = None, *others: Tensor, track: bool = True) -> Tensor: ...

    def grads(self, *points: Tensor) -> list[Tensor]: ...

    def step(self, x: Tensor, rate: float | Tensor) -> Tensor: ...

    def values(self, x: Tensor, ask: Objective, *others: Tensor) -> Tensor: ...

    def at(self, buffers: Tensor) -> GradientOracle: ...

    def other(self, name: str, buffers: Tensor) -> GradientOracle: ...

    def parts(self, count: int) -> Sequence[GradientOracle]: ...


class LocalData(Protocol):
    """What `local_start` and `measure` may use: the whole of a client's data."""

    @property
    def buffers(self) -> Tensor:
        """[..., Q] BatchNorm's statistics at the start of the round."""

    def full_grad(self, x: Tensor) -> Tensor: ...


class NoData(NamedTuple):
    """`LocalData` of a client without samples, for whoever only wants to know what a state will be like."""

    buffers: Tensor

    def full_grad(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)


class Batch(NamedTuple):
    """One mini-batch of every client; padded samples have real = 0."""

    inputs: Tensor  # [..., B, *shape]
    targets: Tensor  # [..., B, *]
    real: Tensor | None  # [..., B]; None: no sample is padding
    key: Tensor  # [...] the step's dropout stream
    dropout: bool = True


class View:
    """The model as an objective sees it: a function of a vector [P] and inputs, for one client."""

    def __init__(self, net: Net, task: Net, buffers: Tensor, context: Context, stacked: bool) -> None:
        self.net, self.task, self.buffers, self.context, self.stacked = net, task, buffers, context, stacked
        self.after = buffers

    def __call__(self, x: Tensor, inputs: Tensor) -> Tensor:
        """Outputs in training mode; the last call's running statistics are kept."""
        outputs, self.after = self.net(x, self.buffers, inputs, self.context, self.stacked)
        return outputs

    def trace(self, x: Tensor, inputs: Tensor) -> list[Tensor]:
        """The outputs of all blocks in training mode, as a call; the last one is the model's output."""
        outputs, self.after = self.net.trace(x, self.buffers, inputs, self.context, self.stacked)
        return outputs

    def onward(self, block: int, x: Tensor, h: Tensor) -> Tensor:
        """What the blocks of x from number `block` on make of h, in training mode, leaving no statistics behind."""
        return self.net.onward(block, x, self.buffers, h, self.context, self.stacked)

    def still_features(self, x: Tensor, buffers: Tensor, inputs: Tensor) -> Tensor:
        """The input [B, h] of the classifier in evaluation mode, with the given statistics."""
        return self.net.trace(x, buffers, inputs, None, self.stacked)[0][-2].flatten(1)

    def still(self, x: Tensor, buffers: Tensor, inputs: Tensor) -> Tensor:
        """Outputs in evaluation mode, with the given statistics."""
        return self.net(x, buffers, inputs, None, self.stacked)[0]

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The task's loss of each sample [B]."""
        return self.net.sample_losses(outputs, targets)

    def probabilities(self, outputs: Tensor) -> Tensor:
        """What the outputs say of each class, or of each structure at each pixel."""
        return self.task.probabilities(outputs)

    def mixed_loss(self, probabilities: Tensor, targets: Tensor) -> Tensor:
        """The task's loss of each sample [B] for probabilities that are a mixture."""
        return self.task.mixed_losses(probabilities, targets)


def task_loss(model: View, x: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
    """The objective of a plain gradient: the task's loss of each sample."""
    return model.loss(model(x, inputs), targets)


@dataclass
class Tally:
    """What was asked so far."""

    calls: int = 0  # gradients
    mapped: bool = False  # by vmap, in which a stacked convolution becomes a grouped one


class Oracle:
    """Gradients on one mini-batch for clients [...]: `lead` is () for a client alone, (S,) for a stacked cohort.

    It counts its gradients, keeps the last tracked loss, and carries the BatchNorm buffers [..., Q] forward: a call with
    track=False leaves them as they are.
    """

    def __init__(self, net: Net, batch: Batch, buffers: Tensor) -> None:
        self.net, self.batch, self.buffers = net, batch, buffers
        self.task = net  # whose task it is, where `net` is a network beside it
        self.lead = batch.key.shape
        self.tally = Tally()  # shared with the oracles made of this one
        self.layout = net.layout
        self.loss = torch.zeros((*self.lead, 1), dtype=buffers.dtype, device=buffers.device)

    @property
    def calls(self) -> int:
        return self.tally.calls

    @property
    def samples(self) -> Tensor:
        """[..., 1] how many real samples the mini-batch has."""
        if self.batch.real is not None:
            return self.batch.real.sum(-1, keepdim=True)
        count = self.batch.inputs.shape[len(self.lead)]
        return torch.full((*self.lead, 1), float(count), dtype=self.loss.dtype, device=self.loss.device)

    def at(self, buffers: Tensor) -> Oracle:
        """The same mini-batch for a model with BatchNorm statistics of its own, which are then in `.buffers`."""
        return self._relative(self.net, self.batch, buffers)

    def other(self, name: str, buffers: Tensor) -> Oracle:
        """The same mini-batch for another network; an objective has to say what its loss is."""
        return self._relative(self.net.beside[name], self.batch, buffers)

    def parts(self, count: int) -> list[Oracle]:
        """The mini-batch as independent ones: every count-th sample, from the first on, from the second on, and so on.

        A part without a sample has the gradient zero.
        """
        inputs, targets, real, key, dropout = self.batch
        dim = len(self.lead)
        width = inputs.shape[dim]
        if width < count:
            real = torch.ones(*self.lead, width, dtype=self.loss.dtype, device=inputs.device) if real is None else real
            more = [
                t.narrow(dim, 0, 1).expand(*self.lead, count - width, *t.shape[dim + 1 :]) for t in (inputs, targets)
            ]
            inputs, targets = torch.cat([inputs, more[0]], dim), torch.cat([targets, more[1]], dim)
            real = F.pad(real, (0, count - width))

        def some(t: Tensor, j: int) -> Tensor:
            return t.index_select(dim, torch.arange(j, t.shape[dim], count, device=t.device))

        return [
            self._relative(
                self.net,
                Batch(some(inputs, j), some(targets, j), None if real is None else some(real, j), key, dropout),
                self.buffers,
            )
            for j in range(count)
        ]

    def _relative(self, net: Net, batch: Batch, buffers: Tensor) -> Oracle:
        made = Oracle(net, batch, buffers.expand(*self.lead, buffers.shape[-1]))
        made.tally, made.task = self.tally, self.task
        return made

    def values(self, x: Tensor, ask: Objective, *others: Tensor) -> Tensor:
        """What ask(model, x, inputs, targets, *others) says of each sample [..., B, m], without a gradient."""
        points = [v.detach().expand(*self.lead, v.shape[-1]) for v in (x, *others)]
        with torch.no_grad():
            return self._each(ask, points[0], points[1:])[0]

    def grad(self, x: Tensor, objective: Objective | None = None, *others: Tensor, track: bool = True) -> Tensor:
        """The gradient [..., P] at x [..., P] of the mean over real samples of objective(model, x, inputs, targets, *others).

        The objective is written for one client and returns one number a sample; `others` are further vectors [..., P]
        that it needs, such as the server's model. Without an objective it is the task's loss.
        """
        self.tally.calls += 1
        g, losses, after = task_gradient(self, x) if objective is None else self.by_autograd(objective, x, *others)
        if track:
            self.buffers, self.loss = after, losses.unsqueeze(-1)
        return g

    def by_autograd(self, objective: Objective, x: Tensor, *others: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`grad`, every client's mean loss [...], and the buffers [..., Q] after the pass."""
        points = [v.detach().expand(*self.lead, v.shape[-1]) for v in (x, *others)]
        at = points[0].requires_grad_()
        with torch.enable_grad():
            losses, after = self._losses(objective, at, points[1:])
            (g,) = torch.autograd.grad(losses.sum(), at)
        return g, losses.detach(), after.detach()

    def step(self, x: Tensor, rate: float | Tensor) -> Tensor:
        """x - rate g(x) for the task's loss and a rate that meets x [..., P]."""
        return task_step(self, x, rate)

    def grads(self, *points: Tensor) -> list[Tensor]:
        """The gradients at several points on the one mini-batch, with one dropout mask; the first one is tracked.

        For stacked clients it is one call, with the points as one more leading dimension.
        """
        if not self.lead:
            return [self.grad(x, track=n == 0) for n, x in enumerate(points)]
        many = torch.Size((len(points), *self.lead))
        stacked = torch.stack([x.expand(*self.lead, x.shape[-1]) for x in points])
        inputs, targets, real, key, dropout = self.batch
        inputs, targets, key = (t.expand(len(points), *t.shape) for t in (inputs, targets, key))
        batch = Batch(inputs, targets, None if real is None else real.expand(len(points), *real.shape), key, dropout)
        inner = Oracle(self.net, batch, self.buffers.expand(*many, self.buffers.shape[-1]))
        inner.tally = self.tally
        found = inner.grad(stacked)
        self.tally.calls += len(points) - 1
        self.buffers, self.loss = inner.buffers[0], inner.loss[0]
        return list(found)

    def _losses(self, objective: Objective, x: Tensor, others: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Every client's mean loss [...] over its real samples, and buffers [..., Q]."""

        def of_one(losses: Tensor, real: Tensor | None) -> Tensor:
            if real is None:
                return losses.mean()
            # Padding may hold anything, so it is cut off rather than multiplied by zero.
            return torch.where(real > 0, losses, 0.0).sum() / real.sum().clamp(min=1)

        return self._each(objective, x, others, of_one)

    def _each(
        self,
        ask: Objective,
        x: Tensor,
        others: list[Tensor],
        summed: Callable[[Tensor, Tensor | None], Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """What is asked about every client, and its buffers [..., Q], by vmap over all leading dimensions at once."""

        batch = self.batch

        def of_one(
            x: Tensor,
            buffers: Tensor,
            inputs: Tensor,
            targets: Tensor,
            real: Tensor | None,
            key: Tensor,
            *others: Tensor,
        ) -> tuple[Tensor, Tensor]:
            model = View(self.net, self.task, buffers, Context(real, key, batch.dropout), bool(self.lead))
            said = ask(model, x, inputs, targets, *others)
            return said if summed is None else summed(said, real), model.after

        if not self.lead:
            return of_one(x, self.buffers, *batch[:-1], *others)
        self.tally.mapped = True
        last = len(self.lead) - 1
        flat: list[Any] = [None if t is None else t.flatten(0, last) for t in (x, self.buffers, *batch[:-1], *others)]
        said, after = torch.vmap(of_one, in_dims=tuple(None if t is None else 0 for t in flat))(*flat)
        return said.unflatten(0, self.lead), after.unflatten(0, self.lead)


@plain
def task_gradient(oracle: Oracle, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient [..., P] of the task's loss at x, the loss [...] itself, and the buffers [..., Q] after the pass."""
    return oracle.by_autograd(task_loss, x)


@plain
def task_step(oracle: Oracle, x: Tensor, rate: float | Tensor) -> Tensor:
    """x - rate g(x) for the task's loss, as `Oracle.step`, which is tracked."""
    return descend(x, rate, oracle.grad(x))


@plain
def stacks_in_a_thread(net: Net) -> bool:
    """Whether a thread is faster with a few stacked clients than with one after another."""
    return False
