"""The simulator: one federation, one algorithm, one round at a time."""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from undrift.algorithms.base import Algorithm
from undrift.algorithms.checks import check_algorithm
from undrift.algorithms.personal import Personal
from undrift.core import ranks
from undrift.core.errors import BadSetting, ClientFailed
from undrift.core.forms import plain_forms
from undrift.core.run_files import ADAPTER
from undrift.core.trees import State, map_leaves, named_leaves, nbytes
from undrift.data.batches import Plan, Table
from undrift.data.federation import Federation, Ids, pool
from undrift.models._adapters import has_adapters, save_adapter
from undrift.oracle.identity import identity
from undrift.oracle.net import Net
from undrift.round.accounting import Accountant
from undrift.round.aggregate import parse_rule
from undrift.round.attack import attack_keys, flip_labels, make_attackers, parse_attack
from undrift.round.clients import new_clients
from undrift.round.compressed import Uplink, check_compressed, upload_form, wrap
from undrift.round.order import Ask, Cost, Nobody, ServerState, first_state, play, send_down
from undrift.round.private import Private, Source, check_private, make_accountant
from undrift.round.record import RoundRecord, write_record
from undrift.round.robust import check_rule
from undrift.round.shapes import Forms
from undrift.round.timeline import staleness_of
from undrift.round.who import Attendance, Sampling, Task, Who
from undrift.simulate import export
from undrift.simulate.check_task import check_task
from undrift.simulate.choose import choose, keep_freed_memory
from undrift.simulate.client_store import DiskTable, choose_table
from undrift.simulate.clients import ClientTable
from undrift.simulate.evaluate import MOST_CLASSES, Metrics
from undrift.simulate.here import AskHere, Execution, Stacked, add_client_dimension
from undrift.simulate.program import uses_whole
from undrift.simulate.replay import LONGEST, FirstStates, Replay
from undrift.simulate.score_keeper import ScoreKeeper
from undrift.simulate.settings import Settings
from undrift.simulate.sharded import agree, over_ranks
from undrift.simulate.stale import AskStale, Held, restore_held, tensors_of
from undrift.simulate.virtual_time import make_timeline
from undrift.simulate.work import LocalWork

MOST_SHOWN = 100  # clients whose samples run.toml counts, class by class


class Simulation:
    """A run in memory. `rounds()` advances it and returns records; `tensors()` is all that a checkpoint needs.

    `remote` asks clients that are elsewhere; without it they are run here.
    """

    def __init__(
        self,
        alg: Algorithm,
        net: Net,
        data: Federation,
        settings: Settings,
        metrics: Metrics,
        device: torch.device,
        remote: Callable[[LocalWork], Ask] | None = None,
    ) -> None:
        if alg.pools:
            data, settings = pool(data), replace(settings, cohort=1)
        if not 1 <= settings.cohort <= data.clients:
            raise BadSetting(f"cohort must lie between 1 and the {data.clients} clients, not {settings.cohort}")
        self.most = data.clients if settings.sampling == "bernoulli" else settings.cohort  # clients in a round
        check_algorithm(alg, data.clients, self.most)
        self.accountant: Accountant | None = None
        self.source: Source | None = None  # a secret for noise and cohorts; None: they come from the seed
        if settings.privacy is not None:
            if settings.compress:
                raise BadSetting("privacy_clip: leave compress out, whose clients keep what they did not send")
            check_private(alg, net, data.clients, settings.privacy, settings.sampling, settings.weights)
            self.accountant = make_accountant(alg, settings.privacy, data.clients)
            alg = Private(alg, settings.privacy, settings.seed)
        self.whole = alg  # `alg` is what it does in the present round
        self.alg, self.net, self.data, self.settings = alg, net.to(device), data, settings
        self.metrics = metrics
        self.device, self.remote = device, remote
        self.uplink: Uplink | None = None
        if settings.compress:
            check_compressed(alg)
            self.uplink = Uplink(settings.compress, settings.seed, net, upload_form(alg, net, data.clients))
        self.rule, self.attackers = parse_rule(settings.aggregate), None
        self.unguarded = False  # whether too few have answered in some round for the rule, and that was said
        if self.rule is not None:
            check_rule(self.rule, alg, settings.cohort, settings.compress, settings.privacy is not None)
        if attack := parse_attack(settings.attack):
            if alg.pools:
                raise BadSetting(f"{type(alg).__name__} has one client with all samples; attack needs several")
            if attack.name == "gauss" and settings.compress in ("int8", "int4"):
                raise BadSetting(
                    "attack=gauss sends noise in place of vectors, and of whole numbers only the scales would be noise; give "
                    "compress=fp16, or attack=scale"
                )
            self.attackers = make_attackers(attack, data.clients, settings.seed, device)
            if attack.name == "labelflip":
                self.data = flip_labels(data, attack.attackers(data.clients, settings.seed))
        self.weight_of: Callable[[Ids], Any] = lambda ids: self.data.sizes[ids]  # what clients weigh, with weights=size
        self.t = 0
        x0, buffers = (v.to(device) for v in net.start())
        self.state: ServerState = first_state(alg, net, x0, buffers, data.clients)
        self.timeline = make_timeline(settings, self.alg, self.uplink, net, data.clients)
        self.clock_before = 0.0  # its seconds when the last round was over
        self.held: dict[int, Held] = {}  # what clients at work began with, by round
        self.clients: ClientTable | DiskTable = ClientTable()
        self.position = np.zeros(data.clients, dtype=np.int64)  # batches each client has taken so far
        self.counted = np.zeros(
            data.clients, dtype=np.int64
        )  # the last round, from 1 on, that counts each one's answer
        self.latest = 0  # the last round that counts anybody's
        self.last_reply: tuple[Tensor, State] | None = None  # to whom the server replied after the round, and what
        self.score_keeper = ScoreKeeper(
            metrics, settings.eval_every, settings.client_eval_every, settings.seed, data.classes
        )
        self.execution: Execution | None = None
        on_one_gpu = device.type == "cuda" and ranks.count() == 1 and remote is None
        on_the_host = self.uplink or self.accountant or self.timeline or settings.execution == "debug"
        self.replays = settings.replay and on_one_gpu and not on_the_host
        self.replay: Replay | None = None
        if device.type == "cpu":
            keep_freed_memory()

    @property
    def task(self) -> Task:
        return Task(self.net, self.data.clients, self.rule, self.attackers)

    @property
    def sampling(self) -> Sampling:
        """How cohorts are drawn."""
        how = self.settings
        secret = None if self.source is None else self.source.words
        return Sampling(
            self.data.sizes, how.plan, how.cohort, how.seed, how.sampling, how.dropout_rate, how.slow,
            how.privacy is not None, secret,
        )  # fmt: skip

    def draw_from(self, source: Source) -> None:
        """Draw noise and cohorts from a secret instead of the seed."""
        self.source = source
        assert isinstance(self.whole, Private) and isinstance(self.alg, Private)
        self.whole, self.alg = self.whole.drawing(source.normal), self.alg.drawing(source.normal)
        key = torch.zeros_like(self.state.companion.key)
        self.state = self.state._replace(companion=self.state.companion._replace(key=key))

    def attendance(self, t: int) -> Attendance:
        """Who takes part in round t, and how much each one does."""
        return self.sampling.round(t) if self.timeline is None else self.timeline.attend(t, self.sampling)

    def wrap(self, alg: Algorithm) -> Algorithm:
        """The algorithm with what the settings put around it, at the rate of the next round."""
        return wrap(alg, self.settings.schedule(self.t), self.uplink, self.t)

    def who(self, attendance: Attendance) -> Who:
        """The clients of a round as the server sees them."""
        ids, drawn = (torch.from_numpy(v).to(self.device) for v in (attendance.ids, attendance.drawn))
        size = torch.from_numpy(self.weight_of(attendance.ids)).to(self.state.x).unsqueeze(-1)
        share = size if self.settings.weights == "size" else torch.ones_like(size)
        steps = torch.from_numpy(attendance.steps).to(self.state.x).unsqueeze(-1)
        keys = attack_keys(self.settings.seed, self.t, ids) if self.attackers and self.attackers.draws else ()
        return Who(ids, drawn, share, share / share.sum(-2, keepdim=True), steps, attack=keys)

    def work(self, attendance: Attendance) -> LocalWork:
        """What the clients of the next round train on."""
        ids, how = attendance.ids, self.settings
        rounds = self.t if attendance.versions is None else attendance.versions
        if self.remote is not None:  # who has samples elsewhere chooses them there; here it could have any number
            table = Table(torch.zeros(len(ids), 0, 0), np.zeros((len(ids), 0), np.int64), attendance.steps)
        else:
            table = self.data.table(how.plan, how.seed, rounds, ids, self.position[ids])
        if (attendance.steps < table.steps).any():
            table = table.shorten(attendance.steps)
        apart = None if isinstance(rounds, int) else torch.from_numpy(rounds).to(self.device)
        return LocalWork(
            self.net,
            self.data,
            how.seed,
            self.t,
            torch.from_numpy(ids).to(self.device),
            table,
            how.plan.batch,
            rounds=apart,
        )

    def ask(self, work: LocalWork, who: Who) -> Ask:
        """How the clients of the next round are asked; the first call also checks the task and chooses an execution."""
        if self.remote is not None:
            return self.remote(work)
        if self.execution is None:
            where = (self.net, self.state.x, self.state.buffers, work)
            check_task(*where)
            alg = self.wrap(self.alg)
            down = self.down(who)
            client = new_clients(alg, add_client_dimension(down), who.ids, self.state.buffers.unsqueeze(-2))
            self.execution = agree(
                self.settings.execution,
                self.settings.chunk,
                self.device,
                lambda name, chunk: choose(name, chunk, alg, down, client, *where),
            )
            work.gradients = 0  # only the round itself counts
        if work.rounds is None:
            return AskHere(over_ranks(self.execution), work, self.clients)
        rate, versions = self.settings.schedule, work.rounds.cpu().numpy()
        return AskStale(
            self.execution,
            work,
            self.clients,
            versions,
            self.held,
            rate,
            lambda t: wrap(self.alg, rate(t), self.uplink, t),
        )

    def late(self, who: Who, attendance: Attendance) -> Who:
        """The clients of a round with the models that they began with, where these may be older ones."""
        if attendance.versions is None:
            return who
        began = [self.held[version].x for version in attendance.versions.tolist()]
        missed = torch.from_numpy(self.t - attendance.versions).to(self.state.x).unsqueeze(-1)
        return who._replace(staleness=missed, start=torch.stack(began))

    def down(self, who: Who) -> State:
        """What would go down to these clients now."""
        alg = self.wrap(self.alg)
        return send_down(alg, self.state.x, self.state.companion, self.task.cohort(alg, who))

    @property
    def plan(self) -> Plan:
        return self.settings.plan

    def serving(self) -> tuple[Algorithm, State, State]:
        """The algorithm, what would go down to everybody now, and everybody's state."""
        everybody = np.arange(self.data.clients)
        who = self.who(Attendance(everybody, everybody, everybody, np.ones_like(everybody)))
        alg, down = self.wrap(self.alg), self.down(who)
        new = new_clients(alg, add_client_dimension(down), who.ids, self.state.buffers.unsqueeze(-2))
        return alg, down, self.clients.read(who.ids, new)

    def round(self, last: bool = False) -> RoundRecord:
        """One round; `last` asks for an evaluation whatever the interval is."""
        began = time.perf_counter()
        self.enter()
        attendance, cost = self.attendance(self.t), Cost()
        kept, gradients, numbers = attendance.ids[:0], 0, {"train_loss": float("nan"), "consistency": 0.0}
        if attendance.versions is not None:  # some begin with the present model, in this round or a later one
            self.held[self.t] = Held(self.state.x, self.state.buffers, self.down(self.who(attendance)))
        if len(attendance.ids):
            who, work = self.late(self.who(attendance), attendance), self.work(attendance)
            with plain_forms(self.settings.execution == "debug"):
                after = play(self.wrap(self.alg), self.task, self.state, who, self.ask(work, who), cost)
            good = after.good.cpu().numpy()
            kept, gradients = attendance.ids[good], work.gradients
            self.state, self.last_reply = after.state, (after.ids, after.reply)
            self.position[kept] += work.table.steps[good]
            if len(kept):
                self.clients.write(after.ids, after.client)
                numbers = dict(zip(cost.names, after.numbers.tolist(), strict=True))
        elif self.alg.moves_alone:
            nobody = Nobody(Forms.of(self.alg, self.net, self.data.clients).answers)
            self.state = play(self.wrap(self.alg), self.task, self.state, self.who(attendance), nobody, cost).state
        if not len(kept):
            self.last_reply = None
            numbers |= {name: float(value) for name, value in self.alg.facts(self.state.server).items()}
        record = self.record(attendance, kept, cost, gradients, numbers, began)
        if self.timeline is not None:
            needed = self.timeline.rounds_in_use()
            self.held = {t: held for t, held in self.held.items() if t in needed}
        self.t += 1
        scores = self.evaluate(torch.from_numpy(attendance.ids).to(self.device), last)
        return record.with_scores(scores)._replace(seconds=time.perf_counter() - began)

    def record(
        self, attendance: Attendance, kept: Ids, cost: Cost, gradients: int, numbers: Mapping[str, Any], began: float
    ) -> RoundRecord:
        """The next round's record, without scores; whose answers count is remembered."""
        invited, asked, alg = len(attendance.invited), len(attendance.ids), self.alg
        since = self.latest - 1 if alg.since is None else alg.since  # in the first round nobody lacks anything
        returning = int((self.counted[attendance.invited] > since).sum())
        down, up = 0, cost.bytes_up(asked)
        if asked:
            down = alg.bytes_down(cost.down, invited, returning, self.data.clients) + len(kept) * cost.reply
            down += alg.buffers_down(invited, returning) * nbytes(self.state.buffers)
        if len(kept):
            self.counted[kept] = self.latest = self.t + 1
        self.say_unguarded(len(kept))
        if len(kept) and attendance.versions is not None:  # its state is that after the round whose model it began with
            self.counted[kept] = attendance.versions[np.isin(attendance.ids, kept)] + 1
        each = down / max(1, invited) + up / max(1, asked)
        network = self.network_seconds(each, 2 if alg.measures and asked else 1)
        if self.timeline is not None:
            network = self.clock_seconds() | staleness_of(attendance, self.t)
        numbers = {**numbers, **network, **self.spend(attendance)}
        return write_record(self.t + 1, began, numbers, invited, invited - len(kept), down, up, gradients)

    def say_unguarded(self, answers: int) -> None:
        """Warn of the first round in which too few answer for the rule; a deployment says it of every round by itself."""
        if self.rule is not None and self.remote is None and 0 < answers < self.rule.least and not self.unguarded:
            self.unguarded = True
            warnings.warn(
                f"round {self.t + 1}: aggregate={self.settings.aggregate} needs {self.rule.least} answers to keep its promise, "
                f"not {answers}; raise cohort (said once)",
                stacklevel=2,
            )

    def spend(self, attendance: Attendance) -> dict[str, float]:
        """What the next round and all before it cost in privacy, and the clipping that it leaves, where that changes."""
        how = self.settings.privacy
        if how is None or self.accountant is None:
            return {}
        self.accountant.add(self.t, attendance.invited)
        clip = {"clip": float(self.state.companion.bound)} if how.quantile else {}
        return {"epsilon": self.accountant.epsilon} | clip

    def rounds(self, most: int, last: bool = False) -> list[RoundRecord]:
        """Run at most `most` rounds, up to the next evaluation, replayed on a GPU; `last`: the run ends after `most`."""
        alike = self.enter()
        if self.replays and self.replay is None and len(self.attendance(self.t).ids):
            replay = Replay([self])
            self.replays = replay.begin()
            self.replay = replay if self.replays else None
        if self.replay is None:
            return [self.round(last and most == 1)]
        began = time.perf_counter()
        try:
            replayed = self.replay.rounds(min(most, alike, self.score_keeper.until_due(self.t)))
        except (RuntimeError, ClientFailed) as error:  # what was changed has been put back
            warnings.warn(f"rounds are run one by one, because they could not be replayed: {error}", stacklevel=2)
            self.replay, self.replays, replayed = None, False, None
        if self.replay is None or replayed is None or not replayed[0]:
            return [self.round(last and most == 1)]
        records = self.add_scores(replayed[0], self.replay.last[0].ids, last and len(replayed[0]) == most)
        seconds = (time.perf_counter() - began) / len(records)
        return [record._replace(seconds=seconds) for record in records]

    def first_states(self) -> FirstStates | None:
        """What is known of the next round's clients before they are asked; None where nobody takes part."""
        attendance = self.attendance(self.t)
        if not len(attendance.ids):
            return None
        who = self.who(attendance)
        self.ask(self.work(attendance), who)  # the first call chooses an execution
        alg, down, buffers = self.wrap(self.alg), add_client_dimension(self.down(who)), self.state.buffers.unsqueeze(-2)
        client = new_clients(alg, down, who.ids, buffers)
        return FirstStates(client, uses_whole(alg, down, client, buffers, self.net.layout))

    def enter(self) -> int:
        """Turn to what the algorithm does in the next round; for how many rounds, up to LONGEST, it goes on like that."""
        now = self.whole.at(self.t)
        if now != self.alg:
            self.alg, self.replay = now, None
        alike = (n for n in range(1, LONGEST) if self.whole.at(self.t + n) != now)
        return LONGEST if type(self.whole).at is Personal.at else next(alike, LONGEST)

    def add_scores(self, records: list[RoundRecord], cohort: Ids, last: bool) -> list[RoundRecord]:
        """The records with what is due of scores in the last one, in which `cohort` took part."""
        scores = self.evaluate(torch.from_numpy(cohort).to(self.device), last)
        return [*records[:-1], records[-1].with_scores(scores)]

    def network_seconds(self, bytes_per_client: float, exchanges: int) -> dict[str, float]:
        """How long the messages of a round would take, where a network is simulated."""
        if not (self.settings.bandwidth or self.settings.latency):
            return {}
        sending = bytes_per_client * 8 / (self.settings.bandwidth * 1e6) if self.settings.bandwidth else 0.0
        return {"network_seconds": 2 * exchanges * self.settings.latency + sending}

    def clock_seconds(self) -> dict[str, float]:
        """How long the round took on the virtual clock, and when it was over."""
        assert self.timeline is not None
        before, self.clock_before = self.clock_before, self.timeline.now
        return {"network_seconds": self.timeline.now - before, "virtual_seconds": self.timeline.now}

    def evaluate(self, cohort: Tensor, last: bool) -> dict[str, Any]:
        """The scores that are due after a round in which `cohort` took part."""
        return self.score_keeper.scores(self, cohort, last, self.replay is not None)

    # What a checkpoint holds: tensors only, under names that say where they belong.
    def tensors(self) -> dict[str, Tensor]:
        state = dict(named_leaves("state", self.state))
        moved = np.flatnonzero(self.position)  # few of a million clients
        part = {"position.ids": moved, "position": self.position[moved], "counted": self.counted[moved]}
        own = {name: torch.from_numpy(array) for name, array in part.items()}
        if self.accountant is not None:
            own |= {"privacy.spent": self.accountant.spent, "privacy.open": self.accountant.open}
        if self.timeline is not None:
            own |= self.timeline.tensors()
            own |= tensors_of(self.held)
        return state | self.clients.tensors() | own | {"class_best": self.score_keeper.class_best}

    def restore(self, tensors: dict[str, Tensor], t: int) -> None:
        for name, leaf in named_leaves("state", self.state):
            if tensors[name].shape != leaf.shape:
                raise ValueError(f"{name} is {list(tensors[name].shape)}, not {list(leaf.shape)}")
        # Cloned, because a tensor read from a file lies where it lay there, and sums round by how memory is aligned.
        stored = iter([tensors[name].to(leaf.device).clone() for name, leaf in named_leaves("state", self.state)])
        self.state = map_leaves(lambda _: next(stored), self.state)
        self.clients.restore(tensors, self.device)
        self.replay = None
        self.position, self.counted = (np.zeros(self.data.clients, dtype=np.int64) for _ in range(2))
        moved, position, counted = (tensors[name].cpu().numpy() for name in ("position.ids", "position", "counted"))
        self.position[moved], self.counted[moved], self.latest = position, counted, int(counted.max(initial=0))
        self.score_keeper.class_best = tensors["class_best"].cpu().clone()
        if self.timeline is not None:
            self.timeline.restore(tensors)
            everybody = np.arange(self.data.clients)
            who = self.who(Attendance(everybody, everybody, everybody, np.ones_like(everybody)))
            self.held = restore_held(tensors, Held(self.state.x, self.state.buffers, self.down(who)))
            self.clock_before = self.timeline.now
        if self.accountant is not None:
            self.accountant.spent = tensors["privacy.spent"].cpu().clone()
            self.accountant.open = tensors["privacy.open"].cpu().clone()
        self.t = t

    def model(self) -> dict[str, Tensor]:
        """The server's model as a plain state dict on the CPU."""
        return {name: tensor.cpu() for name, tensor in self.net.state_dict(self.state.x, self.state.buffers).items()}

    # What `jobs.protocol.Run` asks for besides.
    diverged = False  # answers that are not finite are left out
    enough = False  # it ends by its settings alone

    def choices(self) -> dict[str, Any]:
        """How rounds are run, which once chosen stays, so that results can be repeated."""
        made: dict[str, Any] = {}
        if self.device.type == "cuda":
            made["compile"] = "on" if self.settings.compile else "off"
        if self.execution is not None:
            made["execution"] = self.execution.name
        if isinstance(self.execution, Stacked):
            made["chunk"] = min(self.execution.chunk, self.most)
        return made

    def about(self) -> dict[str, Any]:
        """Facts about the task; a number that is not the expected one shows data that were misread."""
        data = self.data
        found: dict[str, Any] = {
            "samples": int(data.sizes.sum()),
            "validation_samples": len(data.validation),
            "clients": data.clients,
        }
        found |= {"test_samples": len(data.test), "inputs": list(data.shape), "classes": data.classes}
        sites = {"sites": list(data.site_names)} if data.site_names else {}
        held = {}
        if len(data.train) and data.train.labelled and 0 < data.classes <= MOST_CLASSES:
            held = {"holdings": [" ".join(map(str, row)) for row in data.class_counts(MOST_SHOWN)]}
        return {"parameters": self.net.layout.entries} | found | sites | held | {"task": self.task_identity}

    @functools.cached_property
    def task_identity(self) -> dict[str, str]:
        return identity(self.net, self.data)

    def place(self, path: Path | None, tensors: Mapping[str, Tensor], t: int) -> None:
        """Choose where clients' states are kept, before they are restored from these tensors of round t."""
        row = nbytes(self.state.x)
        self.clients = choose_table(self.settings.client_state, self.data.clients, row, self.device, path, tensors, t)

    def after_checkpoint(self) -> None:
        """A checkpoint was written: the clients' table may forget how to go back to the one before."""
        self.clients.after_checkpoint(self.t)

    def client_rows(self) -> list[dict[str, Any]]:
        """What is known of each client."""
        return self.score_keeper.client_rows(self)

    def extras(self, settings: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> export.Models | None:
        """All models of a personal method."""
        return export.models(self, settings, records) if self.alg.personalises else None

    def leave(self, folder: Path, model: Mapping[str, Tensor]) -> None:
        """The adapter of a model of peft, as peft saves it."""
        if has_adapters(self.net.original):
            save_adapter(self.net.original, model, folder / ADAPTER)

    def close(self) -> None:
        self.clients.close()
