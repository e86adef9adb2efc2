"""Compressed data-parallel SGD written out plainly: lists of workers, whole vectors, masks, one worker at a time."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from undrift.core.streams import Purpose, sample, stream

Gradient = Callable[[int, int, Tensor], Tensor]  # iteration, worker, point -> gradient with weight decay
Mask = Callable[[int, Tensor], Tensor]  # iteration, vector -> which entries are kept


def block_mask(sizes: list[int], ratio: float, seed: int) -> Mask:
    """One wrapped random block of every stretch."""

    def mask(t: int, v: Tensor) -> Tensor:
        kept = torch.zeros(len(v), dtype=torch.bool)
        begin = 0
        for number, n in enumerate(sizes):
            s = stream(seed, Purpose.KEPT, t, number) * n // 2**64
            for j in range(math.ceil(n / ratio)):
                kept[begin + (s + j) % n] = True
            begin += n
        return kept

    return mask


def shuffle_mask(size: int, ratio: float, seed: int) -> Mask:
    """Each of the disjoint blocks once in a pass."""
    length = math.ceil(size / ratio)
    blocks = math.ceil(size / length)

    def mask(t: int, v: Tensor) -> Tensor:
        number = sample(stream(seed, Purpose.KEPT, t // blocks), blocks, blocks)[t % blocks]
        kept = torch.zeros(len(v), dtype=torch.bool)
        kept[number * length : (number + 1) * length] = True
        return kept

    return mask


def random_mask(sizes: list[int], ratio: float, seed: int) -> Mask:
    def mask(t: int, v: Tensor) -> Tensor:
        kept = []
        for number, n in enumerate(sizes):
            random = np.random.Generator(np.random.PCG64(stream(seed, Purpose.KEPT, t, number)))
            chosen = set(random.choice(n, math.ceil(n / ratio), replace=False, shuffle=False).tolist())
            kept += [i in chosen for i in range(n)]
        return torch.tensor(kept)

    return mask


def top_mask(sizes: list[int], ratio: float) -> Mask:
    def mask(t: int, v: Tensor) -> Tensor:
        kept = []
        for part in v.split(sizes):
            order = sorted(range(len(part)), key=lambda i: -abs(float(part[i])))
            chosen = set(order[: math.ceil(len(part) / ratio)])
            kept += [i in chosen for i in range(len(part))]
        return torch.tensor(kept)

    return mask


def leader_mask(sizes: list[int], ratio: float) -> Mask:
    """Top-K of one worker, each in turn; `keep` gives it that worker's vector."""
    mask = top_mask(sizes, ratio)
    vars(mask)["leads"] = True
    return mask


def keep(mask: Mask, t: int, vectors: list[Tensor]) -> list[Tensor]:
    """The kept entries of every worker's vector."""
    leads = vars(mask).get("leads")
    return [torch.where(mask(t, vectors[t % len(vectors)] if leads else v), v, 0.0) for v in vectors]


def error_feedback(
    lam: float | str, x: Tensor, gradient: Gradient, mask: Mask, workers: int, steps: int, lr: float, momentum: float,
    tau: int = 0,
) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
    """EF, SAEF and DEF as in the thesis: the paths of x and of y = x - mean e; with tau errors are averaged so often."""
    e, m = [torch.zeros_like(x)] * workers, [torch.zeros_like(x)] * workers
    along, square = [0.0] * workers, [0.0] * workers
    xs, ys = [], []
    for t in range(steps):
        p = []
        for k in range(workers):
            weight = (
                lam if lam != "auto" else (1 + (min(max(along[k] / square[k], 0.0), 1.0) if square[k] else 0.0)) / 2
            )
            m[k] = momentum * m[k] + gradient(t, k, x - weight * e[k])
            p.append(lr * m[k] + e[k])
        kept = keep(mask, t, p)
        e = [whole - part for whole, part in zip(p, kept, strict=True)]
        c = sum(kept) / workers
        for k in range(workers):
            along[k] = 0.99 * along[k] + 0.01 * float(c @ kept[k])
            square[k] = 0.99 * square[k] + 0.01 * float(kept[k] @ kept[k])
        x = x - c
        xs.append(x)
        ys.append(x - sum(e) / workers)
        if tau and t % tau == tau - 1:
            e = [sum(e) / workers] * workers
    return xs, ys


def csea(
    x0: Tensor, gradient: Gradient, mask: Mask, workers: int, steps: int, lr: float, momentum: float
) -> tuple[list[Tensor], list[Tensor]]:
    """PSync as in the CSER paper, with local models and errors of its sign: the paths of x_k - e_k and of mean x_k."""
    x, e, m = [x0] * workers, [torch.zeros_like(x0)] * workers, [torch.zeros_like(x0)] * workers
    shared, means = [], []
    for t in range(steps):
        for k in range(workers):
            m[k] = momentum * m[k] + gradient(t, k, x[k])
            x[k], e[k] = x[k] - lr * m[k], e[k] - lr * m[k]
        kept = [torch.where(mask(t, e[k]), e[k], 0.0) for k in range(workers)]
        synced = sum(kept) / workers
        for k in range(workers):
            x[k], e[k] = x[k] - kept[k] + synced, e[k] - kept[k]
        shared.append(x[0] - e[0])
        means.append(sum(x) / workers)
    return shared, means


def ef21(
    x: Tensor, gradient: Gradient, mask: Mask, workers: int, steps: int, lr: float, momentum: float
) -> tuple[list[Tensor], list[Tensor]]:
    h, m, xs = [torch.zeros_like(x)] * workers, torch.zeros_like(x), []
    for t in range(steps):
        for k in range(workers):
            g = gradient(t, k, x)
            h[k] = g if t == 0 else torch.where(mask(t, g - h[k]), g, h[k])
        m = momentum * m + sum(h) / workers
        x = x - lr * m
        xs.append(x)
    return xs, xs


def ef21_sgdm(
    x: Tensor, gradient: Gradient, mask: Mask, workers: int, steps: int, lr: float, momentum: float
) -> tuple[list[Tensor], list[Tensor]]:
    """The paper's letters: v are momenta with weight a of the new gradient, g what the others believe them to be."""
    a, xs = 1 - momentum, []
    v = [gradient(0, k, x) for k in range(workers)]
    g = list(v)
    for t in range(1, steps + 1):
        x = x - lr * sum(g) / workers
        xs.append(x)
        for k in range(workers if t < steps else 0):
            v[k] = (1 - a) * v[k] + a * gradient(t, k, x)
            c = v[k] - g[k]
            g[k] = g[k] + torch.where(mask(t, c), c, 0.0)
    return xs, xs


def damped_sgd(x: Tensor, gradient: Gradient, workers: int, steps: int, lr: float, momentum: float) -> list[Tensor]:
    """torch.optim.SGD with as much dampening as momentum, on the mean gradient."""
    weight = x.clone().requires_grad_()
    optimizer, xs = torch.optim.SGD([weight], lr, momentum=momentum, dampening=momentum), []
    for t in range(steps):
        here = weight.detach().clone()
        weight.grad = sum(gradient(t, k, here) for k in range(workers)) / workers
        optimizer.step()
        xs.append(weight.detach().clone())
    return xs


def sgd(x: Tensor, gradient: Gradient, workers: int, steps: int, lr: float, momentum: float) -> list[Tensor]:
    m, xs = torch.zeros_like(x), []
    for t in range(steps):
        m = momentum * m + sum(gradient(t, k, x) for k in range(workers)) / workers
        x = x - lr * m
        xs.append(x)
    return xs


def error_feedback_adamw(
    lam: float, x: Tensor, gradient: Gradient, mask: Mask, workers: int, steps: int, lr: float, betas: tuple[float, float],
    eps: float, decay: float,
) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
    """DEF around AdamW: the paths of x and of y = x - mean e. The gradient is without weight decay."""
    m, v, e = ([torch.zeros_like(x)] * workers for _ in range(3))
    xs, ys = [], []
    for t in range(steps):
        p = []
        for k in range(workers):
            z = x - lam * e[k]
            g = gradient(t, k, z)
            m[k] = betas[0] * m[k] + (1 - betas[0]) * g
            v[k] = betas[1] * v[k] + (1 - betas[1]) * g * g
            mean, square = m[k] / (1 - betas[0] ** (t + 1)), v[k] / (1 - betas[1] ** (t + 1))
            p.append(lr * (mean / (torch.sqrt(square) + eps) + decay * z) + e[k])
        kept = keep(mask, t, p)
        e = [whole - part for whole, part in zip(p, kept, strict=True)]
        x = x - sum(kept) / workers
        xs.append(x)
        ys.append(x - sum(e) / workers)
    return xs, ys


def local_adamw(
    x0: Tensor, gradient: Gradient, mask: Mask, workers: int, steps: int, lr: float, betas: tuple[float, float], eps: float,
    decay: float,
) -> list[Tensor]:  # fmt: skip
    """CSEA around torch.optim.AdamW: local models take its steps, and the kept part of what they moved is averaged.

    Returns the path of the mean of the local models.
    """
    x = [x0.clone().requires_grad_() for _ in range(workers)]
    optimizers = [torch.optim.AdamW([each], lr, betas, eps, decay) for each in x]
    e, means = [torch.zeros_like(x0)] * workers, []
    for t in range(steps):
        for k in range(workers):
            before = x[k].detach().clone()
            x[k].grad = gradient(t, k, before)
            optimizers[k].step()
            e[k] = e[k] + x[k].detach() - before
        kept = [torch.where(mask(t, e[k]), e[k], 0.0) for k in range(workers)]
        synced = sum(kept) / workers
        with torch.no_grad():
            for k in range(workers):
                x[k] += synced - kept[k]
                e[k] = e[k] - kept[k]
        means.append(sum(each.detach() for each in x) / workers)
    return means
