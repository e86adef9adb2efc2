"""GPipe and 1F1B: a batch in M micro-batches whose gradients are summed before one update, by PyTorch's own schedules.

Yanping Huang et al., GPipe, NeurIPS 2019; Deepak Narayanan et al., PipeDream, SOSP 2019. Under torchrun
torch.distributed.pipelining runs the blocks. In one process the micro-batches pass one after another, which gives the
same gradients. BatchNorm sees micro-batches.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from undrift.core.errors import BadSetting
from undrift.pipeline.block import Loss, PipelineBlock
from undrift.pipeline.block_scores import evaluation
from undrift.pipeline.links import receive_form, send_form, translate_errors
from undrift.pipeline.processes import Processes
from undrift.pipeline.simulator import Simulator


class MicroBatches:
    """An engine without staleness, fed with micro-batches."""

    def __init__(self, engine: Simulator | Processes, kind: str, micro: int, loss: Loss) -> None:
        self.engine, self.micro, self.clock = engine, micro, engine.clock
        self.evaluate, self.model = engine.evaluate, engine.model
        self.tensors, self.restore = engine.tensors, engine.restore
        self.blocks = engine.blocks if isinstance(engine, Simulator) else [engine.block]
        if any(block.tied for block in self.blocks):
            raise BadSetting(
                f"{kind} makes no joint update of what the first and the last block share; use dsp, fr or bp-k"
            )
        self.differences: dict[int, float] = {}
        self.bytes_up = self.bytes_down = 0
        self.count = engine.schedule.blocks
        self.stored: list[tuple[int, int]] = []  # unknown: PyTorch's schedules do not report it
        self.kind, self.loss = kind, loss
        if isinstance(engine, Processes):
            engine.cut_more = lambda: setattr(self, "schedule", None)
        self.schedule: Any = None  # PyTorch's, built for the shape of the first batch
        if kind == "1f1b" and micro < self.count:
            raise BadSetting(
                f"1f1b needs at least as many micro-batches as blocks, {self.count}, not {micro}; or use gpipe"
            )
        self.passes: dict[int, int] = {}  # forwards of each block in this batch, minus 1
        for block in self.blocks:
            self.watch(block)

    def watch(self, block: PipelineBlock) -> None:
        """Seed dropout by batch, micro-batch and block, and count bytes; by hooks, as PyTorch calls the module."""
        seeding = contextlib.ExitStack()

        def before(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            if module.training and torch.is_grad_enabled():
                number = self.passes[block.k] = self.passes.get(block.k, -1) + 1
                seeding.enter_context(block.seed_dropout(self.clock.first * self.micro + number, inputs[0].device))

        def after(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            if module.training and torch.is_grad_enabled():
                seeding.close()
                self.bytes_up += output.nbytes if block.k < self.count - 1 else 0
                self.bytes_down += inputs[0].nbytes if block.k else 0  # an error gradient is as large as the input

        block.module.register_forward_pre_hook(before)
        block.module.register_forward_hook(after)

    def step(self, inputs: Tensor | None, targets: Tensor | None, probe: bool = False) -> Tensor | None:
        """One batch through all blocks and back, and one update; the mean loss of the micro-batches."""
        batch = inputs if inputs is not None else targets
        if batch is not None and len(batch) % self.micro:
            raise BadSetting(f"a batch of {len(batch)} does not divide into {self.micro} equal micro-batches")
        for block in self.blocks:
            if block.optimizer is not None:
                block.optimizer.zero_grad()
        if isinstance(self.engine, Simulator):
            assert inputs is not None and targets is not None
            loss: Tensor | None = self.run_here(inputs, targets)
        else:
            with self.engine.guard():
                loss = self.run_stage(self.engine, inputs, targets)
        for block in self.blocks:
            block.update(self.clock.first)
        self.clock.first += 1
        self.passes.clear()
        return loss

    def run_here(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Run all blocks in this process."""
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
        """Build PyTorch's schedule for this rank's block.

        Shapes are sent from rank to rank here: PyTorch would infer them by a real forward, which BatchNorm would track.
        """
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe  # slow to import

        grid, block = engine.grid, engine.block
        if inputs is None:
            shape, dtype = receive_form(grid.rank_of(grid.k - 1), grid.activations, engine.device)
        else:
            shape, dtype = (len(inputs) // self.micro, *inputs.shape[1:]), inputs.dtype
        sample = torch.zeros(shape, dtype=dtype, device=engine.device)
        with evaluation([block]):
            out = block.module(sample)
        if grid.k < self.count - 1:
            send_form(out, grid.rank_of(grid.k + 1), grid.activations)
        sample.requires_grad_(block.sends_error(sample))
        shapes = (sample,), (out.requires_grad_(),)
        stage = PipelineStage(block.module, grid.k, self.count, engine.device, *shapes, group=grid.activations)
        kind = ScheduleGPipe if self.kind == "gpipe" else Schedule1F1B
        return kind(stage, self.micro, loss_fn=self.loss)

    def run_stage(self, engine: Processes, inputs: Tensor | None, targets: Tensor | None) -> Tensor | None:
        """Run this rank's block in PyTorch's schedule."""
        losses: list[Tensor] = []
        first, last = engine.k == 0, engine.k == self.count - 1
        sources = [inputs.to(engine.device)] if first and inputs is not None else []
        sinks = {"target": targets.to(engine.device), "losses": losses} if last and targets is not None else {}
        if self.schedule is None:
            self.schedule = self.prepare(engine, sources[0] if sources else None)
        with translate_errors(Exception):  # any exception of PyTorch's schedule would keep the connection open
            self.schedule.step(*sources, return_outputs=False, **sinks)
        return torch.stack([loss.detach() for loss in losses]).mean() if last else None

    def flush(self) -> list[Tensor]:
        """No batch is under way between two steps."""
        return []
