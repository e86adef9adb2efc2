"""All blocks in one process, timestamp by timestamp: what the processes of `processes.py` compute, bit for bit.

On a GPU each block has a CUDA stream of its own. That keeps the dependencies of the real thing; it is a simulation and
says nothing about speed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from undrift.pipeline.block import PipelineBlock, below, by_batch, fresh, size
from undrift.pipeline.block_scores import ScoreSums, evaluation
from undrift.pipeline.clock import Clock
from undrift.pipeline.difference import Probe
from undrift.pipeline.schedule import Schedule


class Parcel(NamedTuple):
    """A tensor on its way from one block to another; on a GPU the event says when it is ready."""

    tensor: Tensor
    ready: torch.cuda.Event | None = None


class Simulator:
    """Blocks joined by queues. `step` feeds one batch, `flush` lets all batches run through."""

    def __init__(self, blocks: Sequence[PipelineBlock], schedule: Schedule, device: torch.device) -> None:
        assert len(blocks) == schedule.blocks
        self.blocks, self.schedule, self.device = list(blocks), schedule, device
        self.clock = Clock(schedule)
        count = len(blocks)
        self.arriving: list[dict[int, Parcel]] = [{} for _ in range(count)]  # [k]: outputs of block k - 1; P_{k-1}
        self.errors: list[dict[int, Parcel]] = [
            {} for _ in range(count)
        ]  # [k]: error gradients of block k + 1; Q_{k+1}
        self.targets: dict[int, Parcel] = {}  # for the last block
        self.streams = [torch.cuda.Stream(device) for _ in blocks] if device.type == "cuda" else []
        self.probes: list[dict[int, Probe]] = [{} for _ in range(count)]
        self.bp_errors: dict[int, Tensor | None] = {}  # BP's error gradient of a probed batch, on its way down
        self.probed: set[int] = set()
        self.differences: dict[int, float] = {}  # of the last probed batch, by block
        self.bytes_up = self.bytes_down = 0  # activations and error gradients handed over between blocks
        self.stored = [(0, 0)] * count  # the most tensors and bytes that a block kept at a time

    def step(self, inputs: Tensor, targets: Tensor, probe: bool = False) -> Tensor | None:
        """Feed a batch and do one timestamp; the loss of the batch that the last block forwarded in it, if it did."""
        n = self.clock.first + self.clock.fed
        # copies, since they are kept for several steps, in which the caller may fill the same tensors anew
        self.arriving[0][n] = self.parcel(inputs.to(self.device, copy=True))
        self.targets[n] = self.parcel(targets.to(self.device, copy=True))
        if probe:
            self.probed.add(n)
        self.clock.fed += 1
        return self.tick()

    def flush(self) -> list[Tensor]:
        """Let every batch run through all blocks; the losses of those that the last block had not forwarded yet."""
        losses = []
        while not self.clock.idle:
            loss = self.tick()
            losses += [] if loss is None else [loss]
        self.clock.restart()
        return losses

    def tick(self) -> Tensor | None:
        """One timestamp: the blocks' forwards from the bottom up, then their backwards from the top down.

        Where all p, q >= 1 any order gives the same; where some are 0 this is the one that they imply.
        """
        loss = None
        for k in self.forward_order():
            n = self.clock.work(k).forward
            if n is not None:
                loss = self.forward(k, n)
        for k in self.backward_order():
            n = self.clock.work(k).backward
            if n is not None:
                self.backward(k, n)
        if self.streams and loss is not None:  # which is handed out
            current = torch.cuda.current_stream(self.device)
            current.wait_stream(self.streams[-1])
            loss.record_stream(current)
        self.clock.t += 1
        return loss

    def forward_order(self) -> Iterable[int]:
        return range(len(self.blocks))

    def backward_order(self) -> Iterable[int]:
        return reversed(range(len(self.blocks)))

    def forward(self, k: int, n: int) -> Tensor | None:
        block, last = self.blocks[k], k == len(self.blocks) - 1
        with self.lane(k):
            h = self.taken(k, self.arriving[k].pop(n))
            target = self.taken(k, self.targets.pop(n)) if last else None
            if n in self.probed:
                self.probes[k][n] = Probe(block, n, h, target)
            out, loss = block.forward(n, h, target)
            if not last:
                self.arriving[k + 1][n] = self.parcel(out)
                self.bytes_up += out.nbytes
        self.measure(k)
        return loss

    def backward(self, k: int, n: int) -> None:
        block = self.blocks[k]
        with self.lane(k):
            arrived = self.errors[k].pop(n, None)
            error = block.backward(n, None if arrived is None else self.taken(k, arrived))
            if k and error is not None:
                self.errors[k - 1][n] = self.parcel(error)
                self.bytes_down += error.nbytes
            if n in self.probes[k]:
                probe = self.probes[k].pop(n)
                self.differences[k], self.bp_errors[n] = probe.difference(block, self.bp_errors.pop(n, None))
                if k == 0:
                    self.probed.discard(n)
                    del self.bp_errors[n]

    def measure(self, k: int) -> None:
        """Count what block k's queues hold when it has forwarded: 1 + m inputs, 1 + p outputs, q error gradients from above."""
        sent = self.arriving[k + 1] if k + 1 < len(self.blocks) else {}
        parcels = (*sent.values(), *self.errors[k].values())
        held = [*self.blocks[k].held(), *(parcel.tensor for parcel in parcels)]
        self.stored[k] = max(self.stored[k], size(held))

    def evaluate(self, batches: Iterable[tuple[Tensor | None, Tensor | None]]) -> dict[str, float]:
        """ScoreSums of the blocks with their parameters of now, in evaluation mode; the queues stay as they are."""
        self.synchronise()
        scores = ScoreSums(self.blocks[-1].loss)
        with evaluation(self.blocks):
            for h, targets in batches:
                assert h is not None and targets is not None
                h = h.to(self.device)
                for block in self.blocks:
                    h = block.module(h)
                scores.add(h, targets.to(self.device))
        return scores.means()

    def model(self) -> dict[str, Tensor]:
        """The parameters and statistics as those to test, named as in `tensors`."""
        self.synchronise()
        named: dict[str, Tensor] = {}
        for k, block in enumerate(self.blocks):
            with block.shown():
                state = block.module.state_dict()
                named |= {f"block{k}.module.{name}": tensor.detach().clone() for name, tensor in state.items()}
        return named

    def tensors(self) -> dict[str, Tensor]:
        """All that the pipeline's future depends on, between two timestamps."""
        self.synchronise()
        named = self.clock.tensors()
        for k, block in enumerate(self.blocks):
            own = block.tensors()
            own |= {f"arriving.{n}": parcel.tensor for n, parcel in self.arriving[k].items()}
            own |= {f"error.{n}": parcel.tensor for n, parcel in self.errors[k].items()}
            own |= {f"target.{n}": p.tensor for n, p in self.targets.items()} if k == len(self.blocks) - 1 else {}
            named |= {f"block{k}.{name}": tensor for name, tensor in own.items()}
        return named

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Take over what `tensors` returned, here or on the ranks of another run."""
        self.clock.restore(tensors)
        self.synchronise()
        for k, block in enumerate(self.blocks):
            with self.lane(k):  # memory that the block's stream frees is its own
                own = {name: fresh(t, self.device) for name, t in below(f"block{k}.", tensors).items()}
                block.restore(own)
            self.arriving[k] = {n: Parcel(t) for n, t in by_batch("arriving.", own).items()}
            self.errors[k] = {n: Parcel(t) for n, t in by_batch("error.", own).items()}
            if k == len(self.blocks) - 1:
                self.targets = {n: Parcel(t) for n, t in by_batch("target.", own).items()}
        self.synchronise()

    def synchronise(self) -> None:
        if self.streams:
            torch.cuda.synchronize(self.device)

    @contextlib.contextmanager
    def lane(self, k: int) -> Iterator[None]:
        """Block k's own CUDA stream."""
        if not self.streams:
            yield
            return
        with torch.cuda.stream(self.streams[k]):
            yield

    def parcel(self, tensor: Tensor) -> Parcel:
        if not self.streams:
            return Parcel(tensor)
        event = torch.cuda.Event()
        event.record()
        return Parcel(tensor, event)

    def taken(self, k: int, parcel: Parcel) -> Tensor:
        """The tensor, for use in block k's stream."""
        if parcel.ready is not None:
            self.streams[k].wait_event(parcel.ready)
            parcel.tensor.record_stream(self.streams[k])
        return parcel.tensor
