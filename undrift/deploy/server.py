"""The server of a real federation: the simulator's round, with clients that answer by letter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from undrift.core.trees import named_leaves, unstack
from undrift.deploy.privacy import Ledger
from undrift.deploy.remote import Remote, Visit
from undrift.deploy.scores import Best
from undrift.deploy.sums import check_secure
from undrift.jobs.protocol import InMemory
from undrift.round.aggregate import MEAN
from undrift.round.record import RoundRecord
from undrift.simulate.simulation import Simulation

if TYPE_CHECKING:
    from undrift.deploy.asynchronous import Arriving


class Deployment(InMemory):
    """Adapter: lets `Course` drive a run with remote clients."""

    def __init__(
        self,
        simulation: Simulation,
        remote: Remote,
        keep: Callable[[list[Visit]], None],
        samples: Mapping[str, int] | None = None,
        ledger: Ledger | None = None,
        weight_cap: float = 1.0,
        best: Best | None = None,
        keep_best: Callable[[dict[str, Tensor], Best], None] | None = None,
        arriving: Arriving | None = None,
    ) -> None:
        """`keep` stores visits, `samples` are what clients with files report, a private run has a `ledger`.

        `weight_cap` is the largest share of a round's weight that a client may have by what it reports. With `best` clients
        score models on samples that they hold out, and `keep_best` stores the model of the best round. In an asynchronous run
        answers are taken as they come, by `arriving`.
        """
        self.samples, self.sizes = samples, np.zeros(len(remote.names), np.int64)  # as first reported; 0: not yet
        self.weight_cap, self.told = weight_cap, set[str]()  # lines on reports that were said already
        self.simulation, self.remote, self.keep, self.ledger = simulation, remote, keep, ledger
        self.best, self.keep_best = best, keep_best
        if ledger is not None and simulation.accountant is not None:
            simulation.draw_from(ledger)
            ledger.carry_over(simulation.accountant, 0)
        self.net, self.device = simulation.net, simulation.device
        simulation.remote, remote.aggregate = remote, simulation.settings.aggregate
        self.arriving = arriving
        if arriving is not None:
            arriving.serve(simulation)
        how = simulation.settings
        remote.adds_up = (how.aggregate, how.weights, how.compress, how.privacy) == (MEAN, "uniform", "", None)
        if remote.secure_bound:
            check_secure(simulation.whole, simulation.net, how, simulation.data.clients)
        if samples is not None:
            simulation.weight_of = self.weight_of
        simulation.data = replace(simulation.data, held_out={})  # clients keep the samples that they hold out

    @property
    def t(self) -> int:
        return self.simulation.t

    def rounds(self, most: int, last: bool = False) -> list[RoundRecord]:
        """Run one round."""
        run, remote = self.simulation, self.remote
        self.begin()
        record = run.round(last and most == 1)
        if self.ledger is not None and run.accountant is not None:
            self.ledger.write(run.accountant)  # before anybody is sent the model
        if run.last_reply is not None:
            ids, replies = run.last_reply
            for id, reply in zip(ids.tolist(), unstack(replies, len(ids)), strict=True):
                remote.replies[id] = dict(named_leaves("reply", self.net.without_padding(reply)))
            run.last_reply = None
        self.keep(remote.visits)
        record = self.complete(record)
        if self.best is not None and ((last and most == 1) or run.t % run.settings.eval_every == 0):
            remote.visits = []
            scores = remote.score(run)
            self.keep(remote.visits)
            if self.best.take(run.t, scores) and self.keep_best is not None:
                self.keep_best(run.model(), self.best)
            record = record.with_scores(scores | {"loss": record.loss, "accuracy": record.accuracy})
        return [record]

    @property
    def enough(self) -> bool:
        """Whether clients have not scored a round better for long."""
        return self.best is not None and self.best.enough

    def close(self, delivered: Set[tuple[str, int]] = frozenset()) -> None:
        """After the last round, send clients the replies to their last rounds. The run does not depend on it."""
        self.begin()
        self.remote.close(self.simulation.data.sizes, delivered)
        self.keep(self.remote.visits)

    def begin(self) -> None:
        """Prepare an exchange; clients with files have the sizes that they reported, or 1."""
        run = self.simulation
        self.remote.position, self.remote.counted, self.remote.visits = run.position, run.counted, []
        if self.samples is None:
            return
        for id, name in enumerate(self.remote.names):
            reported = self.samples.get(name, 0)
            self.sizes[id] = known = self.sizes[id] or reported
            if reported not in (0, known):
                self.tell(
                    f"{name} reports {reported} training samples now, {known} before: its answers will be refused"
                )
        self.simulation.data = replace(self.simulation.data, sizes=np.maximum(self.sizes, 1))

    def weight_of(self, ids: NDArray[np.int64]) -> NDArray[np.float64]:
        """What the answers of clients with files weigh: their numbers of samples, as far as `weight_cap` allows."""
        sizes, known = self.simulation.data.sizes[ids], self.sizes[ids] > 0  # the answers of others will be refused
        weights = sizes.astype(np.float64)
        weights[known] = cap_shares(sizes[known], self.weight_cap)
        if self.simulation.settings.weights == "size":
            for id in ids[weights < sizes]:
                self.tell(
                    f"{self.remote.names[id]} reports {self.sizes[id]} training samples and would have more than "
                    f"{self.weight_cap:.0%} of a round's weight: it gets no more; weight_cap=1 believes every report"
                )
        return weights

    def tell(self, line: str) -> None:
        """Say a line once."""
        if line not in self.told:
            self.told.add(line)
            self.remote.say(line)

    def complete(self, record: RoundRecord) -> RoundRecord:
        """Add to a record what was measured in its exchanges."""
        visits = self.remote.visits
        answered = [v for v in visits if v.outcome == "answered"]
        measured = {
            "wire_down": sum(v.bytes_down for v in visits),
            "wire_up": sum(v.bytes_up for v in visits),
            "client_seconds": sum(v.seconds for v in answered) / max(1, len(answered)),
            "exchange_seconds": sum({v.exchange: v.away for v in visits}.values()),
            "refused": sum(v.outcome.startswith("refused") for v in visits),
        }
        if self.arriving is not None:  # its answers are those that were used, and all are there
            return record._replace(more=record.more | measured)
        # The simulator counts an upload for every client, even those that did not answer.
        bytes_up = record.bytes_up * sum(v.bytes_up > 0 for v in visits) // max(1, len(visits))
        rule = self.simulation.rule
        if rule is not None and record.clients - record.dropped < rule.least:
            self.remote.say(
                f"round {record.round}: {self.remote.aggregate} needs {rule.least} answers to keep its promise, "
                f"not {record.clients - record.dropped}"
            )
        silent = len({v.client for v in visits} - {v.client for v in answered})
        more, loss = record.more | measured, None if self.remote.private else record.train_loss
        dropped = max(record.dropped, silent)
        return record._replace(bytes_up=bytes_up, dropped=dropped, train_loss=loss, more=more)

    def tensors(self) -> dict[str, Tensor]:
        replies = {f"to.{id}.{name}": t for id, reply in self.remote.replies.items() for name, t in reply.items()}
        best = {} if self.best is None else self.best.tensors()
        return self.simulation.tensors() | {"samples": torch.from_numpy(self.sizes)} | best | replies

    def restore(self, tensors: dict[str, Tensor], t: int) -> None:
        self.simulation.restore(tensors, t)
        if self.ledger is not None and self.simulation.accountant is not None:
            self.ledger.carry_over(self.simulation.accountant, t)
        self.sizes = tensors["samples"].cpu().numpy().copy()
        if self.best is not None:
            self.best.restore(tensors)
        self.remote.replies = {}
        for name, tensor in tensors.items():
            if name.startswith("to."):
                _, id, rest = name.split(".", 2)
                self.remote.replies.setdefault(int(id), {})[rest] = tensor.clone()

    def model(self) -> dict[str, Tensor]:
        return self.simulation.model()

    def leave(self, folder: Path, model: Mapping[str, Tensor]) -> None:
        self.simulation.leave(folder, model)

    def about(self) -> dict[str, Any]:
        sites = {} if self.best is None else {"sites": list(self.remote.names)}
        return {"parameters": self.net.layout.entries} | sites | {"task": self.simulation.task_identity}


def cap_shares(sizes: NDArray[np.int64], cap: float) -> NDArray[np.float64]:
    """Weights like the sizes of a cohort's clients, of which none is more than a share `cap` of their sum.

    >>> cap_shares(np.array([100, 300, 10**6]), 0.5), cap_shares(np.array([1, 2, 3]), 0.1)
    (array([100., 300., 400.]), array([1., 1., 1.]))
    """
    weights = sizes.astype(np.float64)
    if cap * len(sizes) <= 1:
        return np.ones_like(weights)
    rest, largest = weights.sum(), np.sort(weights)[::-1]
    for above, size in enumerate(largest):  # so many clients get the largest share
        limit = cap * rest / (1 - above * cap) if above * cap < 1 else rest
        if size <= limit:
            break
        rest -= size
    return weights.clip(max=limit)
