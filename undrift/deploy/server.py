"""The server of a real federation: the simulator's round, with clients that answer by letter.

A client that does not answer in time, or whose answer is refused, stands in the cohort with an answer of NaN; the round drops
it as it drops every answer that is not finite, and the weights of the others add up to one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from undrift.algorithms.base import Algorithm
from undrift.core.trees import Nothing, State, map_leaves, named_leaves, unstack
from undrift.deploy.client import CLOSE, MEASURE, TRAIN, Measured, Reply, Request
from undrift.deploy.messages import Encoded, Fact, Letter, Refused, check_finite, encode, pack, unpack
from undrift.jobs.protocol import InMemory
from undrift.round.clients import Answers
from undrift.round.record import RoundRecord
from undrift.round.shapes import Forms
from undrift.round.who import Who
from undrift.simulate.simulation import Simulation
from undrift.simulate.work import LocalWork


class Post(Protocol):
    """Carries letters to clients by name; for whom no letter came back, the answer is a text that says why."""

    def exchange(self, letters: Mapping[str, Letter]) -> dict[str, Letter | str]: ...


class Visit(NamedTuple):
    """What one client did in one exchange, a line of clients.jsonl."""

    round: int
    client: str
    exchange: str
    outcome: str  # "answered", or why its answer does not count
    bytes_down: int
    bytes_up: int
    seconds: float  # that the client says it worked
    away: float  # from the letter's leaving to the end of the exchange


class Remote:
    """An execution of the clients' part on other machines."""

    name = "flower"

    def __init__(self, post: Post, names: Sequence[str], token: str, least: int, say: Callable[[str], None]) -> None:
        self.post, self.names, self.token, self.least, self.say = post, names, token, least, say
        self.counted = np.zeros(len(names), dtype=np.int64)  # the last round of each client whose answer counted
        self.position = self.counted  # batches each has taken, the simulation's own
        self.replies: dict[int, dict[str, Tensor]] = {}  # what each client is still to be sent of its last round
        self.visits: list[Visit] = []
        self.absent = torch.nan  # what stands for a missing update; 0 where the sum is private, and nobody is left out

    def __call__(self, work: LocalWork) -> Letters:
        """How the clients of a round are asked."""
        return Letters(self, work)

    def ask(self, exchange: str, request: Request, work: LocalWork, read: Callable[[Letter], Any]) -> list[Any]:
        """The cohort's answers in the order of its ids, None for each that does not count."""
        arrays, letters = pack(request, work.net), {}
        for id in work.ids.tolist():
            own = self.replies.get(id, {}) if exchange == TRAIN else {}
            letters[id] = self.letter(id, work.round, exchange, arrays | {n: encode(t) for n, t in own.items()})

        def taken(answer: Letter) -> Any:
            gradients, found = answer.fact("gradients", int), read(answer)
            work.gradients += gradients
            return found

        found = self.visit(letters, work.data.sizes, taken, "does not count")
        if sum(a is not None for a in found) < self.least:
            self.say(f"round {work.round + 1}: fewer than {self.least} clients answered; the model stays as it is")
            return [None] * len(found)
        return found

    def close(self, sizes: NDArray[np.int64], delivered: Set[tuple[str, int]]) -> None:
        """Send the replies to clients' last rounds that no letter has taken along, except those `delivered` (name, round)."""
        due = {id: own for id, own in self.replies.items() if own}
        letters = {
            id: self.letter(id, int(self.counted[id]) - 1, CLOSE, {n: encode(t) for n, t in own.items()})
            for id, own in sorted(due.items())
            if (self.names[id], int(self.counted[id])) not in delivered
        }
        if letters:
            got = self.visit(letters, sizes, lambda answer: True, "keeps what it had, without the last reply")
            sent = sum(letter.nbytes for letter in letters.values())
            self.say(
                f"{sum(map(bool, got))} of {len(letters)} clients got the reply to their last round, {sent} bytes down"
            )

    def letter(self, id: int, round: int, exchange: str, arrays: dict[str, Encoded]) -> Letter:
        facts: dict[str, Fact] = {"run": self.token, "client": self.names[id], "id": id, "round": round}
        facts |= {"exchange": exchange, "since": int(self.counted[id]), "position": int(self.position[id])}
        return Letter(facts, arrays)

    def visit(
        self, letters: Mapping[int, Letter], sizes: NDArray[np.int64], read: Callable[[Letter], Any], failed: str
    ) -> list[Any]:
        """What `read` makes of the answers to letters, by the clients' ids; None where there is none that can be used.

        `sizes` [N] are how many samples each client has, and `failed` says what becomes of one without such an answer.
        """
        began = time.perf_counter()
        answers = self.post.exchange({self.names[id]: letter for id, letter in letters.items()})
        away = time.perf_counter() - began
        found = []
        for id, letter in letters.items():
            name, round = self.names[id], letter.fact("round", int) + 1
            answer, taken, seconds = answers.get(name, "no answer"), None, 0.0
            outcome = answer if isinstance(answer, str) else "answered"
            if isinstance(answer, Letter):
                try:
                    for fact in ("run", "client", "round", "exchange"):
                        if answer.facts.get(fact) != letter.facts[fact]:
                            raise Refused(f"its {fact} is {answer.facts.get(fact)!r}, not {letter.facts[fact]!r}")
                    samples = answer.fact("samples", int)
                    if samples != sizes[id]:  # it came after the round had begun, or has other samples now
                        raise Refused(f"it has {samples} samples, but this round counts on {sizes[id]}")
                    seconds = answer.number("seconds")
                    taken = read(answer)
                except Refused as error:
                    outcome = f"refused: {error}"
            if taken is None:
                self.say(f"round {round}: {name} {failed}: {outcome}")
            up = answer.nbytes if isinstance(answer, Letter) else 0
            exchange = letter.fact("exchange", str)
            self.visits.append(Visit(round, name, exchange, outcome, letter.nbytes, up, seconds, away))
            found.append(taken)
        return found


class Letters:
    """Asks the clients of one round by letter. Who does not answer stands in the cohort with NaN, and is left out."""

    def __init__(self, remote: Remote, work: LocalWork) -> None:
        self.remote, self.work = remote, work

    def measure(self, alg: Algorithm, down: State, buffers: Tensor, who: Who) -> Tensor:
        def read(letter: Letter) -> Measured:
            measured: Measured = unpack(letter.arrays, Measured(down.x), self.work.net, down.x.device)
            check_finite(measured)
            return measured

        found = self.remote.ask(MEASURE, Request(down, buffers), self.work, read)
        return torch.stack([torch.full_like(down.x, torch.nan) if a is None else a.sent for a in found])

    def train(self, alg: Algorithm, down: State, buffers: Tensor, who: Who) -> Answers:
        remote, work, x = self.remote, self.work, down.x
        form = Forms.of(alg, work.net, work.data.clients).answers
        # What stays with a client is not here: neither its state nor its model.
        facts, none = form.facts, x.new_full((1,), torch.nan)

        def read(letter: Letter) -> Answers:
            reply: Reply = unpack(letter.arrays, Reply(form.up, form.buffers), work.net, x.device)
            check_finite(reply)
            if letter.fact("anew", bool):
                remote.say(f"round {work.round + 1}: {letter.facts['client']} had lost its state and begins anew")
            numbers = type(facts)(*(x.new_tensor([letter.number(f"fact.{n}")]) for n in facts._fields))
            return Answers(reply.up, Nothing(), reply.buffers, none, x.new_tensor([letter.number("loss")]), numbers)

        found = remote.ask(TRAIN, Request(down, buffers), work, read)

        def fill(value: float, like: State) -> State:
            return map_leaves(lambda v: torch.full(v.shape, value, dtype=v.dtype, device=x.device), like)

        nan = torch.nan
        lost = Answers(
            fill(remote.absent, form.up), Nothing(), fill(nan, form.buffers), none, fill(nan, form.loss),
            fill(nan, facts),
        )  # fmt: skip
        rows = [lost if answer is None else answer for answer in found]
        return map_leaves(lambda *parts: torch.stack(parts), *rows)


class Deployment(InMemory):
    """A run whose clients are elsewhere."""

    def __init__(
        self,
        simulation: Simulation,
        remote: Remote,
        keep: Callable[[list[Visit]], None],
        spent: Callable[[int], dict[str, float]] = lambda rounds: {},
        samples: Mapping[str, int] | None = None,
    ) -> None:
        """`keep` is given each round's visits; `spent` says what of privacy so many rounds have spent.

        `samples` are how many each client has said it has so far, where they have files of their own.
        """
        self.samples, self.sizes = samples, np.zeros(len(remote.names), np.int64)  # as they were first said; 0: not yet
        self.spent = spent
        self.simulation, self.remote, self.keep = simulation, remote, keep
        self.net, self.device = simulation.net, simulation.device
        simulation.remote = remote
        simulation.data = replace(
            simulation.data, own={}
        )  # what clients hold out for tests, and their models, are theirs

    @property
    def t(self) -> int:
        return self.simulation.t

    def rounds(self, most: int, last: bool = False) -> list[RoundRecord]:
        """The next round."""
        run, remote = self.simulation, self.remote
        remote.position, before = run.position, run.position.copy()
        remote.visits = []
        self.count_samples()
        record = run.round(last and most == 1)
        remote.counted[run.position != before] = run.t  # whose batches were taken, its answer counted
        if run.last_reply is not None:
            ids, reply = run.last_reply
            for id, own in zip(ids.tolist(), unstack(reply, len(ids)), strict=True):
                remote.replies[id] = dict(named_leaves("reply", self.net.sent(own)))
            run.last_reply = None
        self.keep(remote.visits)
        return [self.completed(record)]

    def close(self, delivered: Set[tuple[str, int]] = frozenset()) -> None:
        """After the last round: what clients are still to be sent. It is no round, and nothing of the run depends on it."""
        self.remote.position, self.remote.visits = self.simulation.position, []
        self.count_samples()
        self.remote.close(self.simulation.data.sizes, delivered)
        self.keep(self.remote.visits)

    def count_samples(self) -> None:
        """Count on what clients with files of their own have said; one that has not said it yet cannot answer rightly."""
        if self.samples is None:
            return
        for id, name in enumerate(self.remote.names):
            self.sizes[id] = self.sizes[id] or self.samples.get(name, 0)
        self.simulation.data = replace(self.simulation.data, sizes=np.maximum(self.sizes, 1))

    def completed(self, record: RoundRecord) -> RoundRecord:
        """The record with what was measured on the way."""
        visits = self.remote.visits
        answered = [v for v in visits if v.outcome == "answered"]
        measured = {
            "wire_down": sum(v.bytes_down for v in visits),
            "wire_up": sum(v.bytes_up for v in visits),
            "client_seconds": sum(v.seconds for v in answered) / max(1, len(answered)),
            "exchange_seconds": sum({v.exchange: v.away for v in visits}.values()),
            "refused": sum(v.outcome.startswith("refused") for v in visits),
        }
        # The simulator counts an upload for each client that was asked; who did not answer has sent nothing.
        bytes_up = record.bytes_up * sum(v.bytes_up > 0 for v in visits) // max(1, len(visits))
        silent = len({v.client for v in visits} - {v.client for v in answered})
        dropped = max(record.dropped, silent)
        return record._replace(
            bytes_up=bytes_up, dropped=dropped, more=record.more | measured | self.spent(record.round)
        )

    def tensors(self) -> dict[str, Tensor]:
        replies = {f"to.{id}.{name}": t for id, own in self.remote.replies.items() for name, t in own.items()}
        known = {"counted": torch.from_numpy(self.remote.counted), "samples": torch.from_numpy(self.sizes)}
        return self.simulation.tensors() | known | replies

    def restore(self, tensors: dict[str, Tensor], t: int) -> None:
        self.simulation.restore(tensors, t)
        self.remote.counted = tensors["counted"].cpu().numpy().copy()
        self.sizes = tensors["samples"].cpu().numpy().copy()
        self.remote.replies = {}
        for name, tensor in tensors.items():
            if name.startswith("to."):
                _, id, rest = name.split(".", 2)
                self.remote.replies.setdefault(int(id), {})[rest] = tensor.clone()

    def model(self) -> dict[str, Tensor]:
        return self.simulation.model()

    def about(self) -> dict[str, Any]:
        return {"parameters": self.net.layout.entries}
