"""Flower: carries letters in its messages, finds clients by name, and provides the server's and the client's app."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid, ServerApp

from undrift.core import stopping
from undrift.core.device import arithmetic
from undrift.core.errors import UndriftError, UnknownName
from undrift.deploy import pull
from undrift.deploy.log import LONGEST, say
from undrift.deploy.messages import Encoded, Fact, Letter, Refused, most_bytes
from undrift.deploy.node import build_client, check_allowed, name_of, states_of
from undrift.deploy.pull import Pull
from undrift.deploy.run import deploy
from undrift.deploy.sent import write_report
from undrift.deploy.settings import REFUSED, DeployConfig, Plan
from undrift.deploy.site_files import Report, check_fits, read_report, site_path
from undrift.deploy.versions import differences, report_versions, versions_of

NPY = "numpy.ndarray"  # Flower's name for a .npy file
PAUSE = 1.0  # seconds between two looks for answers and new nodes
AT_ONCE = 1.0  # seconds after which others are looked after, while an answer is on its way
LOST = (ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.NODE_UNAVAILABLE)  # Flower's words for a node that did not answer
UNBOUND = "UNDRIFT_INSECURE"  # in the environment of `deploy local --insecure`: nodes without keys say who they are


def to_records(letter: Letter) -> RecordDict:
    arrays = {name: Array(a.dtype, a.shape, NPY, a.data) for name, a in letter.arrays.items()}
    return RecordDict({"arrays": ArrayRecord(arrays), "facts": ConfigRecord(dict(letter.facts))})


def from_records(records: RecordDict) -> Letter:
    """Read the letter in a message, without decoding its arrays."""
    arrays, facts = records.get("arrays"), records.get("facts")
    if not isinstance(arrays, ArrayRecord) or not isinstance(facts, ConfigRecord) or len(records) > 2:
        raise Refused(f"a message has the records arrays and facts, not {sorted(records)[:5]}")
    for name, array in arrays.items():
        if array.stype != NPY:
            raise Refused(f"{name} is written as {array.stype!r}, not {NPY}")
    plain: Any = {name: fact for name, fact in facts.items() if isinstance(fact, bool | int | float | str)}
    return Letter(plain, {name: Encoded(a.dtype, tuple(a.shape), a.data) for name, a in arrays.items()})


@dataclass
class Question:
    """What a node has been asked: its name and its samples."""

    name: str  # under which its key was registered
    activation: str  # when the node joined; one that was started again is asked anew
    message: str  # id of the query; empty once it is answered
    patience: float  # seconds that the node has
    again: float  # when it may be asked again


@dataclass
class Sent:
    """A letter whose answer has not come yet."""

    message: str  # its id; empty where it could not be sent
    node: int  # that was asked
    nbytes: int  # how long the letter is
    at: float  # by time.monotonic
    why: str  # there will be no answer, if it does not come in time


class GridPost:
    """Carries letters over Flower's grid to the nodes of the clients.

    The SuperLink knows each node by its key, under the name with which the operator registered it. An answer belongs to
    the node that was asked: what the answer itself says about its sender was written by the client.
    """

    def __init__(self, grid: Grid, timeout: float, say: Callable[[str], None], plan: Plan | None = None) -> None:
        self.grid, self.timeout, self.say = grid, timeout, say
        how = DeployConfig() if plan is None else plan.deploy
        self.join, self.wait = how.join, how.wait
        self.plan = plan if plan is not None and plan.site_files else None  # where clients report on their files
        self.node: dict[str, int] = {}  # node ids by client name
        self.key: dict[str, bytes] = {}  # public keys by client name
        self.names = None if plan is None else frozenset(plan.names)  # other nodes may be connected too; None: any
        self.samples: dict[str, int] = {}  # numbers of samples that clients with files have reported
        self.versions = {} if plan is None else versions_of(plan)
        self.questions: dict[int, Question] = {}  # by node id
        self.pulls: dict[str, Pull] = {}  # by message: answers on their way
        self.said: set[str] = set()  # to say each once
        self.open: dict[str, Sent] = {}  # letters of a run that does not wait, by client name

    def say_once(self, line: str) -> None:
        line = line[:LONGEST]  # a client may have written a part of it, and it is kept
        if line not in self.said:
            self.said.add(line)
            self.say(line)

    def roll(self) -> set[int]:
        """Ask new nodes who they are, take in the answers that have come, and return the connected nodes."""
        present, now = {info.node_id: info for info in self.grid.get_nodes()}, time.monotonic()
        for node, old in [*self.questions.items()]:
            if node not in present or old.activation != present[node].last_activated_at:
                self.forget([self.questions.pop(node).message])
        queries = []
        for node in sorted(present.keys() - set(self.node.values())):
            question = self.questions.get(node)
            if question is not None and (question.message or now < question.again):
                continue
            if not present[node].name and not os.environ.get(UNBOUND):
                self.say_once(
                    f"node {node} is left out: its key was registered without a name; use undrift deploy admit"
                )
                continue
            patience = self.join if question is None else 2 * question.patience  # a machine may be slower than expected
            self.questions[node] = Question(
                present[node].name, present[node].last_activated_at, "", patience, now + patience
            )
            queries.append(Message(RecordDict(), node, "query", ttl=patience))
        ids = list(self.grid.push_messages(queries)) if queries else []
        for query, id in zip(queries, ids, strict=True):
            self.questions[query.metadata.dst_node_id].message = id or ""
        for node, asked in self.questions.items():
            if not asked.message or (pulled := self.look(asked.message, 0, asked.again)) is None:
                continue
            try:
                with pulled as replies:
                    for reply in replies:
                        asked.message = ""
                        self.hear(present[node], content_of(reply, node), present.keys())
            except Refused as error:
                asked.message = ""
                self.say_once(f"{present[node].name or f'node {node}'} does not say its name: {error}")
        return set(present)

    def look(self, id: str, bytes_down: int, until: float) -> Pull | None:
        """What has come as the answer to a message of so many bytes; None while it is on its way."""
        pulled = self.pulls.pop(id, None) or Pull(self.grid, id, most_bytes(bytes_down), until)
        if pulled.done.wait(AT_ONCE):
            return pulled
        self.pulls[id] = pulled
        return None

    def forget(self, ids: Iterable[str]) -> None:
        """Look no longer for the answers to these messages."""
        for id in ids:
            if id in self.pulls:
                self.pulls.pop(id).let_go()

    def hear(self, info: NodeInfo, letter: Letter, present: Set[int]) -> None:
        """Take in a node that says its name, or say why not."""
        node, known, name = info.node_id, info.name or f"node {info.node_id}", letter.fact("client", str)
        if info.name and name != info.name:
            self.say_once(
                f"{known} is turned away: its key was registered for {known}, and it says that it is {name!r}"
            )
        elif reason := self.unfit(letter):
            self.say_once(f"{name} is turned away: {reason}")
        elif self.node.get(name, node) != node and self.node[name] in present:
            self.say_once(f"node {node} is turned away: {name} is there already")
        else:
            if self.key.setdefault(name, info.public_key) != info.public_key:
                self.say(f"{name} has another key than before: the operator has revoked one and admitted another")
            for line in differences(letter.facts, self.versions) if self.versions else ():
                self.say_once(f"{name} has {line}")
            self.node[name], self.key[name] = node, info.public_key
            if self.plan is not None:
                self.samples[name] = Report.of(letter).samples

    def unfit(self, letter: Letter) -> str:
        """Why the client's samples do not fit the run; empty if they do."""
        if "unfit" in letter.facts or self.plan is None:
            return str(letter.facts.get("unfit", ""))[:300]
        try:
            check_fits(Report.of(letter), self.plan)
        except UndriftError as error:
            return str(error)
        return ""

    def meet(self, clients: Iterable[str], wait: float) -> int:
        """Wait until all these clients have joined, at most `wait` seconds, and count those that have."""
        wanted, strangers, until = set(clients), set[str](), time.monotonic() + wait
        awaited: list[str] = []
        while wanted - self.node.keys() and time.monotonic() < until and not stopping.stop_signal():
            self.roll()
            if (missing := sorted(wanted - self.node.keys())) and missing != awaited:
                more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
                self.say(f"waiting for {', '.join(missing[:5])}{more}, at most {until - time.monotonic():.0f} s")
                awaited = missing
            for name in sorted(self.node.keys() - wanted - strangers):
                self.say(f"a node is left out: {UnknownName('client', name, wanted)}")
                strangers.add(name)
            time.sleep(PAUSE)
        return len(wanted & self.node.keys())

    def expects(self, clients: Iterable[str]) -> bool:
        """Whether one of these clients has not joined yet, but is there and has been asked."""
        asked = {question.name for question in self.questions.values() if question.message}
        return any(name not in self.node and asked & {name, ""} for name in clients)

    def wait_for(self, clients: Iterable[str]) -> set[int]:
        """Wait for clients that are about to join; and where nobody is connected, as when a line is down, for anybody."""
        present, began = self.roll(), time.monotonic()

        def alone() -> bool:
            ours = (node for name, node in self.node.items() if self.names is None or name in self.names)
            return present.isdisjoint(ours)

        if alone():
            self.say(f"no client is connected; waiting at most {self.wait:.0f} s for one")
        while not stopping.stop_signal():
            waited = time.monotonic() - began
            joining = self.expects(clients) and waited < min(self.join, self.timeout)
            if not joining and not (alone() and waited < self.wait):
                break
            time.sleep(PAUSE)
            present = self.roll()
        return present

    def send(self, letters: Mapping[str, Letter]) -> None:
        present = self.wait_for(letters)
        for name, letter in letters.items():
            why, message = "no answer in time" if self.node.get(name) in present else "not connected", ""
            node = self.node.get(name, 0)
            if name in self.node:
                (id,) = self.grid.push_messages([Message(to_records(letter), node, "train", ttl=self.timeout)])
                message = id or ""
            self.open[name] = Sent(message, node, letter.nbytes, time.monotonic(), why)

    def receive(self) -> list[tuple[str, Letter | str]]:
        while self.open:
            found = [
                (name, answer)
                for name, sent in [*self.open.items()]
                if (answer := self.answer_to(name, sent)) is not None
            ]
            for name, _ in found:
                del self.open[name]
            if found:
                return found
            time.sleep(PAUSE)
            self.roll()  # who joins may be asked next
        return []

    def answer_to(self, name: str, sent: Sent) -> Letter | str | None:
        """The answer to a letter, or why there is none; None while it may come."""
        until = sent.at + self.timeout
        if sent.message and (pulled := self.look(sent.message, sent.nbytes, until)) is not None:
            answers = [*answers_of(pulled, sent.node)]
            if len(answers) > 1:
                self.say(f"a second answer of {name} is ignored")
            if answers:
                early = sent.why != "not connected" and time.monotonic() < until - PAUSE
                return answers[0] or ("not connected any more" if early else sent.why)
        takes = sent.message in self.pulls and self.pulls[sent.message].takes
        if sent.message and (takes or time.monotonic() < until):
            return None
        self.forget([sent.message])
        return sent.why

    def exchange(self, letters: Mapping[str, Letter]) -> Iterator[tuple[str, Letter | str]]:
        present = self.wait_for(letters)
        waiting, missing, sent = dict[str, str](), dict[str, str](), dict[str, float]()
        for name, letter in letters.items():
            missing[name] = "no answer in time" if self.node.get(name) in present else "not connected"
            if name in self.node:
                message = Message(to_records(letter), self.node[name], "train", ttl=self.timeout)
                sent[name] = time.monotonic()
                for id in self.grid.push_messages([message]):  # one by one: Flower copies what it sends
                    waiting |= {id: name} if id else {}  # there is none where Flower could not send
        until = time.monotonic() + self.timeout
        while waiting and (time.monotonic() < until or any(self.pulls[id].takes for id in waiting if id in self.pulls)):
            for id, name in [*waiting.items()]:
                pulled = self.look(id, letters[name].nbytes, until)
                for answer in () if pulled is None else answers_of(pulled, self.node[name]):
                    if waiting.pop(id, None) is None:
                        self.say(f"a second answer of {name} is ignored")
                    elif answer is not None:
                        del missing[name]
                        yield name, answer
                    elif missing[name] != "not connected" and time.monotonic() < sent[name] + self.timeout - PAUSE:
                        missing[name] = "not connected any more"
                    del answer
            if waiting:
                time.sleep(PAUSE)
        self.forget(waiting)
        yield from missing.items()


def answers_of(pulled: Pull, node: int) -> Iterator[Letter | str | None]:
    """The letters that a node has sent as the answer to a message; words where one is none, None where it was lost."""
    try:
        with pulled as replies:
            while replies:
                reply = replies.pop(0)  # nothing holds an answer but who has asked for it
                lost = reply.has_error() and reply.error.code in LOST
                answer = None if lost else letter_or_words(reply, node)
                del reply
                yield answer
                del answer
    except Refused as error:
        yield f"refused: {error}"


def letter_or_words(reply: Message, node: int) -> Letter | str:
    try:
        return content_of(reply, node)
    except Refused as error:
        return f"failed: {error}" if reply.has_error() else f"refused: {error}"


def content_of(reply: Message, node: int) -> Letter:
    """The letter in the reply of a node; raise Refused where there is none, or one that names another sender."""
    if reply.has_error():
        raise Refused(" ".join(str(reply.error.reason).split())[:300])
    if reply.metadata.src_node_id != node:
        raise Refused("the message says that another node wrote it")
    return from_records(reply.content)


def server_app() -> ServerApp:
    """The app of a federation's server."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        plan = Plan.from_flat(context.run_config)
        pull.set_up()
        post = GridPost(grid, plan.deploy.timeout, say, plan)
        try:
            with stopping.heed_signals(lambda how: say(f"{how}; go on with resume=true")):
                deploy(plan, post, lambda: post.meet(plan.names, plan.deploy.wait), post.samples, say)
        except stopping.Stopped as stopped:
            signal.raise_signal(stopped.number)  # now for Flower, which tells the SuperLink and ends the process
        except UndriftError as error:
            say(f"{REFUSED}{error}")  # Flower prints a traceback too
            raise

    return app


def client_app() -> ClientApp:
    """The app of each client."""
    app = ClientApp()

    @app.query()
    def query(message: Message, context: Context) -> Message:
        facts: dict[str, Fact] = {"client": name_of(context.node_config)}
        try:
            check_allowed(context.run_config, context.node_config)
            plan = Plan.from_flat(context.run_config)
            facts |= report_versions(plan)
            path = site_path(plan, context.node_config)
            facts |= {} if path is None else read_report(plan, path)._asdict()
        except UndriftError as error:
            say(f"{facts['client']}: {error}")
            file = str(context.node_config.get("data", ""))  # the server need not know its path
            facts["unfit"] = str(error).replace(file, "its file") if file else str(error)
        write_report(states_of(context.node_config), facts)
        return Message(to_records(Letter(facts, {})), reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        check_allowed(context.run_config, context.node_config)  # before anything that the run names is imported
        plan = Plan.from_flat(context.run_config)
        client, began = build_client(plan, context.node_config), time.perf_counter()
        try:
            letter = from_records(message.content)
            with arithmetic(plan.run.precision, plan.run.deterministic):
                answer = client.answer(letter)
        except UndriftError as error:
            say(f"{client.name}: {error}")
            raise
        say(
            f"{client.name}: round {int(letter.facts['round']) + 1} of run {letter.facts['run']}, {letter.facts['exchange']}: "
            f"{client.settings.plan.steps or answer.facts.get('steps', 0)} steps in {time.perf_counter() - began:.2f} s, "
            f"{answer.nbytes} bytes up"
        )
        return Message(to_records(answer), reply_to=message)

    return app
