"""Simulated attacks: some clients, the same all through a run, send something else than what they computed.

    signflip:SHARE[:STRENGTH]   -STRENGTH times their vectors (1)
    scale:SHARE[:STRENGTH]      STRENGTH times their vectors (20)
    gauss:SHARE[:STRENGTH]      noise N(0, STRENGTH^2) in place of their vectors (1)
    labelflip:SHARE             what they computed, with label y taken for C - 1 - y

Of BatchNorm's statistics the change from the server's is attacked; counters are left alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from undrift.core.errors import BadSetting, UnknownName
from undrift.core.streams import Purpose, fold, sample, stream, uniform, words
from undrift.core.trees import leaves, map_leaves
from undrift.data.federation import Federation, Ids
from undrift.round.clients import Answers
from undrift.round.who import Who

STRENGTHS = {"signflip": 1.0, "scale": 20.0, "gauss": 1.0, "labelflip": None}  # by default; None: it takes none


@dataclass(frozen=True)
class Attack:
    """What attackers do, and how many of the clients they are."""

    name: str
    share: float
    strength: float

    def attackers(self, clients: int, seed: int) -> Ids:
        """The attacking clients in rising order, at least one."""
        count = max(1, round(self.share * clients))
        return np.sort(sample(stream(seed, Purpose.ATTACK), clients, count))


def parse_attack(text: str) -> Attack | None:
    """The attack of a setting such as "scale:0.2:20"; None for none.

    >>> parse_attack("signflip:0.2")
    Attack(name='signflip', share=0.2, strength=1.0)
    """
    if not text:
        return None
    name, *numbers = text.split(":")
    if name not in STRENGTHS:
        raise UnknownName("value of attack", name, STRENGTHS)
    usual = STRENGTHS[name]
    try:
        share, strength = (*map(float, numbers), usual or 1.0)[:2]
    except ValueError:
        share = strength = math.nan
    if not (0 < share <= 1 and abs(strength) < math.inf and len(numbers) <= 1 + (usual is not None)):
        form = f"{name}:SHARE" + ("" if usual is None else ":STRENGTH")
        raise BadSetting(f"attack takes {form} with a share above 0 and at most 1, not {text!r}")
    return Attack(name, share, strength)


class Attackers(NamedTuple):
    """The attacking clients of a run."""

    attack: Attack
    are: Tensor  # [N] bool

    @property
    def draws(self) -> bool:
        """Whether they need random numbers, under the keys `Who.attack`."""
        return self.attack.name == "gauss"


def spoil(attackers: Attackers | None, sent: Tensor, who: Who, number: int = 0) -> Tensor:
    """Vectors [..., S, P] as they come from a cohort with attackers; `number` tells a message's vectors apart."""
    if attackers is None or attackers.attack.name == "labelflip" or not sent.is_floating_point():
        return sent
    attack, hostile = attackers.attack, attackers.are[who.ids].unsqueeze(-1)
    if attack.name == "gauss":
        return torch.where(
            hostile, attack.strength * normal(fold(who.attack, torch.full_like(who.ids, number)), sent), sent
        )
    factor = attack.strength if attack.name == "scale" else -attack.strength
    return torch.where(hostile, factor * sent, sent)


def spoil_answers(
    attackers: Attackers | None, answers: Answers, who: Who, buffers: Tensor, counters: Tensor
) -> Answers:
    """The answers of a cohort with attackers."""
    if attackers is None or attackers.attack.name == "labelflip":
        return answers
    numbers = iter(range(1, len(leaves(answers.up)) + 1))
    up, statistics = map_leaves(lambda v: spoil(attackers, v, who, next(numbers)), answers.up), answers.buffers
    if statistics.shape[-1]:
        old = buffers.unsqueeze(-2)
        moved = old + spoil(attackers, statistics - old, who, -1)
        statistics = torch.where(counters | ~attackers.are[who.ids].unsqueeze(-1), statistics, moved)
    return answers._replace(up=up, buffers=statistics)


def normal(keys: Tensor, like: Tensor) -> Tensor:
    """Normal numbers, as many as `like` [..., S, P] has, under keys [..., S] (Box and Muller)."""
    word = words(keys, 2 * like.shape[-1]).unflatten(-1, (2, -1))
    radius, angle = (1 - uniform(word[..., 0, :])).log().mul(-2).sqrt(), uniform(word[..., 1, :])
    return (radius * (2 * math.pi * angle).cos()).to(like.dtype)


def flip_labels(data: Federation, attackers: Ids) -> Federation:
    """The federation in which attackers have label C - 1 - y for y."""
    if not data.train.labelled or data.masks:
        raise BadSetting("attack=labelflip needs one class label a sample; use signflip, scale or gauss")
    rows, _ = data.rows_of(attackers)
    others, _ = data.rows_of(np.setdiff1d(np.arange(data.clients), attackers))
    if bool(torch.isin(rows, others).any()):
        raise BadSetting("attack=labelflip needs clients that share no sample; use another partition than resample")
    targets = data.train.targets.clone()
    rows = rows.unique()
    targets[rows] = data.classes - 1 - targets[rows]
    return replace(data, train=replace(data.train, targets=targets))


def make_attackers(attack: Attack, clients: int, seed: int, device: torch.device) -> Attackers:
    are = torch.zeros(clients, dtype=torch.bool)
    are[torch.from_numpy(attack.attackers(clients, seed))] = True
    return Attackers(attack, are.to(device))


def attack_keys(seed: int, t: int, ids: Tensor) -> Tensor:
    """The key of what each of clients `ids` draws in round t, if it attacks."""
    return fold(stream(seed, Purpose.ATTACK, t), ids)
