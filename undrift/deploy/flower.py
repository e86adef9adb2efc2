"""Flower: carries letters in its messages, finds clients by name, and provides the server's and the client's app."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from undrift.core import stopping
from undrift.core.errors import UndriftError, UnknownName
from undrift.deploy.messages import Encoded, Fact, Letter, Refused
from undrift.deploy.node import build_client, name_of
from undrift.deploy.run import deploy
from undrift.deploy.settings import REFUSED, Plan
from undrift.deploy.site_files import Report, check_fits, read_report, site_path

NPY = "numpy.ndarray"  # Flower's name for a .npy file
PAUSE = 1.0  # seconds between two queries for new nodes


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


class GridPost:
    """Carries letters over Flower's grid to the nodes of the clients."""

    def __init__(self, grid: Grid, timeout: float, say: Callable[[str], None], plan: Plan | None = None) -> None:
        self.grid, self.timeout, self.say = grid, timeout, say
        self.plan = plan if plan is not None and plan.site_files else None  # where clients report on their files
        self.node: dict[str, int] = {}  # node ids by client name
        self.samples: dict[str, int] = {}  # numbers of samples that clients with files have reported
        self.rejected: set[tuple[str, str]] = set()  # (name, reason), to say each once

    def roll(self, timeout: float) -> None:
        """Ask new nodes for their names."""
        nodes = set(self.grid.get_node_ids())
        queries = [Message(RecordDict(), n, "query", ttl=timeout) for n in sorted(nodes - set(self.node.values()))]
        for reply in self.grid.send_and_receive(queries, timeout=timeout) if queries else ():
            if reply.has_error():  # it is starting, or it is gone
                continue
            node = reply.metadata.src_node_id
            try:
                letter = from_records(reply.content)
                name = letter.fact("client", str)
            except Refused as error:
                self.say(f"node {node} does not say its name: {error}")
                continue
            if reason := self.unfit(letter):
                if (name, reason) not in self.rejected:
                    self.say(f"{name} is turned away: {reason}")
                    self.rejected.add((name, reason))
            elif self.node.get(name) in nodes:
                self.say(f"node {node} is turned away: {name} is there already")
            else:
                self.node[name] = node
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
        while wanted - self.node.keys() and time.monotonic() < until and not stopping.asked():
            self.roll(min(30.0, wait))
            if (missing := sorted(wanted - self.node.keys())) and missing != awaited:
                more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
                self.say(f"waiting for {', '.join(missing[:5])}{more}, at most {until - time.monotonic():.0f} s")
                awaited = missing
            for name in sorted(self.node.keys() - wanted - strangers):
                self.say(f"a node is left out: {UnknownName('client', name, wanted)}")
                strangers.add(name)
            time.sleep(PAUSE)
        return len(wanted & self.node.keys())

    def exchange(self, letters: Mapping[str, Letter]) -> dict[str, Letter | str]:
        nodes = set(self.grid.get_node_ids())
        if any(self.node.get(name) not in nodes for name in letters):
            self.roll(min(30.0, self.timeout))
        answers: dict[str, Letter | str] = {}
        messages, names = [], {}
        for name, letter in letters.items():
            answers[name] = "no answer in time" if name in self.node else "not connected"
            if name in self.node:
                names[self.node[name]] = name
                messages.append(Message(to_records(letter), self.node[name], "train", ttl=self.timeout))
        for reply in self.grid.send_and_receive(messages, timeout=self.timeout):
            client = names.get(reply.metadata.src_node_id)
            if client is None or isinstance(answers[client], Letter):  # a stranger, or a second answer
                self.say(f"an answer of node {reply.metadata.src_node_id} that nobody waits for is ignored")
            elif reply.has_error():
                answers[client] = f"failed: {' '.join(str(reply.error.reason).split())[:300]}"
            else:
                try:
                    answers[client] = from_records(reply.content)
                except Refused as error:
                    answers[client] = f"refused: {error}"
        return answers


def server_app() -> ServerApp:
    """The app of a federation's server."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        plan = Plan.from_flat(context.run_config)
        post = GridPost(grid, plan.deploy.timeout, say, plan)
        try:
            with stopping.heeded(lambda how: say(f"{how}; go on with resume=true")):
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
        plan = Plan.from_flat(context.run_config)
        try:
            path = site_path(plan, context.node_config)
            facts |= {} if path is None else read_report(plan, path)._asdict()
        except UndriftError as error:
            say(f"{facts['client']}: {error}")
            file = str(context.node_config.get("data", ""))  # the server need not know its path
            facts["unfit"] = str(error).replace(file, "its file") if file else str(error)
        return Message(to_records(Letter(facts, {})), reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        client, began = build_client(Plan.from_flat(context.run_config), context.node_config), time.perf_counter()
        try:
            letter = from_records(message.content)
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


def say(line: str) -> None:
    print(line, flush=True)
