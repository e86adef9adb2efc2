"""The simulator: one federation, one algorithm, one round at a time."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from undrift.algorithms.base import Algorithm, Cohort, Worker, check
from undrift.core import ranks
from undrift.core.errors import BadSetting
from undrift.core.schedule import Schedule
from undrift.core.streams import Purpose, fold, sample, samples, stream, uniform
from undrift.core.trees import map_leaves, named_leaves, nbytes
from undrift.data.batches import Plan
from undrift.data.federation import Federation, Ids, pooled
from undrift.oracle.net import Net
from undrift.personal import export
from undrift.personal.scores import own_scores
from undrift.round.compressed import Compressed, Uplink, check_summed
from undrift.round.order import Kept, RoundRecord, client_init, consistency, finite, replied, server_init, server_part
from undrift.simulate.client_store import DiskTable, choose_table
from undrift.simulate.clients import ClientTable
from undrift.simulate.evaluate import Metric, accuracy, client_scores, forgetting, group_means, means, sample_scores
from undrift.simulate.execute import (
    Execution,
    RoundWork,
    Stacked,
    check_labels,
    check_repeatable,
    choose,
    keep_freed_memory,
)
from undrift.simulate.graphs import recorded
from undrift.simulate.replay import LONGEST, Part, Replay
from undrift.simulate.sharded import agreed, over_ranks

DRAWN_TOGETHER = 128  # clients of a cohort: larger ones are drawn one after another


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
    replay: bool = True  # on a GPU, replay rounds as CUDA graphs
    compile: bool = False  # fuse the local step's kernels with torch.compile, where rounds are replayed
    client_eval_every: int = 0  # rounds between scores on the clients' own samples; 0: only in the last round
    compress: str = ""  # of the uploads, with error feedback: rbgs:R, randk:R, topk:R or fp16
    warmup: float = 0.0  # rounds in which the local rate rises
    client_state: str = "auto"  # where it is kept: memory, disk, or auto

    def schedule(self, t: int) -> float:
        """What the local rate of round t (counted from 0) is multiplied by."""
        return Schedule(self.warmup, self.lr_decay, self.lr_drops, self.lr_drop).rate(1.0, t, t + 1.0)


class Opening(NamedTuple):
    """What a round begins with."""

    alg: Algorithm  # with this round's rate
    work: RoundWork
    invited: Cohort
    down: Any
    client: Any


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
        if alg.pools:
            data, settings = pooled(data), replace(settings, cohort=1)
        if not 1 <= settings.cohort <= data.clients:
            raise BadSetting(f"cohort must lie between 1 and the {data.clients} clients, not {settings.cohort}")
        check(alg, data.clients, data.clients if settings.sampling == "bernoulli" else settings.cohort)
        taken = [name for name in metrics if name in RoundRecord._fields and name != "accuracy"]
        if taken:
            raise BadSetting(
                f"a metric cannot be called {taken[0]!r}, which the record uses itself; give it another name"
            )
        self.whole = alg  # `alg` is what it does in the present round
        self.alg, self.net, self.data, self.settings, self.metrics = alg, net.to(device), data, settings, metrics
        self.device = device
        self.uplink = Uplink(settings.compress, settings.seed, net.layout) if settings.compress else None
        if self.uplink is not None:
            check_summed(alg)
        self.t = 0
        x0, buffers = (v.to(device) for v in net.start())
        self.state = server_init(alg, net, x0, buffers, data.clients)
        self.clients: ClientTable | DiskTable = ClientTable()
        self.position = np.zeros(data.clients, dtype=np.int64)  # batches each client has taken so far
        self.last_cohort = np.zeros(0, dtype=np.int64)  # who took part in the round before
        self.last_reply: tuple[Tensor, Any] | None = None  # whom the server wrote to when the round was over, and what
        self.class_best = torch.full((data.classes,), -1.0, dtype=torch.float64)  # accuracy so far; -1: none
        self.execution: Execution | None = None
        on_one_gpu = device.type == "cuda" and ranks.count() == 1
        self.replays = settings.replay and on_one_gpu and self.uplink is None
        self.replay: Replay | None = None
        self.evaluation: tuple[Tensor, Tensor, Callable[[], dict[str, Tensor]]] | None = None
        if device.type == "cpu":
            keep_freed_memory()

    def draw(self, t: int | None = None) -> tuple[Tensor, Tensor]:
        """Who is invited to a round, by default the next: ids in rising order, and each one's place in the order drawn."""
        settings, clients = self.settings, self.data.clients
        key = stream(settings.seed, Purpose.COHORT, self.t if t is None else t)
        if settings.sampling == "fixed":
            ids = torch.tensor(sample(key, clients, settings.cohort))
            order = ids.argsort()
            return ids[order], order
        ids = torch.zeros(0, dtype=torch.int64)
        while not len(ids):  # an empty cohort is drawn again
            ids = (self.chances(key, torch.arange(clients)) < settings.cohort / clients).nonzero().squeeze(-1)
            key += 1
        return ids, torch.arange(len(ids))

    @staticmethod
    def chances(key: int, ids: Tensor) -> Tensor:
        """A number in [0, 1) for each client."""
        return uniform(fold(key, ids))

    @staticmethod
    def parts(simulations: Sequence[Simulation], rounds: Sequence[int]) -> list[list[Part]]:
        """Who takes part in each of some rounds of each simulation: `takes_part(t)`, with all cohorts drawn together."""
        settings, clients = simulations[0].settings, simulations[0].data.clients
        alike = all((s.settings.cohort, s.data.clients) == (settings.cohort, clients) for s in simulations)
        fixed = all(s.settings.sampling == "fixed" for s in simulations) and settings.cohort <= DRAWN_TOGETHER
        if not (alike and fixed) or clients >> 31:
            return [[s.takes_part(t) for t in rounds] for s in simulations]
        every = torch.tensor(rounds)
        keys = torch.cat([fold(stream(s.settings.seed, Purpose.COHORT), every) for s in simulations])
        drawn = (t.view(len(simulations), len(rounds), -1) for t in samples(keys, clients, settings.cohort).sort(1))
        return [s.all_parts(rounds, *mine) for s, *mine in zip(simulations, *drawn, strict=True)]

    def all_parts(self, rounds: Sequence[int], invited: Tensor, drawn: Tensor) -> list[Part]:
        """`part` for some rounds with the cohorts invited [R, S]."""
        if self.settings.dropout_rate or self.settings.slow[0]:
            return [self.part(t, *mine) for t, *mine in zip(rounds, invited, drawn, strict=True)]
        ids = invited.numpy()
        return list(map(Part, ids, ids, drawn.numpy(), self.settings.plan.steps_of(self.data.sizes[ids])))

    def takes_part(self, t: int) -> Part:
        """Who takes part in round t, and how much each one does."""
        return self.part(t, *self.draw(t))

    def part(self, t: int, invited: Tensor, drawn: Tensor) -> Part:
        """The same for clients that are known to be invited."""
        settings, ids = self.settings, invited
        if settings.dropout_rate:
            answering = self.chances(self.key(Purpose.FAILURE, t), ids) >= settings.dropout_rate
            ids, drawn = ids[answering], drawn[answering]
        steps = settings.plan.steps_of(self.data.sizes[ids.numpy()])
        chance, share = settings.slow
        if chance:
            slow = self.chances(self.key(Purpose.SLOWNESS, t), ids).numpy() < chance
            steps = np.where(slow, np.maximum(1, np.rint(share * steps)), steps).astype(np.int64)
        return Part(invited.numpy(), ids.numpy(), drawn.numpy(), steps)

    def opening(self, part: Part) -> Opening:
        """What the next round begins with; the first one also checks everything and chooses how clients are run."""
        ids, drawn = (torch.from_numpy(v).to(self.device) for v in (part.ids, part.drawn))
        table = self.data.table(self.settings.plan, self.settings.seed, self.t, part.ids, self.position[part.ids])
        if (part.steps < table.steps).any():
            table = table.shortened(part.steps)
        work = RoundWork(self.net, self.data, self.settings.seed, self.t, ids, table, self.settings.plan.batch)
        alg = self.algorithm()
        invited = self.cohort(alg, ids, drawn, torch.from_numpy(table.steps).to(self.device))
        down = alg.broadcast(self.state.x, self.state.companion, invited)
        client = self.clients.read(ids, self.fresh(alg, down, ids))
        if self.execution is None:
            where = (self.net, self.state.x, self.state.buffers, work)
            check_labels(*where)
            check_repeatable(*where)
            self.execution = agreed(
                self.settings.execution,
                self.settings.chunk,
                self.device,
                lambda name, chunk: choose(name, chunk, alg, down, client, *where),
            )
            work.gradients = 0  # only the round itself counts
        return Opening(alg, work, invited, down, client)

    def fresh(self, alg: Algorithm, down: Any, ids: Tensor) -> Any:
        """The states of clients that take part for the first time."""
        shared = map_leaves(lambda v: v.unsqueeze(-2), down)
        return client_init(alg, shared, ids, self.state.buffers.unsqueeze(-2))

    def round(self, last: bool = False) -> RoundRecord:
        """One round; `last` asks for an evaluation whatever the interval is."""
        began = time.perf_counter()
        self.enter()
        part = self.takes_part(self.t)
        invited_ids, host_ids = part.invited, part.ids
        if not len(host_ids):
            return self.nothing_happened(len(invited_ids), began, last)
        alg, work, invited, down, client = self.opening(part)
        assert self.execution is not None
        ids, drawn, steps, table = invited.ids, invited.drawn, invited.steps.squeeze(-1), work.table
        state, sent, fine = self.state, None, torch.ones_like(ids, dtype=torch.bool)
        if alg.measures:  # two exchanges: measure at x_t, then train with what the server made of it
            sent = over_ranks(self.execution).measure(alg, down, self.state.buffers, work)
            fine = sent.isfinite().all(-1)
            measuring = self.cohort(alg, ids[fine], drawn[fine], steps[fine])
            if bool(fine.any()):
                state = state._replace(companion=alg.measured(state.companion, sent[fine], measuring))
            down = alg.broadcast(state.x, state.companion, invited)
        answers = over_ranks(self.execution)(alg, down, client, self.state.buffers, work)
        # Bytes are those of what travels; the server sees it unpacked.
        bytes_up = nbytes(self.net.sent(answers.up)) + (nbytes(answers.buffers) if alg.buffers_up else 0)
        bytes_up += 0 if sent is None else nbytes(self.net.sent(sent))
        if isinstance(alg, Compressed):
            own = answers.client.own if isinstance(answers.client, Kept) else answers.client
            answers = answers._replace(up=alg.received(answers.up, own.error))
        # In the first round nobody lacks anything of a round before.
        returning = len(np.intersect1d(invited_ids, self.last_cohort)) if self.t else len(invited_ids)
        asked = len(invited_ids)
        bytes_down = alg.bytes_down(self.net.sent(down), asked, returning, self.data.clients)
        bytes_down += asked * nbytes(self.state.buffers) if alg.buffers_down else 0

        # A client whose update is not finite is dropped: its state stays as it was, the others' weights add up to one.
        good = finite(answers) & fine
        kept = len(ids) if bool(good.all()) else int(good.sum())
        if kept < len(ids):
            answers = map_leaves(lambda v: v[good], answers)
        cohort = self.cohort(alg, ids[good], drawn[good], steps[good])
        if kept:
            self.state = server_part(alg, self.net, state, answers, cohort)
            client, reply = replied(alg, self.state, answers, cohort)
            self.last_reply = cohort.ids, reply
            bytes_down += nbytes(self.net.sent(reply))
            self.clients.write(cohort.ids, client)
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
            consistency=float(consistency(answers, cohort.uniform)) if kept else 0.0,
            seconds=time.perf_counter() - began,
            train_loss=float(answers.loss.mean()) if kept else float("nan"),
            clients=len(invited_ids),
            dropped=len(invited_ids) - kept,
            more=scores
            | ({name: float(fact.mean()) for name, fact in answers.facts._asdict().items()} if kept else {})
            | self.facts(bytes_down / len(invited_ids) + bytes_up / len(ids), 2 if alg.measures else 1),
        )

    def rounds(self, most: int, last: bool = False) -> list[RoundRecord]:
        """The next rounds, at most so many, and no further than the next evaluation; `last`: the run ends after `most`.

        On a GPU they are replayed, see `replay`.
        """
        alike = self.enter()
        if self.replays and self.replay is None:
            part = self.takes_part(self.t)
            if not len(part.ids):
                return [self.round(last and most == 1)]
            client = self.opening(part).client
            self.replays = Replay.possible(self, client)
            if self.replays and isinstance(self.clients, ClientTable):
                self.clients.begin(client)
                self.clients.spread(self.data.clients)
                self.replay = Replay(self, self.clients)
        if self.replay is None:
            return [self.round(last and most == 1)]
        began = time.perf_counter()
        try:
            records, cohort = self.replay.rounds(min(most, alike, self.until_scores()))
        except RuntimeError as error:  # what was changed has been put back
            warnings.warn(f"rounds are run one by one, because they could not be replayed: {error}", stacklevel=2)
            self.replay, self.replays, records = None, False, []
        if not records:
            return [self.round(last and most == 1)]
        records = self.scored(records, cohort, last and len(records) == most)
        seconds = (time.perf_counter() - began) / len(records)
        return [record._replace(seconds=seconds) for record in records]

    def enter(self) -> int:
        """Turn to what the algorithm does in the next round; for how many rounds, up to LONGEST, it goes on like that."""
        now = self.whole.at(self.t)
        if now != self.alg:
            self.alg, self.replay = now, None
        alike = (n for n in range(1, LONGEST) if self.whole.at(self.t + n) != now)
        return LONGEST if type(self.whole).at is Worker.at else next(alike, LONGEST)

    def scored(self, records: list[RoundRecord], cohort: Ids, last: bool) -> list[RoundRecord]:
        """The records with what is due of scores in the last one, in which `cohort` took part."""
        scores = self.evaluate(torch.from_numpy(cohort).to(self.device), last)
        loss, accuracy = scores.pop("loss", None), scores.pop("accuracy", None)
        return [
            *records[:-1],
            records[-1]._replace(loss=loss, accuracy=accuracy, more=scores | records[-1].more),
        ]

    def until_scores(self) -> int:
        """Rounds up to the next evaluation."""
        return min(e - self.t % e for e in (self.settings.eval_every, self.settings.client_eval_every) if e)

    def key(self, purpose: Purpose, t: int) -> int:
        return stream(self.settings.seed, purpose, t)

    def facts(self, bytes_per_client: float, exchanges: int) -> dict[str, float]:
        """The algorithm's own numbers, and how long the messages of a round would take."""
        facts = {name: float(value) for name, value in self.alg.facts(self.state.server).items()}
        return facts | self.network_seconds(bytes_per_client, exchanges)

    def network_seconds(self, bytes_per_client: float, exchanges: int) -> dict[str, float]:
        """How long the messages of a round would take, where a network is simulated."""
        if not (self.settings.bandwidth or self.settings.latency):
            return {}
        sending = bytes_per_client * 8 / (self.settings.bandwidth * 1e6) if self.settings.bandwidth else 0.0
        return {"network_seconds": 2 * exchanges * self.settings.latency + sending}

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
        alg = self.alg if rate == 1.0 else replace(self.alg, lr=self.alg.lr * rate)
        return alg if self.uplink is None else cast(Algorithm, Compressed(alg, self.uplink, self.t))

    def cohort(self, alg: Algorithm, ids: Tensor, drawn: Tensor, steps: Tensor) -> Cohort:
        size = torch.from_numpy(self.data.sizes)[ids.cpu()].to(self.state.x).unsqueeze(-1)
        weight = size if self.settings.weights == "size" else torch.ones_like(size)
        return Cohort(
            ids, drawn, weight / weight.sum(-2, keepdim=True), steps.to(self.state.x).unsqueeze(-1), alg.lr,
            self.data.clients, self.net.layout,
        )  # fmt: skip

    def evaluate(self, cohort: Tensor, last: bool) -> dict[str, Any]:
        """What is due after this round of the server's model's scores: on the test samples, on the validation samples as
        val_*, and on the clients' own samples.
        """
        where, data = (self.net, self.state.x, self.state.buffers), self.data
        scores: dict[str, Any] = {}
        if last or self.t % self.settings.eval_every == 0:
            tested = self.tested()
            scores |= means(tested)
            if "accuracy" in tested and data.test.labelled:
                now = group_means(tested["accuracy"], data.test.targets, data.classes).cpu()
                lost, self.class_best = forgetting(self.class_best, now)
                scores |= {} if lost.isnan() else {"forgetting": float(lost)}
            validation = torch.from_numpy(data.validation).to(self.device)
            held_out = means(sample_scores(*where, data.train, data.transform, self.metrics, validation))
            scores |= {f"val_{name}": value for name, value in held_out.items()}
        if data.own and (last or self.t % self.settings.eval_every == 0):
            scores |= own_scores(self, last)
        every = self.settings.client_eval_every
        if len(data.train) and (last or (every and self.t % every == 0)):  # none here where each client has its own
            scores |= client_scores(*where, data, self.metrics, cohort, self.settings.seed)
        return scores

    def tested(self) -> dict[str, Tensor]:
        """The scores of every test sample; a CUDA graph where rounds are replayed and nothing of the user's is called."""
        rows = torch.arange(len(self.data.test), device=self.device)

        def play(x: Tensor, buffers: Tensor) -> dict[str, Tensor]:
            return sample_scores(self.net, x, buffers, self.data.test, self.data.transform, self.metrics, rows)

        ours = self.net.loss is F.cross_entropy and all(metric is accuracy for metric in self.metrics.values())
        if self.replay is None or not ours or self.data.test.held is None or self.device.type != "cuda":
            return play(self.state.x, self.state.buffers)
        if self.evaluation is None:
            at = self.state.x.clone(), self.state.buffers.clone()
            self.evaluation = *at, recorded(lambda: play(*at), [], self.device)
        x, buffers, replay = self.evaluation
        x.copy_(self.state.x)
        buffers.copy_(self.state.buffers)
        return replay()

    # What a checkpoint holds: tensors only, under names that say where they belong.
    def tensors(self) -> dict[str, Tensor]:
        state = dict(named_leaves("state", self.state))
        moved = np.flatnonzero(self.position)  # few of a million clients
        positions = {"position.ids": torch.from_numpy(moved), "position": torch.from_numpy(self.position[moved])}
        own = positions | {"last_cohort": torch.from_numpy(self.last_cohort)}
        return state | self.clients.tensors() | own | {"class_best": self.class_best}

    def restore(self, tensors: dict[str, Tensor], t: int) -> None:
        for name, leaf in named_leaves("state", self.state):
            if tensors[name].shape != leaf.shape:
                raise ValueError(f"{name} is {list(tensors[name].shape)}, not {list(leaf.shape)}")
        # Cloned, because a tensor read from a file lies where it lay there, and sums round by how memory is aligned.
        stored = iter([tensors[name].to(leaf.device).clone() for name, leaf in named_leaves("state", self.state)])
        self.state = map_leaves(lambda _: next(stored), self.state)
        self.clients.restore(tensors, self.device)
        self.replay = None
        self.position = np.zeros(self.data.clients, dtype=np.int64)
        self.position[tensors["position.ids"].cpu().numpy()] = tensors["position"].cpu().numpy()
        self.last_cohort = tensors["last_cohort"].cpu().numpy().copy()
        self.class_best = tensors["class_best"].cpu().clone()
        self.t = t

    def model(self) -> dict[str, Tensor]:
        """The server's model as a plain state dict on the CPU."""
        return {name: tensor.cpu() for name, tensor in self.net.state_dict(self.state.x, self.state.buffers).items()}

    # What `jobs.protocol.Run` asks for besides.
    diverged = False  # answers that are not finite are left out

    def choices(self) -> dict[str, Any]:
        """How rounds are run, which once chosen stays, so that results can be repeated."""
        made: dict[str, Any] = {}
        if self.device.type == "cuda":
            made["compile"] = "on" if self.settings.compile else "off"
        if self.execution is not None:
            made["execution"] = self.execution.name
        if isinstance(self.execution, Stacked):
            made["chunk"] = min(self.execution.chunk, self.settings.cohort)
        return made

    def about(self) -> dict[str, Any]:
        """Facts about the task."""
        sites = {"sites": list(self.data.site_names)} if self.data.site_names else {}
        return {"parameters": self.net.layout.entries} | sites

    def place(self, path: Path | None, tensors: Mapping[str, Tensor], t: int) -> None:
        """Choose where clients' states are kept, before they are restored from these tensors of round t."""
        row = nbytes(self.state.x)
        self.clients = choose_table(self.settings.client_state, self.data.clients, row, self.device, path, tensors, t)

    def saved(self) -> None:
        """A checkpoint was written: the clients' table may forget how to go back to the one before."""
        self.clients.saved(self.t)

    def extras(self, settings: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> export.Models | None:
        """All models of a personal method."""
        return export.models(self, settings, records) if self.alg.personalises else None

    def close(self) -> None:
        self.clients.close()
