"""FedSM-extra: the models first, and then, in extra rounds, a selector that learns which of them is best for a sample.

Xu, Li, Guo, Yang, Roth, Hatamizadeh, Zhao, Xu, Huang, Xu: Closing the Generalization Gap of Cross-silo Federated Medical
Image Segmentation. CVPR 2022, section 3.1 (Algorithm 6 of the first author's thesis).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from undrift.algorithms.base import Average, Cohort, LocalSGD, Served, Stream, at_least, standing_still
from undrift.algorithms.fedsm import GlobalAndPulled
from undrift.core.trees import nbytes
from undrift.core.vec import mean
from undrift.oracle.oracle import GradientOracle, View


@dataclass(frozen=True)
class ThenSelector(GlobalAndPulled):
    """Rounds 0 .. begin - 1 train x and the v_i as FedSM does; then they are frozen and the selector s is trained by FedAvg.

    Its label is the model with the least loss on the sample: 0 for the server's, k for client k's.
    """

    begin: int = 67  # R, rounds that train the models: two thirds of 100
    phase: int = 0  # set by the run. 0: models; 1: the first extra round, when all models go to everybody; 2: later
    selector_model: str = "small-cnn"  # the paper's is vgg11
    selector_lr: float = 1e-3  # eta_s

    uploads_apart: ClassVar[bool] = True
    sends_updates: ClassVar[bool] = False  # not in the extra rounds
    chooses: ClassVar[str] = "argmax"

    class Companion(NamedTuple):
        v: Tensor  # [N, P] everybody's model
        statistics: Tensor  # [N, Q] and its BatchNorm statistics
        s: Tensor
        s_statistics: Tensor

    class Down(NamedTuple):
        x: Tensor
        s: Tensor
        s_statistics: Tensor
        models: Tensor  # [N P] v_1, v_2, ... one after another; [0] while they are trained
        statistics: Tensor  # [N Q]

    class Member(NamedTuple):
        own: Stream
        s_opt: Any  # the selector's optimiser

    class Choice(NamedTuple):
        """What goes up in an extra round."""

        s: Tensor
        s_statistics: Tensor

    class Silence(NamedTuple):
        """What the server replies in an extra round."""

    @property
    def chooser(self) -> LocalSGD:
        return LocalSGD(lr=self.selector_lr, optimizer=self.optimizer, momentum=self.momentum)

    def at(self, t: int) -> Any:
        return replace(self, phase=0 if t < self.begin else 1 if t == self.begin else 2)

    def selects(self, rounds: int) -> bool:
        return rounds > self.begin

    # The server.
    def networks(self, clients: int) -> dict[str, tuple[str, int]]:
        return {"selector": (self.selector_model, clients + 1)}

    def companion_init(self, x0: Tensor, clients: int) -> Companion:
        none = x0[..., :0]
        return self.Companion(x0.expand(clients, -1).clone(), none.expand(clients, 0), none, none)

    def companion_more(self, companion: Companion, starts: Mapping[str, Served]) -> Companion:
        s, statistics = starts["selector"]
        own = starts["model"].buffers.expand(len(companion.v), -1).clone()
        return companion._replace(statistics=own, s=s, s_statistics=statistics)

    def selector(self, companion: Companion) -> Served:
        return Served(companion.s, companion.s_statistics)

    def broadcast(self, x: Tensor, companion: Companion, invited: Cohort) -> Down:
        v, statistics = companion.v.flatten(-2), companion.statistics.flatten(-2)
        if not self.phase:
            v, statistics = v[..., :0], statistics[..., :0]
        return self.Down(x, companion.s, companion.s_statistics, v, statistics)

    def bytes_down(self, down: Down, invited: int, returning: int, clients: int) -> int:
        if not self.phase:
            return invited * nbytes(down.x)
        once = (clients + 1) * nbytes(down.x) + nbytes(down.statistics)  # x and all v_k
        return invited * (nbytes((down.s, down.s_statistics)) + (once if self.phase == 1 else 0))

    @property
    def buffers_down(self) -> bool:
        return self.phase < 2

    @property
    def buffers_up(self) -> bool:
        return self.phase == 0

    def gather(self, companion: Companion, up: Any, cohort: Cohort) -> tuple[Tensor, Companion]:
        if self.phase:
            s, statistics = mean(up.s, cohort.weight), mean(up.s_statistics, cohort.weight)
            return standing_still(cohort), companion._replace(s=s, s_statistics=statistics)
        after = self.reply(companion, up, up.statistics, cohort)
        return mean(up.d, cohort.weight), companion._replace(
            v=put(companion.v, after.v, cohort), statistics=put(companion.statistics, after.statistics, cohort)
        )

    def reply(self, companion: Companion, up: Any, buffers: Tensor, cohort: Cohort) -> Any:
        return self.Silence() if self.phase else super().reply(companion, up, buffers, cohort)

    def receive(self, client: Member, reply: Any) -> Member:
        found: ThenSelector.Member = client if self.phase else super().receive(client, reply)
        return found

    # A client.
    def client_init(self, down: Down, ids: Tensor, buffers: Tensor) -> Member:
        own = super().client_init(down, ids, buffers).own
        return self.Member(own, self.chooser.rest(down.s))

    def local_start(self, down: Down, client: Member) -> Any:
        if not self.phase:
            return super().local_start(down, client)
        opt = client.s_opt if self.keep_moments else self.chooser.rest(down.s)
        return Stream(down.s, torch.zeros_like(down.s[..., :1]), opt, down.s_statistics)

    def take_moments(self, work: Any, opt: Any) -> Any:
        return work if self.phase else super().take_moments(work, opt)

    def left_moments(self, work: Any, opt: Any) -> Any:
        return opt if self.phase else super().left_moments(work, opt)

    def local_step(self, down: Down, client: Member, work: Any, oracle: GradientOracle) -> Any:
        if not self.phase:
            return super().local_step(down, client, work, oracle)
        watching = oracle.other("selector", work.statistics)
        known = oracle.values(down.x, self.known, down.models, oracle.buffers, down.statistics)
        g = watching.grad(work.x, self.objective, known.flatten(-2))
        oracle.loss = watching.loss
        return self.chooser.move(work, g, watching)._replace(statistics=watching.buffers)

    @staticmethod
    def known(
        model: View, x: Tensor, inputs: Tensor, targets: Tensor, v: Tensor, buffers: Tensor, statistics: Tensor
    ) -> Tensor:
        """[B, N + 1] each model's loss on each sample."""
        outputs = of_all(model, x, inputs, v, buffers, statistics)
        return torch.stack([model.loss(h, targets) for h in outputs], -1)

    @staticmethod
    def objective(model: View, s: Tensor, inputs: Tensor, targets: Tensor, known: Tensor) -> Tensor:
        best = known.view(len(inputs), -1).argmin(-1)  # one_hot(argmin_k L(h_k, y))
        return F.cross_entropy(model(s, inputs), best, reduction="none")

    def local_end(self, down: Down, client: Member, work: Any) -> tuple[Any, Any]:
        if self.phase:
            return self.Choice(work.x, work.statistics), client._replace(s_opt=work.opt)
        up, _ = super().local_end(down, client, work)
        return up, client._replace(own=work.own)

    def check(self, clients: int, cohort: int) -> None:
        super().check(clients, cohort)
        at_least(self, 0, "begin")
        at_least(self, 0.0, "selector_lr")


def of_all(model: View, x: Tensor, inputs: Tensor, v: Tensor, buffers: Tensor, statistics: Tensor) -> list[Tensor]:
    """The outputs h_0, h_1, ... of the server's model and of everybody's, in evaluation mode."""
    models = [x, *v.split(x.shape[-1])]
    own = [buffers, *(statistics.split(buffers.shape[-1]) if len(buffers) else [buffers] * (len(models) - 1))]
    return [model.still(each, its, inputs) for each, its in zip(models, own, strict=True)]


def put(rows: Tensor, new: Tensor, cohort: Cohort) -> Tensor:
    """rows [..., N, P] with those of the cohort replaced by new [..., S, P]."""
    if not new.shape[-1]:
        return rows
    number = torch.arange(rows.shape[-2], device=rows.device).unsqueeze(-1)
    taken = (number == cohort.ids.unsqueeze(-2)).to(new.dtype)  # [..., N, S]
    if cohort.there is not None:
        taken = taken * cohort.there.transpose(-1, -2)
    return torch.where(taken.sum(-1, keepdim=True) > 0, taken @ new, rows)


@dataclass(frozen=True)
class FedSMExtra(ThenSelector, Average):
    """Models first, the selector afterwards."""

    paper: ClassVar[str] = """@inproceedings{xu2022fedsm,
  title     = {Closing the Generalization Gap of Cross-silo Federated Medical Image Segmentation},
  author    = {Xu, An and Li, Wenqi and Guo, Pengfei and Yang, Dong and Roth, Holger R. and Hatamizadeh, Ali and Zhao, Can
               and Xu, Daguang and Huang, Heng and Xu, Ziyue},
  booktitle = {CVPR},
  year      = {2022}
}"""
