"""The numbers that a round leaves for its record."""

from __future__ import annotations

import torch
from torch import Tensor

from undrift.algorithms.base import Algorithm, Cohort
from undrift.core.forms import plain
from undrift.core.trees import State
from undrift.core.vec import mean
from undrift.round.clients import Answers


def numbers_of(
    alg: Algorithm, server: State, answers: Answers, cohort: Cohort, more: dict[str, Tensor]
) -> tuple[list[str], Tensor]:
    """Names, and values [n, ...] in float64: the mean training loss, the consistency, the algorithm's own facts."""
    share, clients = cohort.uniform, (-2, -1)
    each = {"train_loss": (answers.loss * share).sum(clients), "consistency": consistency(answers, share)}
    each |= {name: (fact * share).sum(clients) for name, fact in answers.facts._asdict().items()}
    each |= more | alg.facts(server)
    lead = cohort.ids.shape[:-1]
    values = [value.reshape(lead).to(share.device, torch.float64) for value in each.values()]
    return list(each), torch.stack(values)


@plain
def consistency(answers: Answers, share: Tensor) -> Tensor:
    """(1/S) sum |x_i^K - mean x^K|^2, how far apart the local models end; `share` [..., S, 1] is 1/S for every client."""
    apart = answers.x - mean(answers.x, share).unsqueeze(-2)
    return mean(torch.linalg.vector_norm(apart, dim=-1, keepdim=True).square(), share).squeeze(-1)
