"""Rules for the clients' mean that a few hostile clients cannot turn as they like, one file each.

A rule says what the server sees in place of the clients' vectors: from v [..., S, P] and weights [..., S, 1], which add up to
one, it makes vectors of the same shape. The method takes their mean, as always. So a rule works with every method that needs
only the mean, and no method can go round it. Most rules give every client the same vector, the rule's result; a bound on norms
leaves each client its own, and goes with every method.

A place with weight 0 is empty. Nothing here asks the host for a value, so that a GPU can record it.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import ClassVar, get_type_hints

import torch
from torch import Tensor

from undrift.core.errors import BadSetting, UnknownName

MEAN = "mean"  # no rule
MAJORITY = 3  # clients of whom one can be outvoted: between two, a median is the mean
LONGEST = 1e12  # entries so many times the usual ones are cut, so that their squares do not overflow


@dataclass(frozen=True)
class Rule(ABC):
    """A rule; its fields are the numbers after its name, as in krum:2:5."""

    keeps_single: ClassVar[bool] = False  # True: each client's vector stays its own

    @abstractmethod
    def __call__(self, v: Tensor, weight: Tensor) -> Tensor:
        """What the server sees in place of v [..., S, P]."""

    @property
    def least(self) -> int:
        """The fewest clients with which the rule keeps its promise."""
        return 1


def spread(z: Tensor, v: Tensor) -> Tensor:
    """The result z [..., P] for every client of v [..., S, P]."""
    return z.unsqueeze(-2).expand_as(v)


def middle(v: Tensor, weight: Tensor) -> Tensor:
    """The median [..., P] of clients [..., S, P], entry by entry. Every client has one voice, whatever it weighs.

    >>> middle(torch.tensor([[1.0], [9.0], [2.0], [3.0]]), torch.tensor([[0.1], [0.7], [0.1], [0.1]]))
    tensor([2.5000])
    """
    ordered, count = in_order(v, weight)
    low, high = (ordered.take_along_dim(place, -2) for place in ((count - 1) // 2, count // 2))
    return (low / 2 + high / 2).squeeze(-2)


def in_order(v: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The clients' entries in rising order, those of empty places last; and the number of clients [..., 1, 1]."""
    there = weight > 0
    return v.masked_fill(~there, torch.inf).sort(-2).values, there.sum(-2, keepdim=True)


def normalise(v: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """v in units of a usual client's largest entry, with entries of at most LONGEST; and the unit [..., 1, 1]."""
    unit = middle(v.abs().amax(-1, keepdim=True), weight).unsqueeze(-2).clamp(min=torch.finfo(v.dtype).tiny)
    return (v / unit).clamp(-LONGEST, LONGEST), unit


NAMES = tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


def rule_class(name: str) -> type[Rule]:
    module = importlib.import_module(f"{__name__}.{name}")
    here = [c for c in vars(module).values() if inspect.isclass(c) and c.__module__ == module.__name__]
    return next(c for c in here if issubclass(c, Rule))


def parse_rule(text: str) -> Rule | None:
    """The rule that a setting such as "trimmed:0.2" names; None for the plain mean.

    >>> parse_rule("trimmed:0.2"), parse_rule("krum:2"), parse_rule("mean")
    (Trimmed(share=0.2), Krum(faulty=2, chosen=1), None)
    """
    name, *numbers = text.split(":")
    if name not in (MEAN, *NAMES):
        raise UnknownName("value of aggregate", name, (MEAN, *NAMES))
    kinds = [] if name == MEAN else list(get_type_hints(rule_class(name)).items())
    kinds = [(field, kind) for field, kind in kinds if kind in (int, float)]
    try:
        if len(numbers) > len(kinds):
            raise ValueError
        values = [kind(number) for (_, kind), number in zip(kinds, numbers, strict=False)]
    except ValueError:
        form = ":".join([name, *(field.upper() for field, _ in kinds)])
        raise BadSetting(f"aggregate takes {form}, not {text!r}") from None
    if name == MEAN:
        return None
    return rule_class(name)(*values)


def describe(rule: Rule) -> str:
    """The rule as a setting.

    >>> describe(parse_rule("krum:2"))
    'krum:2:1'
    """
    return ":".join([type(rule).__name__.lower(), *(f"{getattr(rule, f.name):g}" for f in fields(rule))])
