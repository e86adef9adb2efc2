"""FedSM: a super model of the server's model, a personal one for every client, and a selector that knows whose sample it sees.

Xu, Li, Guo, Yang, Roth, Hatamizadeh, Zhao, Xu, Huang, Xu: Closing the Generalization Gap of Cross-silo Federated Medical
Image Segmentation. CVPR 2022, Algorithm 1 (Algorithm 2 of the first author's thesis).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from undrift.algorithms.apfl import Mixture
from undrift.algorithms.base import Adam, Average, Cohort, LocalSGD, Nothing, Served, Stream, Worker, at_least
from undrift.algorithms.ft import FineTuning
from undrift.algorithms.per_fedavg import MetaSteps
from undrift.algorithms.pfedme import MoreauEnvelope
from undrift.algorithms.softpull import check_pull, pull_remarks, pulled
from undrift.core.errors import BadSetting, UnknownName
from undrift.core.trees import map_leaves
from undrift.core.vec import mean
from undrift.oracle.oracle import GradientOracle, LocalData, View

PERSONAL = ("softpull", "ft", "apfl", "per-fedavg", "pfedme")
MODES = ("full_batch_synced", "per_batch")


@dataclass(frozen=True)
class GlobalAndPulled(Worker):
    """Two models on every mini-batch: x_i as in FedAvg, and the client's own v_i, pulled by the server after the round."""

    keep_moments: bool = True
    lam: float = 0.7  # lambda of SoftPull

    personalises: ClassVar[bool] = True

    class Client(NamedTuple):
        own: Stream  # v_i

    class Work(NamedTuple):
        x: Tensor
        k: Tensor
        opt: Any
        own: Stream

    class Up(NamedTuple):
        d: Tensor
        v: Tensor
        statistics: Tensor  # of v's BatchNorm layers

    class Pull(NamedTuple):
        v: Tensor
        statistics: Tensor

    def client_init(self, down: Any, ids: Tensor, buffers: Tensor) -> Any:
        return self.Client(Stream(down.x, torch.zeros_like(down.x[..., :1]), self.rest(down.x), buffers))

    def local_start(self, down: Any, client: Any) -> Any:
        own = client.own if self.keep_moments else client.own._replace(opt=self.rest(client.own.x))
        return self.Work(down.x, torch.zeros_like(down.x[..., :1]), self.rest(down.x), own)

    def local_step(self, down: Any, client: Any, work: Any, oracle: GradientOracle) -> Any:
        own, _ = self.advance(work.own, oracle)  # v_i <- OPT(v_i, grad f_i(v_i))
        return self.move(work, oracle.grad(work.x), oracle)._replace(own=own)  # x_i <- OPT(x_i, grad f_i(x_i))

    def local_end(self, down: Any, client: Any, work: Any) -> tuple[Any, Any]:
        return self.Up(down.x - work.x, work.own.x, work.own.statistics), self.Client(work.own)

    def reply(self, companion: Any, up: Any, buffers: Tensor, cohort: Cohort) -> Any:
        return self.Pull(pulled(up.v, self.lam, cohort), pulled(up.statistics, self.lam, cohort))

    def receive(self, client: Any, reply: Any) -> Any:
        return client._replace(own=client.own._replace(x=reply.v, statistics=reply.statistics))

    def serves(self, down: Any, client: Any, local: LocalData) -> Served:
        return Served(client.own.x, client.own.statistics)

    def check(self, clients: int, cohort: int) -> None:
        super().check(clients, cohort)
        check_pull(self, cohort)

    def remarks(self, rounds: int, cohort: int) -> list[str]:
        return [*super().remarks(rounds, cohort), *pull_remarks(self, cohort)]


class Moments(NamedTuple):
    """Adam's state as it travels: the clients know the number of steps."""

    m: Tensor
    v: Tensor


@dataclass(frozen=True)
class WithSelector(Worker):
    """Any personalisation, and beside it a selector s that learns which client a sample is from.

    A client sees one label only, its own number. So by default (`full_batch_synced`, as in the authors' code) the selector makes
    one step a round, on the gradient of all of the round's samples, and its moments are averaged and sent like its weights;
    `per_batch` is the paper's: a step on every mini-batch.
    """

    keep_moments: bool = True
    personal: str = "softpull"
    lam: float = 0.7  # lambda of softpull, apfl and pfedme
    alpha: float = 0.01  # of per-fedavg
    inner_lr: float = 0.05  # of pfedme
    inner_steps: int = 5  # of pfedme
    begin: int = 90  # of ft
    phase: int = 0  # of ft, set by the run
    selector_model: str = "small-cnn"  # the paper's is vgg11
    selector_lr: float = 1e-3  # eta_s
    selector_mode: str = "full_batch_synced"
    gamma: float = -1.0  # confidence above which a personal model is used; below 0: tuned on validation samples

    personalises: ClassVar[bool] = True
    uploads_apart: ClassVar[bool] = True
    sends_updates: ClassVar[bool] = False
    chooses: ClassVar[str] = "threshold"

    class Companion(NamedTuple):
        own: Any  # of the personalisation
        s: Tensor
        statistics: Tensor
        moments: Any

    class Down(NamedTuple):
        own: Any
        s: Tensor
        statistics: Tensor
        moments: Any

        @property
        def x(self) -> Tensor:
            found: Tensor = self.own.x
            return found

    class Client(NamedTuple):
        own: Any
        id: Tensor  # [..., 1] its number, the selector's label
        opt: Any  # the selector's optimiser, where it makes a step on every mini-batch
        n: Tensor  # [..., 1] steps of the selector

    class Work(NamedTuple):
        own: Any
        s: Stream
        total: Tensor  # sum of the round's gradients, by samples
        samples: Tensor  # [..., 1]

        @property
        def x(self) -> Tensor:
            found: Tensor = self.own.x
            return found

    class Up(NamedTuple):
        own: Any
        s: Tensor
        statistics: Tensor
        moments: Any

    @property
    def inner(self) -> Any:
        """The personalisation, with this algorithm's fields."""
        common = {f.name: getattr(self, f.name) for f in fields(Worker)}
        if self.personal == "softpull":
            return GlobalAndPulled(**common, lam=self.lam)
        if self.personal == "ft":
            return FineTuning(**common, begin=self.begin, phase=self.phase)
        if self.personal == "apfl":
            return Mixture(**common, lam=self.lam)
        if self.personal == "per-fedavg":
            return MetaSteps(**common, alpha=self.alpha)
        return MoreauEnvelope(**common, lam=self.lam, inner_lr=self.inner_lr, inner_steps=self.inner_steps)

    @property
    def chooser(self) -> LocalSGD:
        """What moves the selector: the same base optimiser, at its own rate."""
        return LocalSGD(lr=self.selector_lr, optimizer=self.optimizer, momentum=self.momentum)

    @property
    def synced(self) -> bool:
        return self.selector_mode == "full_batch_synced"

    # The server.
    def networks(self, clients: int) -> dict[str, tuple[str, int]]:
        return {"selector": (self.selector_model, clients)}

    def companion_init(self, x0: Tensor, clients: int) -> Companion:
        return self.Companion(self.inner.companion_init(x0, clients), x0[..., :0], x0[..., :0], Nothing())

    def companion_more(self, companion: Companion, starts: Mapping[str, Served]) -> Companion:
        s, statistics = starts["selector"]
        rest = self.chooser.rest(s) if self.synced else Nothing()
        moments = Moments(rest.m, rest.v) if isinstance(rest, Adam) else rest
        return self.Companion(companion.own, s, statistics, moments)

    def selector(self, companion: Companion) -> Served:
        return Served(companion.s, companion.statistics)

    def broadcast(self, x: Tensor, companion: Companion, invited: Cohort) -> Down:
        return self.Down(self.inner.broadcast(x, companion.own, invited), *companion[1:])

    def gather(self, companion: Companion, up: Up, cohort: Cohort) -> tuple[Tensor, Companion]:
        d, own = self.inner.gather(companion.own, up.own, cohort)
        s, statistics = mean(up.s, cohort.weight), mean(up.statistics, cohort.weight)  # s = sum_i (n_i / n) s_i
        return d, self.Companion(own, s, statistics, map_leaves(lambda t: mean(t, cohort.weight), up.moments))

    def companion_step(self, companion: Companion, up: Up, cohort: Cohort, x_old: Tensor, x_new: Tensor) -> Companion:
        return companion._replace(own=self.inner.companion_step(companion.own, up.own, cohort, x_old, x_new))

    def reply(self, companion: Companion, up: Up, buffers: Tensor, cohort: Cohort) -> Any:
        return self.inner.reply(companion.own, up.own, buffers, cohort)

    def receive(self, client: Client, reply: Any) -> Client:
        return client._replace(own=self.inner.receive(client.own, reply))

    # A client.
    def client_init(self, down: Down, ids: Tensor, buffers: Tensor) -> Client:
        number = ids.to(down.s.dtype).unsqueeze(-1)
        opt = Nothing() if self.synced else self.chooser.rest(down.s)
        return self.Client(self.inner.client_init(down.own, ids, buffers), number, opt, torch.zeros_like(number))

    def local_start(self, down: Down, client: Client) -> Work:
        opt = client.opt
        if self.synced:
            opt = Adam(*down.moments, client.n) if isinstance(down.moments, Moments) else down.moments
        s = Stream(down.s, client.n, opt, down.statistics)
        return self.Work(
            self.inner.local_start(down.own, client.own), s, torch.zeros_like(down.s), torch.zeros_like(client.n)
        )

    def take_moments(self, work: Work, opt: Any) -> Work:
        return work._replace(own=self.inner.take_moments(work.own, opt))

    def left_moments(self, work: Work, opt: Any) -> Any:
        return self.inner.left_moments(work.own, opt)

    def prepare(self, down: Down, client: Client, work: Work, local: LocalData) -> Work:
        return work._replace(own=self.inner.prepare(down.own, client.own, work.own, local))

    def local_step(self, down: Down, client: Client, work: Work, oracle: GradientOracle) -> Any:
        own = self.inner.local_step(down.own, client.own, work.own, oracle)
        if "buffers" in own._fields:
            own = own._replace(buffers=oracle.buffers)
        watching = oracle.other("selector", work.s.statistics)
        g = watching.grad(work.s.x, self.objective, client.id)  # of CE(f_s(s; a), i)
        s = work.s._replace(statistics=watching.buffers)
        if self.synced:
            seen = watching.samples
            return self.Work(own, s, work.total + seen * g, work.samples + seen)
        return work._replace(own=own, s=self.chooser.move(s, g, watching))

    @staticmethod
    def objective(model: View, s: Tensor, inputs: Tensor, targets: Tensor, number: Tensor) -> Tensor:
        return F.cross_entropy(model(s, inputs), number.long().expand(len(inputs)), reduction="none")

    def local_end(self, down: Down, client: Client, work: Work) -> tuple[Up, Client]:
        up, own = self.inner.local_end(down.own, client.own, work.own)
        s, opt = work.s, client.opt
        moments: Any = Nothing()
        if self.synced:
            s = self.chooser.optimise(s, work.total / work.samples)
            moments = Moments(s.opt.m, s.opt.v) if isinstance(s.opt, Adam) else s.opt
        elif self.keep_moments:
            opt = s.opt
        return self.Up(up, s.x, s.statistics, moments), self.Client(own, client.id, opt, s.k)

    def serves(self, down: Down, client: Client, local: LocalData) -> Served:
        found: Served = self.inner.serves(down.own, client.own, local)
        return found

    # What the personalisation decides.
    def at(self, t: int) -> Any:
        return replace(self, phase=self.inner.at(t).phase) if self.personal == "ft" else self

    @property
    def buffers_down(self) -> bool:
        return bool(self.inner.buffers_down)

    @property
    def buffers_up(self) -> bool:
        return bool(self.inner.buffers_up)

    def remarks(self, rounds: int, cohort: int) -> list[str]:
        found: list[str] = self.inner.remarks(rounds, cohort)
        return found

    def check(self, clients: int, cohort: int) -> None:
        for field, allowed in (("personal", PERSONAL), ("selector_mode", MODES)):
            if getattr(self, field) not in allowed:
                raise UnknownName(f"value of {field}", str(getattr(self, field)), allowed)
        self.inner.check(clients, cohort)
        at_least(self, 0.0, "selector_lr")
        if not self.gamma <= 1:
            raise BadSetting(f"gamma must be at most 1, not {self.gamma}; below 0 it is tuned on validation samples")


@dataclass(frozen=True)
class FedSM(WithSelector, Average):
    """x and s are averaged (by size, with --weights size), the v_i pulled, and the selector chooses among them."""

    paper: ClassVar[str] = """@inproceedings{xu2022fedsm,
  title     = {Closing the Generalization Gap of Cross-silo Federated Medical Image Segmentation},
  author    = {Xu, An and Li, Wenqi and Guo, Pengfei and Yang, Dong and Roth, Holger R. and Hatamizadeh, Ali and Zhao, Can
               and Xu, Daguang and Huang, Heng and Xu, Ziyue},
  booktitle = {CVPR},
  year      = {2022}
}"""
