"""Check an algorithm's fields before a run."""

from __future__ import annotations

import dataclasses
import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

from undrift.core.errors import BadSetting, UnknownName

if TYPE_CHECKING:
    from undrift.algorithms.base import Algorithm
    from undrift.algorithms.optimise import LocalOptimizer


class Checked:
    """A part of an algorithm that checks its fields; a part's `check` ends with `super().check`."""

    def check(self, clients: int, cohort: int) -> None:
        """Raise BadSetting where a field's value, alone or with the federation's size, makes no sense."""


@dataclass(frozen=True)
class ServerRate(Checked):
    """The rate of every server part, and of worker parts that need it."""

    server_lr: float = 1.0  # eta_g

    def check(self, clients: int, cohort: int) -> None:
        super().check(clients, cohort)
        at_least(self, 0.0, "server_lr")


def check_algorithm(alg: Algorithm, clients: int, cohort: int) -> None:
    """Raise BadSetting unless the algorithm's fields make sense and its two parts fit."""
    check_choices(alg)
    alg.check(clients, cohort)
    if alg.needs_single_updates and not alg.sends_updates:
        name = type(alg).__name__
        raise BadSetting(f"the server part of {name} needs the clients' own updates; its worker part sends none")


def looks_at_single_uploads(alg: Algorithm | type[Algorithm]) -> bool:
    """Whether an algorithm or its class needs every answer, not only their sum."""
    return bool(alg.needs_single_updates or alg.uploads_apart)


def check_choices(part: Any) -> None:
    """Raise UnknownName where a field annotated as `Literal` has none of its values."""
    for field in dataclasses.fields(part):
        allowed, value = choices_of(type(part), field), getattr(part, field.name)
        if allowed and value not in allowed:
            raise UnknownName(f"value of {field.name}", str(value), map(str, allowed))


def choices_of(kind: type, field: dataclasses.Field[Any]) -> tuple[Any, ...]:
    """The values that a field annotated as `Literal` may have; () for other fields."""
    if "Literal[" not in str(field.type):
        return ()
    owner = next(c for c in kind.__mro__ if field.name in inspect.get_annotations(c))
    return get_args(inspect.get_annotations(owner, eval_str=True)[field.name])


def at_least(part: object, lowest: float, *fields: str) -> None:
    """Raise BadSetting unless every named field is a finite number >= lowest."""
    for field in fields:
        value = getattr(part, field)
        if not lowest <= float(value) < 1e30:  # NaN compares false
            raise BadSetting(f"{field} must be a number of at least {lowest:g} and below 1e30, not {value}")


def above(part: object, lowest: float, *fields: str) -> None:
    """Raise BadSetting unless every named field is a finite number > lowest."""
    for field in fields:
        if not lowest < getattr(part, field) < 1e30:
            raise BadSetting(f"{field} must be a number above {lowest:g} and below 1e30, not {getattr(part, field)}")


def needs_fresh_momentum(part: Any) -> None:
    """Raise BadSetting unless local steps use momentum and buffers are not kept between rounds."""
    if part.optimizer != "momentum":
        raise BadSetting(f"{type(part).__name__} needs optimizer=momentum, not {part.optimizer}")
    if part.keep_moments:
        raise BadSetting(f"{type(part).__name__} sets its local buffers in each round; leave keep_moments at false")


def check_local_steps(part: LocalOptimizer) -> None:
    """Raise BadSetting where the settings of local steps make no sense."""
    from undrift.algorithms.optimise import NAMES  # not above: it imports PyTorch, which `undrift list` spares

    at_least(part, 0.0, "weight_decay", "clip", "warm_steps", "cosine_steps")
    above(part, 0.0, "lr", "epsilon")
    below_one(part, "momentum", "momentum2")
    if part.optimizer not in NAMES:
        raise UnknownName("optimizer", part.optimizer, NAMES)
    if part.steady_rate:
        needs_steady_rate(part)


def needs_steady_rate(part: Any) -> None:
    """Raise BadSetting where the rate changes within a round, for parts that divide by the rate and the number of steps."""
    if not part.steady:
        raise BadSetting(
            f"the rate must not change within a round of {type(part).__name__}, whose formulas take one rate for all steps; "
            "leave out warm_steps and cosine_steps (--warmup and --lr-decay change it between rounds)"
        )


def below_one(part: object, *fields: str) -> None:
    """Raise BadSetting unless every named field lies in [0, 1)."""
    at_least(part, 0.0, *fields)
    for field in fields:
        if not getattr(part, field) < 1.0:
            raise BadSetting(f"{field} must lie in [0, 1), not {getattr(part, field)}")
