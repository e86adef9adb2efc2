"""One block of a network that is trained with stale parameters: forward now, replay and backward m batches later.

Eq. (1-6) of the thesis for block k, with its parameters x_k at the time of each call:

    forward(n)    h_{k+1} = f_k(h_k; x_k)                                    keeps the input h_k, no graph
    backward(n)   recompute f_k(h_k; x_k) from the kept input, then
                  G_{x_k} = J_x f_k^T e_{k+1},  e_k = J_h f_k^T e_{k+1}      and one step of the optimiser with G

The loss gradient is taken at the last block's output in its forward. A block without staleness (m = 0) keeps its graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from undrift.core.errors import BadSetting
from undrift.core.streams import Purpose, stream

Loss = Callable[[Tensor, Tensor], Tensor]
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
Rate = Callable[[int], float]  # what multiplies the learning rates of all parameter groups for a batch
TIED = "tied_optimizer."  # prefix of its state, which is stored once, with the first block
NUMBER = ":number"  # suffix of optimiser state that is a plain number


class PipelineBlock:
    """Block k of a pipeline. Only the last block has a `loss`."""

    def __init__(
        self,
        module: nn.Module,
        k: int,
        m: int,
        optimizer: MakeOptimizer,
        loss: Loss | None = None,
        rate: Rate | None = None,
        seed: int = 0,
        tied: Sequence[nn.Parameter] = (),
        late: bool = False,
    ) -> None:
        self.module, self.k, self.m, self.loss, self.rate, self.seed = module, k, m, loss, rate, seed
        self.make_optimizer = optimizer
        self.trained = [p for p in module.parameters() if p.requires_grad]
        self.tied, self.late = (
            list(tied),
            late,
        )  # what another block trains too; whether updates wait for `end_timestamp`
        self.own = [p for p in self.trained if all(p is not other for other in tied)]
        self.optimizer = optimizer(self.own) if self.own else None
        self.tied_optimizer = optimizer(self.tied) if self.tied else None
        self.tied_gradients: dict[int, list[Tensor]] = {}  # gradients of batches whose other half is still to come
        self.waiting_update: int | None = None  # the batch whose gradients wait for the end of the timestamp
        self.inputs: dict[int, Tensor] = {}  # M_k: the inputs of batches before their backward
        self.graphs: dict[int, tuple[Tensor, Tensor]] = {}  # if m = 0: input, and output or loss, with their graph
        self.loss_errors: dict[int, Tensor] = {}  # in the last block with m > 0: the loss gradient at the output
        self.norms = [layer for layer in module.modules() if isinstance(layer, _NormBase) and layer.track_running_stats]
        self.reduce: Callable[[], None] = lambda: None  # averages the gradients of the block's replicas
        self.prepare()

    def prepare(self) -> None:
        """Set up what a subclass adds."""

    def forward(self, n: int, h: Tensor, target: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """The output for batch n under the current parameters, and the loss in the last block."""
        version = h._version
        loss = None
        if self.m == 0:  # forward and backward use the same parameters: one pass serves both
            leaf = h.detach().requires_grad_(self.sends_error(h))
            with self.seed_dropout(n, h.device):
                out = self.module(leaf)
            if self.loss is not None:
                loss = self.loss(out, require_target(target))
            self.graphs[n] = leaf, out if loss is None else loss
        else:
            with torch.no_grad(), self.seed_dropout(n, h.device):
                out = self.module(h)
            self.inputs[n] = h
            if self.loss is not None:
                out.requires_grad_()
                loss = self.loss(out, require_target(target))
                (self.loss_errors[n],) = torch.autograd.grad(loss, out)
        if h._version != version:
            raise BadSetting(
                f"block {self.k} changes its input in place, so it cannot be replayed; "
                "build its first layer with inplace=False, or cut the model elsewhere"
            )
        return out.detach(), None if loss is None else loss.detach()

    def backward(self, n: int, error: Tensor | None) -> Tensor | None:
        """Step along batch n's gradient; the gradient for the block below."""
        if self.m == 0:
            h, out = self.graphs.pop(n)
        else:
            h, out = self.replay(n)
            error = self.loss_errors.pop(n, error)
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        if out.requires_grad:  # false in a first block without parameters
            torch.autograd.backward(out, error)
        if self.tied:
            self.tied_gradients[n] = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.tied]
            for p in self.tied:
                p.grad = None
        if self.late:
            self.waiting_update = n
        else:
            self.update(n)
        return h.grad

    def replay(self, n: int) -> tuple[Tensor, Tensor]:
        """Batch n's kept input and its output under the current parameters, with a graph."""
        kept = self.inputs.pop(n)
        h = kept.detach().requires_grad_(self.sends_error(kept))
        with self.seed_dropout(n, h.device), self.freeze_statistics():  # the forward has tracked them
            return h, self.module(h)

    def update(self, n: int) -> None:
        """One step of the optimiser with the gradients of batch n, at batch n's rate."""
        self.reduce()
        if self.optimizer is not None:
            self.step(self.optimizer, n)

    def square(self) -> float:
        """The squared norm of the gradients that wait for the end of the timestamp."""
        grads = [p.grad for p in self.own if p.grad is not None] if self.waiting_update is not None else []
        return sum_of_squares(grads)

    def end_timestamp(self, factor: float) -> None:
        """The update that has waited, with a factor of its gradients."""
        if self.waiting_update is not None:
            scale_gradients([p.grad for p in self.own if p.grad is not None], factor)
            self.update(self.waiting_update)
        self.waiting_update = None

    def update_tied(self, n: int, gradients: Sequence[Tensor], factor: float) -> None:
        """One step of what the first and the last block share, with the sum of both gradients of batch n."""
        assert self.tied_optimizer is not None
        for p, gradient in zip(self.tied, gradients, strict=True):
            p.grad = gradient
        scale_gradients(gradients, factor)
        self.step(self.tied_optimizer, n)
        for p in self.tied:
            p.grad = None

    def step(self, optimizer: torch.optim.Optimizer, n: int) -> None:
        """One step of an optimiser at batch n's rate, which is a factor of each group's own."""
        if self.rate is not None:
            for group in optimizer.param_groups:
                group["lr"] = group.setdefault("initial_lr", group["lr"]) * self.rate(n)
        optimizer.step()

    def sends_error(self, h: Tensor) -> bool:
        return self.k > 0 and h.is_floating_point()

    @contextlib.contextmanager
    def seed_dropout(self, n: int, device: torch.device) -> Iterator[None]:
        """Draw the same dropout mask whenever batch n passes this block, in any process."""
        # fork_rng and manual_seed visit every kind of device and take a hundred times as long
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
    def freeze_statistics(self) -> Iterator[None]:
        """Let BatchNorm normalise by the batch without updating its running statistics."""
        for layer in self.norms:
            layer.track_running_stats = False
        try:
            yield
        finally:
            for layer in self.norms:
                layer.track_running_stats = True

    def show_weights(self) -> contextlib.AbstractContextManager[None]:
        """Set the parameters to those to test and save, where the optimiser takes gradients elsewhere."""
        return getattr(self.optimizer, "evaluating", contextlib.nullcontext)()

    def stored_tensors(self) -> list[Tensor]:
        """The tensors of batches under way: inputs and loss gradients."""
        halves = [gradient for each in self.tied_gradients.values() for gradient in each]
        return [*self.inputs.values(), *self.loss_errors.values(), *(h for h, _ in self.graphs.values()), *halves]

    def release(self) -> None:
        """Drop the optimiser, which may keep a connection to other ranks open."""
        self.optimizer, self.tied_optimizer, self.reduce = None, None, lambda: None
        del self.make_optimizer

    def tensors(self) -> dict[str, Tensor]:
        """The block's state between two timestamps."""
        named = {f"module.{name}": tensor for name, tensor in self.module.state_dict().items()}
        named |= optimizer_tensors(self.optimizer, "optimizer.")
        if self.k == 0:
            named |= optimizer_tensors(self.tied_optimizer, TIED)
        named |= {f"tied_gradient.{n}.{i}": g for n, each in self.tied_gradients.items() for i, g in enumerate(each)}
        named |= {f"input.{n}": tensor for n, tensor in self.inputs.items()}
        return named | {f"loss_error.{n}": tensor for n, tensor in self.loss_errors.items()}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Load what `tensors` returned."""
        self.module.load_state_dict(strip_prefix("module.", tensors))
        restore_optimizer(self.optimizer, strip_prefix("optimizer.", tensors))
        restore_optimizer(self.tied_optimizer, strip_prefix(TIED, tensors))
        self.tied_gradients = {}
        for name, gradient in strip_prefix("tied_gradient.", tensors).items():
            self.tied_gradients.setdefault(int(name.partition(".")[0]), []).append(gradient)
        self.inputs = by_batch("input.", tensors)
        self.loss_errors = by_batch("loss_error.", tensors)


def sum_of_squares(tensors: Sequence[Tensor]) -> float:
    return sum(float(t.double().square().sum()) for t in tensors)


def scale_gradients(gradients: Sequence[Tensor], factor: float) -> None:
    if factor != 1.0 and gradients:
        torch._foreach_mul_(list(gradients), factor)


def clip_factor(square: float, clip: float) -> float:
    """What makes a vector with this squared norm as long as `clip` at most, as clip_grad_norm_ does; 0 does not clip.

    >>> clip_factor(0.25, 1.0), round(clip_factor(4.0, 1.0), 3)
    (1.0, 0.5)
    """
    return min(1.0, clip / (square**0.5 + 1e-6)) if clip else 1.0


def strip_prefix(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin with a prefix, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def copy_tensors(prefix: str, tensors: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Copies of the tensors below a prefix: one read from a file may be unaligned, which changes how BLAS rounds."""
    return {name: tensor.to(device, copy=True) for name, tensor in strip_prefix(prefix, tensors).items()}


def count_bytes(tensors: list[Tensor]) -> tuple[int, int]:
    """The number of different tensors, and their bytes."""
    sizes = {id(tensor): tensor.nbytes for tensor in tensors}
    return len(sizes), sum(sizes.values())


def require_target(target: Tensor | None) -> Tensor:
    assert target is not None, "the last block is given the targets"
    return target


def by_batch(prefix: str, tensors: dict[str, Tensor]) -> dict[int, Tensor]:
    """The tensors named prefix + batch number, oldest first."""
    return dict(sorted((int(n), tensor) for n, tensor in strip_prefix(prefix, tensors).items()))


def optimizer_tensors(optimizer: torch.optim.Optimizer | None, prefix: str) -> dict[str, Tensor]:
    """An optimiser's state, by parameter in torch's and by vector in ours; numbers become tensors, text is left out."""
    named: dict[str, Tensor] = {}
    for place, values in ({} if optimizer is None else optimizer.state_dict()["state"]).items():
        for name, value in values.items() if isinstance(values, dict) else (("", values),):
            key = f"{prefix}{place}.{name}".removesuffix(".")
            if isinstance(value, Tensor):
                named[key] = value
            elif isinstance(value, int | float):
                dtype = torch.float64 if isinstance(value, float) else None
                named[key + (NUMBER if name else "")] = torch.tensor(value, dtype=dtype)
    return named


def restore_optimizer(optimizer: torch.optim.Optimizer | None, tensors: dict[str, Tensor]) -> None:
    """Load what `optimizer_tensors` returned."""
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
