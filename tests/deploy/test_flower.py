"""Flower's apps called directly: the server's main function and the clients' train and query, with Flower's own messages."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

flwr = pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict  # noqa: E402
from flwr.common.constant import ErrorCode  # noqa: E402
from flwr.proto.node_pb2 import NodeInfo  # noqa: E402
from flwr.supercore.task_identity import TaskIdentity  # noqa: E402

from tests.deploy.test_federation import without  # noqa: E402
from tests.small import DEEPER, model_for  # noqa: E402
from undrift.core.errors import BadSetting  # noqa: E402
from undrift.core.names import attribute, names  # noqa: E402
from undrift.data.load import load_dataset  # noqa: E402
from undrift.deploy.client import Client  # noqa: E402
from undrift.deploy.flower import GridPost, client_app, from_records, server_app, to_records  # noqa: E402
from undrift.deploy.messages import Letter, Refused, encode  # noqa: E402
from undrift.deploy.node import check_allowed, name_of  # noqa: E402
from undrift.deploy.settings import Plan  # noqa: E402
from undrift.jobs.registry import algorithm_class  # noqa: E402
from undrift.jobs.run import build_simulation  # noqa: E402


class Nodes:
    """A grid whose nodes are called in this process; their ids have nothing to do with their names."""

    def __init__(self, clients: int, config: dict[str, Any], root: Path) -> None:
        called = [name for name in str(config.get("names", "")).split(",") if name]
        self.contexts = {
            7919 * (clients - i): Context(
                1,
                1,
                ({"name": called[i]} if called else {"partition-id": i})
                | {"state-dir": str(root / str(i)), "allow": "tests"},
                RecordDict(),
                config,
            )
            for i in range(clients)
        }
        self.known: dict[int, str] = {}  # names by node id
        self.mail: dict[str, list[Message]] = {}  # answers by the id of the message
        self.pushed = 0  # messages so far
        self.twice = False  # every node answers twice
        self.failing: set[int] = set()

    def get_node_ids(self) -> set[int]:
        return set(self.contexts)

    def get_nodes(self) -> list[NodeInfo]:
        """The nodes as the SuperLink knows them: each was registered under the name that it was given at first."""
        return [NodeInfo(node_id=node, name=self.registered(node)) for node in sorted(self.get_node_ids())]

    def registered(self, node: int) -> str:
        return self.known.setdefault(node, name_of(self.contexts[node].node_config))

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        messages = list(messages)
        for message in messages:
            message.metadata.__dict__["_message_id"] = f"{self.pushed}"
            self.pushed += 1
            self.mail[message.metadata.message_id] = []
        for answer in self.send_and_receive(messages):
            self.mail[answer.metadata.reply_to_message_id].append(answer)
        return [message.metadata.message_id for message in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return [answer for id in message_ids for answer in self.mail.pop(id, [])]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        answers = []
        for message in messages:
            node = message.metadata.dst_node_id
            TaskIdentity.node_id = node
            if node in self.failing:
                answers.append(Message(Error(code=1, reason="out of memory"), reply_to=message))
                continue
            answers += [client_app()(message, self.contexts[node])] * (2 if self.twice else 1)
        TaskIdentity.node_id = 1
        return answers


@pytest.fixture(autouse=True)
def identity() -> None:
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1


def planned(out: Path, **settings: Any) -> Plan:
    given = {"clients": 3, "cohort": 2, "rounds": 3, "model": "logreg", "partition": "iid", "batch": 16, "steps": 2}
    given |= {"dtype": "float64", "device": "cpu", "eval_every": 3, "out": str(out), "wait": 0.1, "timeout": 5.0}
    return Plan.of(given | settings)


def serve(plan: Plan, root: Path) -> Nodes:
    config: dict[str, Any] = plan.flat()
    nodes = Nodes(plan.run.clients, config, root)
    server_app()(nodes, Context(1, 1, {}, RecordDict(), config))
    return nodes


def test_clients_may_have_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever order they are named in or join in: in sorted order they are clients 0, 1 and so on."""
    monkeypatch.setattr("undrift.deploy.flower.PAUSE", 0.0)
    plan = planned(tmp_path / "out", algorithm="scaffold", model="logreg", names="west,east,north", clients=3, cohort=2)
    assert plan.names == ["east", "north", "west"]
    serve(plan, tmp_path)
    visits = [json.loads(line) for line in (tmp_path / "out" / "clients.jsonl").read_text().splitlines()]
    run = build_simulation(plan.run, plan.alg, load_dataset("digits"), plan.run.model, torch.device("cpu"))
    asked = [plan.names[i] for t in range(3) for i in run.attendance(t).ids]
    assert [visit["client"] for visit in visits] == asked and {v["outcome"] for v in visits} == {"answered"}
    for place, name in enumerate(["west", "east", "north"]):  # each keeps its state under its own name
        assert not (tmp_path / str(place)).exists() or [p.name for p in (tmp_path / str(place)).glob("*/*")] == [name]
    found = run.net.layout.join(load_file(tmp_path / "out" / "model.safetensors"), run.state.x)
    for _ in range(3):
        run.round()
    torch.testing.assert_close(found, run.state.x, rtol=1e-9, atol=1e-12)


def test_a_node_with_a_mistyped_name_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("undrift.deploy.flower.PAUSE", 0.0)
    plan = planned(tmp_path / "out", algorithm="fedavg", names="west,east,north", clients=3, cohort=2, rounds=1)
    nodes = Nodes(3, plan.flat() | {"names": "wets,east,north"}, tmp_path)
    for context in nodes.contexts.values():
        context.run_config["names"] = plan.deploy.names
    server_app()(nodes, Context(1, 1, {}, RecordDict(), plan.flat()))
    said = capsys.readouterr().out
    assert said.count("a node is left out") == 1 and "unknown client 'wets'" in said and "did you mean 'west'" in said


@pytest.mark.parametrize("name", [name for name in names("algorithms") if not algorithm_class(name).pools])
def test_the_apps_equal_the_simulator(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("undrift.deploy.flower.PAUSE", 0.0)
    model = "mlp" if name in DEEPER else model_for(name, "logreg")
    plan = planned(tmp_path / "out", algorithm=name, model=model, set={"lr": 0.05})
    serve(plan, tmp_path)
    dataset = load_dataset("digits")

    def make() -> Any:
        return build_simulation(plan.run, plan.alg, dataset, plan.run.model, torch.device("cpu"))

    run = make()
    found = run.net.without_padding(
        run.net.layout.join(load_file(tmp_path / "out" / "model.safetensors"), run.state.x), "model"
    )
    torch.testing.assert_close(found, without(make, set(), 3)[-1], rtol=1e-9, atol=1e-12)


def test_records_become_letters_only_where_they_are_ours() -> None:
    letter = Letter({"run": "a1", "round": 3}, {"up.d": encode(torch.arange(3.0))})
    assert from_records(to_records(letter)) == letter
    pickled = ArrayRecord({"up.d": Array("float32", (3,), "pickle", b"rubbish")})
    for records, reason in (
        (RecordDict({"arrays": pickled, "facts": ConfigRecord({})}), "written as 'pickle'"),
        (RecordDict({"facts": ConfigRecord({})}), "records arrays and facts"),
        (RecordDict({"arrays": ConfigRecord({}), "facts": ConfigRecord({})}), "records arrays and facts"),
    ):
        with pytest.raises(Refused, match=reason):
            from_records(records)


def test_second_answers_failures_and_doubles_are_dealt_with(tmp_path: Path) -> None:
    plan, said = planned(tmp_path / "out"), []
    nodes = Nodes(3, plan.flat(), tmp_path)  # type: ignore[arg-type]
    post = GridPost(nodes, 5.0, said.append)  # type: ignore[arg-type]
    post.meet(["0", "1", "2"], 5.0)
    assert post.node == {"0": 3 * 7919, "1": 2 * 7919, "2": 7919}
    impostor = Context(1, 1, {"partition-id": 1, "state-dir": str(tmp_path / "5")}, RecordDict(), {})
    nodes.contexts[5] = impostor
    post.roll()
    assert post.node["1"] == 2 * 7919 and said == ["node 5 is turned away: 1 is there already"]
    nodes.twice, nodes.failing = True, {7919}
    run = build_simulation(plan.run, plan.alg, load_dataset("digits"), "logreg", torch.device("cpu"))
    arrays = {"down.x": encode(run.net.without_padding(run.state.x, "model")), "buffers": encode(run.state.buffers)}
    facts = {"run": "a1", "round": 0, "exchange": "train", "since": 0, "position": 0}
    letters = {n: Letter(facts | {"client": n, "id": int(n)}, arrays) for n in ("0", "2", "7")}
    answers = dict(post.exchange(letters))
    assert (
        isinstance(answers["0"], Letter) and answers["2"] == "failed: out of memory" and answers["7"] == "not connected"
    )
    assert "a second answer of 0 is ignored" in said


def joined(plan: Plan, nodes: Nodes, said: list[str]) -> GridPost:
    post = GridPost(nodes, plan.deploy.timeout, said.append, plan)  # type: ignore[arg-type]
    post.meet(plan.names, 0.5)
    return post


def test_a_node_has_the_name_that_its_key_was_registered_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that says another name is turned away, also where that name's own node is not there; one without a name too."""
    monkeypatch.setattr("undrift.deploy.flower.PAUSE", 0.0)
    plan, said = planned(tmp_path / "out", names="a,b,mallory"), list[str]()
    nodes = Nodes(3, plan.flat(), tmp_path)  # type: ignore[arg-type]
    a, b, mallory = (next(n for n in nodes.contexts if nodes.registered(n) == name) for name in plan.names)
    nodes.contexts[mallory].node_config["name"] = "a"
    nodes.known[b] = ""
    away = nodes.contexts.pop(a)
    post = joined(plan, nodes, said)
    assert post.node == {}
    nodes.contexts[a] = away
    post.meet(plan.names, 0.5)
    assert post.node == {"a": a}
    wrong = "mallory is turned away: its key was registered for mallory, and it says that it is 'a'"
    assert said.count(wrong) == 1 and sum(line.startswith(f"node {b} is left out") for line in said) == 1
    monkeypatch.setenv("UNDRIFT_INSECURE", "1")  # nobody has a key, as in deploy local --insecure
    nodes.known[mallory] = ""
    assert joined(plan, nodes, said).node.keys() == {"a", "b"}


def test_an_answer_that_names_another_sender_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower takes the sender from what the client wrote."""
    monkeypatch.setattr("undrift.deploy.flower.PAUSE", 0.0)
    plan = planned(tmp_path / "out", cohort=3, rounds=1)
    nodes, honest = Nodes(3, plan.flat(), tmp_path), Nodes.send_and_receive  # type: ignore[arg-type]

    def forged(messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        answers = honest(nodes, messages)
        for answer in answers:
            if answer.metadata.src_node_id == 7919 and answer.metadata.message_type == "train":
                answer.metadata.__dict__["_src_node_id"] = 2 * 7919
                answer.content["facts"]["client"] = "1"
        return answers

    nodes.send_and_receive = forged  # type: ignore[method-assign, assignment]
    server_app()(nodes, Context(1, 1, {}, RecordDict(), plan.flat()))  # type: ignore[arg-type]
    visits = [json.loads(line) for line in (tmp_path / "out" / "clients.jsonl").read_text().splitlines()]
    outcomes = {v["client"]: v["outcome"] for v in visits}
    assert outcomes == {"0": "answered", "1": "answered", "2": "refused: the message says that another node wrote it"}


class SlowNodes(Nodes):
    """Nodes whose answers come `late` seconds after the question, on a clock that each look moves by one second."""

    def __init__(self, late: float, plan: Plan, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(plan.run.clients, plan.flat(), root)  # type: ignore[arg-type]
        self.late, self.now, self.asked = late, 0.0, list[tuple[float, float]]()
        monkeypatch.setattr("undrift.deploy.flower.time.monotonic", lambda: self.now)
        monkeypatch.setattr("undrift.deploy.flower.time.sleep", self.pass_by)
        self.due: dict[str, tuple[float, float]] = {}

    def pass_by(self, seconds: float) -> None:
        self.now += 1.0

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        messages = list(messages)
        ids = super().push_messages(messages)
        for id, message in zip(ids, messages, strict=True):
            self.asked.append((self.now, message.metadata.ttl))
            self.due[id] = self.now + self.late, self.now + message.metadata.ttl
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        (id,) = message_ids
        come, expires = self.due[id]
        if self.now >= expires and come > expires:
            return [Message(Error(code=1, reason="expired"), reply_to=self.mail.pop(id)[0])]
        return super().pull_messages([id]) if self.now >= come else []


@pytest.mark.parametrize("late", [0.0, 29.0, 100.0, 500.0])
def test_slow_nodes_join_and_are_asked_seldom(late: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each question has twice the time of the one before, so that every node can answer one of them in time."""
    plan, said = planned(tmp_path / "out", join=30.0, clients=1, cohort=1), list[str]()
    nodes = SlowNodes(late, plan, tmp_path, monkeypatch)
    post = GridPost(nodes, 5.0, said.append, plan)  # type: ignore[arg-type]
    assert post.meet(plan.names, 3000.0) == 1 and post.node == {"0": 7919}
    times = [ttl for _, ttl in nodes.asked]
    assert times == [30.0 * 2**k for k in range(len(times))] and times[-1] >= late
    assert len(times) == 1 or times[-2] < late


def test_a_round_waits_for_a_client_that_is_about_to_join(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for one that is not there: rounds without anybody would otherwise follow each other, or take for ever."""
    plan, said = planned(tmp_path / "out", join=30.0, clients=2, cohort=2, timeout=60.0), list[str]()
    nodes = SlowNodes(20.0, plan, tmp_path, monkeypatch)
    del nodes.contexts[7919]  # client 1
    post = GridPost(nodes, 60.0, said.append, plan)  # type: ignore[arg-type]
    honest = nodes.send_and_receive

    def trains_badly(messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        bad = [m for m in messages if m.metadata.message_type == "train"]
        return [Message(Error(code=1, reason="bad"), reply_to=m) for m in bad] if bad else honest(messages)

    nodes.send_and_receive = trains_badly  # type: ignore[method-assign, assignment]
    assert dict(post.exchange({n: Letter({}, {}) for n in ("0", "1")})) == {"0": "failed: bad", "1": "not connected"}
    assert post.node == {"0": 2 * 7919} and nodes.now == 40.0
    assert dict(post.exchange({"1": Letter({}, {})})) == {"1": "not connected"} and nodes.now == 40.0


@pytest.mark.parametrize("back", [7.0, 100.0])
def test_a_round_waits_where_nobody_is_connected(back: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the server's line is down: rounds without any client would be used up one after the other."""
    plan, said = planned(tmp_path / "out", clients=2, cohort=2, timeout=60.0, wait=50.0), list[str]()
    nodes = SlowNodes(0.0, plan, tmp_path, monkeypatch)
    post = GridPost(nodes, 60.0, said.append, plan)  # type: ignore[arg-type]
    post.meet(plan.names, 50.0)
    came, away = nodes.now, nodes.contexts
    monkeypatch.setattr(nodes, "get_node_ids", lambda: set(away) if nodes.now >= came + back else set())
    monkeypatch.setattr(nodes, "send_and_receive", lambda messages: [])
    post.wait_for(["0"])
    assert nodes.now == came + min(back, 50.0) and "no client is connected; waiting at most 50 s for one" in said


def test_a_node_of_no_client_of_the_run_does_not_count_as_somebody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have been admitted for another run; the round waits for one of its own clients all the same."""
    plan = planned(tmp_path / "out", clients=2, cohort=2, timeout=60.0, wait=50.0)
    nodes = SlowNodes(0.0, plan, tmp_path, monkeypatch)
    post = GridPost(nodes, 60.0, lambda line: None, planned(tmp_path, clients=1, cohort=1, wait=50.0))  # type: ignore[arg-type]
    post.meet(["0"], 50.0)
    came, other = nodes.now, post.node["1"]
    monkeypatch.setattr(nodes, "get_node_ids", lambda: {other})
    monkeypatch.setattr(nodes, "send_and_receive", lambda messages: [])
    post.wait_for(["0"])
    assert nodes.now == came + 50.0


@pytest.mark.parametrize("code", [ErrorCode.NODE_UNAVAILABLE, ErrorCode.MESSAGE_UNAVAILABLE])
@pytest.mark.parametrize("late", [5.0, 60.0])
def test_why_there_is_no_answer_is_said_plainly(
    late: float, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower answers for a node that it has lost, and for one that is late, with the same codes and long sentences."""
    plan, said = planned(tmp_path / "out", clients=1, cohort=1), list[str]()
    nodes = SlowNodes(0.0, plan, tmp_path, monkeypatch)
    post = GridPost(nodes, 60.0, said.append, plan)  # type: ignore[arg-type]
    post.meet(plan.names, 5.0)
    nodes.late = late

    def lost(messages: Iterable[Message]) -> list[Message]:
        return [Message(Error(code=code, reason="Error: Unavailable"), reply_to=message) for message in messages]

    monkeypatch.setattr(nodes, "send_and_receive", lost)
    why = "not connected any more" if late < 60 else "no answer in time"
    assert dict(post.exchange({"0": Letter({}, {})})) == {"0": why}


def test_what_a_client_writes_cannot_steer_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr("undrift.deploy.flower.PAUSE", 0.0)
    plan = planned(tmp_path / "out", cohort=3, rounds=1)
    nodes, honest = Nodes(3, plan.flat(), tmp_path), Nodes.send_and_receive  # type: ignore[arg-type]
    evil = "\x1b[2J\x1b]0;x\x07\nround 9 of 9: all is well\r\u202e\u2028\x9b" + "x" * 10**6

    def spoiled(messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        answers = honest(nodes, messages)
        for answer in answers:
            if answer.metadata.message_type == "train":
                answer.content["facts"]["run"] = evil
            elif answer.metadata.src_node_id == 7919:
                answer.content["facts"]["client"] = evil
            elif answer.metadata.src_node_id == 2 * 7919:
                answer.content["facts"]["unfit"] = evil
        return [*answers]

    nodes.send_and_receive = spoiled  # type: ignore[method-assign, assignment]
    server_app()(nodes, Context(1, 1, {}, RecordDict(), plan.flat()))  # type: ignore[arg-type]
    said, files = capsys.readouterr().out, [*(tmp_path / "out").glob("*.jsonl")]
    assert said.count("all is well") == 3 and not any(line.startswith("round 9") for line in said.splitlines())
    assert len(said) < 20_000 and all(file.stat().st_size < 20_000 for file in files)
    assert all(c == "\n" or c.isprintable() for text in (said, *(f.read_text() for f in files)) for c in text)


OUTSIDE = ["evil:thing", "evil.inside:thing", "ok:thing+evil:thing"]
ESCAPED = ["'evil:thing'", '"evil\\u003athing"', "hf:config.json"]  # as TOML may have it


@pytest.mark.parametrize(
    ("setting", "value"),
    [(s, v) for s in ("algorithm", "model", "dataset", "set.selector_model") for v in OUTSIDE]
    + [("set.selector_model", v) for v in ESCAPED],
)
def test_a_node_imports_nothing_that_it_does_not_allow(
    setting: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Neither when it is asked for its name nor when it trains, though the module lies in its working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for module in ("evil", "ok"):
        (tmp_path / f"{module}.py").write_text(f"open({str(tmp_path / 'run')!r}, 'w')\n")
    config: Any = planned(tmp_path / "out", algorithm="fedsm").flat() | {setting: value}
    node: Any = {"partition-id": 0, "allow": "ok,evil.inside.deeper", "state-dir": str(tmp_path / "states")}
    context = Context(1, 1, node, RecordDict(), config)
    letter = client_app()(Message(RecordDict(), 1, "query"), context)
    said = "reads no model" if "hf:" in value else "runs only what undrift has"
    assert said in str(from_records(letter.content).facts["unfit"])
    with pytest.raises(BadSetting, match=said):
        client_app()(Message(RecordDict(), 1, "train"), context)
    assert not (tmp_path / "run").exists()
    capsys.readouterr()


def test_what_is_said_once_is_kept_only_as_long_as_it_is_shown() -> None:
    said = list[str]()
    post = GridPost(None, 1.0, said.append)  # type: ignore[arg-type]
    post.say_once(10**6 * "x")
    assert [len(line) for line in (*post.said, *said)] == [2000, 2000]


def test_a_client_computes_with_the_precision_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def look(self: Client, letter: Letter) -> Letter:
        return Letter({"round": 0, "run": "a", "exchange": torch.backends.cuda.matmul.fp32_precision}, {})  # type: ignore[attr-defined]

    monkeypatch.setattr(Client, "answer", look)
    node: Any = {"partition-id": 0, "state-dir": str(tmp_path / "states")}
    for precision, products in (("tf32", "tf32"), ("fp32", "ieee")):
        config: Any = planned(tmp_path / "out", precision=precision).flat()
        message = Message(to_records(Letter({"round": 0, "run": "a", "exchange": "train"}, {})), 1, "train")
        reply = client_app()(message, Context(1, 1, node, RecordDict(), config))
        assert from_records(reply.content).facts["exchange"] == products


def test_what_is_installed_is_found_before_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    (tmp_path / "colorsys.py").write_text("raise SystemExit('the working folder')")
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    assert attribute("colorsys:rgb_to_hsv")(1.0, 1.0, 1.0) == (0.0, 0.0, 1.0)
    check_allowed({"model": "mine.models:net"}, {"allow": "mine"})


def test_a_private_run_clips_adds_noise_and_says_epsilon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accounting = pytest.importorskip("dp_accounting")
    monkeypatch.setattr("undrift.deploy.flower.PAUSE", 0.0)
    settings = {
        "clients": 3,
        "cohort": 3,
        "sampling": "bernoulli",
        "privacy_clip": 0.5,
        "rounds": 2,
        "privacy_noise": 2.0,
    }
    plan = planned(tmp_path / "out", **settings)
    serve(plan, tmp_path)
    accountant = accounting.rdp.RdpAccountant()
    accountant.compose(accounting.GaussianDpEvent(2.0), 2)  # everybody takes part
    records = [json.loads(line) for line in (tmp_path / "out" / "rounds.jsonl").read_text().splitlines()]
    assert records[-1]["epsilon"] == pytest.approx(accountant.get_epsilon(1e-5), rel=0.02)
    assert records[0]["epsilon"] < records[1]["epsilon"]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"algorithm": "gradma-s"}, "single updates"),
        ({"algorithm": "scaffold"}, "more than their update"),
        ({"algorithm": "moon", "model": "mlp"}, "keep a state"),
        ({"sampling": "fixed"}, "sampling bernoulli"),
        ({"weights": "size"}, "weights uniform"),
        ({"min_replies": 2}, "min_replies"),
        ({"steps": 0, "epochs": 1.0, "batches": "fresh"}, "--steps instead of --epochs"),
        ({"algorithm": "dp-ftrl", "privacy_quantile": 0.5}, "nodes need one C"),
        ({"privacy_noise": 0.0}, "must both be above 0"),
        ({"privacy_clip": 0.0}, "must both be above 0"),
        ({"privacy_clip": float("nan")}, "must both be above 0"),
        ({"privacy_noise": float("inf")}, "must both be above 0"),
        ({"privacy_delta": 0.0}, "privacy_delta must lie between 0 and 1"),
        ({"privacy_quantile": 1.0}, "privacy_quantile must lie in"),
    ],
)
def test_privacy_is_refused_where_it_would_not_hold(settings: dict[str, Any], reason: str, tmp_path: Path) -> None:
    private = {"cohort": 3, "sampling": "bernoulli", "privacy_clip": 0.5, "privacy_noise": 1.0}
    with pytest.raises(BadSetting, match=reason):
        serve(planned(tmp_path / "out", **(private | settings)), tmp_path)
    assert not (tmp_path / "out").exists()
