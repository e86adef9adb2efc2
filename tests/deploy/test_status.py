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
from undrift.cli import main, parser
from undrift.core.errors import BadRunFolder
from undrift.deploy.flower import server_app
from undrift.deploy.settings import Plan
from undrift.deploy.status import Window, as_page, as_text, read_status
from undrift.deploy.versions import versions_of


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
    assert said.count("2 has other settings, or other defaults (SHA-256 ") == 1 and " has another" not in said
    ours = versions_of(plan)
    assert versions_of(planned(tmp_path, algorithm="fedavg"))["algorithm"] != ours["algorithm"]
    assert versions_of(planned(tmp_path, algorithm="scaffold", set={"lr": 0.5}))["algorithm"] == ours["algorithm"]
    monkeypatch.setattr("undrift.deploy.flower.versions_of", lambda plan: ours | {"undrift": "9.9", "algorithm": "ab"})
    serve(planned(tmp_path / "other", rounds=1, algorithm="scaffold"), tmp_path)
    said = capsys.readouterr().out
    for client in "012":
        assert f"{client} has undrift {ours['undrift']} in place of 9.9" in said
        assert f"{client} has another file of the algorithm (SHA-256 {ours['algorithm']} in place of ab)" in said


def sent(root: Path) -> list[str]:
    (file,) = root.rglob("sent.log")
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


def test_a_client_can_read_with_whom_it_was_added_up(tmp_path: Path) -> None:
    serve(planned(tmp_path / "out", cohort=3, rounds=1, secure_bound=16.0), tmp_path / "secure")
    keys, shares, masked, opened = sent(tmp_path / "secure" / "1")
    assert "two public keys" in keys and "sealed for each of 3 clients" in shares
    assert "sent 651 numbers under masks" in masked and masked.endswith(
        "only as a sum with those of the 3 clients 0, 1, 2"
    )
    assert opened.endswith("can be taken off the sum of 3 clients: 0, 1, 2")


def test_the_examples_run_commands_that_there_are() -> None:
    folder = Path(__file__).parents[2] / "undrift" / "examples" / "deploy"
    units = [
        line.split("bin/", 1)[1]
        for f in folder.glob("*.service")
        for line in f.read_text().splitlines()
        if "Exec" in line
    ]
    assert {parser().parse_args(shlex.split(unit)[1:]).action for unit in units} == {"server", "node"}
    assert 'ENTRYPOINT ["undrift"]' in (folder / "Containerfile").read_text()
