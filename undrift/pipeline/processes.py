"""One process for each block, over torch.distributed: every rank follows the same schedule and waits only for data.

On the CPU the tensors go through gloo, which is what the tests run. The same calls go through NCCL where the blocks are on
GPUs; that path has not been run on several GPUs.
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
from undrift.pipeline.block import PipelineBlock, below, by_batch, fresh, size
from undrift.pipeline.block_scores import ScoreSums, evaluation
from undrift.pipeline.clock import Clock
from undrift.pipeline.difference import Probe
from undrift.pipeline.grid import Grid
from undrift.pipeline.links import Inbox, LostNeighbour, MessageForm, Outbox, receive_whole, send_whole
from undrift.pipeline.schedule import Schedule


class Processes:
    """This rank's block and its links. All ranks call the same methods in the same order."""

    def __init__(self, block: PipelineBlock, schedule: Schedule, grid: Grid, device: torch.device) -> None:
        self.block, self.schedule, self.grid, self.device = block, schedule, grid, device
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
        self.waiting: dict[
            int, tuple[Tensor | None, Tensor | None]
        ] = {}  # fed batches that this block has not forwarded
        self.probes: dict[int, Probe] = {}
        self.probed: set[int] = set()
        self.differences: dict[int, float] = {}
        self.stored = [(0, 0)] * schedule.blocks
        self.cut_more: Callable[[], None] = lambda: None  # for those who use the groups besides

    def step(self, inputs: Tensor | None, targets: Tensor | None, probe: bool = False) -> Tensor | None:
        """Feed a batch and do one timestamp. The first rank uses the inputs and the last one the targets, and has the loss."""
        n = self.clock.first + self.clock.fed
        last = self.outputs is None
        if self.arriving is None or last:
            self.waiting[n] = (  # copies, since the caller may fill the same tensors anew before they are used
                None if inputs is None or self.arriving is not None else inputs.to(self.device, copy=True),
                None if targets is None or not last else targets.to(self.device, copy=True),
            )
        if probe:
            self.probed.add(n)
        self.clock.fed += 1
        with self.guarded():
            return self.tick()

    def flush(self) -> list[Tensor]:
        """Let every batch run through all blocks."""
        losses = []
        with self.guarded():
            while not self.clock.idle:
                loss = self.tick()
                losses += [] if loss is None else [loss]
            self.finish()
        self.clock.restart()
        return losses

    def tick(self) -> Tensor | None:
        """One timestamp of this block: wait for an activation, forward, send; wait for an error, backward, update, send."""
        work, loss = self.clock.work(self.k), None
        if work.forward is not None:
            loss = self.forward(work.forward)
        self.measure()
        if work.backward is not None:
            self.backward(work.backward)
        self.clock.t += 1
        return loss

    @property
    def newest(self) -> int:
        """The last batch that was fed: all up to it are certain to come."""
        return self.clock.first + self.clock.fed - 1

    def forward(self, n: int) -> Tensor | None:
        inputs, target = self.waiting.pop(n, (None, None))
        if self.arriving is not None:
            self.arriving.post(self.newest, self.arriving.announced)
            inputs = self.arriving.take(n)
            self.arriving.post(self.newest, self.arriving.announced)
        assert inputs is not None, "the first block is given the inputs"
        if n in self.probed:
            self.probes[n] = Probe(self.block, n, inputs, target)
        out, loss = self.block.forward(n, inputs, target)
        if self.outputs is not None and self.errors is not None:
            self.errors.form = tuple(out.shape), out.dtype
            self.errors.post(self.newest, self.error_form)
            self.outputs.send(n, out, announce=True)
        return loss

    def error_form(self, n: int) -> MessageForm:
        """An error gradient looks like this block's output; of a probed batch BP's comes with it."""
        assert self.errors is not None and self.errors.form is not None
        shape, dtype = self.errors.form
        return ((2, *shape) if n in self.probed else shape), dtype

    def backward(self, n: int) -> None:
        error = bp_error = None
        if self.errors is not None:
            self.errors.post(self.newest, self.error_form)
            error = self.errors.take(n)
            if n in self.probed:
                error, bp_error = error
        below_error = self.block.backward(n, error)
        if n in self.probed:
            self.differences[self.k], bp_error = self.probes.pop(n).difference(self.block, bp_error)
            self.probed.discard(n)
            if below_error is not None and bp_error is not None:
                below_error = torch.stack([below_error, bp_error])
        if self.sent_errors is not None:
            assert below_error is not None
            self.sent_errors.send(n, below_error)

    def measure(self) -> None:
        """What this process holds of batches under way: stored inputs, posted receives, sends that are not done."""
        held = self.block.held() + [t for pair in self.waiting.values() for t in pair if t is not None]
        for inbox in (self.arriving, self.errors):
            if inbox is not None:
                held += [*inbox.here.values(), *(buffer for _, buffer in inbox.posted.values())]
        for outbox in (self.outputs, self.sent_errors):
            held += [tensor for _, tensor in outbox.under_way] if outbox is not None else []
        self.stored[self.k] = max(self.stored[self.k], size(held))

    @property
    def bytes_up(self) -> int:
        return 0 if self.outputs is None else self.outputs.bytes

    @property
    def bytes_down(self) -> int:
        return 0 if self.sent_errors is None else self.sent_errors.bytes

    def finish(self) -> None:
        """Take in all that the neighbours sent up to the last timestamp, and see all own messages delivered."""
        t, clock = self.clock.t - 1, self.clock
        if clock.fed == 0:
            return  # nothing is under way
        if self.arriving is not None:
            sent = min(t - self.schedule.forward_lag[self.k - 1], clock.fed - 1)
            self.arriving.drain(clock.first + sent, self.arriving.announced)
        if self.errors is not None:
            sent = min(t - self.schedule.backward_lag[self.k + 1], clock.fed - 1)
            self.errors.drain(clock.first + sent, self.error_form)
        for outbox in (self.outputs, self.sent_errors):
            if outbox is not None:
                outbox.finish()

    def evaluate(self, batches: Iterable[tuple[Tensor | None, Tensor | None]]) -> dict[str, float]:
        """ScoreSums of the first replica's blocks with their parameters of now; every rank learns them."""
        said: list[Any] = [None]
        with self.guarded():
            self.finish()
            with evaluation([self.block]):  # on all replicas, which may have to exchange something for it
                if self.grid.d == 0:
                    said = [self.score(batches)]
        ranks.all_well()
        dist.broadcast_object_list(said, src=self.schedule.blocks - 1)
        means: dict[str, float] = said[0]
        return means

    def score(self, batches: Iterable[tuple[Tensor | None, Tensor | None]]) -> dict[str, float] | None:
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
        """The first replica's parameters and statistics as those to test, named as in `tensors`; on rank 0 of all blocks."""
        with self.guarded(), self.block.shown():
            mine = {
                f"block{self.k}.module.{n}": t.detach().cpu().clone() for n, t in self.block.module.state_dict().items()
            }
        return gathered(mine if self.grid.d == 0 else {})

    def tensors(self) -> dict[str, Tensor]:
        """All that the future of the first replica's pipeline depends on, on every rank: as in the simulator."""
        with self.guarded():
            self.finish()
        own = self.block.tensors()
        own |= {f"arriving.{n}": t for n, t in (self.arriving.here if self.arriving else {}).items()}
        own |= {f"arriving.{n}": t for n, (t, _) in self.waiting.items() if t is not None}
        errors = self.errors.here if self.errors else {}  # without BP's of a probed batch: a probe is not kept
        own |= {f"error.{n}": t[0] if n in self.probed else t for n, t in errors.items()}
        own |= {f"target.{n}": t for n, (_, t) in self.waiting.items() if t is not None}
        prefix = f"block{self.k}." if self.grid.d == 0 else f"replica{self.grid.d}.block{self.k}."
        mine = {prefix + name: tensor.detach().cpu() for name, tensor in own.items()}
        return self.clock.tensors() | gathered(mine)

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Take over this rank's part of what `tensors` returned, here or in a simulation."""
        if self.clock.fed:
            raise BadSetting(
                "messages are under way already; load the state into a new pipeline, before its first step"
            )
        self.clock.restore(tensors)
        prefix = f"block{self.k}." if self.grid.d == 0 else f"replica{self.grid.d}.block{self.k}."
        own = {name: fresh(t, self.device) for name, t in below(prefix, tensors).items()}
        self.block.restore(own)
        arriving, targets = by_batch("arriving.", own), by_batch("target.", own)
        clock, lags = self.clock, self.schedule
        if self.arriving is None:
            self.waiting = {n: (t, None) for n, t in arriving.items()}
        else:
            self.arriving.here = arriving
            self.arriving.next = clock.first + max(0, clock.t - lags.forward_lag[self.k]) + len(arriving)
        if self.outputs is None:
            self.waiting = {n: (self.waiting.get(n, (None, None))[0], t) for n, t in targets.items()}
        if self.errors is not None:
            self.errors.here = by_batch("error.", own)
            self.errors.next = clock.first + max(0, clock.t - lags.backward_lag[self.k]) + len(self.errors.here)

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Whatever happens here is felt by the other ranks: their waits end as soon as this one's connections do."""
        try:
            yield
        except LostNeighbour as error:
            error.__context__ = None  # torch's exception, which holds on to the connection
            self.cut()
            ranks.all_well()  # says what happened on the rank that failed, or that it is gone
            raise LostRank(f"rank {ranks.rank()} lost touch with a neighbour ({error})") from None
        except Exception:
            self.cut()
            raise

    def cut(self) -> None:
        for link in (self.arriving, self.errors, self.outputs, self.sent_errors):
            if link is not None:
                link.cut()
        self.cut_more()
        if self.grid.activations is not None:
            self.block.let_go()
        self.grid.cut()


def gathered(mine: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of all ranks, on rank 0; elsewhere only this rank's."""
    ranks.all_well()
    each: list[Any] | None = [None] * ranks.count() if ranks.rank() == 0 else None
    dist.gather_object(mine, each, dst=0)
    return mine if each is None else {name: tensor for part in each for name, tensor in part.items()}
