"""FedSM-extra: the models first, and then, in extra rounds, a selector that learns which of them is best for a sample.

Xu, Li, Guo, Yang, Roth, Hatamizadeh, Zhao, Xu, Huang, Xu: Closing the Generalization Gap of Cross-silo Federated Medical
Image Segmentation. CVPR 2022, section 3.1 (Algorithm 6 of the first author's thesis).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from undrift.algorithms.base import Algorithm, Average, Cohort, GradientOracle, LocalData, Nothing, State, Vec
from undrift.algorithms.checks import at_least
from undrift.algorithms.optimise import FILES, LocalOptimizer
from undrift.algorithms.personal import SelectorVec, Served, Stream, put, stand_still
from undrift.algorithms.pulled import GlobalAndPulled
from undrift.algorithms.wrapper import Wrapper
from undrift.core.trees import nbytes
from undrift.core.vec import mean
from undrift.oracle.oracle import View


@dataclass(frozen=True)
class ThenSelector(GlobalAndPulled):
    """Rounds 0 .. begin - 1 train x and the v_i as in FedSM; later rounds are an `ExtraRound`.

    The selector's label is the model with the least loss on the sample: 0 for the server's, k for client k's.
    """

    begin: int = 67  # R, rounds that train the models: two thirds of 100
    selector_model: str = "small-cnn"  # the paper's is vgg11
    selector_lr: float = 1e-3  # eta_s

    uploads_apart: ClassVar[bool] = True
    sends_updates: ClassVar[bool] = False  # not in the extra rounds
    chooses: ClassVar[str] = "argmax"

    class Companion(NamedTuple):
        v: Vec  # [N, P] the clients' models
        statistics: Tensor  # [N, Q] their BatchNorm statistics
        s: SelectorVec
        s_statistics: Tensor

    class Down(NamedTuple):
        x: Vec
        s: SelectorVec
        s_statistics: Tensor
        models: Tensor  # [N P] v_1, v_2, ... one after another; [0] while they are trained
        statistics: Tensor  # [N Q]

    class Client(NamedTuple):
        own: Stream
        s_opt: State  # the selector's optimiser

    def at(self, t: int) -> ThenSelector | ExtraRound:
        return self if t < self.begin else ExtraRound(cast(Algorithm, self))

    def selects(self, rounds: int) -> bool:
        return rounds > self.begin

    def networks(self, clients: int) -> dict[str, tuple[str, int]]:
        return {"selector": (self.selector_model, clients + 1)}

    def companion_init(self, x0: Tensor, clients: int) -> Companion:
        none = x0[..., :0]
        return self.Companion(x0.expand(clients, -1).clone(), none.expand(clients, 0), none, none)

    def companion_networks(self, companion: Companion, starts: Mapping[str, Served]) -> Companion:
        s, statistics = starts["selector"]
        own = starts["model"].buffers.expand(len(companion.v), -1).clone()
        return companion._replace(statistics=own, s=s, s_statistics=statistics)

    def selector(self, companion: Companion) -> Served:
        return Served(companion.s, companion.s_statistics)

    def broadcast(self, x: Tensor, companion: Companion, invited: Cohort) -> Down:
        return self.Down(x, companion.s, companion.s_statistics, x[..., :0], x[..., :0])

    def bytes_down(self, down: Down, invited: int, returning: int, clients: int) -> int:
        return invited * nbytes(down.x)

    def client_init(self, down: Down, ids: Tensor, buffers: Tensor) -> Client:
        own = Stream(down.x, torch.zeros_like(down.x[..., :1]), self.rest(down.x), buffers)
        return self.Client(own, self.rest(down.s))

    def gather(self, companion: Companion, up: GlobalAndPulled.Up, cohort: Cohort) -> tuple[Tensor, Companion]:
        pull = self.reply(companion, up, up.statistics, cohort)
        statistics = put(companion.statistics, pull.statistics, cohort)
        return mean(up.d, cohort.weight), companion._replace(v=put(companion.v, pull.v, cohort), statistics=statistics)

    @staticmethod
    def score_models(model: View, h: Tensor, targets: Tensor) -> Tensor:
        """[B, N + 1] each model's loss on each sample."""
        return model.losses(h, targets)

    @staticmethod
    def objective(model: View, s: Tensor, inputs: Tensor, targets: Tensor, known: Tensor) -> Tensor:
        best = known.view(len(inputs), -1).argmin(-1)  # one_hot(argmin_k L(h_k, y))
        return F.cross_entropy(model(s, inputs), best, reduction="none")

    def check(self, clients: int, cohort: int) -> None:
        super().check(clients, cohort)
        at_least(self, 0, "begin")
        at_least(self, 0.0, "selector_lr")


class ExtraRound(Wrapper):
    """A round in which the models of `inner` are frozen and the selector s is trained by FedAvg."""

    class Up(NamedTuple):
        s: SelectorVec
        s_statistics: Tensor

    def at(self, t: int) -> State:
        return self.inner.at(t)

    @property
    def stands_still(self) -> bool:
        return True

    @property
    def since(self) -> int | None:
        return int(self.inner.begin)

    def buffers_down(self, invited: int, returning: int) -> int:
        return invited - returning

    @property
    def buffers_up(self) -> bool:
        return False

    def broadcast(self, x: Tensor, companion: ThenSelector.Companion, invited: Cohort) -> ThenSelector.Down:
        models, statistics = companion.v.flatten(-2), companion.statistics.flatten(-2)
        return ThenSelector.Down(x, companion.s, companion.s_statistics, models, statistics)

    def bytes_down(self, down: ThenSelector.Down, invited: int, returning: int, clients: int) -> int:
        once = (clients + 1) * nbytes(down.x) + nbytes(down.statistics)  # x and all v_k, to those without them
        return invited * nbytes((down.s, down.s_statistics)) + (invited - returning) * once

    def local_start(self, down: ThenSelector.Down, client: ThenSelector.Client, local: LocalData) -> Stream:
        opt = client.s_opt if self.keep_moments else self.rest(down.s)
        return Stream(down.s, torch.zeros_like(down.s[..., :1]), opt, down.s_statistics)

    def local_step(
        self, down: ThenSelector.Down, client: ThenSelector.Client, work: Stream, oracle: GradientOracle
    ) -> Stream:
        watching = oracle.other("selector", work.statistics)
        v = down.models.unflatten(-1, (-1, down.x.shape[-1]))  # [..., N, P]
        statistics = down.statistics.unflatten(-1, (v.shape[-2], -1))
        known = oracle.answers(self.inner.score_models, down.x, v, statistics)
        g = watching.grad(work.x, self.inner.objective, known.flatten(-2))
        oracle.loss = watching.loss
        lr, epsilon = self.inner.selector_lr, self.epsilon
        rates = LocalOptimizer(lr=lr, momentum=self.momentum, momentum2=self.momentum2, epsilon=epsilon)
        s, opt = FILES[self.optimizer].step(rates, work.x, work.opt, g, watching.layout)
        return Stream(s, work.k + 1, opt, watching.buffers)

    def local_end(
        self, down: ThenSelector.Down, client: ThenSelector.Client, work: Stream
    ) -> tuple[Up, ThenSelector.Client]:
        return self.Up(work.x, work.statistics), client._replace(s_opt=work.opt)

    def gather(
        self, companion: ThenSelector.Companion, up: Up, cohort: Cohort
    ) -> tuple[Tensor, ThenSelector.Companion]:
        s, statistics = mean(up.s, cohort.weight), mean(up.s_statistics, cohort.weight)
        return stand_still(cohort), companion._replace(s=s, s_statistics=statistics)

    def reply(self, companion: State, up: Up, buffers: Tensor, cohort: Cohort) -> Nothing:
        return Nothing()

    def receive(self, client: ThenSelector.Client, reply: Nothing) -> ThenSelector.Client:
        return client

    def take_moments(self, client: ThenSelector.Client, work: Stream, opt: State) -> Stream:
        return work

    def leave_moments(self, work: Stream, opt: State) -> State:
        return opt


@dataclass(frozen=True)
class FedSMExtra(ThenSelector, Average):
    """Models first, the selector afterwards."""
