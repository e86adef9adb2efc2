"""Cut a model into blocks: by hand, or so that the slowest block is as fast as possible."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from undrift.core import ranks
from undrift.core.errors import BadSetting
from undrift.core.pieces import Piece
from undrift.oracle.losses import logits_of
from undrift.oracle.net import call, only_runs_its_parts
from undrift.pipeline.block import Loss

Model = nn.Module | Sequence[nn.Module]
Cuts = Sequence[int | str] | None


class Stretch(nn.Sequential):
    """Layers of a block. The first block's may take inputs of several parts, the last one's return `logits`."""

    pieces: tuple[Piece, ...] = ()  # the parts of the inputs, joined in one tensor
    last = False

    def forward(self, h: Tensor) -> Tensor:
        out: Any = h
        for number, layer in enumerate(self):
            out = call(layer, self.pieces if number == 0 else (), out)
        if self.last:
            return logits_of(out)
        if not isinstance(out, Tensor):
            raise BadSetting(
                f"a block hands a {type(out).__name__} on to the next one, and it must be one tensor; cut elsewhere, or let "
                "the layer before the cut return a tensor"
            )
        return out


@dataclass(frozen=True)
class ModelPart:
    """A stretch of a model's layers as a module of its own."""

    module: Stretch
    layers: tuple[str, ...]  # each layer's name in the whole model

    def whole_name(self, name: str) -> str:
        """The name of one of the part's tensors in the whole model."""
        layer, _, rest = name.partition(".")
        return f"{self.layers[int(layer)]}.{rest}"


def join_parts(parts: Sequence[ModelPart], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The whole model's state dict from an engine's `model()`, which on ranks above 0 holds only their own block."""
    whole = {}
    for k, part in enumerate(parts):
        for name in part.module.state_dict():
            if (key := f"block{k}.module.{name}") in tensors:
                whole[part.whole_name(name)] = tensors[key]
    return whole


def layers_of(model: nn.Module, name: str = "") -> list[tuple[str, nn.Module]]:
    """The layers that a model runs one after another: nested nn.Sequentials are opened, other modules are one layer."""
    if only_runs_its_parts(model):
        children = zip(model._modules, model, strict=True)  # named_children leaves out repeated layers
        return [layer for child, part in children for layer in layers_of(part, f"{name}{child}.")]
    if not name:
        raise BadSetting(
            f"the model to cut must be an nn.Sequential, not {type(model).__name__}, and do nothing but run its parts; "
            "wrap its stages in an nn.Sequential, or give a list of modules"
        )
    return [(name.removesuffix("."), model)]


def cut_model(model: Model, cuts: Cuts = None) -> list[ModelPart]:
    """Cut a model where a layer begins a block, by its name or its number in `layers_of`; a list holds blocks already.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> [part.layers for part in cut_model(model, cuts=[2])], [part.layers for part in cut_model(model, cuts=["1"])]
    ([('0', '1'), ('2',)], [('0',), ('1', '2')])
    """
    if not isinstance(model, nn.Module):
        if cuts is not None:
            raise BadSetting("a list of modules is cut already; give it without cuts, or one model with cuts")
        return as_blocks([[(str(k), module)] for k, module in enumerate(model)])
    if isinstance(cuts, str | int):
        raise BadSetting(f"cuts is a list of layers, such as [{cuts!r}], not {cuts!r}")
    layers = layers_of(model)
    names = [name for name, _ in layers]
    places = []
    for cut in cuts or ():
        if isinstance(cut, str) and not cut.isdecimal():
            begins = [i for i, name in enumerate(names) if name == cut or name.startswith(f"{cut}.")]
            if not begins:
                raise BadSetting(f"there is no layer {cut!r} to cut at; the layers are {', '.join(names)}")
            places.append(begins[0])
        else:
            places.append(int(cut))
    if places != sorted(set(places)) or (places and not (places[0] > 0 and places[-1] < len(layers))):
        raise BadSetting(f"cuts must rise and lie between 1 and {len(layers) - 1}, not {places}")
    pairs = itertools.pairwise([0, *places, len(layers)])
    return as_blocks([layers[a:b] for a, b in pairs])


def as_blocks(blocks: Sequence[Sequence[tuple[str, nn.Module]]]) -> list[ModelPart]:
    """Named layers by block as the parts of a model; only the first and the last block may share parameters."""
    owner: dict[int, int] = {}
    ends = {0, len(blocks) - 1}
    for k, layers in enumerate(blocks):
        for name, layer in layers:
            for tensor in (*layer.parameters(), *layer.buffers()):
                other = owner.setdefault(id(tensor), k)
                if other != k and ({other, k} != ends or not isinstance(tensor, nn.Parameter)):
                    raise BadSetting(
                        f"layer {name} shares a tensor with an earlier block; keep both in one block (the first and the last "
                        "block may share parameters)"
                    )
    parts = [ModelPart(Stretch(*(layer for _, layer in b)), tuple(name for name, _ in b)) for b in blocks]
    parts[-1].module.last = True
    return parts


def shared_parameters(parts: Sequence[ModelPart]) -> list[nn.Parameter]:
    """The trained parameters that the first and the last block share."""
    if len(parts) < 2:
        return []
    first, last = ({id(p): p for p in part.module.parameters() if p.requires_grad} for part in (parts[0], parts[-1]))
    return [p for name, p in first.items() if name in last]


@dataclass(frozen=True)
class Balance:
    """The cuts of a model, and the cost of each block per batch."""

    cuts: tuple[int, ...]
    seconds: tuple[float, ...]  # forward, replay, backward and update; the last block does not replay
    names: tuple[str, ...]  # the layer that begins each block

    @property
    def share(self) -> float:
        """The mean block's cost over the slowest one's: 1 is a perfect balance."""
        return statistics.fmean(self.seconds) / max(self.seconds)

    def __str__(self) -> str:
        costs = enumerate(zip(self.names, self.seconds, strict=True))
        rows = [f"block {k}: from {name}, {1000 * seconds:.1f} ms a batch" for k, (name, seconds) in costs]
        return "\n".join([*rows, f"balance {100 * self.share:.0f} % (the mean block over the slowest)"])


def balance_model(
    model: nn.Module, blocks: int, inputs: Tensor, target: Tensor, loss: Loss, replays: bool = True, times: int = 5
) -> Balance:
    """Time the layers on one batch and cut so that the slowest block is as fast as possible.

    `replays`: every block but the last runs its forward twice (FR, DSP). All ranks measure at once, as their blocks
    will run at once, and use rank 0's times.
    """
    layers = layers_of(model)
    if not 1 <= blocks <= len(layers):
        raise BadSetting(f"a model of {len(layers)} layers cannot be cut into {blocks} blocks")
    measured = layer_times([layer for _, layer in layers], inputs, target, loss, times)
    forward, backward, update = ranks.first_rank_says(measured)
    last = [sum(each) for each in zip(forward, backward, update, strict=True)]
    lower = [f + cost for f, cost in zip(forward, last, strict=True)] if replays else last
    cuts = min_max_cuts(lower, last, blocks)
    borders = [0, *cuts, len(layers)]
    costs = [sum((last if b == len(layers) else lower)[a:b]) for a, b in itertools.pairwise(borders)]
    return Balance(tuple(cuts), tuple(costs), tuple(layers[a][0] for a in borders[:-1]))


def min_max_cuts(lower: Sequence[float], last: Sequence[float], blocks: int) -> list[int]:
    """Cut costs into contiguous blocks so that the largest sum is smallest; the last block costs `last`.

    >>> min_max_cuts([3.0, 1.0, 1.0, 1.0], [2.0, 1.0, 1.0, 1.0], 2)
    [1]
    """
    size, sums = len(lower), [*itertools.accumulate(lower, initial=0.0)]
    best: list[tuple[float, list[int]]] = [(sums[i], []) for i in range(size + 1)]  # the first i layers in one block
    for _ in range(2, blocks):
        best = [
            min(
                ((max(best[j][0], sums[i] - sums[j]), [*best[j][1], j]) for j in range(1, i)),
                default=(float("inf"), []),
            )
            for i in range(size + 1)
        ]
    if blocks == 1:
        return []
    return min((max(best[j][0], sum(last[j:])), [*best[j][1], j]) for j in range(blocks - 1, size))[1]


def layer_times(
    layers: Sequence[nn.Module], inputs: Tensor, target: Tensor, loss: Loss, times: int
) -> tuple[list[float], list[float], list[float]]:
    """Median seconds of each layer's forward, backward and update (momentum SGD) on one batch.

    The loss counts for the last layer. The model's state is restored.
    """
    before = [{name: tensor.clone() for name, tensor in layer.state_dict().items()} for layer in layers]
    forward, backward, update = ([list[float]() for _ in layers] for _ in range(3))
    trained = [[p for p in layer.parameters() if p.requires_grad] for layer in layers]
    optimizers = [torch.optim.SGD(weights, lr=0.0, momentum=0.9) if weights else None for weights in trained]
    devices = [inputs.device] if inputs.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        for _ in range(times):
            kept, h = [], inputs
            for i, layer in enumerate(layers):
                h = h.detach().requires_grad_(h.is_floating_point())
                began = _now(h)
                out = layer(h)
                if i == len(layers) - 1:
                    out = loss(logits_of(out), target)
                forward[i].append(_now(out) - began)
                kept.append((h, out))
                h = out
            error: Tensor | None = None
            for i, (h, out) in reversed(list(enumerate(kept))):
                began = _now(out)
                if out.requires_grad:
                    torch.autograd.backward(out, error)
                backward[i].append(_now(out) - began)
                error, began, optimizer = h.grad, _now(out), optimizers[i]
                if optimizer is not None:
                    optimizer.step()
                    optimizer.zero_grad()
                update[i].append(_now(out) - began)
    for layer, state in zip(layers, before, strict=True):
        layer.load_state_dict(state)
        layer.zero_grad(set_to_none=True)
    forwards, backwards, updates = (
        [statistics.median(seconds) for seconds in kind] for kind in (forward, backward, update)
    )
    return forwards, backwards, updates


def _now(tensor: Tensor) -> float:
    if tensor.device.type == "cuda":
        torch.cuda.synchronize(tensor.device)
    return time.perf_counter()
