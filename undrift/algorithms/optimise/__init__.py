"""Base optimisers of local steps, one file each: `init(x)` makes the state, `step(rates, x, state, u)` moves x along u.

The file's name is the value of `optimizer`.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, Self, TypeVar

from torch import Tensor

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


class BaseOptimizer(Protocol):
    """The functions of a file in this folder."""

    def init(self, x: Tensor) -> NamedTuple:
        """The state before the first step from x [..., P]."""

    def step(self, rates: LocalOptimizer, x: Tensor, state: NamedTuple, u: Tensor) -> tuple[Tensor, NamedTuple]:
        """x and the state after one step along the direction u."""


@dataclass(frozen=True)
class LocalOptimizer:
    """The settings of local steps that every worker part has."""

    lr: float = 0.1  # eta_l
    weight_decay: float = 0.0  # coupled L2, added to the final direction of each local step
    decay_biases: bool = True  # False: weight decay spares biases and normalisation, the tensors of one dimension
    clip: float = 0.0  # greatest norm of a local direction; 0 does not clip
    optimizer: str = "sgd"  # a file of this folder
    momentum: float = 0.9  # momentum's mu, Adam's beta_1
    keep_moments: bool = False  # True: a client keeps the base optimiser's state between rounds

    varies: ClassVar[tuple[str, ...]] = ("lr", "momentum")  # real fields in which runs of one program may differ

    def rest(self, x: Tensor) -> State:
        """The base optimiser's state before the first step from x."""
        return FILES[self.optimizer].init(x)


NAMES = tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))
FILES: dict[str, BaseOptimizer] = {name: importlib.import_module(f"{__name__}.{name}") for name in NAMES}
