"""Base optimisers of local steps, one file each: `init(x)` makes the state, `step(rates, x, state, u, layout)` moves x along u.

The file's name is the value of `optimizer`. READS names the fields that it reads besides lr. With DECOUPLED = True weight decay
does not pass through the optimiser's moments: `move` takes lr * weight_decay * x from x, instead of adding weight_decay * x to u.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Protocol, Self, TypeVar, cast

import torch
from torch import Tensor

from undrift.core.layout import Layout
from undrift.core.trees import State


class Moving(Protocol):
    """The state that local steps move: a method's `Work` or a `personal.Stream`."""

    @property
    def x(self) -> Tensor: ...

    @property
    def k(self) -> Tensor: ...

    @property
    def opt(self) -> State: ...

    def _replace(self, *given: Any, **changes: Any) -> Self: ...


W = TypeVar("W", bound=Moving)
MOMENTS = ("momentum", "momentum2", "epsilon")  # fields for base optimisers alone


class BaseOptimizer(Protocol):
    """What a file in this folder has."""

    DECOUPLED: bool
    READS: tuple[str, ...]  # which of the fields momentum, momentum2 and epsilon it reads

    def init(self, x: Tensor) -> NamedTuple:
        """The state before the first step from x [..., P]."""

    def step(
        self, rates: LocalOptimizer, x: Tensor, state: NamedTuple, u: Tensor, layout: Layout
    ) -> tuple[Tensor, NamedTuple]:
        """x and the state after one step along the direction u; `layout` is that of x."""


@dataclass(frozen=True)
class LocalOptimizer:
    """The settings of local steps that every worker part has."""

    lr: float = 0.1  # eta_l
    weight_decay: float = 0.0  # added to the final direction of each local step; adamw and muon shrink x instead
    decay_biases: bool = True  # False: weight decay spares biases and normalisation, the tensors of one dimension
    clip: float = 0.0  # greatest norm of a local direction; 0 does not clip
    optimizer: str = "sgd"  # a file of this folder
    momentum: float = 0.9  # momentum's mu, Adam's beta_1
    momentum2: float = 0.999  # Adam's beta_2
    epsilon: float = 1e-8  # Adam's epsilon
    keep_moments: bool = False  # True: a client keeps the base optimiser's state between rounds
    warm_steps: int = 0  # first steps of a round, in which the rate rises linearly
    cosine_steps: int = 0  # steps after these over which the rate falls to zero along a cosine; 0: it stays

    varies: ClassVar[tuple[str, ...]] = ("lr", "momentum")  # real fields in which runs of one program may differ
    steady_rate: ClassVar[bool] = (
        False  # True: a part divides by a round's rate, which must not change within the round
    )

    def rest(self, x: Tensor) -> State:
        """The base optimiser's state before the first step from x."""
        return FILES[self.optimizer].init(x)

    def unread(self, given: Iterable[str]) -> list[str]:
        """Which of the given fields the base optimiser does not read."""
        return [name for name in given if name in MOMENTS and name not in FILES[self.optimizer].READS]

    @property
    def steady(self) -> bool:
        """Whether all local steps of a round have the same rate."""
        return not (self.warm_steps or self.cosine_steps)

    def at_step(self, k: Tensor) -> Self:
        """The settings of step k [..., 1] of a round, counted from 0.

        >>> import torch
        >>> from undrift.algorithms.optimise import LocalOptimizer
        >>> LocalOptimizer(lr=1.0, warm_steps=2, cosine_steps=4).at_step(torch.tensor([0.0, 1.0, 2.0, 4.0, 9.0])).lr
        tensor([0.5000, 1.0000, 1.0000, 0.5000, 0.0000])
        """
        if self.steady:
            return self
        share = ((k + 1) / self.warm_steps).clamp(max=1.0) if self.warm_steps else torch.ones_like(k)
        if self.cosine_steps:
            passed = ((k - self.warm_steps) / self.cosine_steps).clamp(0.0, 1.0)
            share = share * (1 + torch.cos(math.pi * passed)) / 2
        return replace(self, lr=cast(float, self.lr * share))


NAMES = tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))
FILES: dict[str, BaseOptimizer] = {name: importlib.import_module(f"{__name__}.{name}") for name in NAMES}
