"""Clients on other machines: letters to them, and what is believed of their answers.

A missing or refused answer is NaN in the cohort. The round drops it, as every answer that is not finite.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from undrift.algorithms.base import Algorithm
from undrift.algorithms.checks import looks_at_single_uploads
from undrift.core.errors import BadSetting
from undrift.core.trees import Nothing, State, leaves, map_leaves
from undrift.deploy.client import CLOSE, MEASURE, TRAIN, Measured, Reply, Request
from undrift.deploy.messages import NOT_FINITE, Encoded, Fact, Letter, Refused, check_finite, encode, pack, unpack
from undrift.deploy.scores import KINDS, SCORE, Scoring, gather_scores, read_scores
from undrift.deploy.sums import SecureLetters, Total, fill
from undrift.oracle.net import Net
from undrift.round.aggregate import MEAN
from undrift.round.clients import Answers
from undrift.round.compressed import Compressed
from undrift.round.order import Ask
from undrift.round.private import PART
from undrift.round.shapes import Forms
from undrift.round.who import Attendance, Who
from undrift.simulate.simulation import Simulation
from undrift.simulate.work import LocalWork

# What a client of a private or secure run does not tell, and what the server takes for it: nobody reads these numbers.
UNTOLD: dict[str, Fact] = {"seconds": 0.0, "gradients": 0, "loss": 0.0, "anew": False}
LONG = 10.0  # vectors so many times as long as the median client's are reported
CALLS = 100  # most gradients that a method computes of one mini-batch
LONGEST = 300  # most characters of a reason in the record; a client may have written a part of it
LARGEST = 1e9  # largest loss, or other number for the record, that is believed


class Post(Protocol):
    """Carries letters to clients by name; a text in place of an answer says why there is none."""

    def exchange(self, letters: Mapping[str, Letter]) -> Iterable[tuple[str, Letter | str]]:
        """Give each client's name and answer once, as the answers arrive."""


class Stream(Post, Protocol):
    """A post that need not be waited for."""

    def send(self, letters: Mapping[str, Letter]) -> None:
        """Send letters, without waiting for their answers."""

    def receive(self) -> list[tuple[str, Letter | str]]:
        """The answers that have come since, in their order; it waits until there is one, if any is still to come."""


class Visit(NamedTuple):
    """One client's part in one exchange: a line of clients.jsonl."""

    round: int
    client: str
    exchange: str
    outcome: str  # "answered", or why its answer does not count
    bytes_down: int
    bytes_up: int
    seconds: float  # how long the client worked, as it says
    away: float  # seconds of the whole exchange


class Remote:
    """Executes the clients' part on other machines."""

    name = "flower"

    def __init__(
        self,
        post: Post,
        names: Sequence[str],
        token: str,
        least: int,
        say: Callable[[str], None],
        private: bool = False,
        secure_bound: float = 0.0,
        settings: str = "",
    ) -> None:
        """`secure_bound` is the largest entry of an upload whose single values the server must not see; 0: it sees them.

        `settings` are the run's, which clients must have too if they are to be added up.
        """
        self.settings = settings
        self.post, self.names, self.token, self.say = post, names, token, say
        self.private, self.least, self.secure_bound = private, 0 if private else least, secure_bound
        self.quiet = private or secure_bound > 0  # clients send what they must and nothing else
        # The simulation's arrays: the last round that counts each client's answer, and the batches that each has taken.
        self.counted = self.position = np.zeros(len(names), dtype=np.int64)
        self.replies: dict[int, dict[str, Tensor]] = {}  # by id: replies to last rounds that are still to be sent
        self.visits: list[Visit] = []
        self.aggregate = MEAN  # the rule that guards the server
        self.adds_up = False  # whether uploads are added up as they arrive
        self.absent = 0.0 if private else torch.nan  # for a missing update: a private sum leaves nobody out

    def __call__(self, work: LocalWork) -> Ask:
        return SecureLetters(self, work) if self.secure_bound else Letters(self, work)

    def ask(self, exchange: str, request: Request, work: LocalWork, read: Callable[[Letter], Any]) -> list[Any]:
        """Ask the cohort; return its answers in the order of its ids, None for each that does not count."""
        arrays = pack(request, work.net)
        letters = {id: self.letter(id, work.round, exchange, arrays) for id in work.ids.tolist()}

        batches = most_batches(work.table.steps, work.data.sizes[work.ids.cpu().numpy()], work.batch)
        most = dict(zip((self.names[id] for id in letters), batches.tolist(), strict=True))

        def read_counted(answer: Letter) -> Any:
            gradients = read_gradients(answer, most[answer.fact("client", str)])
            content = read(answer)
            work.gradients += gradients
            return content

        answers = self.visit(letters, work.data.sizes, read_counted, "does not count")
        spoilt = sum(visit.outcome == f"refused: {NOT_FINITE}" for visit in self.visits[-len(letters) :])
        if 2 * spoilt > len(letters):
            self.say(
                f"round {work.round + 1}: most answers are not finite, so the model that was sent is probably ruined; "
                "begin anew with a rule such as --aggregate median"
            )
        if sum(a is not None for a in answers) < self.least:
            self.say(f"round {work.round + 1}: fewer than {self.least} clients answered; the model stays as it is")
            return [None] * len(answers)
        return answers

    def say_lengths(self, round: int, lengths: Mapping[int, float]) -> None:
        """Say whose vectors are very much longer than those of most others."""
        usual = statistics.median(lengths.values()) if len(lengths) > 2 else math.inf
        guard = "nothing guards against it: see --aggregate"
        if self.aggregate != MEAN:
            guard = f"aggregate={self.aggregate} guards against it"
        for id, length in lengths.items():
            if length > LONG * usual:
                times = f"{length / usual:.3g} times" if usual else "very much"
                self.say(f"round {round + 1}: {self.names[id]} sent vectors {times} longer than most; {guard}")

    def close(self, sizes: NDArray[np.int64], delivered: Set[tuple[str, int]]) -> None:
        """Send the replies to last rounds that are still to be sent; `delivered` (name, round) have got theirs."""
        letters = {
            id: self.letter(id, int(self.counted[id]) - 1, CLOSE, {})
            for id, reply in sorted(self.replies.items())
            if reply and (self.names[id], int(self.counted[id])) not in delivered
        }
        if letters:
            answers = self.visit(letters, sizes, lambda answer: True, "keeps what it had, without the last reply")
            got, sent = sum(map(bool, answers)), sum(letter.nbytes for letter in letters.values())
            self.say(f"{got} of {len(letters)} clients got the reply to their last round, {sent} bytes down")

    def score(self, run: Simulation) -> dict[str, Any]:
        """Ask every client how the server's model, and its own, do on the samples that it holds out."""
        every = np.arange(len(self.names))
        down = run.down(run.who(Attendance(every, every, every, np.ones_like(every))))
        arrays = pack(Scoring(run.state.x, down, run.state.buffers), run.net)
        kinds = KINDS if run.alg.personalises else KINDS[:1]
        metrics = ["loss", *run.score_keeper.metrics]
        letters = {id: self.letter(id, run.t - 1, SCORE, arrays) for id in every.tolist()}
        marks = self.visit(letters, run.data.sizes, lambda a: read_scores(a, kinds, metrics), "is not scored")
        return gather_scores(marks, kinds, metrics)

    def letter(self, id: int, round: int, exchange: str, arrays: dict[str, Encoded], **more: Fact) -> Letter:
        if exchange != MEASURE:
            arrays = arrays | {name: encode(tensor) for name, tensor in self.replies.get(id, {}).items()}
        facts: dict[str, Fact] = {"run": self.token, "client": self.names[id], "id": id, "round": round}
        facts |= {"exchange": exchange, "since": int(self.counted[id]), "position": int(self.position[id])}
        return Letter(facts | more, arrays)

    def visit(
        self, letters: Mapping[int, Letter], sizes: NDArray[np.int64], read: Callable[[Letter], Any], failed: str
    ) -> list[Any]:
        """Send letters to clients by id, and `read` their answers; None for an answer that is missing or refused.

        `sizes` [N] are the clients' numbers of samples; `failed` tells the user the effect of a missing answer.
        """
        began, sent = time.perf_counter(), {self.names[id]: (id, letter) for id, letter in letters.items()}
        contents: dict[int, Any] = dict.fromkeys(letters)
        visits: dict[int, Visit] = {}
        for name, answer in self.post.exchange({name: letter for name, (_, letter) in sent.items()}):
            id, letter = sent[name]
            away = time.perf_counter() - began
            contents[id], visits[id] = self.take(letter, answer, int(sizes[id]), away, read, failed)
            del answer  # so that it takes no memory while others are waited for
        away = time.perf_counter() - began
        self.visits += [visits[id]._replace(away=away) for id in letters]
        return list(contents.values())

    def take(
        self, letter: Letter, answer: Letter | str, size: int, away: float, read: Callable[[Letter], Any], failed: str
    ) -> tuple[Any, Visit]:
        """Read the answer to a letter that was sent `away` seconds ago; None for one that is missing or refused."""
        name, round, exchange = letter.fact("client", str), letter.fact("round", int) + 1, letter.fact("exchange", str)
        seconds, content, outcome = 0.0, None, answer[:LONGEST] if isinstance(answer, str) else "answered"
        if isinstance(answer, Letter):
            if self.quiet:
                answer = replace(answer, facts=answer.facts | UNTOLD | {"samples": size})
            try:
                for fact in ("run", "client", "round", "exchange"):
                    if answer.facts.get(fact) != letter.facts[fact]:
                        raise Refused(f"its {fact} is {answer.facts.get(fact)!r}, not {letter.facts[fact]!r}")
                samples = answer.fact("samples", int)
                if samples != size:  # it joined after the round began, or its file has changed
                    raise Refused(f"it has {samples} samples, but this round counts on {size}")
                claimed = answer.number("seconds")
                if not 0 <= claimed <= away:
                    raise Refused(f"it says that it worked for {claimed:g} s, in an exchange of {away:g} s")
                seconds, content = claimed, read(answer)
            except Refused as error:
                outcome = f"refused: {error}"[:LONGEST]
        if content is None:
            self.say(f"round {round}: {name} {failed}: {outcome}")
        up = answer.nbytes if isinstance(answer, Letter) else 0
        return content, Visit(round, name, exchange, outcome, letter.nbytes, up, seconds, away)


def most_batches(steps: NDArray[np.int64], sizes: NDArray[np.int64], batch: int) -> NDArray[np.int64]:
    """The most gradients of mini-batches that clients can have computed: of their steps, and of all samples."""
    return CALLS * (steps + -(-sizes // batch))


def read_gradients(letter: Letter, largest: int) -> int:
    """How many gradients a client says that it has computed."""
    gradients = letter.fact("gradients", int)
    if not 0 <= gradients <= largest:
        raise Refused(f"it counts {gradients} gradients, but it can have computed at most {largest}")
    return gradients


def read_answers(
    remote: Remote, alg: Algorithm, form: Answers, letter: Letter, round: int, net: Net, x: Tensor
) -> Answers:
    """What a client sends when it has trained, in the simulator's form; the client's model stays with it."""
    reply = check_finite(unpack(letter.arrays, Reply(form.up, form.buffers), net, x.device))
    if letter.fact("anew", bool):
        remote.say(f"round {round + 1}: {letter.facts['client']} had lost its state and begins anew")
    if isinstance(alg, Compressed):
        refuse_misplaced(alg, reply.up)
        check_finite(alg.open("up", reply.up))  # numbers that are finite may have scales under which they are not
    told = {n: 0.0 if remote.private else read_number(letter, f"fact.{n}") for n in form.facts._fields}
    numbers = type(form.facts)(*(x.new_tensor([value]) for value in told.values()))
    loss = x.new_tensor([read_number(letter, "loss")])
    return Answers(reply.up, Nothing(), reply.buffers, x.new_full((1,), torch.nan), loss, numbers)


def read_number(letter: Letter, name: str) -> float:
    """Read a number for the record; one client's must not drown those of the others."""
    value = letter.number(name)
    if abs(value) > LARGEST:
        raise Refused(f"{name} is {value:g}; at most {LARGEST:g} is believed")
    return value


def refuse_misplaced(alg: Compressed, up: State) -> None:
    try:
        alg.uplink.check(up)
    except BadSetting as error:
        raise Refused(str(error)) from error


class Letters:
    """Asks the clients of one round by letter."""

    def __init__(self, remote: Remote, work: LocalWork) -> None:
        self.remote, self.work = remote, work

    def measure(self, alg: Algorithm, down: State, buffers: Tensor, who: Who) -> Tensor:
        lengths: dict[int, float] = {}

        def read(letter: Letter) -> Measured:
            found = check_finite(unpack(letter.arrays, Measured(down.x), self.work.net, down.x.device))
            lengths[self.remote.names.index(letter.fact("client", str))] = length(found)
            return found

        answers = self.remote.ask(MEASURE, Request(down, buffers), self.work, read)
        self.remote.say_lengths(self.work.round, lengths)
        return torch.stack([torch.full_like(down.x, torch.nan) if a is None else a.sent for a in answers])

    def train(self, alg: Algorithm, down: State, buffers: Tensor, who: Who) -> Answers:
        remote, work, x = self.remote, self.work, down.x
        form = Forms.of(alg, work.net, work.data.clients).answers
        facts, none = form.facts, x.new_full((1,), torch.nan)  # `none`: the client's model stays with it
        total = Total() if remote.adds_up and not looks_at_single_uploads(alg) else None
        lengths: dict[int, float] = {}

        def read(letter: Letter) -> Answers:
            found = read_answers(remote, alg, form, letter, work.round, work.net, x)
            seen = alg.open("up", found.up) if isinstance(alg, Compressed) else found.up
            lengths[remote.names.index(letter.fact("client", str))] = length(seen)
            if total is not None:
                total.add(found.up)
                found = found._replace(up=Nothing())
            return found

        up = Nothing() if total is not None else fill(form.up, x, remote.absent)
        lost = Answers(up, Nothing(), fill(form.buffers, x), none, fill(form.loss, x), fill(facts, x))
        answers = remote.ask(TRAIN, Request(down, buffers), work, read)
        remote.say_lengths(work.round, {id: lengths[id] for id in work.ids.tolist() if id in lengths})
        rows = map_leaves(lambda *rows: torch.stack(rows), *(lost if a is None else a for a in answers))
        if total is None:
            return rows
        there = torch.tensor([a is not None for a in answers], device=x.device)
        return rows._replace(up=total.rows(form.up, x, len(answers)), there=there)


def length(up: State) -> float:
    """The norm of all that a client sent, in float64."""
    parts = (part for leaf in leaves(up) for part in leaf.flatten().split(PART))  # as float64 one by one
    return math.sqrt(sum(float(part.double().square().sum()) for part in parts))
