"""Tasks whose targets are neither class labels nor masks: yes or no from one output, and survival.

A survival target [B, 2] is an event (1 if the patient died, 0 if the patient was last seen alive) and the time of either; the
model's one output is a risk.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from undrift.oracle.losses import Loss, batch_loss


def binary_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of one output [B, 1] before the sigmoid, and targets [B] of 0 and 1."""
    return F.binary_cross_entropy_with_logits(outputs.flatten(), targets.flatten())


def binary_accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """[B] whether an output is on the side of its target.

    >>> binary_accuracy(torch.tensor([[0.3], [-2.0]]), torch.tensor([1.0, 1.0]))
    tensor([ True, False])
    """
    return (outputs.flatten() > 0) == (targets > 0.5)


@batch_loss
def cox_loss(outputs: Tensor, targets: Tensor, real: Tensor | None) -> Tensor:
    """[B] e_i log sum_{j: t_j >= t_i} exp(s_j - s_i), the negative partial log-likelihood; j runs over the mini-batch.

    Cox: Regression Models and Life-Tables. 1972. Of equal times each is at risk at the other.

    >>> cox_loss(torch.zeros(3, 1), torch.tensor([[1.0, 5.0], [0.0, 7.0], [1.0, 9.0]]), None)
    tensor([1.0986, 0.0000, 0.0000])
    """
    s, (events, times) = outputs.flatten(), targets.unbind(-1)
    at_risk = times.unsqueeze(0) >= times.unsqueeze(1)  # [i, j] whether j is at risk when i's time is over
    if real is not None:
        at_risk = at_risk & ((real > 0).unsqueeze(0) | torch.eye(len(s), dtype=torch.bool, device=s.device))
    return events * (s.unsqueeze(0) - s.unsqueeze(1)).masked_fill(~at_risk, -torch.inf).logsumexp(1)


def concordance(risks: Tensor, targets: Tensor) -> float:
    """Harrell's c-index: of the pairs of which it is known who died first, the share in which that one has the higher risk.

    An equal risk counts one half. NaN where no pair can be compared.

    >>> concordance(torch.tensor([2.0, 1.0, 3.0]), torch.tensor([[1.0, 5.0], [0.0, 7.0], [1.0, 9.0]]))
    0.5
    """
    events, times = targets.double().unbind(-1)
    earlier = times.unsqueeze(1) < times.unsqueeze(0)  # [i, j] i's time is over before j's
    outlived = (times.unsqueeze(1) == times.unsqueeze(0)) & (events == 0).unsqueeze(0)  # j was still seen on that day
    known = (events > 0).unsqueeze(1) & (earlier | outlived)
    right = (risks.unsqueeze(1) > risks.unsqueeze(0)).double() + (risks.unsqueeze(1) == risks.unsqueeze(0)).double() / 2
    return float((right * known).sum() / known.sum())


LOSSES: dict[str, Loss] = {"binary": binary_loss, "survival": cox_loss}
