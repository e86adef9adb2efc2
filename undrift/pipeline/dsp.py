"""DSP: a network in K blocks that train on different batches at the same time, with diversely stale parameters.

An Xu, Zhouyuan Huo and Heng Huang, On the Acceleration of Deep Learning Model Parallelism with Staleness, CVPR 2020.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar, final

import torch
from torch import Tensor, nn

from undrift.core import ranks
from undrift.core.errors import BadSetting
from undrift.pipeline.batch import STORED, Batch, decode, describe, encode, read
from undrift.pipeline.block import Loss, MakeOptimizer, PipelineBlock, Rate
from undrift.pipeline.block_scores import mean_cross_entropy
from undrift.pipeline.engines import build_engine
from undrift.pipeline.schedule import Schedule
from undrift.pipeline.split import Balance, Cuts, Model, ModelPart, balance_model, cut_model, join_parts

T = TypeVar("T")


@final
class DSP:
    """A model under training. In one process it is a simulation; under torchrun each of K processes trains its block.

    `model` is a list of modules, one per block, or an nn.Sequential to cut at the layers `cuts` or into `blocks` of
    equal cost, timed on a batch `sample`: print(dsp.balance) shows the result. The model's own parameters are trained.
    `p` and `m` are the thesis' queue lengths, by default the shortest with which no block waits. `optimizer` makes an
    optimiser for a list of parameters; `rate` gives a factor of its groups' learning rates for batch n; `clip` bounds the
    length of the gradient of all blocks in a timestamp. A batch is (inputs, targets), where inputs may be a tuple or a
    mapping of tensors, or a mapping with `labels`. The first and the last block may share parameters.

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
        model: Model,
        cuts: Cuts = None,
        blocks: int | None = None,
        p: Sequence[int] | None = None,
        m: Sequence[int] | None = None,
        optimizer: MakeOptimizer | None = None,
        loss: Loss = mean_cross_entropy,
        rate: Rate | None = None,
        sample: Batch | None = None,
        seed: int = 0,
        device: torch.device | str = "cpu",
        clip: float = 0.0,
    ) -> None:
        if not 0.0 <= clip < float("inf"):
            raise BadSetting(f"clip must be a number of at least 0, which does not clip, not {clip}")
        if not callable(optimizer):  # None, or one optimiser, where each block needs its own
            raise BadSetting("give what makes an optimiser: optimizer=lambda params: torch.optim.SGD(params, lr=0.1)")
        with ranks.join():
            self.device = ranks.device_of_rank(torch.device(device))
            self.parts, self.balance = split(model, cuts, blocks, sample, loss, self.device)
            count = len(self.parts)
            if (p is None) != (m is None):
                raise BadSetting("give both queue lengths p and m, or neither")
            self.schedule = Schedule.shortest(count) if p is None or m is None else Schedule(tuple(p), tuple(m))
            if self.schedule.blocks != count:
                raise BadSetting(f"the queue lengths are for {self.schedule.blocks} blocks, and the model has {count}")
            self.engine = build_engine(
                PipelineBlock, self.parts, self.schedule, optimizer, loss, rate, seed, self.device, clip=clip
            )
        self.half_way = False  # whether a step failed, so that its batch has passed only some blocks
        self.seen = False  # whether the parts of the inputs are known

    def step(self, batch: Batch, probe: bool = False) -> Tensor | None:
        """Feed a batch; the loss of the batch in the last block, on its rank. `probe` fills `differences`."""
        return self.advance(lambda: self.engine.step(*self.join(batch), probe=probe))

    def join(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """A batch's inputs as one tensor, which the first block parts again, and its targets."""
        inputs, targets, pieces = read(batch)
        first = self.parts[0].module
        if self.seen and pieces != first.pieces:
            raise BadSetting(
                f"all batches need the same inputs: {describe(pieces)} came after {describe(first.pieces)}"
            )
        first.pieces, self.seen = pieces, True
        return inputs, targets

    def flush(self) -> list[Tensor]:
        """Run the batches under way through all blocks, which empties the queues; their losses as in `step`."""
        return self.advance(self.engine.flush)

    def advance(self, play: Callable[[], T]) -> T:
        """Call play(), unless the last call failed."""
        if self.half_way:
            raise BadSetting(
                "a step failed with its batch half way through the blocks; "
                "load_state_dict a state from before it, or build the pipeline anew"
            )
        self.half_way = True
        result = play()
        self.half_way = False
        return result

    def evaluate(self, batches: Iterable[Batch]) -> dict[str, float]:
        """Mean loss and accuracy under the current parameters; the queues stay as they are."""
        return self.engine.evaluate(self.join(batch) for batch in batches)

    @property
    def differences(self) -> dict[int, float]:
        """|BP gradient - DSP gradient| / number of parameters of the last probed batch, by block of this process."""
        return self.engine.differences

    def state_dict(self) -> dict[str, Tensor]:
        """A copy of parameters, statistics, optimisers and queues, on rank 0; all ranks must call it."""
        state = {name: tensor.detach().clone() for name, tensor in self.engine.tensors().items()}
        pieces = self.parts[0].module.pieces
        return state | ({STORED: encode(pieces)} if pieces else {})

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on from a state of the same blocks and queues, from one process or from ranks."""
        self.engine.restore({name: tensor for name, tensor in state.items() if name != STORED})
        if STORED in state:
            self.parts[0].module.pieces, self.seen = decode(state[STORED]), True
        self.half_way = False

    def model_state(self) -> dict[str, Tensor]:
        """A plain state dict of the whole model, on rank 0; all ranks must call it."""
        return join_parts(self.parts, self.engine.model())


def split(
    model: Model, cuts: Cuts, blocks: int | None, sample: Batch | None, loss: Loss, device: torch.device
) -> tuple[list[ModelPart], Balance | None]:
    """Cut the model as given, or measure it and return the balance too."""
    if not isinstance(model, nn.Module) or cuts is not None:
        parts = cut_model(model, cuts)
        if blocks is not None and blocks != len(parts):
            raise BadSetting(f"blocks is {blocks}, but the model is given in {len(parts)}; leave out one of the two")
        return [ModelPart(part.module.to(device), part.layers) for part in parts], None
    if blocks is None or sample is None:
        raise BadSetting("give cuts=[...], or blocks=K with sample=(inputs, targets), a batch to time the layers on")
    model.to(device)
    inputs, targets, pieces = read(sample)
    if pieces:
        raise BadSetting("layers are timed on inputs of one part; give cuts=[...]")
    balance = balance_model(model, blocks, inputs.to(device), targets.to(device), loss)
    return cut_model(model, balance.cuts), balance
