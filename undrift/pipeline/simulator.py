"""All blocks in one process, timestamp by timestamp, with the same bits as `processes.py`.

On a GPU each block has its own CUDA stream, which keeps the real dependencies. A simulation says nothing about speed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from undrift.pipeline.block import PipelineBlock, by_batch, clip_factor, copy_tensors, count_bytes, sum_of_squares
from undrift.pipeline.block_scores import ScoreSums, evaluation
from undrift.pipeline.clock import Clock
from undrift.pipeline.difference import Probe
from undrift.pipeline.schedule import Schedule


class Parcel(NamedTuple):
    """A tensor between two blocks; on a GPU with the event of its completion."""

    tensor: Tensor
    ready: torch.cuda.Event | None = None


class Simulator:
    """Blocks with queues between them. `step` feeds one batch, `flush` runs all batches through."""

    def __init__(
        self, blocks: Sequence[PipelineBlock], schedule: Schedule, device: torch.device, clip: float = 0.0
    ) -> None:
        assert len(blocks) == schedule.blocks
        self.clip = clip  # the longest gradient of all blocks in a timestamp; 0: any
        self.blocks, self.schedule, self.device = list(blocks), schedule, device
        self.clock = Clock(schedule)
        count = len(blocks)
        self.arriving: list[dict[int, Parcel]] = [{} for _ in range(count)]  # [k]: outputs of block k - 1; P_{k-1}
        self.errors: list[dict[int, Parcel]] = [{} for _ in range(count)]  # [k]: errors of block k + 1; Q_{k+1}
        self.targets: dict[int, Parcel] = {}  # for the last block
        self.streams = [torch.cuda.Stream(device) for _ in blocks] if device.type == "cuda" else []
        self.probes: list[dict[int, Probe]] = [{} for _ in range(count)]
        self.bp_errors: dict[int, Tensor | None] = {}  # BP's error gradient of a probed batch
        self.probed: set[int] = set()
        self.differences: dict[int, float] = {}  # differences of the last probed batch, by block
        self.bytes_up = self.bytes_down = 0  # activations and error gradients between blocks
        self.stored = [(0, 0)] * count  # the most tensors and bytes that a block stored

    def step(self, inputs: Tensor, targets: Tensor, probe: bool = False) -> Tensor | None:
        """Feed a batch and do one timestamp; the loss of the batch that the last block forwarded, if any."""
        n = self.clock.feed(inputs, targets)
        # copies: the caller may overwrite the tensors before they are used
        self.arriving[0][n] = self.parcel(inputs.to(self.device, copy=True))
        self.targets[n] = self.parcel(targets.to(self.device, copy=True))
        if probe:
            self.probed.add(n)
        return self.tick()

    def flush(self) -> list[Tensor]:
        """Run every batch through all blocks; the losses of those that the last block had not forwarded yet."""
        losses = []
        while not self.clock.idle:
            loss = self.tick()
            losses += [] if loss is None else [loss]
        self.clock.restart()
        return losses

    def tick(self) -> Tensor | None:
        """One timestamp: forwards from the bottom up, then backwards from the top down, as p = 0 or q = 0 demand."""
        loss = None
        for k in self.forward_order():
            n = self.clock.work(k).forward
            if n is not None:
                loss = self.forward(k, n)
        for k in self.backward_order():
            n = self.clock.work(k).backward
            if n is not None:
                self.backward(k, n)
        if any(block.late for block in self.blocks):
            self.end_timestamp()
        if self.streams and loss is not None:  # the caller reads it
            current = torch.cuda.current_stream(self.device)
            current.wait_stream(self.streams[-1])
            loss.record_stream(current)
        self.clock.t += 1
        return loss

    def end_timestamp(self) -> None:
        """The updates of all blocks, with what the first and the last one share, and with gradients of bounded length."""
        self.synchronise()
        first, last = self.blocks[0], self.blocks[-1]
        n, joint = self.clock.work(0).backward, list[Tensor]()
        if first.tied and n is not None:
            halves = first.tied_gradients.pop(n), last.tied_gradients.pop(n)
            joint = [a + b for a, b in zip(*halves, strict=True)]
        squares = [block.square() for block in self.blocks] if self.clip else [0.0]
        squares[0] += sum_of_squares(joint) if self.clip else 0.0
        factor = clip_factor(sum(squares), self.clip)
        for block in self.blocks:
            block.end_timestamp(factor)
        if n is not None and joint:
            first.update_tied(n, joint, factor)
        self.synchronise()

    def forward_order(self) -> Iterable[int]:
        return range(len(self.blocks))

    def backward_order(self) -> Iterable[int]:
        return reversed(range(len(self.blocks)))

    def forward(self, k: int, n: int) -> Tensor | None:
        block, last = self.blocks[k], k == len(self.blocks) - 1
        with self.lane(k):
            h = self.open(k, self.arriving[k].pop(n))
            target = self.open(k, self.targets.pop(n)) if last else None
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
            error = block.backward(n, None if arrived is None else self.open(k, arrived))
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
        """Measure block k's queues after its forward: 1 + m inputs, 1 + p outputs, q error gradients from above."""
        sent = self.arriving[k + 1] if k + 1 < len(self.blocks) else {}
        parcels = (*sent.values(), *self.errors[k].values())
        stored = [*self.blocks[k].stored_tensors(), *(parcel.tensor for parcel in parcels)]
        self.stored[k] = max(self.stored[k], count_bytes(stored))

    def evaluate(self, batches: Iterable[tuple[Tensor | None, Tensor | None]]) -> dict[str, float]:
        """Scores under the current parameters; the queues stay as they are."""
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
        """The parameters and statistics to test, named as in `tensors`."""
        self.synchronise()
        named: dict[str, Tensor] = {}
        for k, block in enumerate(self.blocks):
            with block.show_weights():
                state = block.module.state_dict()
                named |= {f"block{k}.module.{name}": tensor.detach().clone() for name, tensor in state.items()}
        return named

    def tensors(self) -> dict[str, Tensor]:
        """The pipeline's state between two timestamps."""
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
        """Load what `tensors` returned, here or on ranks."""
        self.clock.restore(tensors)
        self.synchronise()
        for k, block in enumerate(self.blocks):
            with self.lane(k):  # a stream reuses the memory that was allocated in it
                own = copy_tensors(f"block{k}.", tensors, self.device)
                block.restore(own)
            self.arriving[k] = {n: Parcel(t) for n, t in by_batch("arriving.", own).items()}
            self.errors[k] = {n: Parcel(t) for n, t in by_batch("error.", own).items()}
            if k == len(self.blocks) - 1:
                self.targets = {n: Parcel(t) for n, t in by_batch("target.", own).items()}
        self.synchronise()

    def synchronise(self) -> None:
        if self.streams:
            torch.cuda.synchronize(self.device)

    def lane(self, k: int) -> contextlib.AbstractContextManager[Any]:
        """Block k's own CUDA stream."""
        return torch.cuda.stream(self.streams[k]) if self.streams else contextlib.nullcontext()

    def parcel(self, tensor: Tensor) -> Parcel:
        if not self.streams:
            return Parcel(tensor)
        event = torch.cuda.Event()
        event.record()
        return Parcel(tensor, event)

    def open(self, k: int, parcel: Parcel) -> Tensor:
        """Make a tensor ready for block k's stream."""
        if parcel.ready is not None:
            self.streams[k].wait_event(parcel.ready)
            parcel.tensor.record_stream(self.streams[k])
        return parcel.tensor
