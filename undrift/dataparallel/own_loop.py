"""An algorithm in a training loop of the user's, which has one gradient a step and an optimizer of its own.

The algorithm's `local_step` says where it wants the gradient, is given the user's, and says which step the optimizer is to take.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from undrift.algorithms.base import Worker
from undrift.core.errors import BadSetting
from undrift.core.layout import Layout
from undrift.jobs.registry import algorithm_class, make_algorithm
from undrift.oracle.oracle import NoData, task_loss

THEIRS = (
    "optimizer",
    "momentum",
    "momentum2",
    "epsilon",
    "weight_decay",
    "decay_biases",
    "clip",
    "warm_steps",
    "cosine_steps",
)


class Wanted(Exception):
    """Where an algorithm wants its next gradient."""

    def __init__(self, point: Tensor) -> None:
        super().__init__()
        self.point = point


class Caught(NamedTuple):
    """The step that an algorithm makes of a gradient, for the user's optimizer."""

    u: Tensor  # the direction
    start: Tensor  # where the step begins


class OwnGradient:
    """What a local step may ask in a loop of the user's: one gradient of the user's loss. Without one it says where."""

    def __init__(self, layout: Layout, buffers: Tensor, g: Tensor | None = None) -> None:
        self.layout, self.buffers, self.g, self.asked = layout, buffers, g, False
        self.loss = buffers.new_zeros(1)

    def grad(self, x: Tensor, objective: Any = None, *others: Tensor, track: bool = True) -> Tensor:
        if objective not in (None, task_loss) or others:
            refuse("a loss of its own")
        if self.g is None:
            raise Wanted(x)
        if self.asked:
            refuse("two gradients")
        self.asked = True
        return self.g

    def __getattr__(self, name: str) -> NoReturn:
        refuse(f"`oracle.{name}`")


class NoPass(NoData):
    """A client whose samples only the user knows."""

    def full_grad(self, x: Tensor) -> Tensor:
        refuse("a gradient of all samples")


def refuse(what: str) -> NoReturn:
    raise BadSetting(
        f"the algorithm needs {what} in its local steps, and a loop of one's own has one gradient a step; take another one, "
        "such as diloco, fedavgm, scaffold, fedcm, fedmim, domo-s or gradma-s"
    )


def algorithm_in_a_loop(name: str, given: dict[str, Any], optimizer: torch.optim.Optimizer | None, islands: int) -> Any:
    """The algorithm, whose local steps the user's optimizer takes."""
    kind = algorithm_class(name)
    for field in given:
        if field in THEIRS:
            raise BadSetting(f"{field} belongs to your optimizer: leave it out of set")
    if optimizer is None and "keep_moments" not in given:
        fresh = make_algorithm(kind, name, given, ())
        if fresh.optimizer != "momentum":
            given = given | {"keep_moments": True}
        elif not fresh.keep_moments:
            raise BadSetting(
                f"{name} begins each round without momentum: give LocalSteps optimizer=..., which it clears"
            )
    alg = make_algorithm(kind, name, given, ())
    alg.check(islands, islands)
    divides = divides_by_rate(alg, islands)
    if divides and "lr" not in given:
        raise BadSetting(f"{name} divides by the rate: give that of your optimizer, set={{'lr': ...}}")
    if alg.personalises or alg.measures or alg.networks(islands):
        raise BadSetting(
            f"{name} {'has a first exchange' if alg.measures else 'trains more than one model'}, which LocalSteps has not"
        )
    if alg.at(1) != alg.at(0) or type(alg).trains is not Worker.trains:
        raise BadSetting(
            f"{name} chooses what is trained, which LocalSteps has not; freeze the rest yourself, with requires_grad_(False), "
            "and take fedavg"
        )
    for group in optimizer.param_groups if optimizer is not None and divides else ():
        if float(group["lr"]) != alg.lr:
            raise BadSetting(f"{name} divides by the rate, which is {alg.lr} in set and {group['lr']} in the optimizer")
    return replace(alg, optimizer="sgd")  # no moments are needed here


def divides_by_rate(alg: Any, islands: int) -> bool:
    """Whether the algorithm refuses a rate that changes within a round."""
    try:
        replace(alg, warm_steps=2).check(islands, islands)
    except BadSetting:
        return True
    return False


def step_along(alg: Any, down: Any, client: Any, work: Any, oracle: OwnGradient) -> Any:
    """The work after a local step that takes no step; its `opt` says which one the optimizer is to take."""
    after = without_moves(alg).local_step(down, client, work, oracle)
    if not isinstance(after.opt, Caught):
        refuse("more than one step along one direction")
    return after


def without_moves(alg: Any) -> Any:
    """The algorithm with a `move` that takes no step, but says which one."""

    def move(self: Any, work: Any, u: Tensor, oracle: Any, start: Tensor | None = None) -> Any:
        return work._replace(k=work.k + 1, opt=Caught(u, work.x if start is None else start))

    kind = type(alg)
    other: Any = object.__new__(type(kind.__name__, (kind,), {"move": move}))
    vars(other).update(vars(alg))
    return other
