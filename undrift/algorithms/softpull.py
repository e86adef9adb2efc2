"""SoftPull: every client has its own model, which the server pulls softly towards the others' after each round.

Xu, Li, Guo, Yang, Roth, Hatamizadeh, Zhao, Xu, Huang, Xu: Closing the Generalization Gap of Cross-silo Federated Medical
Image Segmentation. CVPR 2022, equation (11).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from undrift.algorithms.base import Average, Cohort, Worker, at_least
from undrift.algorithms.local import Alone
from undrift.core.errors import BadSetting
from undrift.core.trees import nbytes
from undrift.core.vec import mean


def pulled(v: Tensor, lam: float, cohort: Cohort) -> Tensor:
    """v_i <- lam v_i + (1 - lam) / (S - 1) sum_{j != i} v_j, for all v [..., S, P] at once; alone, a model stays as it is.

    It is lam' v_i + (1 - lam') mean(v) with lam' = (S lam - 1) / (S - 1).
    """
    share: float | Tensor
    if isinstance(cohort.size, int):
        share = (cohort.size * lam - 1) / (cohort.size - 1) if cohort.size > 1 else 1.0
    else:
        size = cohort.size.unsqueeze(-1)
        share = torch.where(size > 1, (size * lam - 1) / (size - 1).clamp(min=1), 1.0)
    centre = mean(v, cohort.uniform).unsqueeze(-2)
    return share * v + (1 - share) * centre


def check_pull(alg: Any, cohort: int) -> None:
    at_least(alg, 0.0, "lam")
    if alg.lam > 1:
        raise BadSetting(
            f"lam must lie in [0, 1], and from 1/S = {1 / cohort:.3g} on it does not overshoot, not {alg.lam}"
        )


def pull_remarks(alg: Any, cohort: int) -> list[str]:
    """Such a lambda is allowed: the thesis' Table 15 has one."""
    said = f"lam {alg.lam:g} is below 1/S = {1 / cohort:.3g}: a model then has less of itself than of each other one"
    return [said] if alg.lam * cohort < 1 else []


@dataclass(frozen=True)
class SoftlyPulled(Alone):
    """The clients train alone; between rounds the server pulls. Its own x is the mean of all models, for newcomers."""

    lam: float = 0.7  # lambda: 1/N averages, 1 leaves everybody alone

    uploads_apart: ClassVar[bool] = True

    class Companion(NamedTuple):
        x: Tensor  # the server's model once more: the direction is seen from there

    class Sent(NamedTuple):
        v: Tensor

    def companion_init(self, x0: Tensor, clients: int) -> Companion:
        return self.Companion(x0)

    def bytes_down(self, down: Any, invited: int, returning: int, clients: int) -> int:
        return (invited - returning) * nbytes(down)  # who was there has a model of its own

    def local_end(self, down: Any, client: Any, work: Any) -> tuple[Sent, Any]:
        return self.Sent(work.x), self.Client(work.x, work.buffers)

    def gather(self, companion: Companion, up: Sent, cohort: Cohort) -> tuple[Tensor, Companion]:
        return companion.x - mean(up.v, cohort.uniform), companion

    def companion_step(self, companion: Companion, up: Sent, cohort: Cohort, x_old: Tensor, x_new: Tensor) -> Companion:
        return self.Companion(x_new)

    @property
    def buffers_up(self) -> bool:
        return True

    def reply(self, companion: Companion, up: Sent, buffers: Tensor, cohort: Cohort) -> Any:
        return self.Client(pulled(up.v, self.lam, cohort), pulled(buffers, self.lam, cohort))

    def receive(self, client: Any, reply: Any) -> Any:
        return reply

    def check(self, clients: int, cohort: int) -> None:
        Worker.check(self, clients, cohort)
        check_pull(self, cohort)

    def remarks(self, rounds: int, cohort: int) -> list[str]:
        return [*super().remarks(rounds, cohort), *pull_remarks(self, cohort)]


@dataclass(frozen=True)
class SoftPull(SoftlyPulled, Average):
    """Personal models, pulled towards each other."""

    paper: ClassVar[str] = """@inproceedings{xu2022fedsm,
  title     = {Closing the Generalization Gap of Cross-silo Federated Medical Image Segmentation},
  author    = {Xu, An and Li, Wenqi and Guo, Pengfei and Yang, Dong and Roth, Holger R. and Hatamizadeh, Ali and Zhao, Can
               and Xu, Daguang and Huang, Heng and Xu, Ziyue},
  booktitle = {CVPR},
  year      = {2022}
}"""
