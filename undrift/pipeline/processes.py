"""One process per block, over torch.distributed: every rank follows the same schedule and waits only for data.

The tests run gloo on CPUs. The same calls use NCCL on GPUs, which has not been run on several GPUs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from undrift.core import ranks
from undrift.core.errors import BadSetting, LostRank
from undrift.pipeline.block import (
    TIED,
    PipelineBlock,
    by_batch,
    clip_factor,
    copy_tensors,
    count_bytes,
    sum_of_squares,
)
from undrift.pipeline.block_scores import ScoreSums, evaluation
from undrift.pipeline.clock import Clock
from undrift.pipeline.difference import Probe
from undrift.pipeline.grid import Grid
from undrift.pipeline.links import (
    Inbox,
    LostNeighbour,
    MessageForm,
    Outbox,
    receive_whole,
    resize,
    send_whole,
    translate_errors,
)
from undrift.pipeline.schedule import Schedule

Batch = tuple[Tensor | None, Tensor | None]  # inputs and targets, where this rank needs them


class Processes:
    """This rank's block and its links. All ranks must call the same methods in the same order."""

    def __init__(
        self, block: PipelineBlock, schedule: Schedule, grid: Grid, device: torch.device, clip: float = 0.0
    ) -> None:
        self.block, self.schedule, self.grid, self.device, self.clip = block, schedule, grid, device, clip
        self.k, self.clock = grid.k, Clock(schedule)
        k, first, last = self.k, grid.k == 0, grid.k == schedule.blocks - 1
        self.arriving = self.errors = None
        self.outputs = self.sent_errors = None
        if not first:
            self.arriving = Inbox(grid.rank_of(k - 1), grid.activations, 1 + schedule.p[k - 1], device)
            self.sent_errors = Outbox(grid.rank_of(k - 1), grid.gradients, 1 + schedule.q[k])
        if not last:
            self.outputs = Outbox(grid.rank_of(k + 1), grid.activations, 1 + schedule.p[k])
            self.errors = Inbox(grid.rank_of(k + 1), grid.gradients, 1 + schedule.q[k + 1], device)
        self.inboxes = [inbox for inbox in (self.arriving, self.errors) if inbox is not None]
        self.outboxes = [outbox for outbox in (self.outputs, self.sent_errors) if outbox is not None]
        self.waiting: dict[int, Batch] = {}  # batches that this block has not forwarded yet
        self.probes: dict[int, Probe] = {}
        self.probed: set[int] = set()
        self.differences: dict[int, float] = {}
        self.stored = [(0, 0)] * schedule.blocks
        self.cut_more: Callable[[], None] = lambda: None  # set by other users of the groups

    def step(self, inputs: Tensor | None, targets: Tensor | None, probe: bool = False) -> Tensor | None:
        """Feed a batch for one timestamp. The first rank uses the inputs, the last one the targets and has the loss."""
        n = self.clock.feed(inputs, targets)
        last = self.outputs is None
        if self.arriving is None or last:
            self.waiting[n] = (  # copies: the caller may overwrite the tensors before they are used
                None if inputs is None or self.arriving is not None else inputs.to(self.device, copy=True),
                None if targets is None or not last else targets.to(self.device, copy=True),
            )
        if probe:
            self.probed.add(n)
        with self.guard():
            return self.tick()

    def flush(self) -> list[Tensor]:
        """Run every batch through all blocks."""
        losses = []
        with self.guard():
            while not self.clock.idle:
                loss = self.tick()
                losses += [] if loss is None else [loss]
            self.finish()
        self.clock.restart()
        return losses

    def tick(self) -> Tensor | None:
        """One timestamp: wait for an activation, forward, send; wait for an error gradient, backward, update, send."""
        work, loss = self.clock.work(self.k), None
        if work.forward is not None:
            loss = self.forward(work.forward)
        self.measure()
        if work.backward is not None:
            self.backward(work.backward)
        if self.block.late:
            self.end_timestamp()
        self.clock.t += 1
        return loss

    def end_timestamp(self) -> None:
        """The block's update, with what the first and the last one share, and with gradients of bounded length.

        To share, these two exchange gradients, and to bound lengths all blocks exchange one number.
        """
        n, joint = self.clock.work(0).backward, list[Tensor]()
        if self.block.tied and n is not None:
            joint = self.block.tied_gradients.pop(n)
            flat = torch.cat([gradient.reshape(-1) for gradient in joint])
            with translate_errors():
                dist.all_reduce(flat, group=self.grid.ends)
            joint = [part.view_as(g) for part, g in zip(flat.split([g.numel() for g in joint]), joint, strict=True)]
        factor = 1.0
        if self.clip:
            square = self.block.square() + (sum_of_squares(joint) if self.k == 0 else 0.0)
            own = torch.tensor([square], dtype=torch.float64, device=self.device)
            each = [torch.empty_like(own) for _ in range(self.schedule.blocks)]
            with translate_errors():
                dist.all_gather(each, own, group=self.grid.everyone)
            factor = clip_factor(sum(float(one) for one in each), self.clip)
        self.block.end_timestamp(factor)
        if n is not None and joint:
            self.block.update_tied(n, joint, factor)

    @property
    def newest(self) -> int:
        """The last batch fed: all up to it are certain to come."""
        return self.clock.first + self.clock.fed - 1

    def forward(self, n: int) -> Tensor | None:
        inputs, target = self.waiting.pop(n, (None, None))
        if self.arriving is not None:
            self.arriving.post(self.newest, self.activation_form)
            inputs = self.arriving.take(n)
            self.arriving.post(self.newest, self.activation_form)
        assert inputs is not None, "the first block is given the inputs"
        if n in self.probed:
            self.probes[n] = Probe(self.block, n, inputs, target)
        out, loss = self.block.forward(n, inputs, target)
        if self.outputs is not None and self.errors is not None:
            self.errors.form, self.errors.rows = (tuple(out.shape), out.dtype), self.clock.rows.get(n)
            self.errors.post(self.newest, self.error_form)
            self.outputs.send(n, out, announce=True, rows=self.clock.rows.get(n))
        return loss

    def activation_form(self, n: int) -> MessageForm:
        assert self.arriving is not None
        return self.arriving.announced_form(n, self.clock.rows)

    def error_form(self, n: int) -> MessageForm:
        """An error gradient has the form of this block's output; for a probed batch BP's comes with it."""
        assert self.errors is not None and self.errors.form is not None
        shape, dtype = resize(self.errors.form, self.errors.rows, self.clock.rows.get(n))
        return ((2, *shape) if n in self.probed else shape), dtype

    def backward(self, n: int) -> None:
        error = bp_error = None
        if self.errors is not None:
            self.errors.post(self.newest, self.error_form)
            error = self.errors.take(n)
            if n in self.probed:
                error, bp_error = error
        below = self.block.backward(n, error)
        if n in self.probed:
            self.differences[self.k], bp_error = self.probes.pop(n).difference(self.block, bp_error)
            self.probed.discard(n)
            if below is not None and bp_error is not None:
                below = torch.stack([below, bp_error])
        if self.sent_errors is not None:
            assert below is not None
            self.sent_errors.send(n, below)

    def measure(self) -> None:
        """Measure what this process stores of batches under way: inputs, posted receives, unfinished sends."""
        stored = self.block.stored_tensors() + [t for pair in self.waiting.values() for t in pair if t is not None]
        for inbox in self.inboxes:
            stored += [*inbox.received.values(), *(buffer for _, buffer in inbox.posted.values())]
        for outbox in self.outboxes:
            stored += [tensor for _, tensor in outbox.under_way]
        self.stored[self.k] = max(self.stored[self.k], count_bytes(stored))

    @property
    def bytes_up(self) -> int:
        return 0 if self.outputs is None else self.outputs.bytes

    @property
    def bytes_down(self) -> int:
        return 0 if self.sent_errors is None else self.sent_errors.bytes

    def finish(self) -> None:
        """Receive all that neighbours sent up to the last timestamp, and wait until own messages are delivered."""
        t, clock = self.clock.t - 1, self.clock
        if clock.fed == 0:
            return
        if self.arriving is not None:
            sent = min(t - self.schedule.forward_lag[self.k - 1], clock.fed - 1)
            self.arriving.drain(clock.first + sent, self.activation_form)
        if self.errors is not None:
            sent = min(t - self.schedule.backward_lag[self.k + 1], clock.fed - 1)
            self.errors.drain(clock.first + sent, self.error_form)
        for outbox in self.outboxes:
            outbox.finish()

    def evaluate(self, batches: Iterable[Batch]) -> dict[str, float]:
        """Scores of the first replica's current parameters, on every rank."""
        scores: list[Any] = [None]
        with self.guard():
            self.finish()
            with evaluation([self.block]):  # on all replicas, which may have to communicate for it
                if self.grid.d == 0:
                    scores = [self.score(batches)]
        ranks.all_well()
        dist.broadcast_object_list(scores, src=self.schedule.blocks - 1)
        return scores[0]  # type: ignore[no-any-return]

    def score(self, batches: Iterable[Batch]) -> dict[str, float] | None:
        """Pass the batches through the first replica; the last rank has the scores."""
        scores = ScoreSums(self.block.loss) if self.outputs is None else None
        for inputs, targets in batches:
            if self.arriving is not None:
                inputs = receive_whole(self.arriving.source, self.arriving.group, self.device)
            assert inputs is not None
            out = self.block.module(inputs.to(self.device))
            if scores is not None:
                assert targets is not None
                scores.add(out, targets.to(self.device))
            elif self.outputs is not None:
                send_whole(out, self.outputs.to, self.outputs.group)
        return None if scores is None else scores.means()

    def model(self) -> dict[str, Tensor]:
        """The first replica's parameters and statistics to test, named as in `tensors`; on rank 0 of all blocks."""
        with self.guard(), self.block.show_weights():
            state = self.block.module.state_dict()
            tensors = {f"block{self.k}.module.{name}": t.detach().cpu().clone() for name, t in state.items()}
        return collect(tensors if self.grid.d == 0 else {})

    @property
    def prefix(self) -> str:
        """The names of this rank's tensors in a state begin with this."""
        return f"block{self.k}." if self.grid.d == 0 else f"replica{self.grid.d}.block{self.k}."

    def tensors(self) -> dict[str, Tensor]:
        """The pipeline's state as in the simulator, on rank 0 of all ranks."""
        with self.guard():
            self.finish()
        own = self.block.tensors()
        own |= {f"arriving.{n}": t for n, t in (self.arriving.received if self.arriving else {}).items()}
        own |= {f"arriving.{n}": t for n, (t, _) in self.waiting.items() if t is not None}
        errors = self.errors.received if self.errors else {}  # BP's are left out: a probe is not kept
        own |= {f"error.{n}": t[0] if n in self.probed else t for n, t in errors.items()}
        own |= {f"target.{n}": t for n, (_, t) in self.waiting.items() if t is not None}
        return self.clock.tensors() | collect(
            {self.prefix + name: tensor.detach().cpu() for name, tensor in own.items()}
        )

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Load this rank's part of what `tensors` returned, here or in a simulation."""
        if self.clock.fed:
            raise BadSetting("messages are under way; load the state into a new pipeline, before its first step")
        self.clock.restore(tensors)
        own = copy_tensors(self.prefix, tensors, self.device)
        own |= {TIED + name: t for name, t in copy_tensors(f"block0.{TIED}", tensors, self.device).items()}
        self.block.restore(own)
        arriving, targets = by_batch("arriving.", own), by_batch("target.", own)
        clock, lags = self.clock, self.schedule
        if self.arriving is None:
            self.waiting = {n: (t, None) for n, t in arriving.items()}
        else:
            self.arriving.received = arriving
            self.arriving.next = clock.first + max(0, clock.t - lags.forward_lag[self.k]) + len(arriving)
        if self.outputs is None:
            self.waiting = {n: (self.waiting.get(n, (None, None))[0], t) for n, t in targets.items()}
        if self.errors is not None:
            self.errors.received = by_batch("error.", own)
            self.errors.next = clock.first + max(0, clock.t - lags.backward_lag[self.k]) + len(self.errors.received)

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Close the connections on any error, so that the other ranks stop waiting."""
        try:
            yield
        except LostNeighbour as error:
            error.__context__ = None  # torch's exception keeps the connection open
            self.cut()
            ranks.all_well()  # raises what happened on the rank that failed, or that it is gone
            raise LostRank(f"rank {ranks.rank()} lost touch with a neighbour ({error})") from None
        except Exception:
            self.cut()
            raise

    def cut(self) -> None:
        links: list[Inbox | Outbox] = [*self.inboxes, *self.outboxes]
        for link in links:
            link.cut()
        self.cut_more()
        if self.grid.activations is not None:
            self.block.release()
        self.grid.cut()


def collect(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of all ranks, on rank 0; elsewhere only this rank's."""
    ranks.all_well()
    each: list[Any] | None = [None] * ranks.count() if ranks.rank() == 0 else None
    dist.gather_object(tensors, each, dst=0)
    return tensors if each is None else {name: tensor for part in each for name, tensor in part.items()}
