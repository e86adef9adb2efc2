"""The simulator: one federation, one algorithm, one round at a time."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from undrift.algorithms.base import Algorithm, Cohort, check
from undrift.data.batches import Plan, Table
from undrift.data.federation import Federation
from undrift.errors import BadSetting
from undrift.net import Net
from undrift.round import RoundRecord, consistency, fill, finite, server_init, server_part
from undrift.simulate.clients import ClientTable
from undrift.simulate.evaluate import Metric, client_scores, forgetting, group_means, means, sample_scores
from undrift.simulate.execute import Execution, RoundWork, check_labels, check_repeatable, choose, keep_freed_memory
from undrift.simulate.ranks import agreed, over_ranks
from undrift.streams import Purpose, fold, sample, stream, uniform
from undrift.vec import map_leaves, nbytes


@dataclass(frozen=True)
class Settings:
    """How rounds are run, apart from what is trained on what."""

    cohort: int
    plan: Plan
    seed: int = 0
    weights: str = "uniform"  # or size: n_i / sum of the cohort's n_i
    eval_every: int = 1
    execution: str = "auto"  # or stacked, or pool
    chunk: int = 0  # clients stacked at a time; 0: as many as fit in memory
    lr_decay: float = 1.0  # the local rate is multiplied by this after every round
    lr_drops: tuple[int, ...] = ()  # and by lr_drop after these rounds
    lr_drop: float = 0.1
    sampling: str = "fixed"  # or bernoulli: every client with probability cohort / clients
    dropout_rate: float = 0.0  # how often an invited client fails to answer
    slow: tuple[float, float] = (0.0, 1.0)  # how often a client makes only that share of its steps
    bandwidth: float = 0.0  # Mbit/s of each client's link, for simulated seconds; 0: infinite
    latency: float = 0.0  # seconds of each message
    client_eval_every: int = 0  # rounds between scores on the clients' own samples; 0: only in the last round

    def schedule(self, t: int) -> float:
        """What the local rate of round t (counted from 0) is multiplied by."""
        return float(self.lr_decay**t * self.lr_drop ** sum(t >= drop for drop in self.lr_drops))


class Simulation:
    """A run in memory. `round()` advances it and returns the round's record; `tensors()` is all that a checkpoint needs."""

    def __init__(
        self,
        alg: Algorithm,
        net: Net,
        data: Federation,
        settings: Settings,
        metrics: Mapping[str, Metric],
        device: torch.device,
    ) -> None:
        if not 1 <= settings.cohort <= data.clients:
            raise BadSetting(f"cohort must lie between 1 and the {data.clients} clients, not {settings.cohort}")
        check(alg, data.clients, data.clients if settings.sampling == "bernoulli" else settings.cohort)
        taken = [name for name in metrics if name in RoundRecord._fields and name != "accuracy"]
        if taken:
            raise BadSetting(
                f"a metric cannot be called {taken[0]!r}, which the record uses itself; give it another name"
            )
        self.alg, self.net, self.data, self.settings, self.metrics = alg, net.to(device), data, settings, metrics
        self.device = device
        self.t = 0
        x0, buffers = (v.to(device) for v in net.start())
        self.state = server_init(alg, net, x0, buffers, data.clients)
        self.clients = ClientTable()
        self.position = np.zeros(data.clients, dtype=np.int64)  # batches each client has taken so far
        self.last_cohort = np.zeros(0, dtype=np.int64)  # who took part in the round before
        self.class_best = torch.full((data.classes,), -1.0, dtype=torch.float64)  # accuracy so far; -1: none
        self.execution: Execution | None = None
        if device.type == "cpu":
            keep_freed_memory()

    def draw(self) -> tuple[Tensor, Tensor]:
        """The cohort of this round: its ids in rising order, and each one's place in the order of sampling."""
        settings, clients = self.settings, self.data.clients
        key = stream(settings.seed, Purpose.COHORT, self.t)
        if settings.sampling == "fixed":
            ids = torch.tensor(sample(key, clients, settings.cohort))
            order = ids.argsort()
            return ids[order].to(self.device), order.to(self.device)
        ids = torch.zeros(0, dtype=torch.int64)
        while not len(ids):  # an empty cohort is drawn again
            ids = (self.chances(key, torch.arange(clients)) < settings.cohort / clients).nonzero().squeeze(-1)
            key += 1
        return ids.to(self.device), torch.arange(len(ids), device=self.device)

    @staticmethod
    def chances(key: int, ids: Tensor) -> Tensor:
        """A number in [0, 1) for each client."""
        return uniform(fold(key, ids))

    def round(self, last: bool = False) -> RoundRecord:
        """One round; `last` asks for an evaluation whatever the interval is."""
        began = time.perf_counter()
        ids, drawn = self.draw()
        invited_ids = ids
        if self.settings.dropout_rate:
            answering = self.chances(self.key(Purpose.FAILURE), ids) >= self.settings.dropout_rate
            ids, drawn = ids[answering], drawn[answering]
        if not len(ids):
            return self.nothing_happened(len(invited_ids), began, last)
        host_ids = ids.cpu().numpy()
        table = self.data.table(self.settings.plan, self.settings.seed, self.t, host_ids, self.position[host_ids])
        chance, share = self.settings.slow
        if chance:
            slow = self.chances(self.key(Purpose.SLOWNESS), ids).cpu().numpy() < chance
            fewer = np.maximum(1, np.rint(share * table.steps)).astype(np.int64)
            table = shortened(table, np.where(slow, fewer, table.steps))
        work = RoundWork(self.net, self.data, self.settings.seed, self.t, ids, table, self.settings.plan.batch)

        alg = self.algorithm()
        steps = torch.from_numpy(table.steps).to(self.device)
        invited = self.cohort(alg, ids, drawn, steps)
        down = alg.broadcast(self.state.x, self.state.companion, invited)
        fresh = fill(
            alg.client_init(map_leaves(lambda v: v.unsqueeze(-2), down), ids, self.state.buffers.unsqueeze(-2)),
            ids.shape,
        )
        client = self.clients.read(ids, fresh)
        if self.execution is None:
            check_labels(self.net, self.state.x, self.state.buffers, work)
            check_repeatable(self.net, self.state.x, self.state.buffers, work)
            where = (self.net, self.state.x, self.state.buffers, work)
            self.execution = agreed(
                self.settings.execution,
                self.settings.chunk,
                self.device,
                lambda name, chunk: choose(name, chunk, alg, down, client, *where),
            )
            work.gradients = 0  # only the round itself counts
        state, sent, fine = self.state, None, torch.ones_like(ids, dtype=torch.bool)
        if alg.measures:  # two exchanges: measure at x_t, then train with what the server made of it
            sent = over_ranks(self.execution).measure(alg, down, self.state.buffers, work)
            fine = sent.isfinite().all(-1)
            measuring = self.cohort(alg, ids[fine], drawn[fine], steps[fine])
            if bool(fine.any()):
                state = state._replace(companion=alg.measured(state.companion, sent[fine], measuring))
            down = alg.broadcast(state.x, state.companion, invited)
        answers = over_ranks(self.execution)(alg, down, client, self.state.buffers, work)

        bytes_up = nbytes(answers.up) + nbytes(answers.buffers) + (0 if sent is None else nbytes(sent))
        # In the first round nobody lacks anything of a round before.
        returning = len(set(invited_ids.tolist()) & set(self.last_cohort.tolist())) if self.t else len(invited_ids)
        asked = len(invited_ids)
        bytes_down = alg.bytes_down(down, asked, returning, self.data.clients) + asked * nbytes(self.state.buffers)

        # A client whose update is not finite is dropped: its state stays as it was, the others' weights add up to one.
        good = finite(answers) & fine
        kept = len(ids) if bool(good.all()) else int(good.sum())
        if kept < len(ids):
            answers = map_leaves(lambda v: v[good], answers)
        cohort = self.cohort(alg, ids[good], drawn[good], steps[good])
        if kept:
            self.state = server_part(alg, self.net, state, answers, cohort)
            self.clients.write(cohort.ids, answers.client)
            self.last_cohort = host_ids
        self.position[host_ids[good.cpu().numpy()]] += table.steps[good.cpu().numpy()]

        self.t += 1
        scores = self.evaluate(ids, last)
        return RoundRecord(
            round=self.t,
            loss=scores.pop("loss", None),
            accuracy=scores.pop("accuracy", None),
            bytes_down=bytes_down,
            bytes_up=bytes_up,
            gradients=work.gradients,
            consistency=float(consistency(answers)) if kept else 0.0,
            seconds=time.perf_counter() - began,
            train_loss=float(answers.loss.mean()) if kept else float("nan"),
            clients=len(invited_ids),
            dropped=len(invited_ids) - kept,
            more=scores
            | ({name: float(fact.mean()) for name, fact in answers.facts._asdict().items()} if kept else {})
            | self.facts(bytes_down / len(invited_ids) + bytes_up / len(ids), 2 if alg.measures else 1),
        )

    def key(self, purpose: Purpose) -> int:
        return stream(self.settings.seed, purpose, self.t)

    def facts(self, bytes_per_client: float, exchanges: int) -> dict[str, float]:
        """The algorithm's own numbers, and how long the messages of a round would take."""
        facts = {name: float(value) for name, value in self.alg.facts(self.state.server).items()}
        if self.settings.bandwidth or self.settings.latency:
            sending = bytes_per_client * 8 / (self.settings.bandwidth * 1e6) if self.settings.bandwidth else 0.0
            facts["network_seconds"] = 2 * exchanges * self.settings.latency + sending
        return facts

    def nothing_happened(self, invited: int, began: float, last: bool) -> RoundRecord:
        """The record of a round in which nobody answered: all state stays as it is."""
        self.t += 1
        scores = self.evaluate(torch.zeros(0, dtype=torch.int64, device=self.device), last)
        loss, accuracy = scores.pop("loss", None), scores.pop("accuracy", None)
        seconds = time.perf_counter() - began
        more = scores | self.facts(0.0, 1)
        return RoundRecord(self.t, loss, accuracy, 0, 0, 0, 0.0, seconds, float("nan"), invited, invited, more)

    def algorithm(self) -> Algorithm:
        """The algorithm with this round's local rate."""
        rate = self.settings.schedule(self.t)
        return self.alg if rate == 1.0 else replace(self.alg, lr=self.alg.lr * rate)

    def cohort(self, alg: Algorithm, ids: Tensor, drawn: Tensor, steps: Tensor) -> Cohort:
        size = torch.from_numpy(self.data.sizes)[ids.cpu()].to(self.state.x).unsqueeze(-1)
        weight = size if self.settings.weights == "size" else torch.ones_like(size)
        return Cohort(
            ids, drawn, weight / weight.sum(-2, keepdim=True), steps.to(self.state.x).unsqueeze(-1), alg.lr,
            self.data.clients, self.t, self.net.layout,
        )  # fmt: skip

    def evaluate(self, cohort: Tensor, last: bool) -> dict[str, float]:
        """What is due after this round of the server's model's scores: on the test samples, on the validation samples as
        val_*, and on the clients' own samples.
        """
        where, data = (self.net, self.state.x, self.state.buffers), self.data
        scores: dict[str, float] = {}
        if last or self.t % self.settings.eval_every == 0:
            rows = torch.arange(len(data.test), device=self.device)
            tested = sample_scores(*where, data.test, data.transform, self.metrics, rows)
            scores |= means(tested)
            if "accuracy" in tested and data.test.labelled:
                now = group_means(tested["accuracy"], data.test.targets, data.classes).cpu()
                lost, self.class_best = forgetting(self.class_best, now)
                scores |= {} if lost.isnan() else {"forgetting": float(lost)}
            validation = torch.from_numpy(data.validation).to(self.device)
            held_out = means(sample_scores(*where, data.train, data.transform, self.metrics, validation))
            scores |= {f"val_{name}": value for name, value in held_out.items()}
        every = self.settings.client_eval_every
        if last or (every and self.t % every == 0):
            scores |= client_scores(*where, data, self.metrics, cohort)
        return scores

    # What a checkpoint holds: tensors only, under names that say where they belong.
    def tensors(self) -> dict[str, Tensor]:
        state = dict(named_leaves("state", self.state))
        own = {"position": torch.from_numpy(self.position), "last_cohort": torch.from_numpy(self.last_cohort)}
        return state | self.clients.tensors() | own | {"class_best": self.class_best}

    def restore(self, tensors: dict[str, Tensor], t: int) -> None:
        for name, leaf in named_leaves("state", self.state):
            if tensors[name].shape != leaf.shape:
                raise ValueError(f"{name} is {list(tensors[name].shape)}, not {list(leaf.shape)}")
        # Cloned, because a tensor read from a file lies where it lay there, and sums round by how memory is aligned.
        stored = iter([tensors[name].to(self.device).clone() for name, _ in named_leaves("state", self.state)])
        self.state = map_leaves(lambda _: next(stored), self.state)
        self.clients.restore(tensors, self.device)
        self.position = tensors["position"].cpu().numpy().copy()
        self.last_cohort = tensors["last_cohort"].cpu().numpy().copy()
        self.class_best = tensors["class_best"].cpu().clone()
        self.t = t

    def model(self) -> dict[str, Tensor]:
        """The server's model as a plain state dict on the CPU."""
        return {name: tensor.cpu() for name, tensor in self.net.state_dict(self.state.x, self.state.buffers).items()}


def shortened(table: Table, steps: NDArray[np.int64]) -> Table:
    """The table with only the first `steps` [S] batches of each client."""
    live = np.arange(table.count.shape[1]) < steps[:, None]
    return replace(table, count=np.where(live, table.count, 0)[:, : steps.max()], steps=steps)


def named_leaves(name: str, state: Any) -> list[tuple[str, Tensor]]:
    """The tensors of a state under dotted names, such as state.server.m."""
    if isinstance(state, Tensor):
        return [(name, state)]
    return [
        leaf for field, part in zip(state._fields, state, strict=True) for leaf in named_leaves(f"{name}.{field}", part)
    ]
