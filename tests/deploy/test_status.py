"""What an operator and a client can see: the status, its page, differences of versions, and the log of what was sent."""

from __future__ import annotations

import http.client
import json
import shlex
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from flwr.app import Context, Message, RecordDict

from tests.deploy.test_flower import Nodes, identity, planned, serve  # noqa: F401
from tests.deploy.test_own_files import Sites, labelled
from tests.deploy.test_own_files import planned as own_files
from undrift.cli import main
from undrift.cli.parser import parse
from undrift.core.errors import BadRunFolder
from undrift.deploy.flower import server_app
from undrift.deploy.settings import Plan
from undrift.deploy.status import Window, as_page, as_text, read_status
from undrift.deploy.versions import differences, versions_of


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("undrift.deploy.flower.PAUSE", 0.0)


class OneFails(Nodes):
    """Client 2 fails at training, and says why in a way that a page must not believe."""

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> list[Message]:
        messages = list(messages)
        self.failing = {7919} if all(m.metadata.message_type == "train" for m in messages) else set()
        return super().send_and_receive(messages, timeout=timeout)


@pytest.fixture
def failed(tmp_path: Path) -> Plan:
    plan = planned(tmp_path / "out", cohort=3, sampling="bernoulli", privacy_clip=0.5, privacy_noise=2.0)
    nodes = OneFails(3, plan.flat(), tmp_path / "nodes")  # type: ignore[arg-type]
    server_app()(nodes, Context(1, 1, {}, RecordDict(), plan.flat()))  # type: ignore[arg-type]
    return plan


def test_the_status_says_who_answered_and_why_not(
    failed: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = read_status(tmp_path / "out")
    assert status.lines[0] == "round 3 of 3" and "2 of 3 clients count" in status.lines[1]
    assert any(line.startswith("epsilon ") and line.endswith(" at delta 1e-05") for line in status.lines)
    rows = {row[0]: row[1:] for row in status.rows}
    assert rows["0"][:3] == ("3", "3", "round 3") and rows["2"][:3] == ("3", "0", "never")
    assert rows["2"][-1] == "round 3: failed: out of memory" and rows["0"][-1] == ""
    assert rows["0"][4].endswith(" kB") and rows["2"][4] == "0 B"
    capsys.readouterr()
    assert main(["deploy", "status", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[:2] == as_text(status).splitlines()[:2] and said[-1].startswith("2 ")
    with pytest.raises(BadRunFolder, match="holds no deployed run"):
        read_status(tmp_path)


def test_the_status_of_a_run_that_waits_for_its_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They join late, and the operator looks meanwhile, before there is more than the folder."""
    plan, seen = planned(tmp_path / "out", rounds=1), list[str]()
    nodes, honest = Nodes(3, plan.flat(), tmp_path), Nodes.push_messages  # type: ignore[arg-type]

    def look(messages: Any) -> list[str]:
        messages = list(messages)
        seen.extend(as_text(read_status(tmp_path / "out")) for m in messages if m.metadata.message_type == "query")
        return honest(nodes, messages)

    monkeypatch.setattr(nodes, "push_messages", look)
    server_app()(nodes, Context(1, 1, {}, RecordDict(), plan.flat()))  # type: ignore[arg-type]
    assert len(seen) == 3 and "it waits for its clients" in seen[0] and seen[0].count("never") == 3
    assert "it waits" not in as_text(read_status(tmp_path / "out"))


@pytest.fixture
def window(failed: Plan, tmp_path: Path) -> Iterator[Window]:
    with Window(tmp_path / "out", 0) as window:
        threading.Thread(target=window.serve_forever, daemon=True).start()
        yield window
        window.shutdown()


def ask(window: Window, method: str = "GET", path: str = "/", host: str = "127.0.0.1") -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", window.server_port, timeout=10)
    connection.request(method, path, headers={"Host": f"{host}:{window.server_port}"})
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def test_the_page_is_read_only_and_for_this_machine(window: Window, tmp_path: Path) -> None:
    assert window.server_address[0] == "127.0.0.1"
    code, text = ask(window)
    assert code == 200 and "<td>round 3: failed: out of memory</td>" in text and "<script" not in text
    assert ask(window, host="localhost")[0] == 200
    for method, path, host, wanted in (
        ("GET", "/", "evil.example", 404),  # a name of another site that leads to this machine
        ("GET", "/privacy.json", "127.0.0.1", 404),
        ("GET", "/../privacy.json", "127.0.0.1", 404),
        ("POST", "/", "127.0.0.1", 501),
        ("DELETE", "/", "127.0.0.1", 501),
    ):
        assert ask(window, method, path, host)[0] == wanted, (method, path, host)
    secret = json.loads((tmp_path / "out" / "privacy.json").read_text())["secret"]
    assert secret not in text


def test_what_a_client_wrote_is_text_on_the_page(failed: Plan, tmp_path: Path) -> None:
    status = read_status(tmp_path / "out")
    row = (*status.rows[2][:-1], "round 3: failed: <script>alert(1)</script>")
    page = as_page(status._replace(rows=[row]))
    assert "<script>" not in page and "&lt;script&gt;" in page


def test_other_versions_algorithms_and_settings_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = planned(tmp_path / "out", rounds=1, algorithm="scaffold")
    nodes = Nodes(3, plan.flat(), tmp_path)  # type: ignore[arg-type]
    nodes.contexts[7919].run_config = plan.flat() | {"set.lr": 0.7}  # client 2 has other defaults
    server_app()(nodes, Context(1, 1, {}, RecordDict(), plan.flat()))  # type: ignore[arg-type]
    said = capsys.readouterr().out
    assert said.count(f"2 has set.lr 0.7 in place of {plan.alg.lr}") == 1 and said.count(" in place of ") == 1
    ours = versions_of(plan)
    assert versions_of(planned(tmp_path, algorithm="fedavg"))["algorithm"] != ours["algorithm"]
    assert versions_of(planned(tmp_path, algorithm="scaffold", set={"lr": 0.5}))["algorithm"] == ours["algorithm"]
    monkeypatch.setattr("undrift.deploy.flower.versions_of", lambda plan: ours | {"undrift": "9.9", "algorithm": "ab"})
    serve(planned(tmp_path / "other", rounds=1, algorithm="scaffold"), tmp_path)
    said = capsys.readouterr().out
    for client in "012":
        assert f"{client} has undrift {ours['undrift']} in place of 9.9" in said
        assert f"{client} has another file of the algorithm: SHA-256 {ours['algorithm']} in place of ab" in said


@pytest.mark.parametrize("settings", ["{", "[" * 10**6, "[1]", "x" * 10**6, '{"a": ' + "9" * 5000 + "}", 7])
def test_settings_that_are_none_are_named_and_cost_nothing(settings: Any, tmp_path: Path) -> None:
    ours = versions_of(planned(tmp_path))
    told = {f"has.{name}": value for name, value in ours.items()} | {"has.settings": settings}
    found = differences(told, ours)
    assert len(found) == 6 and found[0].startswith("aggregate none in place of") and "more settings" in found[-1]
    assert differences({f"has.{name}": value for name, value in ours.items()}, ours) == []
    many = json.dumps({f"{n}" * 100: "y" * 100 for n in range(100)})
    assert sum(map(len, differences(told | {"has.settings": many}, ours))) < 1000


def sent(root: Path, run: str = "*/*/") -> list[str]:
    """What a client has sent in its run; with run="" when it joined."""
    (file,) = root.glob(f"{run}sent.log")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    return [line.split(" ", 2)[2] for line in file.read_text().splitlines()]  # without date and time


def test_a_client_can_read_what_it_has_sent(tmp_path: Path) -> None:
    serve(planned(tmp_path / "out", cohort=3, rounds=2), tmp_path / "open")
    lines = sent(tmp_path / "open" / "1")
    assert [line.split(":")[0] for line in lines] == ["round 1", "round 2"]
    assert "sent 650 numbers (" in lines[0] and "open to the server: up.d [650]; and samples " in lines[0]
    assert ", loss " in lines[0]
    private = planned(tmp_path / "p", cohort=3, rounds=1, algorithm="dp-ftrl", privacy_clip=0.5, privacy_noise=8.0)
    serve(private, tmp_path / "private")
    assert sent(tmp_path / "private" / "1")[0].endswith("open to the server: up.d [650]; and nothing else")


def test_a_client_can_read_what_it_has_said_of_itself(tmp_path: Path) -> None:
    serve(planned(tmp_path / "out", rounds=1), tmp_path / "open")
    assert sent(tmp_path / "open" / "1", "") == [
        "joined: sent client 1; and its version of undrift, a digest of the algorithm's file and the run's settings"
    ]
    root = tmp_path / "sites"
    root.mkdir()
    plan = own_files(root, rounds=1)
    nodes = Sites(plan, root, labelled())
    server_app()(nodes, Context(1, 1, {}, RecordDict(), plan.flat()))  # type: ignore[arg-type]
    said = [line for place in range(3) for line in sent(root / str(place), "")]
    assert any(line.startswith("joined: sent client north, samples 40, shape 5, classes 3; and") for line in said)


def test_a_client_can_read_with_whom_it_was_added_up(tmp_path: Path) -> None:
    serve(planned(tmp_path / "out", cohort=3, rounds=1, secure_bound=16.0), tmp_path / "secure")
    keys, shares, masked, opened = sent(tmp_path / "secure" / "1")
    assert "two public keys" in keys and "sealed for each of 3 clients" in shares
    assert "sent 652 numbers under masks" in masked and masked.endswith(
        "only as a sum with those of the 3 clients 0, 1, 2"
    )
    assert opened.endswith("can be taken off the sum of 3 clients: 0, 1, 2")


def test_the_examples_run_commands_that_there_are() -> None:
    folder = Path(__file__).parents[2] / "undrift" / "jobs" / "suites" / "examples" / "deploy"
    units = [
        line.split("bin/", 1)[1]
        for f in folder.glob("*.service")
        for line in f.read_text().splitlines()
        if "Exec" in line
    ]
    assert {parse(shlex.split(unit)[1:]).action for unit in units} == {"server", "node"}
    assert 'ENTRYPOINT ["undrift"]' in (folder / "Containerfile").read_text()
