"""GPipe and 1F1B: a batch in M micro-batches whose gradients are summed before one update, by PyTorch's own schedules.

Yanping Huang et al., GPipe, NeurIPS 2019; Deepak Narayanan et al., PipeDream, SOSP 2019.

Under torchrun torch.distributed.pipelining runs the blocks; in one process the micro-batches go through one after another,
which gives the same gradients. BatchNorm sees micro-batches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from undrift.core.errors import BadSetting
from undrift.pipeline.block import Loss, PipelineBlock
from undrift.pipeline.block_scores import evaluation
from undrift.pipeline.links import on_the_wire, receive_form, send_form
from undrift.pipeline.processes import Processes
from undrift.pipeline.simulator import Simulator


class MicroBatches:
    """The blocks of an engine without staleness, fed with micro-batches."""

    def __init__(self, engine: Simulator | Processes, kind: str, micro: int, loss: Loss) -> None:
        self.engine, self.micro, self.clock = engine, micro, engine.clock
        self.blocks = engine.blocks if isinstance(engine, Simulator) else [engine.block]
        self.differences: dict[int, float] = {}
        self.bytes_up = self.bytes_down = 0
        self.count = engine.schedule.blocks
        self.stored: list[tuple[int, int]] = []  # PyTorch's schedules do not say what they hold
        self.kind, self.loss = kind, loss
        if isinstance(engine, Processes):
            engine.cut_more = lambda: setattr(self, "schedule", None)
        self.schedule: Any = None  # PyTorch's, made when the first batch shows its shape
        if kind == "1f1b" and micro < self.count:
            raise BadSetting(
                f"1f1b needs at least as many micro-batches as blocks, {self.count}, not {micro}; raise micro, or use gpipe"
            )
        self.passes: dict[int, int] = {}  # forwards of a block in this batch
        for block in self.blocks:
            self.watch(block)

    def watch(self, block: PipelineBlock) -> None:
        """Let dropout draw by batch, micro-batch and block; count the bytes that enter and leave the block.

        PyTorch's schedules call the module themselves, so this is done by hooks.
        """
        under_way = contextlib.ExitStack()

        def before(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            if module.training and torch.is_grad_enabled():
                number = self.passes[block.k] = self.passes.get(block.k, -1) + 1
                under_way.enter_context(block.randomness(self.clock.first * self.micro + number, inputs[0].device))

        def after(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            if module.training and torch.is_grad_enabled():
                under_way.close()
                self.bytes_up += output.nbytes if block.k < self.count - 1 else 0
                self.bytes_down += inputs[0].nbytes if block.k else 0  # an error gradient is as large as the input

        block.module.register_forward_pre_hook(before)
        block.module.register_forward_hook(after)

    def step(self, inputs: Tensor | None, targets: Tensor | None, probe: bool = False) -> Tensor | None:
        """One batch through all blocks and back, and one update; the mean loss of its micro-batches."""
        known = inputs if inputs is not None else targets
        if known is not None and len(known) % self.micro:
            raise BadSetting(f"a batch of {len(known)} does not divide into {self.micro} equal micro-batches")
        for block in self.blocks:
            if block.optimizer is not None:
                block.optimizer.zero_grad()
        if isinstance(self.engine, Simulator):
            assert inputs is not None and targets is not None
            loss: Tensor | None = self.in_one_process(inputs, targets)
        else:
            with self.engine.guarded():
                loss = self.in_stages(self.engine, inputs, targets)
        for block in self.blocks:
            block.update(self.clock.first)
        self.clock.first += 1
        self.passes.clear()
        return loss

    def in_one_process(self, inputs: Tensor, targets: Tensor) -> Tensor:
        device, losses = self.engine.device, []
        for h, target in zip(inputs.chunk(self.micro), targets.chunk(self.micro), strict=True):
            h = h.to(device)
            for block in self.blocks:
                h = block.module(h)
            loss = self.loss(h, target.to(device))
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        for block in self.blocks:
            for parameter in block.trained:
                if parameter.grad is not None:
                    parameter.grad.div_(self.micro)
        return torch.stack(losses).mean()

    def prepare(self, engine: Processes, inputs: Tensor | None) -> Any:
        """PyTorch's schedule for this rank's block.

        The shapes go from rank to rank here: PyTorch would find them by a real forward, which BatchNorm would track.
        """
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe  # slow to import

        grid, block = engine.grid, engine.block
        if inputs is None:
            shape, dtype = receive_form(grid.rank_of(grid.k - 1), grid.activations, engine.device)
        else:
            shape, dtype = (len(inputs) // self.micro, *inputs.shape[1:]), inputs.dtype
        one = torch.zeros(shape, dtype=dtype, device=engine.device)
        with evaluation([block]):
            out = block.module(one)
        if grid.k < self.count - 1:
            send_form(out, grid.rank_of(grid.k + 1), grid.activations)
        one.requires_grad_(block.sends_error(one))
        stage = PipelineStage(
            block.module, grid.k, self.count, engine.device, (one,), (out.requires_grad_(),), group=grid.activations
        )
        kind = ScheduleGPipe if self.kind == "gpipe" else Schedule1F1B
        return kind(stage, self.micro, loss_fn=self.loss)

    def in_stages(self, engine: Processes, inputs: Tensor | None, targets: Tensor | None) -> Tensor | None:
        losses: list[Tensor] = []
        first, last = engine.k == 0, engine.k == self.count - 1
        given = [inputs.to(engine.device)] if first and inputs is not None else []
        wanted = {"target": targets.to(engine.device), "losses": losses} if last and targets is not None else {}
        if self.schedule is None:
            self.schedule = self.prepare(engine, given[0] if given else None)
        with on_the_wire(Exception):  # whatever it is: what PyTorch's schedule raises would keep the connection open
            self.schedule.step(*given, return_outputs=False, **wanted)
        return torch.stack([loss.detach() for loss in losses]).mean() if last else None

    def flush(self) -> list[Tensor]:
        """Nothing is under way between two batches."""
        return []

    def evaluate(self, batches: Iterable[tuple[Tensor | None, Tensor | None]]) -> dict[str, float]:
        return self.engine.evaluate(batches)

    def model(self) -> dict[str, Tensor]:
        return self.engine.model()

    def tensors(self) -> dict[str, Tensor]:
        return self.engine.tensors()

    def restore(self, tensors: dict[str, Tensor]) -> None:
        self.engine.restore(tensors)
