"""One block of a network that is trained with stale parameters: forward now, replay and backward m batches later.

Eq. (1-6) of the thesis, seen from block k, with its parameters x_k as they are at the time of each call:

    forward(n)    h_{k+1} = f_k(h_k; x_k)                                    the input h_k is kept, no graph
    backward(n)   rebuild f_k(h_k; x_k) from the kept input, then
                  G_{x_k} = J_x f_k^T e_{k+1},  e_k = J_h f_k^T e_{k+1}      and one step of the optimiser with G

The loss gradient is taken where the last block forwards, at its forward-time output. A block without staleness (m = 0)
keeps its graph and computes nothing twice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from undrift.core.errors import BadSetting
from undrift.core.streams import Purpose, stream

Loss = Callable[[Tensor, Tensor], Tensor]
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
Rate = Callable[[int], float]  # the learning rate of a batch
NUMBER = ":number"  # ends the name of an optimiser's state that is a plain number


class PipelineBlock:
    """Block k of a pipeline. `loss` is given to the last block only."""

    def __init__(
        self,
        module: nn.Module,
        k: int,
        m: int,
        optimizer: MakeOptimizer,
        loss: Loss | None = None,
        rate: Rate | None = None,
        seed: int = 0,
    ) -> None:
        self.module, self.k, self.m, self.loss, self.rate, self.seed = module, k, m, loss, rate, seed
        self.make_optimizer = optimizer
        self.trained = [p for p in module.parameters() if p.requires_grad]
        self.optimizer = optimizer(self.trained) if self.trained else None
        self.inputs: dict[int, Tensor] = {}  # M_k: the inputs of batches that are not yet backwarded
        self.graphs: dict[
            int, tuple[Tensor, Tensor]
        ] = {}  # with m = 0: input and output, or the loss, with their graph
        self.loss_errors: dict[int, Tensor] = {}  # in the last block with m > 0: the loss gradient at the output
        self.norms = [layer for layer in module.modules() if isinstance(layer, _NormBase) and layer.track_running_stats]
        self.reduce: Callable[[], None] = lambda: None  # joins the gradients of the block's replicas
        self.prepare()

    def prepare(self) -> None:
        """What another kind of block keeps besides."""

    def forward(self, n: int, h: Tensor, target: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """The output for batch n with the parameters of now, and the loss in the last block."""
        version = h._version
        if self.m == 0:
            out, loss = self.forward_with_graph(n, h, target)
        else:
            with torch.no_grad(), self.randomness(n, h.device):
                out = self.module(h)
            self.inputs[n] = h
            loss = None
            if self.loss is not None:
                out.requires_grad_()
                loss = self.loss(out, self.wanted(target))
                (self.loss_errors[n],) = torch.autograd.grad(loss, out)
        if h._version != version:
            raise BadSetting(
                f"block {self.k} changes its input in place, so it cannot be replayed; "
                "build its first layer with inplace=False, or cut the model elsewhere"
            )
        return out.detach(), None if loss is None else loss.detach()

    def forward_with_graph(self, n: int, h: Tensor, target: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Where forward and backward use the same parameters, one pass serves both."""
        h = h.detach().requires_grad_(self.sends_error(h))
        with self.randomness(n, h.device):
            out = self.module(h)
        loss = None if self.loss is None else self.loss(out, self.wanted(target))
        self.graphs[n] = h, out if loss is None else loss
        return out, loss

    def backward(self, n: int, error: Tensor | None) -> Tensor | None:
        """The gradient for the block below of batch n; afterwards the block's parameters have made their step."""
        if self.m == 0:
            h, out = self.graphs.pop(n)
        else:
            h, out = self.replayed(n)
            error = self.loss_errors.pop(n, error)
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        if out.requires_grad:  # not in a first block that has nothing to train
            torch.autograd.backward(out, error)
        self.update(n)
        return h.grad

    def replayed(self, n: int) -> tuple[Tensor, Tensor]:
        """Batch n's kept input and its output under the parameters of now, with a graph; statistics are not tracked again."""
        kept = self.inputs.pop(n)
        h = kept.detach().requires_grad_(self.sends_error(kept))
        with self.randomness(n, h.device), self.untracked():
            return h, self.module(h)

    def update(self, n: int) -> None:
        """One step of the optimiser with the gradients of batch n, at batch n's rate."""
        self.reduce()
        if self.optimizer is not None:
            if self.rate is not None:
                for group in self.optimizer.param_groups:
                    group["lr"] = self.rate(n)
            self.optimizer.step()

    def sends_error(self, h: Tensor) -> bool:
        return self.k > 0 and h.is_floating_point()

    def wanted(self, target: Tensor | None) -> Tensor:
        assert target is not None, "the last block is given the targets"
        return target

    @contextlib.contextmanager
    def randomness(self, n: int, device: torch.device) -> Iterator[None]:
        """Dropout draws the same mask whenever batch n passes this block, in whatever process."""
        # fork_rng and manual_seed look at every kind of device and take a hundred times as long
        generator = torch.default_generator
        if device.type == "cuda":
            generator = torch.cuda.default_generators[device.index or 0]
        before = generator.get_state()
        generator.manual_seed(stream(self.seed, Purpose.DROPOUT, n, self.k) >> 1)
        try:
            yield
        finally:
            generator.set_state(before)

    @contextlib.contextmanager
    def untracked(self) -> Iterator[None]:
        """BatchNorm normalises by the batch and leaves its running statistics alone."""
        for layer in self.norms:
            layer.track_running_stats = False
        try:
            yield
        finally:
            for layer in self.norms:
                layer.track_running_stats = True

    def shown(self) -> contextlib.AbstractContextManager[None]:
        """The parameters as those to test and to save, where the optimiser keeps others for its gradients."""
        return getattr(self.optimizer, "evaluating", contextlib.nullcontext)()

    def held(self) -> list[Tensor]:
        """What the block keeps of batches under way: stored inputs, and loss gradients."""
        return [*self.inputs.values(), *self.loss_errors.values(), *(h for h, _ in self.graphs.values())]

    def let_go(self) -> None:
        """Forget the optimiser, which may hold a connection to other ranks open."""
        self.optimizer, self.reduce = None, lambda: None
        del self.make_optimizer

    def tensors(self) -> dict[str, Tensor]:
        """All that the block's future depends on, between two timestamps."""
        named = {f"module.{name}": tensor for name, tensor in self.module.state_dict().items()}
        named |= optimizer_tensors(self.optimizer, "optimizer.")
        named |= {f"input.{n}": tensor for n, tensor in self.inputs.items()}
        return named | {f"loss_error.{n}": tensor for n, tensor in self.loss_errors.items()}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Take over what `tensors` returned."""
        self.module.load_state_dict(below("module.", tensors))
        restore_optimizer(self.optimizer, below("optimizer.", tensors))
        self.inputs = by_batch("input.", tensors)
        self.loss_errors = by_batch("loss_error.", tensors)


def below(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin with a prefix, under the rest of their names."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def fresh(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy in memory of its own: a tensor read from a file may lie at an odd address, for which BLAS rounds otherwise."""
    return tensor.to(device, copy=True)


def size(held: list[Tensor]) -> tuple[int, int]:
    """How many tensors and how many bytes; one that is held in two places is one."""
    each = {id(tensor): tensor.nbytes for tensor in held}
    return len(each), sum(each.values())


def by_batch(prefix: str, tensors: dict[str, Tensor]) -> dict[int, Tensor]:
    """The tensors named prefix + batch number, oldest first."""
    return dict(sorted((int(n), tensor) for n, tensor in below(prefix, tensors).items()))


def optimizer_tensors(optimizer: torch.optim.Optimizer | None, prefix: str) -> dict[str, Tensor]:
    """An optimiser's state under names of its own: a number becomes a tensor that is named as one, text is no state.

    torch's optimisers keep tensors for each parameter, numbered; one that exchanges numbers with other ranks may keep vectors
    of all parameters.
    """
    named: dict[str, Tensor] = {}
    for place, values in ({} if optimizer is None else optimizer.state_dict()["state"]).items():
        for name, value in values.items() if isinstance(values, dict) else (("", values),):
            key = f"{prefix}{place}.{name}".removesuffix(".")
            if isinstance(value, Tensor):
                named[key] = value
            elif isinstance(value, int | float):
                kept = torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
                named[key + (NUMBER if name else "")] = kept
    return named


def restore_optimizer(optimizer: torch.optim.Optimizer | None, tensors: dict[str, Tensor]) -> None:
    if optimizer is None:
        return
    state: dict[Any, Any] = {}
    for named, tensor in tensors.items():
        place, dot, name = named.partition(".")
        if dot:
            number = name.endswith(NUMBER)
            state.setdefault(int(place), {})[name.removesuffix(NUMBER)] = tensor.item() if number else tensor
        else:
            state[place] = tensor if tensor.dim() else tensor.item()
    if state and not any(isinstance(place, int) for place in state):
        state["method"] = type(optimizer).__name__
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
