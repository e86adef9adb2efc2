"""Layers for cohorts: BatchNorm over real samples, dropout from seeded streams, and layers that know of stacked clients.

`prepare` puts them into a module in place of PyTorch's; tensors and hooks stay the same objects.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._ops import OpOverload, OpOverloadPacket
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from undrift.core.device import half_precision
from undrift.core.errors import BadSetting
from undrift.core.forms import plain
from undrift.core.streams import mix


class Context(NamedTuple):
    """The arguments of a forward pass in training besides the inputs."""

    real: Tensor | None  # [B], 1 for a real sample and 0 for padding; None: all are real
    key: Tensor  # [] dropout stream of the pass
    dropout: bool = True


class Pass(threading.local):
    """The current forward pass of this thread: its context and the new BatchNorm statistics."""

    context: Context | None = None  # None: evaluation mode
    stacked: bool = False  # the pass runs under vmap
    statistics: dict[str, Tensor]
    drops: int = 0


class MaskedBatchNorm(_BatchNorm):
    """BatchNorm whose batch statistics cover only the real samples."""

    name: str  # prefix of its tensors' names, with the dot
    current: Pass
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

    current: Pass
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

    current: Pass

    def forward(self, x: Tensor) -> Tensor:
        return group_norm(self, x)


def kept_entries(key: Tensor, shape: torch.Size, p: float) -> Tensor:
    """Which entries of a shape dropout keeps; the key is that of the pass plus the number of the call."""
    place = torch.arange(shape.numel(), device=key.device).view(shape)
    return ((mix(mix(key) + place) >> 32) & 0xFFFFFFFF) >= int(p * 2**32)


def drop(current: Pass, context: Context, x: Tensor, p: float, shape: torch.Size) -> Tensor:
    """x with entries set to zero, as the next call in this pass draws them."""
    current.drops += 1
    keep = kept_entries(context.key + current.drops, shape, p)
    return x * keep.to(x.dtype) * (1.0 / (1.0 - p) if p < 1.0 else 0.0)


class DropoutInFunctions(TorchFunctionMode):
    """Dropout that a model's own code calls as a function, inside attention too, from the pass's streams."""

    def __init__(self, current: Pass, context: Context | None) -> None:
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

    current: Pass
    frozen: bool
    p: float  # the rate of dropout; `dropout` is zero

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
        mask = additive_mask(attn_mask, q)
        if mask is not None and mask.dim() == 3:
            mask = mask.view(-1, self.num_heads, *mask.shape[1:])
        hidden = additive_mask(key_padding_mask, q)
        if hidden is not None:
            mask = hidden[:, None, None] if mask is None else mask + hidden[:, None, None]
        share = attention_weights(q, k, mask, False)
        share = drop(self.current, context, share, self.p, share.shape)
        mixed = self.out_proj((share @ v).transpose(1, 2).flatten(2))
        weights = (share.mean(1) if average_attn_weights else share) if need_weights else None
        return mixed if self.batch_first else mixed.transpose(0, 1), weights


def additive_mask(mask: Tensor | None, like: Tensor) -> Tensor | None:
    """A mask of nn.MultiheadAttention, where True hides, as numbers to add."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=like.dtype, device=like.device).masked_fill(mask, -torch.inf)


class StackedLinear(nn.Linear):
    """A linear layer that knows whether its clients are stacked."""

    current: Pass

    def forward(self, x: Tensor) -> Tensor:
        return linear(self, x)


class StackedConv2d(nn.Conv2d):
    """A convolution that knows whether its clients are stacked."""

    current: Pass

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


def prepare(module: nn.Module, name: str, current: Pass, training: bool, done: set[int]) -> None:
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
            prepare(inner, f"{name}{child}.", current, training, done)
