"""A module as a pure function of (x, buffers, inputs), safe to run for many clients at once.

`Net` takes any `nn.Module`. Only its trainable parameters enter the vector x; BatchNorm's running statistics form a
second vector, the buffers; everything else (frozen parameters, constant buffers) is shared by all clients. BatchNorm
and Dropout are replaced by forms that ignore padded samples and draw from counter-based streams.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm

from undrift.core.errors import BadSetting
from undrift.core.forms import plain
from undrift.core.layout import MODEL, Layout
from undrift.core.streams import mix
from undrift.core.trees import map_tagged
from undrift.oracle.segmentation import dice_loss, soft_dice_loss

T = TypeVar("T")
Loss = Callable[[Tensor, Tensor], Tensor]
ALIGNED = 8  # entries, 32 bytes of float32: a GPU reads and writes so many at once, and wants every client's row to begin there


class Context(NamedTuple):
    """What one forward pass in training brings besides the inputs."""

    real: Tensor | None  # [B], 1 for a real sample and 0 for padding; None: all are real
    key: Tensor  # [] the pass's dropout stream
    dropout: bool = True


class _Pass(threading.local):
    """The forward pass under way in this thread: its context, and the statistics that BatchNorm layers leave."""

    context: Context | None = None  # None: evaluation mode
    stacked: bool = False  # under vmap
    statistics: dict[str, Tensor]
    drops: int = 0


class MaskedBatchNorm(_BatchNorm):
    """BatchNorm whose batch statistics are those of the real samples."""

    name: str  # its place in the model, with a dot behind it
    current: _Pass
    frozen: bool  # put in evaluation mode by the user: its statistics stay as they are

    def forward(self, x: Tensor) -> Tensor:
        running_mean: Tensor | None = getattr(self, "running_mean", None)
        running_var: Tensor | None = getattr(self, "running_var", None)
        context = None if self.frozen else self.current.context
        if context is None and running_mean is not None:
            return F.batch_norm(x, running_mean, running_var, self.weight, self.bias, False, 0.0, self.eps)
        across = [0, *range(2, x.dim())]
        wide = (1, -1) + (1,) * (x.dim() - 2)
        if context is None or context.real is None:
            n = torch.full((), float(x.numel() // x.shape[1]), dtype=x.dtype, device=x.device)
            mean = x.mean(across)
            centred = x - mean.view(wide)
            var = centred.square().mean(across)
        else:
            real = context.real.to(x.dtype)
            if len(x) % len(real):
                raise BadSetting(
                    f"BatchNorm sees {len(x)} rows for {len(real)} samples; padding cannot be told from samples"
                )
            real = real.repeat_interleave(len(x) // len(real)).view((-1,) + (1,) * (x.dim() - 1))
            n = real.sum() * (x.numel() // (x.shape[0] * x.shape[1]))
            mean = (x * real).sum(across) / n.clamp(min=1)
            centred = x - mean.view(wide)
            var = (centred.square() * real).sum(across) / n.clamp(min=1)
        out = centred * (var + self.eps).rsqrt().view(wide)
        if self.weight is not None:
            out = out * self.weight.view(wide) + self.bias.view(wide)
        if context is not None and running_mean is not None and running_var is not None:
            unbiased = var * (n / (n - 1).clamp(min=1))
            self.track(mean.detach(), unbiased.detach())
        return out

    def track(self, mean: Tensor, var: Tensor) -> None:
        """Leave the running statistics after this batch; a layer used twice in a pass goes on from its first use."""
        kept, parts = self.current.statistics, ("running_mean", "running_var", "num_batches_tracked")
        running_mean, running_var, seen = (kept.get(self.name + part, getattr(self, part)) for part in parts)
        seen = seen + 1
        share = 1.0 / seen if self.momentum is None else torch.full_like(seen, self.momentum)
        kept[f"{self.name}running_mean"] = torch.lerp(running_mean, mean, share.to(mean))
        kept[f"{self.name}running_var"] = torch.lerp(running_var, var, share.to(var))
        kept[f"{self.name}num_batches_tracked"] = seen


class StreamDropout(_DropoutNd):
    """Dropout whose mask is a hash of (the pass's key, this call's number, the element's place)."""

    current: _Pass
    frozen: bool
    whole_channels: bool

    def forward(self, x: Tensor) -> Tensor:
        context = None if self.frozen else self.current.context
        if context is None or self.p == 0.0 or not context.dropout:
            return x
        self.current.drops += 1
        shape = x.shape[:2] + (1,) * (x.dim() - 2) if self.whole_channels else x.shape
        place = torch.arange(shape.numel(), device=x.device).view(shape)
        bits = mix(mix(context.key + self.current.drops) + place)
        keep = ((bits >> 32) & 0xFFFFFFFF) >= int(self.p * 2**32)
        return x * keep.to(x.dtype) * (1.0 / (1.0 - self.p) if self.p < 1.0 else 0.0)


class StackedLinear(nn.Linear):
    """A linear layer that knows whether its clients are stacked."""

    current: _Pass

    def forward(self, x: Tensor) -> Tensor:
        return linear(self, x)


class StackedConv2d(nn.Conv2d):
    """A convolution that knows whether its clients are stacked."""

    current: _Pass

    def forward(self, x: Tensor) -> Tensor:
        return conv2d(self, x)


@plain
def linear(layer: StackedLinear, x: Tensor) -> Tensor:
    """What a linear layer makes of x."""
    return nn.Linear.forward(layer, x)


@plain
def conv2d(layer: StackedConv2d, x: Tensor) -> Tensor:
    """What a convolution makes of x."""
    return nn.Conv2d.forward(layer, x)


class _Using(nn.Module):
    """Hands its module to a function: `functional_call` swaps the tensors of a module only while it calls it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, use: Callable[[nn.Module], Any]) -> Any:
        return use(self.module)


class Net:
    """A module, its loss and its layout. `Net(module)` leaves the module itself untouched."""

    def __init__(self, module: nn.Module, loss: Loss = F.cross_entropy, dtype: torch.dtype = torch.float32) -> None:
        if getattr(loss, "weight", None) is not None and getattr(loss, "reduction", "none") == "mean":
            raise BadSetting("a loss with class weights must not average by itself here; give it reduction='none'")
        self.loss = F.cross_entropy if plain_cross_entropy(loss) else loss
        self.dtype = dtype
        self.current = _Pass()
        self.original = copy.deepcopy(module).to(dtype)
        prepared = copy.deepcopy(self.original)
        _prepare(prepared, "", self.current, module.training, set())
        if not module.training:
            prepared.train()
        trained = [(n, p) for n, p in prepared.named_parameters() if p.requires_grad]
        self.layout = Layout.of(trained, ALIGNED)
        if not self.layout.names:
            raise BadSetting("the model has no trainable parameter; set requires_grad on what should be trained")
        tracked = [f"{n}." if n else "" for n, m in prepared.named_modules() if isinstance(m, MaskedBatchNorm)]
        self.buffer_layout = Layout.of(
            (n, b) for n, b in prepared.named_buffers() if any(n == t + n.rpartition(".")[2] for t in tracked)
        )
        self.counters = torch.cat(
            [
                torch.full((s,), n.endswith("num_batches_tracked"))
                for n, s in zip(self.buffer_layout.names, self.buffer_layout.sizes, strict=True)
            ]
            or [torch.zeros(0, dtype=torch.bool)]
        )  # which entries of the buffers' vector are counters: they are aggregated by maximum
        self.beside: dict[str, Net] = {}  # further networks that an algorithm trains on the same samples, by name
        self.remembered: dict[str, Any] = {}  # what faster forms have found out about this network
        self._local = threading.local()
        self._prepared = prepared
        self._still = _unshared(prepared, self.current).eval()

    def put_beside(self, name: str, other: Net) -> None:
        """Have another network trained beside this one; fields that hold its vectors are annotated with its name."""
        self.beside[name] = other

    def layout_of(self, tag: str) -> Layout | None:
        """The layout of vectors under a tag; None for tensors without one."""
        if tag == MODEL:
            return self.layout
        return self.beside[tag].layout if tag else None

    def start(self) -> tuple[Tensor, Tensor]:
        """x0 [P] and the buffers' start [Q]."""
        like = torch.zeros((), dtype=self.dtype)
        named = dict(self.original.named_parameters()) | dict(self.original.named_buffers())
        return self.layout.join(named, like), self.buffer_layout.join(named, like)

    def to(self, device: torch.device) -> Net:
        """Move what the clients share (frozen parameters, constant buffers) to a device."""
        for other in self.beside.values():
            other.to(device)
        if isinstance(self.loss, nn.Module):
            self.loss = copy.deepcopy(self.loss).to(device)
        self.original.to(device)
        self._prepared.to(device)
        self._still = _unshared(self._prepared, self.current).eval()
        self.counters = self.counters.to(device)
        return self

    def module(self, training: bool) -> nn.Module:
        """This thread's own copy: `functional_call` swaps tensors inside the module, so threads must not share one."""
        shared = self._prepared if training else self._still
        if threading.current_thread() is threading.main_thread():
            return shared
        name = "training" if training else "evaluation"
        if not hasattr(self._local, name):
            setattr(self._local, name, _unshared(shared, self.current))
        mine: nn.Module = getattr(self._local, name)
        return mine

    def trace(
        self, x: Tensor, buffers: Tensor, inputs: Tensor, context: Context | None, stacked: bool = False
    ) -> tuple[list[Tensor], Tensor]:
        """As a call, with the output of every block: the last one is the model's."""
        return self._run(x, buffers, context, stacked, lambda module: _through(blocks(module), inputs))

    def onward(
        self, block: int, x: Tensor, buffers: Tensor, h: Tensor, context: Context | None, stacked: bool = False
    ) -> Tensor:
        """What the blocks from number `block` on make of h, with the tensors of x; no statistics are kept.

        Dropout layers are numbered as in a whole pass, so that they drop what they drop there.
        """

        def use(module: nn.Module) -> list[Tensor]:
            before = nn.ModuleList(blocks(module)[:block]).modules()
            self.current.drops = sum(isinstance(m, StreamDropout) and m.p > 0 for m in before)
            return _through(blocks(module)[block:], h)

        outputs: list[Tensor] = self._run(x, buffers, context, stacked, use)[0]
        return outputs[-1]

    def _run(
        self,
        x: Tensor,
        buffers: Tensor,
        context: Context | None,
        stacked: bool,
        use: Callable[[nn.Module], Any],
    ) -> tuple[Any, Tensor]:
        """What `use` makes of the module while it holds the tensors of x and the buffers, and the buffers afterwards."""
        self.current.context, self.current.stacked = context, stacked
        self.current.statistics, self.current.drops = {}, 0
        tensors = self.layout.split(x) | self.buffer_layout.split(buffers)
        holder = _Using(self.module(context is not None))
        try:
            outputs = functional_call(holder, {f"module.{name}": tensor for name, tensor in tensors.items()}, (use,))
        finally:
            self.current.context, self.current.stacked = None, False
        return outputs, self._tracked(buffers, context)

    def _tracked(self, buffers: Tensor, context: Context | None) -> Tensor:
        """The buffers after a pass in training mode."""
        if context is None or not self.buffer_layout.names:
            return buffers
        new = self.current.statistics  # a layer that the pass did not use, or that is frozen, left none
        old = self.buffer_layout.split(buffers)
        return torch.cat([new.get(n, old[n]).reshape(-1) for n in self.buffer_layout.names])

    def __call__(
        self, x: Tensor, buffers: Tensor, inputs: Tensor, context: Context | None, stacked: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Outputs for x [P], and the buffers after this pass; context None means evaluation mode."""
        outputs, after = self._run(x, buffers, context, stacked, lambda module: module(inputs))
        if not isinstance(outputs, Tensor):
            raise BadSetting(f"the model must return one tensor, not {type(outputs).__name__}")
        return outputs, after

    def sample_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of each sample [B]. A loss that returns one number is asked for one sample at a time."""
        if self.loss is F.cross_entropy:
            each = F.cross_entropy(outputs, targets, reduction="none")
            return each.flatten(1).mean(1) if each.dim() > 1 else each  # with a label for every pixel, say
        if self.loss is dice_loss:
            return dice_loss(outputs, targets)
        losses: Tensor = torch.vmap(lambda o, t: self.loss(o.unsqueeze(0), t.unsqueeze(0)).reshape(()))(
            outputs, targets
        )
        return losses

    def probabilities(self, outputs: Tensor) -> Tensor:
        """What the outputs say of each class, or of each structure at each pixel."""
        return outputs.softmax(1) if self.loss is F.cross_entropy else outputs.sigmoid()

    def mixed_losses(self, probabilities: Tensor, targets: Tensor) -> Tensor:
        """The loss of each sample [B] for probabilities, such as a mixture of several models'."""
        if self.loss is F.cross_entropy:
            return F.nll_loss(probabilities.clamp(min=1e-12).log(), targets, reduction="none")
        if self.loss is dice_loss:
            return soft_dice_loss(probabilities, targets)
        raise BadSetting(
            "models can be mixed for cross-entropy and for the Dice loss only; use fedsm-extra, which chooses one"
        )

    def sent(self, state: T, tag: str = "") -> T:
        """A message as it travels: vectors without the zeros behind them; `tag` is that of a tensor by itself."""

        def trim(t: Tensor, tag: str) -> Tensor:
            layout = self.layout_of(tag)
            return t if layout is None else t[..., : layout.entries]

        return map_tagged(trim, state, tag=tag)

    def state_dict(self, x: Tensor, buffers: Tensor) -> dict[str, Tensor]:
        """A plain PyTorch state dict with the module's own names and dtypes."""
        trained = self.layout.split(x) | self.buffer_layout.split(buffers)
        tensors = dict(self.original.named_parameters()) | dict(self.original.named_buffers())
        first = {
            id(tensor): name for name, tensor in tensors.items()
        }  # tied weights have several names, one vector entry
        state = {}
        for name, tensor in self.original.state_dict(keep_vars=True).items():
            value = trained.get(first.get(id(tensor), name), tensor)
            state[name] = value.detach().to(tensor.dtype).clone()
        return state


def blocks(module: nn.Module) -> list[nn.Module]:
    """The parts that a model runs one after another; the last one is the classifier."""
    if not isinstance(module, nn.Sequential) or type(module).forward is not nn.Sequential.forward or len(module) < 2:
        raise BadSetting(
            "this method needs a model made of blocks: an nn.Sequential of at least two parts whose last one is the "
            f"classifier, not {type(module).__name__}"
        )
    return list(module)


def _through(parts: list[nn.Module], h: Tensor) -> list[Tensor]:
    found = []
    for part in parts:
        h = part(h)
        found.append(h)
    return found


def plain_cross_entropy(loss: Loss) -> bool:
    """Whether a loss is cross-entropy in one of its usual spellings, without further options."""
    if not isinstance(loss, nn.CrossEntropyLoss):
        return loss is F.cross_entropy
    return (
        loss.weight is None and loss.ignore_index == -100 and loss.label_smoothing == 0.0 and loss.reduction == "mean"
    )


def _prepare(module: nn.Module, name: str, current: _Pass, training: bool, done: set[int]) -> None:
    """Give every BatchNorm, Dropout, Linear and Conv2d its other forward; the module, its hooks and its tensors stay themselves.

    `training` says that the whole model came in training mode, so that a part in evaluation mode is meant to be frozen.
    """
    if id(module) in done:  # a part that stands in several places
        return
    done.add(id(module))
    frozen = training and not module.training
    if isinstance(module, _BatchNorm):
        module.__class__ = MaskedBatchNorm
        vars(module).update(name=name, current=current, frozen=frozen)
    elif type(module) is nn.Linear:
        module.__class__ = StackedLinear
        vars(module).update(current=current)
    elif type(module) is nn.Conv2d:
        module.__class__ = StackedConv2d
        vars(module).update(current=current)
    elif isinstance(module, nn.AlphaDropout | nn.FeatureAlphaDropout):
        raise BadSetting(f"{type(module).__name__} cannot be drawn from seeded streams; use nn.Dropout or remove it")
    elif isinstance(module, _DropoutNd):
        whole = not isinstance(module, nn.Dropout)
        module.__class__ = StreamDropout
        vars(module).update(current=current, frozen=frozen, whole_channels=whole)
    elif isinstance(module, _InstanceNorm) and module.track_running_stats:
        raise BadSetting(
            "InstanceNorm with running statistics is not supported; build it with track_running_stats=False"
        )
    for child, part in module._modules.items():
        if part is not None:
            _prepare(part, f"{name}{child}.", current, training, done)


def _unshared(module: nn.Module, current: _Pass) -> nn.Module:
    """A copy with its own tensors' places but the same tensors and the same (thread-local) pass."""
    memo: dict[int, object] = {id(current): current}
    for tensor in (*module.parameters(), *module.buffers()):
        memo[id(tensor)] = tensor
    return copy.deepcopy(module, memo)
