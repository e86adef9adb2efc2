"""A module as a pure function of (x, buffers, inputs), safe to run for many clients at once.

The vector x holds the trainable parameters of any `nn.Module`, the vector of buffers BatchNorm's running statistics. All clients
share the rest. BatchNorm ignores padded samples, and Dropout draws from counter-based streams.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, TypeGuard, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._ops import OpOverload, OpOverloadPacket
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from undrift.core.device import half_precision
from undrift.core.errors import BadSetting
from undrift.core.forms import plain
from undrift.core.layout import MODEL, Layout
from undrift.core.pieces import Piece, part
from undrift.core.streams import mix
from undrift.core.trees import map_tagged
from undrift.oracle import checkpoints
from undrift.oracle.checkpoints import inside
from undrift.oracle.segmentation import dice_loss, soft_dice_loss

T = TypeVar("T")
Loss = Callable[..., Tensor]  # of outputs and targets
IGNORED = -100  # the label of what does not count, in PyTorch's cross-entropy
ALIGNED = 8  # entries: a GPU accesses 32 bytes at once, and each client's row should begin at such a boundary


def batch_loss(loss: Loss) -> Loss:
    """Mark loss(outputs, targets, real) as one that sees a whole mini-batch, because it is no mean over samples.

    real [B] is 1 for a sample and 0 for padding, or None where all samples are real. The loss is one number, or a part for each
    sample [B], of which the mean over the real samples is taken. Padding must not change it.
    """
    vars(loss)["of_batch"] = True
    return loss


class Context(NamedTuple):
    """The arguments of a forward pass in training besides the inputs."""

    real: Tensor | None  # [B], 1 for a real sample and 0 for padding; None: all are real
    key: Tensor  # [] dropout stream of the pass
    dropout: bool = True


class _Pass(threading.local):
    """The current forward pass of this thread: its context and the new BatchNorm statistics."""

    context: Context | None = None  # None: evaluation mode
    stacked: bool = False  # the pass runs under vmap
    statistics: dict[str, Tensor]
    drops: int = 0


class MaskedBatchNorm(_BatchNorm):
    """BatchNorm whose batch statistics cover only the real samples."""

    name: str  # prefix of its tensors' names, with the dot
    current: _Pass
    frozen: bool  # the user put it in evaluation mode: its statistics stay unchanged

    def forward(self, x: Tensor) -> Tensor:
        running_mean: Tensor | None = getattr(self, "running_mean", None)
        running_var: Tensor | None = getattr(self, "running_var", None)
        context = None if self.frozen else self.current.context
        if context is None and running_mean is not None:
            return F.batch_norm(x, running_mean, running_var, self.weight, self.bias, False, 0.0, self.eps)
        real = None if context is None else context.real
        if real is not None and len(x) % len(real):
            raise BadSetting(f"BatchNorm sees {len(x)} rows for {len(real)} samples: padding is not recognisable")
        out, mean, var, n = batch_norm(self, x, real)
        if context is not None and running_mean is not None and running_var is not None:
            self.track(mean.detach(), (var * (n / (n - 1).clamp(min=1))).detach())  # the unbiased variance
        return out

    def track(self, mean: Tensor, var: Tensor) -> None:
        """Store the new running statistics; the second use of a layer in a pass continues from the first."""
        new, parts = self.current.statistics, ("running_mean", "running_var", "num_batches_tracked")
        running_mean, running_var, seen = (new.get(self.name + part, getattr(self, part)) for part in parts)
        seen = seen + 1
        share = 1.0 / seen if self.momentum is None else torch.full_like(seen, self.momentum)
        new[f"{self.name}running_mean"] = torch.lerp(running_mean, mean, share.to(mean))
        new[f"{self.name}running_var"] = torch.lerp(running_var, var, share.to(var))
        new[f"{self.name}num_batches_tracked"] = seen


class StreamDropout(_DropoutNd):
    """Dropout whose mask is a hash of (key of the pass, number of the call, index of the element)."""

    current: _Pass
    frozen: bool
    whole_channels: bool

    def forward(self, x: Tensor) -> Tensor:
        context = None if self.frozen else self.current.context
        if context is None or self.p == 0.0 or not context.dropout:
            return x
        shape = x.shape[:2] + (1,) * (x.dim() - 2) if self.whole_channels else x.shape
        return drop(self.current, context, x, self.p, shape)


class StackedGroupNorm(nn.GroupNorm):
    """A GroupNorm that knows whether its clients are stacked."""

    current: _Pass

    def forward(self, x: Tensor) -> Tensor:
        return group_norm(self, x)


def kept_entries(key: Tensor, shape: torch.Size, p: float) -> Tensor:
    """Which entries of a shape dropout keeps; the key is that of the pass plus the number of the call."""
    place = torch.arange(shape.numel(), device=key.device).view(shape)
    return ((mix(mix(key) + place) >> 32) & 0xFFFFFFFF) >= int(p * 2**32)


def drop(current: _Pass, context: Context, x: Tensor, p: float, shape: torch.Size) -> Tensor:
    """x with entries set to zero, as the next call in this pass draws them."""
    current.drops += 1
    keep = kept_entries(context.key + current.drops, shape, p)
    return x * keep.to(x.dtype) * (1.0 / (1.0 - p) if p < 1.0 else 0.0)


class DropoutInFunctions(TorchFunctionMode):
    """Dropout that a model's own code calls as a function, inside attention too, from the pass's streams."""

    def __init__(self, current: _Pass, context: Context | None) -> None:
        super().__init__()
        self.current, self.context = current, context

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.dropout:
            return self.dropout(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return self.attention(*args, **kwargs)
        return func(*args, **kwargs)

    def dropout(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        context = self.drops(p if training else 0.0)
        return x if context is None else drop(self.current, context, x, p, x.shape)

    def drops(self, p: float) -> Context | None:
        """The pass from whose streams entries are dropped; None: none are."""
        if p and self.context is None:
            raise BadSetting(
                "the model calls dropout in evaluation too, so its scores cannot be repeated; use nn.Dropout, or give "
                "the function training=self.training (attention: dropout_p=p if self.training else 0.0)"
            )
        return self.context if p and self.context is not None and self.context.dropout else None

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        context = self.drops(dropout_p)
        if context is None:
            with_mask: Tensor = F.scaled_dot_product_attention(
                q, k, v, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
            )
            return with_mask
        if enable_gqa:
            k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v))
        share = attention_weights(q, k, attn_mask, is_causal, scale)
        return drop(self.current, context, share, dropout_p, share.shape) @ v


def attention_weights(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float | None = None) -> Tensor:
    """softmax(q k^T / sqrt(d) + mask) [..., L, S]; a mask of truth values says who may be seen."""
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~seen, -torch.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(-1)


class StreamAttention(nn.MultiheadAttention):
    """Multi-head attention whose dropout comes from the pass's streams."""

    current: _Pass
    frozen: bool
    p: float  # of dropout; `dropout` is zero

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        context = None if self.frozen else self.current.context
        if context is None or self.p == 0.0 or not context.dropout:
            out: tuple[Tensor, Tensor | None] = nn.MultiheadAttention.forward(
                self, query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
            return out
        if not self._qkv_same_embed_dim or self.bias_k is not None or self.add_zero_attn or query.dim() != 3:
            raise BadSetting(
                "nn.MultiheadAttention with dropout takes batches, and no kdim, vdim, bias_kv or zero_attn here"
            )
        given = query, key, value
        q, k, v = given if self.batch_first else (t.transpose(0, 1) for t in given)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        q, k, v = (
            F.linear(t, w, b).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for t, w, b in zip((q, k, v), self.in_proj_weight.chunk(3), biases, strict=True)
        )  # [B, heads, L, d]
        mask = added(attn_mask, q)
        if mask is not None and mask.dim() == 3:
            mask = mask.view(-1, self.num_heads, *mask.shape[1:])
        hidden = added(key_padding_mask, q)
        if hidden is not None:
            mask = hidden[:, None, None] if mask is None else mask + hidden[:, None, None]
        share = attention_weights(q, k, mask, False)
        share = drop(self.current, context, share, self.p, share.shape)
        mixed = self.out_proj((share @ v).transpose(1, 2).flatten(2))
        weights = (share.mean(1) if average_attn_weights else share) if need_weights else None
        return mixed if self.batch_first else mixed.transpose(0, 1), weights


def added(mask: Tensor | None, like: Tensor) -> Tensor | None:
    """A mask of nn.MultiheadAttention, where True hides, as numbers to add."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=like.dtype, device=like.device).masked_fill(mask, -torch.inf)


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


class WholeAverage(nn.AdaptiveAvgPool2d):
    """An average over all pixels as a mean, which vmap knows also where channels are last in memory."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((-1, -2), keepdim=True) if self.output_size in (1, (1, 1)) else super().forward(x)


STACKED: dict[type[nn.Module], type[nn.Module]] = {
    nn.AdaptiveAvgPool2d: WholeAverage,
    nn.GroupNorm: StackedGroupNorm,
    nn.Linear: StackedLinear,
    nn.Conv2d: StackedConv2d,
}


class Promotion(TorchFunctionMode):
    """Casts bfloat16 to float32 wherever both meet, as PyTorch does by itself in sums and products of single entries."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = args, kwargs or {}
        kinds = {t.dtype for t in tree_leaves(given) if isinstance(t, Tensor)}
        if {torch.bfloat16, torch.float32} <= kinds and not isinstance(func, OpOverload | OpOverloadPacket):
            given = tree_map_only(Tensor, lambda t: t.float() if t.dtype is torch.bfloat16 else t, given)
        return func(*given[0], **given[1])


@plain
def linear(layer: StackedLinear, x: Tensor) -> Tensor:
    """Apply a linear layer to x."""
    return nn.Linear.forward(layer, x)


@plain
def conv2d(layer: StackedConv2d, x: Tensor) -> Tensor:
    """Apply a convolution to x."""
    if not half_precision(x.device):
        return nn.Conv2d.forward(layer, x)
    bias = None if layer.bias is None else layer.bias.bfloat16()
    out: Tensor = layer._conv_forward(x.bfloat16(), layer.weight.bfloat16(), bias)
    return out


@plain
def group_norm(layer: StackedGroupNorm, x: Tensor) -> Tensor:
    """Apply a GroupNorm to x."""
    return nn.GroupNorm.forward(layer, x)


@plain
def batch_norm(layer: MaskedBatchNorm, x: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Normalise x [B', C, *] by its own statistics over the real samples [B]; also their mean, variance [C] and number []."""
    return normalise(x, real, layer.weight, layer.bias, layer.eps)


def normalise(
    x: Tensor, real: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`batch_norm` as a function of its tensors."""
    dtype, x = x.dtype, x.float() if x.dtype is torch.bfloat16 else x
    across = [0, *range(2, x.dim())]
    wide = (1, -1) + (1,) * (x.dim() - 2)
    if real is None:
        n = torch.full((), float(x.numel() // x.shape[1]), dtype=x.dtype, device=x.device)
        mean = x.mean(across)
        centred = x - mean.view(wide)
        var = centred.square().mean(across)
    else:
        real = real.to(x.dtype).repeat_interleave(len(x) // len(real)).view((-1,) + (1,) * (x.dim() - 1))
        n = real.sum() * (x.numel() // (x.shape[0] * x.shape[1]))
        mean = (x * real).sum(across) / n.clamp(min=1)
        centred = x - mean.view(wide)
        var = (centred.square() * real).sum(across) / n.clamp(min=1)
    out = centred * (var + eps).rsqrt().view(wide)
    if weight is not None and bias is not None:
        out = out * weight.view(wide) + bias.view(wide)
    return out.to(dtype), mean, var, n


class _Holder(nn.Module):
    """Passes its module to a function: `functional_call` swaps the tensors of a module only during a call."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, use: Callable[[nn.Module], Any]) -> Any:
        return use(self.module)


class Net:
    """A copy of a module with its loss and its layout."""

    def __init__(
        self,
        module: nn.Module,
        loss: Loss = F.cross_entropy,
        dtype: torch.dtype = torch.float32,
        pieces: tuple[Piece, ...] = (),
        trains: Callable[[tuple[str, ...]], Collection[str]] = tuple,
    ) -> None:
        """`trains` chooses among the names of trainable tensors; the others stay as they are, for all clients."""
        if getattr(loss, "weight", None) is not None and getattr(loss, "reduction", "none") == "mean":
            raise BadSetting("a loss with class weights must not average by itself here; give it reduction='none'")
        if any(is_lazy(p) for p in (*module.parameters(), *module.buffers())):
            raise BadSetting("the model has lazy layers without parameters yet; call it once on a sample before")
        if isinstance(loss, nn.Module) and any(p.requires_grad for p in loss.parameters()):
            raise BadSetting(
                "the loss has parameters, which would not be trained; put them into the model, or call requires_grad_(False)"
            )
        self.loss = F.cross_entropy if plain_cross_entropy(loss) else loss
        self.of_batch: bool = getattr(loss, "of_batch", False)
        self.ignored: int = getattr(loss, "ignore_index", IGNORED)  # only with cross-entropy
        self.dtype, self.pieces = dtype, pieces  # the parts of the inputs, () if they have only one
        self.current = _Pass()
        self.original = copy.deepcopy(module).to(dtype)
        trainable = {n: p for n, p in self.original.named_parameters() if p.requires_grad}
        for name in trainable.keys() - set(trains(tuple(trainable))):
            trainable[name].requires_grad_(False)
        frozen = {id(p): p for p in self.original.parameters() if not p.requires_grad}
        prepared = copy.deepcopy(self.original, frozen)  # which may be large, and stay as they are
        _prepare(prepared, "", self.current, module.training, set())
        if not module.training:
            prepared.train()
        trained = [(n, p) for n, p in prepared.named_parameters() if p.requires_grad]
        tables = {id(m.weight) for m in prepared.modules() if isinstance(m, nn.Embedding)}
        self.layout = Layout.of(trained, ALIGNED, frozenset(n for n, p in trained if id(p) in tables))
        if not self.layout.names:
            raise BadSetting("the model has no trainable parameter; set requires_grad on what should be trained")
        tracked = [f"{n}." if n else "" for n, m in prepared.named_modules() if isinstance(m, MaskedBatchNorm)]
        self.buffer_layout = Layout.of(
            (n, b) for n, b in prepared.named_buffers() if any(n == t + n.rpartition(".")[2] for t in tracked)
        )
        buffers = zip(self.buffer_layout.names, self.buffer_layout.sizes, strict=True)
        counters = [torch.full((s,), n.endswith("num_batches_tracked")) for n, s in buffers]
        # True for the buffer entries that are counters: they are aggregated by maximum.
        self.counters = torch.cat([torch.zeros(0, dtype=torch.bool), *counters])
        self.networks: dict[str, Net] = {}  # further networks that an algorithm trains on the same samples, by name
        self.cache: dict[str, Any] = {}  # results of faster forms' checks of this network
        self._local = threading.local()
        # Whether the model has code of its own, which may call dropout as a function.
        self.own_code = any(not type(m).__module__.startswith(("torch.nn.", "undrift.")) for m in prepared.modules())
        if self.own_code:
            checkpoints.install()
        self.checkpoints = False  # whether a pass has had gradient checkpoints in it
        self._training = prepared
        self._evaluation = _copy_sharing_tensors(prepared, self.current).eval()

    def add_network(self, name: str, other: Net) -> None:
        """Add a network to be trained on the same samples; fields that hold its vectors are annotated with its name."""
        self.networks[name] = other

    def start(self) -> tuple[Tensor, Tensor]:
        """The initial x0 [P] and buffers [Q]; without memory where the module has none."""
        named = dict(self.original.named_parameters()) | dict(self.original.named_buffers())
        hollow = any(t.is_meta for t in named.values())
        like = torch.zeros((), dtype=self.dtype, device="meta" if hollow else "cpu")
        return self.layout.join(named, like), self.buffer_layout.join(named, like)

    def to(self, device: torch.device) -> Net:
        """Move the tensors that clients share (frozen parameters, constant buffers) to a device."""
        for other in self.networks.values():
            other.to(device)
        if isinstance(self.loss, nn.Module):
            self.loss = copy.deepcopy(self.loss).to(device)
        self.original.to(device)
        self._training.to(device)
        self._evaluation = _copy_sharing_tensors(self._training, self.current).eval()
        self.counters = self.counters.to(device)
        return self

    def untouched(self, x: Tensor, buffers: Tensor, inputs: Tensor, context: Context) -> list[str]:
        """The parameters on which the outputs do not depend, as far as autograd knows."""
        alone = {name: tensor.detach().clone().requires_grad_() for name, tensor in self.layout.split(x).items()}
        outputs, _ = self._run(x, buffers, context, False, lambda m: call(m, self.pieces, inputs), alone)
        total = logits_of(outputs).sum()
        if not total.requires_grad:
            return list(alone)
        found = torch.autograd.grad(total, list(alone.values()), allow_unused=True)
        return [name for name, gradient in zip(alone, found, strict=True) if gradient is None]

    def shared_buffers(self) -> dict[str, Tensor]:
        """The buffers that no client has for itself."""
        return {n: b for n, b in self._training.named_buffers() if n not in self.buffer_layout.names}

    def module(self, training: bool) -> nn.Module:
        """This thread's copy: `functional_call` swaps tensors inside the module, so threads must not share one."""
        shared = self._training if training else self._evaluation
        if threading.current_thread() is threading.main_thread():
            return shared
        copies: dict[bool, nn.Module] = vars(self._local).setdefault("copies", {})
        if training not in copies:
            copies[training] = _copy_sharing_tensors(shared, self.current)
        return copies[training]

    def trace(
        self, x: Tensor, buffers: Tensor, inputs: Tensor, context: Context | None, stacked: bool = False
    ) -> tuple[list[Tensor], Tensor]:
        """Like a call, but with the outputs of all blocks: the last one is the model's."""
        return self._run(x, buffers, context, stacked, lambda module: _run_blocks(blocks(module), inputs))

    def onward(
        self, block: int, x: Tensor, buffers: Tensor, h: Tensor, context: Context | None, stacked: bool = False
    ) -> Tensor:
        """Apply the blocks from number `block` on to h, without tracking statistics. Dropout masks are those of a whole pass."""

        def use(module: nn.Module) -> list[Tensor]:
            before = nn.ModuleList(blocks(module)[:block]).modules()
            self.current.drops = sum(isinstance(m, StreamDropout) and m.p > 0 for m in before)
            return _run_blocks(blocks(module)[block:], h)

        outputs: list[Tensor] = self._run(x, buffers, context, stacked, use)[0]
        return outputs[-1]

    def _run(
        self,
        x: Tensor,
        buffers: Tensor,
        context: Context | None,
        stacked: bool,
        use: Callable[[nn.Module], Any],
        parameters: Mapping[str, Tensor] | None = None,
    ) -> tuple[Any, Tensor]:
        """The result of `use` on the module with the tensors of x, or those given, and the buffers; and the buffers after it."""
        self.current.drops = 0
        tensors = dict(parameters or self.layout.split(x)) | self.buffer_layout.split(buffers)
        holder, half = _Holder(self.module(context is not None)), half_precision(x.device)
        outputs, statistics = self._pass(holder, tensors, context, stacked, half, use)
        if half:
            outputs = tree_map_only(Tensor, lambda t: t.to(self.dtype), outputs)
        if context is None or not self.buffer_layout.names:
            return outputs, buffers
        new = tensors | statistics  # unused and frozen layers keep their old ones
        return outputs, torch.cat([new[n].reshape(-1) for n in self.buffer_layout.names])

    def _pass(
        self,
        holder: _Holder,
        tensors: dict[str, Tensor],
        context: Context | None,
        stacked: bool,
        half: bool,
        use: Callable[[nn.Module], Any],
    ) -> tuple[Any, dict[str, Tensor]]:
        """The result of `use` on the module with these tensors, and BatchNorm's new statistics."""
        current, named = self.current, {f"module.{name}": tensor for name, tensor in tensors.items()}
        before = inside.again
        current.context, current.stacked, current.statistics = context, stacked, {}

        def again(part: Callable[..., Any]) -> Callable[..., Any]:
            """A part of the model that runs in this pass as it is now, also after its end: for checkpoints."""
            if stacked:
                raise BadSetting(
                    "stacked clients cannot compute activations again; turn the model's gradient checkpointing off, or let "
                    "clients take turns (--execution pool), which needs less memory too"
                )
            self.checkpoints, drops = True, current.drops

            def run(*inputs: Any, **others: Any) -> Any:
                current.drops = drops
                return self._pass(holder, tensors, context, stacked, half, lambda module: part(*inputs, **others))[0]

            return run

        inside.again = again
        try:
            with contextlib.ExitStack() as modes:
                if half:
                    modes.enter_context(Promotion())
                if self.own_code:
                    modes.enter_context(DropoutInFunctions(current, context))
                return functional_call(holder, named, (use,)), current.statistics
        finally:
            inside.again = before
            current.context, current.stacked = None, False

    def __call__(
        self, x: Tensor, buffers: Tensor, inputs: Tensor, context: Context | None, stacked: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Outputs for x [P], and the buffers after this pass; context None means evaluation mode."""
        outputs, after = self._run(x, buffers, context, stacked, lambda module: call(module, self.pieces, inputs))
        return logits_of(outputs), after

    def sample_losses(self, outputs: Tensor, targets: Tensor, real: Tensor | None = None) -> Tensor:
        """The loss of each sample [B]. A loss that returns one number is called for one sample at a time."""
        outputs = classes_first(outputs, targets)
        if self.of_batch:
            whole = self.loss(outputs, targets, real)
            if whole.numel() not in (1, len(outputs)):
                raise BadSetting(
                    f"a batch_loss gives one number, or one for each of {len(outputs)} samples, not {[*whole.shape]}"
                )
            return whole.flatten().expand(len(outputs))
        if self.loss is F.cross_entropy:
            each = F.cross_entropy(outputs, targets, reduction="none", ignore_index=self.ignored)
            return self.mean_over_labels(each, targets)
        if self.loss is dice_loss:
            return dice_loss(outputs, targets)
        counts = self.label_shares(targets) > 0
        if self.ignores:  # a sample without any label would be 0 / 0
            targets = torch.where(counts.view(-1, *[1] * (targets.dim() - 1)), targets, 1 if self.ignored == 0 else 0)
        losses: Tensor = torch.vmap(self._loss_of_one)(outputs, targets)
        return torch.where(counts, losses, 0.0) if self.ignores else losses

    def _loss_of_one(self, output: Tensor, target: Tensor) -> Tensor:
        loss: Any = self.loss(output.unsqueeze(0), target.unsqueeze(0))
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = f"a tensor {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise BadSetting(
                f"the loss must give one number for outputs {[1, *output.shape]} and targets {[1, *target.shape]}, not {what}"
            )
        return loss.reshape(())

    @property
    def ignores(self) -> bool:
        """Whether a loss other than plain cross-entropy has labels that it leaves out."""
        return self.loss is not F.cross_entropy and hasattr(self.loss, "ignore_index")

    def mean_over_labels(self, values: Tensor, targets: Tensor) -> Tensor:
        """[B] the mean of a sample's values [B, *], zero for those ignored, over its labels; a sample without any has 0."""
        if values.dim() == 1:
            return values
        if targets.shape != values.shape:  # probabilities of classes, all of which count
            return values.flatten(1).mean(1)
        return values.flatten(1).sum(1) / (targets != self.ignored).flatten(1).sum(1).clamp(min=1)

    def label_shares(self, targets: Tensor) -> Tensor:
        """[B] the share of each sample's labels that count: below 1 only where the loss ignores some."""
        if not (self.loss is F.cross_entropy or self.ignores) or targets.is_floating_point():
            return torch.ones(len(targets), dtype=self.dtype, device=targets.device)
        labelled = (targets != self.ignored).to(self.dtype)
        return labelled.flatten(1).mean(1) if labelled.dim() > 1 else labelled

    def probabilities(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The probability of each class [B, C, *], or of each structure at each pixel."""
        return classes_first(outputs, targets).softmax(1) if self.loss is F.cross_entropy else outputs.sigmoid()

    def mixed_losses(self, probabilities: Tensor, targets: Tensor) -> Tensor:
        """The loss of each sample [B] for given probabilities, such as a mixture of several models."""
        if self.loss is F.cross_entropy:
            scores = probabilities.clamp(min=1e-12).log()
            return self.mean_over_labels(
                F.nll_loss(scores, targets, reduction="none", ignore_index=self.ignored), targets
            )
        if self.loss is dice_loss:
            return soft_dice_loss(probabilities, targets)
        raise BadSetting("only cross-entropy and the Dice loss can mix models; use fedsm-extra, which chooses one")

    def sent(self, state: T, tag: str = "") -> T:
        """A message as it is sent: vectors without their padding. `tag` applies to a state that is one tensor."""
        networks = {**self.networks, MODEL: self}
        return map_tagged(lambda t, tag: t[..., : networks[tag].layout.entries] if tag else t, state, tag=tag)

    def state_dict(self, x: Tensor, buffers: Tensor) -> dict[str, Tensor]:
        """A PyTorch state dict with the names and dtypes of the module."""
        trained = self.layout.split(x) | self.buffer_layout.split(buffers)
        tensors = dict(self.original.named_parameters()) | dict(self.original.named_buffers())
        first = {id(tensor): name for name, tensor in tensors.items()}  # tied weights have several names, one entry
        state = {}
        for name, tensor in self.original.state_dict(keep_vars=True).items():
            value = trained.get(first.get(id(tensor), name), tensor)
            state[name] = value.detach().to(tensor.dtype).clone()
        return state


def call(module: nn.Module, pieces: tuple[Piece, ...], inputs: Tensor) -> Any:
    """What a module returns for inputs, which are parted if they have several parts."""
    if not pieces:
        return module(inputs)
    by_place, named = part(pieces, inputs)
    return module(*by_place, **named)


def logits_of(outputs: Any) -> Tensor:
    """What a model returns: a tensor, or the `logits` of a dict or of an output object."""
    if isinstance(outputs, Mapping):
        outputs = outputs.get("logits", outputs)
    outputs = outputs if isinstance(outputs, Tensor) else getattr(outputs, "logits", outputs)
    if not isinstance(outputs, Tensor):
        names = f" of {', '.join(map(str, outputs))}" if isinstance(outputs, Mapping) else ""
        raise BadSetting(
            f"the model must return one tensor, or a dict or an object with `logits`, not a {type(outputs).__name__}{names}"
        )
    return outputs


def classes_first(outputs: Tensor, targets: Tensor) -> Tensor:
    """Outputs [B, T, V] for labels [B, T] as [B, V, T], as PyTorch's cross-entropy has them; all others unchanged.

    >>> classes_first(torch.zeros(2, 5, 7), torch.zeros(2, 5).long()).shape
    torch.Size([2, 7, 5])
    """
    if outputs.dim() != 3 or targets.dim() != 2 or targets.is_floating_point() or outputs.shape[:2] != targets.shape:
        return outputs
    if outputs.shape[1] == outputs.shape[2]:
        raise BadSetting(
            f"outputs {list(outputs.shape)} for labels {list(targets.shape)} may be [B, T, V] or [B, V, T]; "
            "let the number of classes differ from the length, by one more class or one position less"
        )
    return outputs.mT


def blocks(module: nn.Module) -> list[nn.Module]:
    """The consecutive parts of a model, a Sequential's or those that it names in `blocks`; the last one is the classifier."""
    named = getattr(module, "blocks", None)
    if isinstance(named, tuple) and len(named) > 1 and all(isinstance(name, str) for name in named):
        return [module.get_submodule(name) for name in named]
    if not only_runs_its_parts(module) or len(module) < 2:
        raise BadSetting(
            "this method needs a model made of blocks: an nn.Sequential of at least two parts whose last one is the "
            "classifier and that does nothing else, or a module whose attribute `blocks` names such parts, not "
            f"{type(module).__name__}"
        )
    return list(module)


def only_runs_its_parts(module: nn.Module) -> TypeGuard[nn.Sequential]:
    """Whether this is an nn.Sequential that does nothing but call its parts, one after another, and has no tensors of its own."""
    usual = isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward
    return usual and not (is_altered(module) or module._parameters or module._buffers)


def is_altered(module: nn.Module) -> bool:
    """Whether calling the module does something else than its class says: hooks, or a `forward` of its own."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "forward")
    return any(vars(module).get(kind) for kind in kinds)


def _run_blocks(parts: list[nn.Module], h: Tensor) -> list[Tensor]:
    return [h := block(h) for block in parts]


def plain_cross_entropy(loss: Loss) -> bool:
    """Whether a loss is cross-entropy, as a function or a module, with default options except for `ignore_index`."""
    if not isinstance(loss, nn.CrossEntropyLoss):
        return loss is F.cross_entropy
    return loss.weight is None and (loss.label_smoothing, loss.reduction) == (0.0, "mean")


def _prepare(module: nn.Module, name: str, current: _Pass, training: bool, done: set[int]) -> None:
    """Replace the forward of BatchNorm, Dropout and the layers in STACKED; hooks and tensors stay the same objects."""
    if id(module) in done:  # a part that is used in several places
        return
    done.add(id(module))
    frozen = training and not module.training  # a part in evaluation mode within a model in training mode
    if isinstance(module, _BatchNorm):
        module.__class__ = MaskedBatchNorm
        vars(module).update(name=name, current=current, frozen=frozen)
    elif type(module) in STACKED:
        module.__class__ = STACKED[type(module)]
        vars(module).update(current=current)
    elif isinstance(module, nn.AlphaDropout | nn.FeatureAlphaDropout):
        raise BadSetting(f"{type(module).__name__} cannot be drawn from seeded streams; use nn.Dropout or remove it")
    elif type(module) is nn.MultiheadAttention:
        module.__class__ = StreamAttention
        vars(module).update(current=current, frozen=frozen, p=module.dropout, dropout=0.0)
    elif isinstance(module, _DropoutNd):
        whole = not isinstance(module, nn.Dropout)
        module.__class__ = StreamDropout
        vars(module).update(current=current, frozen=frozen, whole_channels=whole)
    elif isinstance(module, _InstanceNorm) and module.track_running_stats:
        raise BadSetting("InstanceNorm with running statistics is not supported; use track_running_stats=False")
    for child, inner in module._modules.items():
        if inner is not None:
            _prepare(inner, f"{name}{child}.", current, training, done)


def _copy_sharing_tensors(module: nn.Module, current: _Pass) -> nn.Module:
    """A copy of the module with the same tensors and the same (thread-local) pass."""
    shared = (current, *module.parameters(), *module.buffers())
    return copy.deepcopy(module, {id(each): each for each in shared})
