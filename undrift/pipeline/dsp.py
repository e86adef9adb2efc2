"""DSP: a network in K blocks that train on different batches at the same time, with diversely stale parameters.

An Xu, Zhouyuan Huo and Heng Huang, On the Acceleration of Deep Learning Model Parallelism with Staleness, CVPR 2020.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from undrift.core import ranks
from undrift.core.errors import BadSetting
from undrift.pipeline.block import Block, Loss, MakeOptimizer, Rate
from undrift.pipeline.methods import engine
from undrift.pipeline.schedule import Schedule
from undrift.pipeline.split import Balance, Part, balanced, parts

Batch = tuple[Tensor, Tensor]
T = TypeVar("T")


@final
class DSP:
    """A model under training. In one process it is a simulation; under torchrun each of K processes trains its block.

    `model` is an nn.Sequential, cut at the layers `cuts` or into `blocks` of equal cost (then `sample`, a batch, is timed),
    or a list of modules, one a block. `p` and `m` are the thesis' queue lengths; without them the shortest with which no
    block waits. `optimizer` makes an optimiser for a list of parameters; `rate` gives the learning rate of batch n.
    The model's own parameters are trained, those of this process's blocks. Where layers were timed, print(dsp.balance) shows
    where the model was cut and what each block costs.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> dsp = DSP(model, cuts=[2], p=(1, 0), m=(2, 0), optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
    >>> batch = torch.randn(8, 4), torch.randint(2, (8,))
    >>> for _ in range(5):
    ...     loss = dsp.step(batch)
    >>> len(dsp.flush()), sorted(dsp.evaluate([batch]))
    (1, ['accuracy', 'loss'])
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        cuts: Sequence[int | str] | None = None,
        blocks: int | None = None,
        p: Sequence[int] | None = None,
        m: Sequence[int] | None = None,
        optimizer: MakeOptimizer | None = None,
        loss: Loss = F.cross_entropy,
        rate: Rate | None = None,
        sample: Batch | None = None,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        if not callable(optimizer):  # nothing, or one optimiser, where each block needs its own
            raise BadSetting(
                "say how to train each block, with a function that makes an optimiser: "
                "optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)"
            )
        with ranks.join():
            self.device = ranks.device_of_rank(torch.device(device))
            self.parts, self.balance = split(model, cuts, blocks, sample, loss, self.device)
            count = len(self.parts)
            if (p is None) != (m is None):
                raise BadSetting("give both queue lengths p and m, or neither")
            self.schedule = Schedule.shortest(count) if p is None or m is None else Schedule(tuple(p), tuple(m))
            if self.schedule.blocks != count:
                raise BadSetting(f"the queue lengths are for {self.schedule.blocks} blocks, and the model has {count}")
            self.engine = engine(Block, self.parts, self.schedule, optimizer, loss, rate, seed, self.device)
        self.half_way = False  # whether a step failed, with its batch in some blocks and not in others

    def step(self, batch: Batch, probe: bool = False) -> Tensor | None:
        """Feed a batch; the loss of the batch that the last block has just forwarded, on the rank that holds it.

        With `probe` the gradients of this batch are compared with backpropagation's: `differences`, block by block.
        """
        return self.advanced(lambda: self.engine.step(*batch, probe=probe))

    def flush(self) -> list[Tensor]:
        """Let the batches under way run through all blocks, which empties the queues; their losses as in `step`."""
        return self.advanced(self.engine.flush)

    def advanced(self, play: Callable[[], T]) -> T:
        """play(), unless it failed the last time."""
        if self.half_way:
            raise BadSetting(
                "a step failed before, with its batch half way through the blocks; "
                "load_state_dict a state from before it, or build the pipeline anew"
            )
        self.half_way = True
        result = play()
        self.half_way = False
        return result

    def evaluate(self, batches: Iterable[Batch]) -> dict[str, float]:
        """Mean loss and accuracy with every block's parameters of now; the queues are left as they are."""
        return self.engine.evaluate(batches)

    @property
    def differences(self) -> dict[int, float]:
        """|BP gradient - DSP gradient| / number of parameters of the last probed batch, by block, of this process's blocks."""
        return self.engine.differences

    def state_dict(self) -> dict[str, Tensor]:
        """A copy of everything: parameters, statistics, optimisers and queues, on rank 0; to be called on all ranks."""
        return {name: tensor.detach().clone() for name, tensor in self.engine.tensors().items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on from a state of the same blocks and queues, in one process or in one a block, whichever it is from."""
        self.engine.restore(state)
        self.half_way = False

    def model_state(self) -> dict[str, Tensor]:
        """A plain state dict of the whole model, on rank 0; to be called on all ranks."""
        return whole_model(self.parts, self.engine.model())


def split(
    model: nn.Module | Sequence[nn.Module],
    cuts: Sequence[int | str] | None,
    blocks: int | None,
    sample: Batch | None,
    loss: Loss,
    device: torch.device,
) -> tuple[list[Part], Balance | None]:
    """The parts by hand, or by measurement with what was measured."""
    if not isinstance(model, nn.Module) or cuts is not None:
        made = parts(model, cuts)
        if blocks is not None and blocks != len(made):
            raise BadSetting(f"blocks is {blocks}, but the model is given in {len(made)}; leave out one of the two")
        return [Part(part.module.to(device), part.layers) for part in made], None
    if blocks is None or sample is None:
        raise BadSetting("give cuts=[...], or blocks=K with sample=(inputs, targets), a batch to time the layers on")
    model.to(device)
    balance = balanced(model, blocks, sample[0].to(device), sample[1].to(device), loss)
    return parts(model, balance.cuts), balance


def whole_model(split_parts: Sequence[Part], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The model's state dict from an engine's `model()`, under the names of the model before it was cut."""
    named = {}
    for k, part in enumerate(split_parts):
        for name in part.module.state_dict():
            key = f"block{k}.module.{name}"
            if key in tensors:  # elsewhere than on rank 0 only the own block's are there
                layer, _, rest = name.partition(".")
                named[f"{part.layers[int(layer)]}.{rest}"] = tensors[key]
    return named
