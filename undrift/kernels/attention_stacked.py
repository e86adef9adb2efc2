"""Attention over stacked clients on a CPU: the rule for vmap that PyTorch lacks, without which it computes one client after
another and warns.

The clients' batches [S, B, ...] become one batch [S B, ...]. It is a rule of PyTorch's operator, so that it serves every model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._functorch.autograd_function import custom_function_call_vmap_helper
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

from undrift.kernels.launch import clients_first

NAME = "_scaled_dot_product_flash_attention_for_cpu"
LIBRARY = torch.library.Library("aten", "IMPL")  # its rules last as long as it does


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *settings: Any) -> tuple[Tensor, Tensor]:
    """PyTorch's operator for q, k, v [B, heads, L, d] and a mask [B or 1, heads or 1, L, S] or [L, S]."""
    p, causal, scale = settings
    out: tuple[Tensor, Tensor] = getattr(torch.ops.aten, NAME)(q, k, v, p, causal, attn_mask=mask, scale=scale)
    return out


def attention_stacked(
    info: Any, dims: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *settings: Any
) -> Any:
    """The same for stacked clients."""
    q, k, v = clients_first(info, dims, q, k, v)
    batch = q.shape[1]
    if mask is not None and (dims[3] is not None or (mask.dim() == 4 and mask.shape[0] > 1)):
        (mask,) = clients_first(info, dims[3:], mask)
        assert mask is not None
        own = mask if mask.dim() == 5 else mask[:, None, None]  # each client's is one for all its samples
        mask = own.expand(-1, batch, *own.shape[2:]).flatten(0, 1)
    out = attention(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), mask, *settings)
    return tuple(t.unflatten(0, (info.batch_size, batch)) for t in out), (0, 0)


def under_vmap(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: float = 0.0,
    causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Any:
    """The operator as PyTorch calls it under vmap."""
    vmap: Any = retrieve_current_functorch_interpreter()
    return custom_function_call_vmap_helper(vmap, attention_stacked, attention, q, k, v, attn_mask, p, causal, scale)


LIBRARY.impl(NAME, under_vmap, "FuncTorchBatched")
