"""FedSM: a super model of the server's model, a personal one for every client, and a selector that knows whose sample it sees.

Xu, Li, Guo, Yang, Roth, Hatamizadeh, Zhao, Xu, Huang, Xu: Closing the Generalization Gap of Cross-silo Federated Medical
Image Segmentation. CVPR 2022, Algorithm 1 (Algorithm 2 of the first author's thesis)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from undrift.algorithms.apfl import Mixture
from undrift.algorithms.base import Average, Cohort, GradientOracle, LocalData, Nothing, State, Worker
from undrift.algorithms.checks import at_least
from undrift.algorithms.ft import FineTuning
from undrift.algorithms.optimise import FILES
from undrift.algorithms.optimise.adam import Adam
from undrift.algorithms.per_fedavg import MetaSteps
from undrift.algorithms.personal import SelectorVec, Served, Stream
from undrift.algorithms.pfedme import MoreauEnvelope
from undrift.algorithms.pulled import GlobalAndPulled
from undrift.algorithms.wrapper import WorkerWrapper
from undrift.core.errors import BadSetting
from undrift.core.layout import Layout
from undrift.core.trees import map_leaves, nbytes
from undrift.core.vec import mean
from undrift.oracle.oracle import View


@dataclass(frozen=True)
class WithSelector(WorkerWrapper):
    """Any personalisation, the `inner` method, and a selector s that learns which client a sample is from.

    `full_batch_synced` (the authors' code): one step per round on the gradient of all samples, with moments that are averaged
    and sent like the weights, because a client sees only one label. `per_batch` (the paper): a step on every mini-batch.
    """

    keep_moments: bool = True
    personal: Literal["softpull", "ft", "apfl", "per-fedavg", "pfedme"] = "softpull"
    lam: float = 0.7  # lambda of softpull, apfl and pfedme
    alpha: float = 0.01  # for per-fedavg
    inner_lr: float = 0.05  # for pfedme
    inner_steps: int = 5  # for pfedme
    begin: int = 90  # for ft
    phase: int = 0  # for ft, set by the run
    selector_model: str = "small-cnn"  # the paper's is vgg11
    selector_lr: float = 1e-3  # eta_s
    selector_mode: Literal["full_batch_synced", "per_batch"] = "full_batch_synced"
    selector_weights: Literal["cohort", "uniform"] = "cohort"  # how clients weigh in s; the paper's are those of x
    gamma: float = -1.0  # confidence above which a personal model is used; below 0: tuned on validation samples
    thresholds: Literal["one", "each"] = "one"  # tune one gamma, or one for each client's model; the paper's is one

    personalises: ClassVar[bool] = True
    uploads_apart: ClassVar[bool] = True
    sends_updates: ClassVar[bool] = False
    chooses: ClassVar[str] = "threshold"
    extends: ClassVar[frozenset[str]] = frozenset({"companion", "down", "client", "work", "up"})

    class Message(NamedTuple):  # the companion, and the messages in both directions
        inner: State
        s: SelectorVec
        statistics: Tensor
        moments: Annotated[State, "selector"]  # the optimiser's m and v, or b, if the selector is synced

        @property
        def x(self) -> Tensor:
            return self.inner.x

    class Client(NamedTuple):
        inner: State
        id: Tensor  # [..., 1] the client's number, the selector's label
        opt: State  # the selector's optimiser with per_batch
        n: Tensor  # [..., 1] steps of the selector

    class Work(NamedTuple):
        inner: State
        s: Stream
        total: Tensor  # sum of the round's gradients, by samples
        samples: Tensor  # [..., 1]

        @property
        def x(self) -> Tensor:
            return self.inner.x

    @cached_property
    def inner(self) -> State:
        """The personalisation, with the fields that it shares with this method."""
        names = dict[str, type[Worker]](ft=FineTuning, apfl=Mixture, pfedme=MoreauEnvelope) | {"per-fedavg": MetaSteps}
        kind, ours = names.get(self.personal, GlobalAndPulled), {f.name for f in fields(self)}
        return kind(**{f.name: getattr(self, f.name) for f in fields(kind) if f.name in ours})

    @property
    def synced(self) -> bool:
        return self.selector_mode == "full_batch_synced"

    def moments(self, opt: State) -> State:
        """The part of the selector's optimiser that travels; clients know Adam's number of steps."""
        sent = opt._replace(n=opt.n[..., :0]) if isinstance(opt, Adam) else opt
        return sent if self.synced else Nothing()

    def step_selector(self, s: Stream, g: Tensor) -> Stream:
        """The selector after one step of the base optimiser at `selector_lr`; to Muon none of its tensors is a matrix."""
        whole = Layout(("selector",), (s.x.shape[-1:],))
        x, opt = FILES[self.optimizer].step(replace(self, lr=self.selector_lr), s.x, s.opt, g, whole)
        return s._replace(x=x, k=s.k + 1, opt=opt)

    def networks(self, clients: int) -> dict[str, tuple[str, int]]:
        return {"selector": (self.selector_model, clients)}

    def selects(self, rounds: int) -> bool:
        return True

    def companion_init(self, x0: Tensor, clients: int) -> Message:
        return self.Message(self.inner.companion_init(x0, clients), x0[..., :0], x0[..., :0], Nothing())

    def companion_networks(self, companion: Message, starts: Mapping[str, Served]) -> Message:
        return self.Message(companion.inner, *starts["selector"], self.moments(self.rest(starts["selector"][0])))

    def selector(self, companion: Message) -> Served:
        return Served(companion.s, companion.statistics)

    def broadcast(self, x: Tensor, companion: Message, invited: Cohort) -> Message:
        return companion._replace(inner=self.inner.broadcast(x, companion.inner, invited))

    def bytes_down(self, down: Message, invited: int, returning: int, clients: int) -> int:
        return self.inner.bytes_down(down.inner, invited, returning, clients) + invited * nbytes(down[1:])

    def gather(self, companion: Message, up: Message, cohort: Cohort) -> tuple[Tensor, Message]:
        d, inner = self.inner.gather(companion.inner, up.inner, cohort)
        weight = cohort.uniform if self.selector_weights == "uniform" else cohort.weight
        averaged = map_leaves(lambda t: mean(t, weight), up._replace(inner=Nothing()))  # s = sum_i (n_i / n) s_i
        return d, averaged._replace(inner=inner)

    def client_init(self, down: Message, ids: Tensor, buffers: Tensor) -> Client:
        number = ids.to(down.s.dtype).unsqueeze(-1)
        inner, opt = self.inner.client_init(down.inner, ids, buffers), Nothing() if self.synced else self.rest(down.s)
        return self.Client(inner, number, opt, torch.zeros_like(number))

    def local_start(self, down: Message, client: Client, local: LocalData) -> Work:
        moments = down.moments._replace(n=client.n) if isinstance(down.moments, Adam) else down.moments
        s = Stream(down.s, client.n, moments if self.synced else client.opt, down.statistics)
        inner = self.inner.local_start(down.inner, client.inner, local)
        return self.Work(inner, s, torch.zeros_like(down.s), torch.zeros_like(client.n))

    def local_step(self, down: Message, client: Client, work: Work, oracle: GradientOracle) -> Work:
        inner = self.inner.local_step(down.inner, client.inner, work.inner, oracle)
        watching = oracle.other("selector", work.s.statistics)
        g = watching.grad(work.s.x, self.objective, client.id)  # the gradient of CE(f_s(s; a), i)
        s, seen = work.s._replace(statistics=watching.buffers), watching.samples
        if self.synced:
            return self.Work(inner, s, work.total + seen * g, work.samples + seen)
        return work._replace(inner=inner, s=self.step_selector(s, g))

    @staticmethod
    def objective(model: View, s: Tensor, inputs: Tensor, targets: Tensor, number: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(model(s, inputs), number.long().expand(len(inputs)), reduction="none")

    def local_end(self, down: Message, client: Client, work: Work) -> tuple[Message, Client]:
        up, inner = self.inner.local_end(down.inner, client.inner, work.inner)
        s = self.step_selector(work.s, work.total / work.samples) if self.synced else work.s
        opt = s.opt if self.keep_moments and not self.synced else client.opt
        return self.Message(up, s.x, s.statistics, self.moments(s.opt)), self.Client(inner, client.id, opt, s.k)

    def at(self, t: int) -> WithSelector:
        return replace(self, phase=self.inner.at(t).phase) if self.personal == "ft" else self

    def check(self, clients: int, cohort: int) -> None:
        super().check(clients, cohort)
        at_least(self, 0.0, "selector_lr")
        if not self.gamma <= 1 or (self.thresholds == "each" and self.gamma >= 0):
            raise BadSetting(f"gamma must be at most 1, and below 0 (tuned) with thresholds=each, not {self.gamma}")


@dataclass(frozen=True)
class FedSM(WithSelector, Average):
    """x and s are averaged (by size, with --weights size), the v_i pulled, and the selector chooses among them."""
