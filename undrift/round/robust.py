"""What the server sees of the clients' answers where a rule (`undrift/round/aggregate`) guards it against hostile ones."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from undrift.algorithms.base import Algorithm, Cohort
from undrift.algorithms.checks import looks_at_single_uploads
from undrift.core.errors import BadSetting
from undrift.core.trees import map_leaves
from undrift.round.aggregate import Rule, describe, middle, spread
from undrift.round.clients import Answers

T = TypeVar("T")


def agree(rule: Rule | None, sent: T, cohort: Cohort) -> T:
    """The clients' vectors [..., S, P] as the rule leaves them, each vector of a message by itself: they differ in scale."""
    if rule is None:
        return sent
    return map_leaves(lambda v: rule(v, cohort.weight) if v.shape[-1] and v.is_floating_point() else v, sent)


def agree_answers(rule: Rule | None, answers: Answers, cohort: Cohort, buffers: Tensor, counters: Tensor) -> Answers:
    """The answers as the rule leaves them; of BatchNorm's statistics it sees the change from `buffers`, the server's."""
    if rule is None:
        return answers
    up, statistics = agree(rule, answers.up, cohort), answers.buffers
    if statistics.shape[-1]:
        old = buffers.unsqueeze(-2)
        steps = torch.where(counters, spread(middle(statistics, cohort.weight).floor(), statistics), 0)
        statistics = old + rule(torch.where(counters, 0, statistics - old), cohort.weight)
        statistics = torch.where(counters, steps, statistics)
    return answers._replace(up=up, buffers=statistics)


def check_rule(rule: Rule, alg: Algorithm, cohort: int, compress: str, private: bool) -> None:
    """Refuse a rule that cannot go with the method, the cohort, the compression or a private sum."""
    name, text = type(alg).__name__, describe(rule)
    if looks_at_single_uploads(alg) and not rule.keeps_single:
        raise BadSetting(
            f"{name} looks at each client's upload by itself, and aggregate={text} shows the server only one for all; "
            "use clip:1 or bound:10, or a method that needs only the mean, such as fedavg"
        )
    if private:
        raise BadSetting(f"aggregate={text} would break the promise of a private sum, which bounds every update itself")
    if compress:
        raise BadSetting(
            f"aggregate={text} does not go with compress: what compression drops now and sends later looks like an attack"
        )
    if cohort < rule.least:
        raise BadSetting(f"aggregate={text} needs at least {rule.least} clients a round, not {cohort}; raise cohort")
