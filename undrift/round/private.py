"""A private mean in place of the clients' updates: they are clipped, and their sum gets noise.

    d = (sum_i clip(d_i, C) + N(0, sigma^2 C^2 I)) / (q N)

McMahan, Ramage, Talwar, Zhang: Learning Differentially Private Recurrent Language Models. ICLR 2018, with a fixed denominator:
who is missing counts as zero. The method inside sees one answer, the private mean.

With a quantile, C follows it (Andrew, Thakkar, McMahan, Ramaswamy: Differentially Private Learning with Adaptive Clipping.
NeurIPS 2021): how many updates are shorter than C is counted with noise of its own, and both noises together are as good as one
of sigma. For a server that wants the sum over all rounds, the noise forms a tree (Kairouz, McMahan, Song, Thakkar, Thakurta, Xu:
Practical and Private (Deep) Learning without Sampling or Shuffling. ICML 2021): the sum of t rounds has the noise of at most
log2(t) + 1 nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from undrift.algorithms.base import Algorithm, Cohort
from undrift.algorithms.checks import looks_at_single_uploads
from undrift.algorithms.wrapper import Wrapper
from undrift.core.errors import BadSetting
from undrift.core.streams import Purpose, fold, normal, stream, to_signed
from undrift.core.trees import Nothing, State, leaves
from undrift.oracle.net import Net
from undrift.round.accounting import Accountant, Counted, Sampled
from undrift.round.shapes import Forms

SHARE = 0.05  # the share of privacy that is spent on counting updates shorter than C
PACE = 0.2  # eta_C of Andrew et al.
GRID = 20  # the sum is rounded to 2^-20 of the noise, or less: the last bits of floating-point noise tell what it was added to
SHORTER = 1 - 2**-20  # so that rounding in 32 bits makes no update longer than C
PART = 1 << 20  # numbers drawn at a time
Draw = Callable[[Tensor, int], Tensor]  # for keys [...] and a count, numbers [..., count] from N(0, 1) in float64


class Privacy(NamedTuple):
    """The settings of a private run."""

    clip: float  # C, or the first one
    noise: float  # sigma
    delta: float
    quantile: float  # the quantile of the updates' norms that C follows; 0: C stays
    expected: float  # q N
    steps: int  # K, which everybody knows


class Source(Protocol):
    """A secret of the server that noise and cohorts are drawn from; clients know the seed."""

    def normal(self, key: Tensor, count: int) -> Tensor:
        """A `Draw` that does without the key and never gives the same numbers again."""

    def words(self, t: int, count: int) -> Tensor:
        """[count] random words for round t, the same whenever they are asked for."""


def draw_by_key(key: Tensor, count: int) -> Tensor:
    """Numbers that anybody who knows the key can draw: for simulations, which protect nobody."""
    parts = []
    for first in range(0, count, PART):
        size = min(PART, count - first)
        place = torch.arange(first, first + size + size % 2, device=key.device)
        parts.append(normal(fold(key.unsqueeze(-1), place))[..., :size])
    return torch.cat(parts, -1)


class Private(Wrapper):
    """An algorithm whose server sees only the private mean of the updates."""

    extends = frozenset({"companion"})
    moves_alone = True  # that nobody was there must not be seen

    class Companion(NamedTuple):
        inner: State
        bound: Tensor  # [..., 1] C
        key: Tensor  # [..., 1] of a simulation's noise
        t: Tensor  # [..., 1] rounds so far
        nodes: Tensor  # [..., L, P] the noise of the tree's nodes that are in use

    def __init__(self, inner: Algorithm, how: Privacy, seed: int = 0, draw: Draw = draw_by_key) -> None:
        super().__init__(inner)
        object.__setattr__(self, "how", how)
        object.__setattr__(self, "noise_seed", seed)
        object.__setattr__(self, "draw", draw)

    def around(self, inner: Algorithm) -> Private:
        return Private(inner, self.how, self.noise_seed, self.draw)

    def drawing(self, draw: Draw) -> Private:
        """The same with noise from elsewhere."""
        return Private(self.inner, self.how, 0, draw)

    def companion_init(self, x0: Tensor, clients: int) -> Companion:
        one = torch.ones_like(x0[..., :1], dtype=torch.int64)
        nodes = torch.zeros_like(x0).unsqueeze(-2).repeat_interleave(self.inner.sums_over.bit_length(), -2)
        key = one * to_signed(stream(self.noise_seed, Purpose.NOISE))
        inner = self.inner.companion_init(x0, clients)
        return self.Companion(inner, one.double() * self.how.clip, key, one * 0, nodes)

    def broadcast(self, x: Tensor, companion: Companion, invited: Cohort) -> State:
        return self.forward("broadcast", dict(x=x, companion=companion, invited=self.one(invited, x)))

    def gather(self, companion: Companion, up: State, cohort: Cohort) -> tuple[Tensor, Companion]:
        d, companion = self.private_mean(companion, up.d, cohort)
        one = type(up)(d.unsqueeze(-2))
        found: tuple[Tensor, Private.Companion]
        found = self.forward("gather", dict(companion=companion, up=one, cohort=self.one(cohort, d)))
        return found

    def server_step(self, server: State, x: Tensor, d: Tensor, up: State, cohort: Cohort) -> tuple[Tensor, State]:
        moved: tuple[Tensor, State]
        moved = self.forward("server_step", dict(server=server, x=x, d=d, up=Nothing(), cohort=self.one(cohort, d)))
        return moved

    def companion_step(self, companion: State, up: State, cohort: Cohort, x_old: Tensor, x_new: Tensor) -> State:
        given = dict(companion=companion, up=Nothing(), cohort=self.one(cohort, x_old), x_old=x_old, x_new=x_new)
        return self.forward("companion_step", given)

    def one(self, cohort: Cohort, d: Tensor) -> Cohort:
        """A cohort of one, the private mean, whoever is in the real one."""
        weight = torch.ones_like(d[..., :1]).unsqueeze(-1)
        ids = torch.zeros_like(d[..., :1], dtype=torch.int64)
        return cohort._replace(ids=ids, drawn=ids, weight=weight, steps=weight * self.how.steps, there=None)

    def private_mean(self, companion: Companion, d: Tensor, cohort: Cohort) -> tuple[Tensor, Companion]:
        """The private mean [..., P] of updates [..., S, P], and the companion with the next C and the tree's nodes."""
        how, bound, layout = self.how, companion.bound, cohort.layout
        share = SHARE if how.quantile else 0.0
        total, shorter = clipped_sum(d, bound, cohort.there)
        z = self.draw(fold(companion.key, companion.t).squeeze(-1), layout.entries + 1).to(d.device)
        scale = how.noise * bound / (1 - share) ** 0.5
        fresh = F.pad(scale * z[..., :-1], (0, layout.padding))
        nodes, added = companion.nodes, fresh
        if self.inner.sums_over:
            nodes = grow(nodes, companion.t % self.inner.sums_over, fresh)
            before = torch.where(companion.t % self.inner.sums_over == 0, 0.0, companion.nodes.sum(-2).double())
            added = nodes.sum(-2).double() - before
        if how.quantile:
            counted = (shorter + how.noise / (2 * share**0.5) * z[..., -1:]) / how.expected + 0.5
            bound = bound * torch.exp(-PACE * (counted - how.quantile))
        grid = torch.exp2(scale.log2().floor() - GRID)
        mean = ((total + added) / grid).round() * grid / how.expected
        return mean.to(d.dtype), companion._replace(bound=bound, t=companion.t + 1, nodes=nodes)


def clipped_sum(d: Tensor, bound: Tensor, there: Tensor | None) -> tuple[Tensor, Tensor]:
    """The sum [..., P] of updates [..., S, P] cut to bound [..., 1]; and of 1/2 for each shorter one, -1/2 for each other."""
    bound = bound.unsqueeze(-2)
    length = torch.linalg.vector_norm(d, dim=-1, keepdim=True, dtype=torch.float64)
    present = torch.ones_like(length) if there is None else there.double()
    factor = present * (SHORTER * bound / length.clamp(min=1e-300)).clamp(max=1.0)
    shorter = present * ((length <= bound).double() - 0.5)
    # A factor below the smallest normal number has few bits left, and the update would be longer than C: it is cut in two steps.
    once = torch.where(factor < torch.finfo(d.dtype).tiny, factor.sqrt(), factor)
    again = factor / once.clamp(min=torch.finfo(once.dtype).tiny)
    return (d * once.to(d.dtype) * again.to(d.dtype)).sum(-2, dtype=torch.float64), shorter.sum(-2)


def grow(nodes: Tensor, t: Tensor, fresh: Tensor) -> Tensor:
    """The nodes [..., L, P] after round t [..., 1] of a tree, counted from 0: one is new, smaller ones become part of it."""
    level = torch.arange(nodes.shape[-2], device=nodes.device)
    size = 2**level
    ends = ((t + 1) % size == 0).unsqueeze(-1)  # [..., L, 1]
    new = ends & ((t + 1) % (2 * size) != 0).unsqueeze(-1)
    stays = (t >= size).unsqueeze(-1) & ~ends
    kept = torch.where(stays, nodes, torch.zeros_like(nodes))
    return torch.where(new, fresh.to(nodes.dtype).unsqueeze(-2), kept)


def make_accountant(alg: Algorithm, how: Privacy, clients: int) -> Accountant:
    """What adds up the cost of this algorithm's rounds."""
    if alg.sums_over:
        return Counted(clients, alg.sums_over, how.noise, how.delta)
    return Sampled(how.expected / clients, how.noise, how.delta)


def check_private(alg: Any, net: Net, clients: int, how: Privacy, sampling: str, weights: str) -> None:
    """Refuse a method, or settings, under which the promise would not hold."""
    forms = Forms.of(alg, net, clients)
    more = not alg.sends_updates or alg.measures or getattr(forms.answers.up, "_fields", ()) != ("d",)
    for wrong, why in (
        (looks_at_single_uploads(alg), "its server looks at single updates"),
        (more, "its clients send more than their update"),
        (
            alg.personalises or alg.pools or alg.keep_moments or bool(leaves(forms.client)),
            "its clients keep a state, which ties rounds together",
        ),
    ):
        if wrong:
            raise BadSetting(
                f"{type(alg).__name__} cannot be made private: {why}; use one that needs only the sum, such as fedavg"
            )
    for wrong, why in (
        (
            sampling != "bernoulli" and not alg.sums_over,
            "give --sampling bernoulli: the promise is for clients drawn independently; dp-ftrl does without",
        ),
        (weights != "uniform", "give --weights uniform: a weight by size would change a client's share"),
        (not how.steps, "give --steps instead of --epochs: how many steps a client makes would tell how much it has"),
        (net.buffer_layout.size > 0, "the model has BatchNorm, whose statistics would go up without noise"),
        (bool(how.quantile and alg.sums_over), "leave privacy_quantile out: a tree's nodes need one C"),
    ):
        if wrong:
            raise BadSetting(f"privacy_clip: {why}")
