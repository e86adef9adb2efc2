"""The gradient of a chain of layers by explicit backpropagation, without autograd.

A chain is a sequence of Linear, ReLU, Flatten, Conv2d, MaxPool2d, BatchNorm and Dropout with cross-entropy at its end. For small
models autograd, `functional_call` and copying the layers' gradients into one vector take half of a step on a CPU, and a quarter
of an uncompiled round on a GPU. Here every layer is called directly and writes its gradient into the vector. The plain form is
`oracle.task_gradient`. For clients stacked on a CPU dense chains run in C (dense_cpu.py); on a GPU they have `Chain.step`.
Images are in channels-last order: on a CPU that makes convolutions of few channels, BatchNorm and pooling several times as fast.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from undrift.core.forms import faster, plain
from undrift.kernels import devices
from undrift.kernels.dense_cpu import Block, Dense, Norm
from undrift.oracle.layers import kept_entries
from undrift.oracle.losses import IGNORED
from undrift.oracle.net import Net, is_altered, only_runs_its_parts
from undrift.oracle.oracle import Oracle, stacks_in_a_thread, task_gradient, task_step

aten: Any = torch.ops.aten
NARROW = 32  # channels: oneDNN is faster for more
NONE = 0  # no reduction


@dataclass
class Pass:
    """What a pass needs besides a vector and samples; for layers that keep statistics or draw masks."""

    key: Tensor  # [...] dropout stream
    dropout: bool
    buffers: Tensor  # [..., Q] BatchNorm's statistics, written in place
    drops: int = 0  # masks drawn so far
    norms: int = 0  # entries of the buffers used so far


# `forward` returns a layer's output and what its `backward` needs. `backward` takes the gradient d of the output, writes the
# gradients of the layer's tensors to `into` and returns the gradient of the input if it is `needed`. h is [B, ...], or
# [S, B, n] for stacked clients of dense chains.


class Linear(NamedTuple):
    biased: bool

    def forward(self, h: Tensor, own: list[Tensor], now: Pass) -> tuple[Tensor, Any]:
        if h.dim() == 2:
            return F.linear(h, *own), h
        w = own[0].mT
        return torch.baddbmm(own[1].unsqueeze(1), h, w) if self.biased else h @ w, h

    def backward(self, d: Tensor, h: Tensor, own: list[Tensor], into: list[Tensor], needed: bool) -> Any:
        if h.dim() == 2:
            torch.mm(d.mT, h, out=into[0])
        elif d.device.type == "cuda":
            torch.bmm(d.mT, h, out=into[0])
        else:
            into[0].copy_(torch.bmm(d.mT, h))  # out=into[0] would go client by client, because into[0] has gaps
        if self.biased:
            torch.sum(d, -2, out=into[1])
        return d @ own[0] if needed else None


class ReLU(NamedTuple):
    def forward(self, h: Tensor, own: list[Tensor], now: Pass) -> tuple[Tensor, Any]:
        out = torch.relu(h)
        return out, out

    def backward(self, d: Tensor, out: Tensor, own: list[Tensor], into: list[Tensor], needed: bool) -> Any:
        return aten.threshold_backward.default(d, out, 0)


class Flatten(NamedTuple):
    def forward(self, h: Tensor, own: list[Tensor], now: Pass) -> tuple[Tensor, Any]:
        return h.flatten(1), h.shape

    def backward(self, d: Tensor, shape: torch.Size, own: list[Tensor], into: list[Tensor], needed: bool) -> Any:
        return d.view(shape)


class Conv2d(NamedTuple):
    biased: bool
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def forward(self, h: Tensor, own: list[Tensor], now: Pass) -> tuple[Tensor, Any]:
        h, w = channels_last(h), channels_last(own[0])
        b = own[1] if self.biased else None
        return torch.conv2d(h, w, b, self.stride, self.padding, self.dilation, self.groups), (h, w)

    def backward(self, d: Tensor, saved: Any, own: list[Tensor], into: list[Tensor], needed: bool) -> Any:
        sizes = [len(own[0])] if self.biased else None
        how = (self.stride, self.padding, self.dilation, False, (0, 0), self.groups, (needed, True, self.biased))
        before, *gradients = aten.convolution_backward.default(channels_last(d), *saved, sizes, *how)
        for place, g in zip(into, gradients, strict=False):
            place.copy_(g)
        return before


HALVES = ((2, 2), (2, 2), (0, 0), (1, 1), False)


def channels_last(t: Tensor) -> Tensor:
    return t.contiguous(memory_format=torch.channels_last)


class MaxPool2d(NamedTuple):
    how: tuple[Any, ...]  # kernel, stride, padding, dilation, ceil mode

    def forward(self, h: Tensor, own: list[Tensor], now: Pass) -> tuple[Tensor, Any]:
        h = channels_last(h)
        out, places = aten.max_pool2d_with_indices.default(h, *self.how)
        return out, (h, places)

    def backward(self, d: Tensor, saved: Any, own: list[Tensor], into: list[Tensor], needed: bool) -> Any:
        return aten.max_pool2d_with_indices_backward.default(channels_last(d), saved[0], *self.how, saved[1])


class BatchNorm(NamedTuple):
    """For a client alone, without padding."""

    images: bool
    how: Norm

    def forward(self, h: Tensor, own: list[Tensor], now: Pass) -> tuple[Tensor, Any]:
        n = len(own[0])
        mean, var, seen = now.buffers[now.norms : now.norms + 2 * n + 1].split_with_sizes((n, n, 1))
        now.norms += 2 * n + 1
        seen += 1
        out, *scale = aten.native_batch_norm.default(h, *own, mean, var, True, self.how.momentum, self.how.eps)
        return out, (h, scale)

    def backward(self, d: Tensor, saved: Any, own: list[Tensor], into: list[Tensor], needed: bool) -> Any:
        h, scale = saved
        how = (True, self.how.eps, (needed, True, True))
        before, *gradients = aten.native_batch_norm_backward.default(d, h, own[0], None, None, *scale, *how)
        for place, g in zip(into, gradients, strict=True):
            place.copy_(g)
        return before


class Dropout(NamedTuple):
    """The masks of `oracle.net.StreamDropout`, for a client alone."""

    p: float

    def forward(self, h: Tensor, own: list[Tensor], now: Pass) -> tuple[Tensor, Any]:
        if not now.dropout:
            return h, None
        now.drops += 1
        kept = kept_entries(now.key + now.drops, h.shape, self.p).to(h.dtype).mul_(1.0 / (1.0 - self.p))
        return h * kept, kept

    def backward(self, d: Tensor, kept: Any, own: list[Tensor], into: list[Tensor], needed: bool) -> Any:
        return d if kept is None else d * kept


Layer = Linear | ReLU | Flatten | Conv2d | MaxPool2d | BatchNorm | Dropout


class Chain:
    """The layers of a module and the shapes of their tensors, in the order of the vector."""

    def __init__(self, layers: list[Layer], shapes: list[list[torch.Size]], takes: int | None) -> None:
        self.layers, self.shapes = pooled_first(layers), shapes
        self.sizes = [shape.numel() for own in shapes for shape in own]
        self.entries = sum(self.sizes)  # the vector may be longer: zeros follow
        self.sample = takes  # dimensions of a sample: 1 for vectors, 3 for images, None: inputs are flattened
        self.pure = not any(
            isinstance(layer, BatchNorm | Dropout) for layer in layers
        )  # a function of x and samples alone
        self.stackable = self.pure and not any(isinstance(layer, Conv2d | MaxPool2d) for layer in layers)
        self.first = next(n for n, own in enumerate(shapes) if own)  # no earlier gradient is needed
        self.dense = as_dense(layers, shapes)

    @classmethod
    def of(cls, module: nn.Module) -> Chain | None:
        """The module as a chain, or None if it is not one."""
        layers: list[Layer] = []
        shapes: list[list[torch.Size]] = []
        takes: int | None = 0  # 0: not known yet
        flat: bool | None = None  # whether a sample is a vector at this layer; None: not known yet
        seen: set[nn.Parameter] = set()
        for part in leaves(module):
            layer, own = as_layer(part, module.training), list(part.parameters())
            if layer is None or seen.intersection(own) or not all(p.requires_grad for p in own):
                return None
            if isinstance(layer, Flatten) and flat is not False:
                takes, flat = (None if takes == 0 else takes), True
                continue  # the inputs are flattened before the first layer
            if not isinstance(layer, ReLU | Dropout):
                images = layer.images if isinstance(layer, BatchNorm) else isinstance(layer, Conv2d | MaxPool2d)
                if flat is not None and images == flat and not isinstance(layer, Flatten):
                    return None
                takes = (3 if images else 1) if takes == 0 else takes
                flat = not images
            seen.update(own)
            layers.append(layer)
            shapes.append([p.shape for p in own])
        return cls(layers, shapes, takes) if layers and isinstance(layers[-1], Linear) else None

    def fits(self, inputs: Tensor, targets: Tensor, lead: torch.Size, real: Tensor | None = None) -> bool:
        """Whether the chain can run on inputs [..., B, *shape] and targets [..., B] of clients `lead`."""
        before = len(lead) + 1
        in_c = self.in_c(inputs, lead.numel() if lead else 0) is not None
        if not (self.pure or in_c) and (
            inputs.device.type != "cpu" or real is not None or targets.shape[-1:].numel() < 2
        ):
            return False  # PyTorch's BatchNorm knows no padding, and has no variance of one sample
        sample = self.sample in (None, inputs.dim() - before) and inputs.is_floating_point()
        stackable = not lead or self.stackable or in_c
        return sample and stackable and targets.dim() == before and targets.dtype == torch.int64

    def tensors(self, x: Tensor) -> list[list[Tensor]]:
        """The tensors of each layer in x [..., P], as views."""
        pieces, lead = iter(x.split_with_sizes([*self.sizes, x.shape[-1] - self.entries], -1)), x.shape[:-1]
        return [[next(pieces).view(lead + s) if len(s) > 1 else next(pieces) for s in own] for own in self.shapes]

    def in_c(self, like: Tensor, clients: int) -> Dense | None:
        """The chain in C, if it serves this number of stacked clients (0: a client alone) with vectors like this one."""
        return self.dense if self.dense is not None and self.dense.serves(like, clients) else None

    def steps(self, like: Tensor, clients: int) -> bool:
        """Whether `gradient` accepts a rate, for this number of stacked clients with vectors like this one."""
        return self.in_c(like, clients) is not None or self.turns(clients, like.dtype, like.device)

    def turns(self, clients: int, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether `step` computes a step: it needs transposed inputs."""
        return self.stackable and self.dense is not None and overflows(clients * self.entries, dtype, device)

    def gradient(
        self,
        x: Tensor,
        inputs: Tensor,
        targets: Tensor,
        real: Tensor | None,
        rate: float | Tensor | None = None,
        now: Pass | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The mean cross-entropy [...] over the real samples at x [..., P], and its gradient g [..., P]; ... is () or (S,).

        With a rate, a number or one for each client [...], it returns x - rate g instead of g; `steps` must hold. `now` is for a
        chain that is not `pure`.
        """
        h = inputs.flatten(x.dim()) if self.sample is None else inputs
        if (dense := self.in_c(x, len(x) if x.dim() > 1 else 0)) is not None:
            return dense.gradient(x, h, targets, real, rate, None if now is None else now.buffers)
        if rate is not None:
            return self.step(x, h, targets, real, rate)
        g = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        g[..., self.entries :] = 0.0
        own, into, saved, now = self.tensors(x), self.tensors(g), [], now or Pass(targets, False, x)
        for layer, tensors in zip(self.layers, own, strict=True):
            h, needed = layer.forward(h, tensors, now)
            saved.append(needed)
        loss, d = cross_entropy(h, targets, real)
        for n in range(len(self.layers) - 1, self.first - 1, -1):
            d = self.layers[n].backward(d, saved[n], own[n], into[n], n > self.first)
        return loss, g

    def step(
        self, x: Tensor, inputs: Tensor, targets: Tensor, real: Tensor | None, rate: float | Tensor
    ) -> tuple[Tensor, Tensor]:
        """`gradient` with a rate, for x [S, P] and inputs [S, B, n] of dense layers; all outputs are transposed, [S, m, B]."""
        assert x.dim() == 2 and self.dense is not None
        biased, relu = self.dense.biased, self.dense.relu
        layers, outs = [own for own in self.tensors(x) if own], [inputs.mT.contiguous()]
        for (w, *b), bend in zip(layers, relu, strict=True):
            z = w @ outs[-1]
            z = z + b[0].unsqueeze(-1) if b else z
            outs.append(torch.relu(z) if bend else z)
        loss, d = transposed_cross_entropy(outs[-1], targets, real)
        back = [d]
        for n in range(len(layers) - 1, -1, -1):
            if relu[n]:
                back[0] = aten.threshold_backward.default(back[0], outs[n + 1], 0)
            if n:
                back.insert(0, layers[n][0].mT @ back[0])
        return loss, dense_step(x, rate, outs[:-1], back, biased)


def overflows(entries: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the clients' vectors, with `entries` in total, exceed the cache of a GPU."""
    return devices.gpu(device) and dtype == torch.float32 and 4 * entries > devices.cache(device)


@plain
def dense_step(x: Tensor, rate: float | Tensor, outs: list[Tensor], back: list[Tensor], biased: list[bool]) -> Tensor:
    """x - rate g for x [S, P], a number or rates [S], and dense layers' inputs [S, n, B] and output gradients [S, m, B]."""
    parts = []
    for h, d, bias in zip(outs, back, biased, strict=True):
        parts += [(d @ h.mT).flatten(1)] + ([d.sum(-1)] if bias else [])
    g = torch.cat(parts, 1)
    g = F.pad(g, (0, x.shape[1] - g.shape[1]))
    return x - (rate.unsqueeze(-1) if isinstance(rate, Tensor) else rate) * g


@plain
def transposed_cross_entropy(outputs: Tensor, targets: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
    """The mean cross-entropy [S] over the labels of the real samples of outputs [S, classes, B], and its gradient."""
    loss, d = cross_entropy(outputs.mT, targets, real)
    return loss, d.mT


def cross_entropy(outputs: Tensor, targets: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
    """The mean cross-entropy [...] over the labels of the real samples of outputs [..., B, classes], and its gradient."""
    lead, labels = targets.shape, targets.reshape(-1)
    scores = torch.log_softmax(outputs.reshape(len(labels), -1), 1)
    losses, total = aten.nll_loss_forward.default(scores, labels, None, NONE, IGNORED)
    counts = targets != IGNORED if real is None else (targets != IGNORED) & (real > 0)
    count = counts.to(scores.dtype).sum(-1, keepdim=True).clamp(min=1)
    loss = torch.where(counts, losses.view(lead), 0.0).sum(-1) / count.squeeze(-1)
    share = (counts / count).reshape(-1)
    d = aten.nll_loss_backward.default(share, scores, labels, None, NONE, IGNORED, total)
    return loss, aten._log_softmax_backward_data.default(d, scores, 1, scores.dtype).view(outputs.shape)


def pooled_first(layers: list[Layer]) -> list[Layer]:
    """The layers with each ReLU after a pooling that follows it: the same numbers, and a quarter of the entries."""
    layers = list(layers)
    for n in range(len(layers) - 1):
        if isinstance(layers[n], ReLU) and isinstance(layers[n + 1], MaxPool2d):
            layers[n : n + 2] = [layers[n + 1], layers[n]]
    return layers


def leaves(module: nn.Module) -> list[nn.Module]:
    """The layers of nested nn.Sequentials, in order; any other module is one layer."""
    if not only_runs_its_parts(module):
        return [module]
    return [leaf for part in module for leaf in leaves(part)]


def as_layer(part: nn.Module, training: bool) -> Layer | None:
    """A part of a module in training or evaluation mode as a layer of a chain, or None if it is not supported."""
    if is_altered(part):
        return None
    if type(part) is nn.Linear:
        return Linear(part.bias is not None)
    if type(part) is nn.ReLU:
        return ReLU()
    if type(part) is nn.Flatten and (part.start_dim, part.end_dim) == (1, -1):
        return Flatten()
    if type(part) is nn.Conv2d and part.padding_mode == "zeros" and not isinstance(part.padding, str):
        return Conv2d(part.bias is not None, part.stride, part.padding, part.dilation, part.groups)
    if type(part) is nn.MaxPool2d and not part.return_indices:
        how = (part.kernel_size, part.stride, part.padding, part.dilation)
        return MaxPool2d((*((v, v) if isinstance(v, int) else v for v in how), part.ceil_mode))
    if part.training != training:  # BatchNorm and Dropout that the user has put in evaluation mode
        return None
    if type(part) is nn.BatchNorm1d or type(part) is nn.BatchNorm2d:
        if part.momentum is None or not (part.affine and part.track_running_stats):
            return None
        return BatchNorm(type(part) is nn.BatchNorm2d, Norm(part.eps, part.momentum))
    return Dropout(part.p) if type(part) is nn.Dropout and 0 < part.p < 1 else None


def as_dense(layers: list[Layer], shapes: list[list[torch.Size]]) -> Dense | None:
    """The layers for C: blocks of Conv2d, ReLU and MaxPool2d, then Linear layers, each with or without a BatchNorm and a ReLU."""
    blocks: list[Block] = []
    while (block := as_block(layers[:3], shapes[:1])) is not None:
        blocks.append(block)
        layers, shapes = layers[3:], shapes[3:]
    if blocks and isinstance(layers[0], Flatten):
        layers, shapes = layers[1:], shapes[1:]
    outputs, inputs, biased, norms, relu = [], [], [], [], []
    while layers:
        (linear, *rest), (own, *_) = layers, shapes
        if not isinstance(linear, Linear):
            return None
        norms.append(rest[0].how if rest and isinstance(rest[0], BatchNorm) else None)
        rest = rest[norms[-1] is not None :]
        relu.append(bool(rest) and isinstance(rest[0], ReLU))
        while rest and isinstance(rest[0], ReLU):
            rest = rest[1:]
        outputs.append(own[0][0])
        inputs.append(own[0][1])
        biased.append(linear.biased)
        layers, shapes = rest, shapes[len(layers) - len(rest) :]
    if not inputs or inputs[1:] != outputs[:-1]:
        return None
    return Dense([inputs[0], *outputs], biased, relu, tuple(blocks), norms)


def as_block(layers: list[Layer], shapes: list[list[torch.Size]]) -> Block | None:
    """Three layers for C: a square kernel of 3 or 5 with stride 1 and few channels, a ReLU, and 2 x 2 pooling."""
    match layers:
        case [Conv2d(biased, (1, 1), padding, (1, 1), 1), ReLU(), MaxPool2d(how)] if how == HALVES:
            outputs, channels, *kernel = shapes[0][0]
            square = kernel in ([3, 3], [5, 5]) and len(set(padding)) == 1
            if square and max(channels, outputs) <= NARROW:
                return Block(channels, outputs, kernel[0], padding[0], biased)
    return None


def chain_of(net: Net) -> Chain | None:
    """The network as a chain, or None if it is not one or its loss is not cross-entropy."""
    if "chain" not in net.cache:
        ours = net.loss is F.cross_entropy and net.ignored == IGNORED
        net.cache["chain"] = Chain.of(net.original) if ours else None
    chain: Chain | None = net.cache["chain"]
    return chain


def fitting_chain(oracle: Oracle) -> Chain | None:
    """The chain of an oracle's network, if it can run on the mini-batch."""
    chain, (inputs, targets, *_) = chain_of(oracle.net), oracle.batch
    fits = chain is not None and chain.fits(inputs, targets, oracle.lead, oracle.batch.real)
    return chain if fits else None


def skips_autograd(oracle: Oracle, x: Tensor) -> bool:
    chain = fitting_chain(oracle)
    if chain is None or oracle.batch.inputs.device.type == "cpu":
        return chain is not None
    return chain.stackable and not devices.is_tracing()  # torch.compile fuses more of autograd's graph


@faster(task_gradient, when=skips_autograd)
def task_gradient_of_chain(oracle: Oracle, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    loss, g, after = run_chain(oracle, x, None)
    return g, loss, after


def steps_at_once(oracle: Oracle, x: Tensor, rate: float | Tensor) -> bool:
    chain = fitting_chain(oracle) if type(oracle).grad is Oracle.grad else None
    return chain is not None and chain.steps(x, oracle.lead.numel() if oracle.lead else 0)


@faster(task_step, when=steps_at_once)
def task_step_of_chain(oracle: Oracle, x: Tensor, rate: float | Tensor) -> Tensor:
    if isinstance(rate, Tensor):
        rate = rate.expand(*oracle.lead, 1).reshape([-1] if oracle.lead else [])
    loss, stepped, oracle.buffers = run_chain(oracle, x, rate)
    oracle.tally.calls += 1
    oracle.loss = loss.unsqueeze(-1)
    return stepped


def run_chain(oracle: Oracle, x: Tensor, rate: float | Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The loss [...], the gradient or step, and the buffers after it, by a chain of layers.

    It sees all leading dimensions as one.
    """
    chain, lead, buffers = chain_of(oracle.net), oracle.lead, oracle.buffers
    assert chain is not None
    inputs, targets, real, key, dropout = oracle.batch
    x = x.detach().expand(*lead, x.shape[-1])
    if not chain.pure:
        buffers = buffers.clone(memory_format=torch.contiguous_format)
    if len(lead) < 2:
        return *chain.gradient(x, inputs, targets, real, rate, Pass(key, dropout, buffers)), buffers
    last = len(lead) - 1
    x, inputs, targets = x.flatten(0, last), inputs.flatten(0, last), targets.flatten(0, last)
    real, now = None if real is None else real.flatten(0, last), Pass(key.flatten(), dropout, buffers.flatten(0, last))
    loss, result = chain.gradient(x, inputs, targets, real, rate, now)
    return loss.view(lead), result.view(*lead, -1), buffers


@faster(stacks_in_a_thread, when=lambda net: chain_of(net) is not None)
def stacks_in_a_thread_of_chain(net: Net) -> bool:
    chain = chain_of(net)
    return chain is not None and chain.stackable
