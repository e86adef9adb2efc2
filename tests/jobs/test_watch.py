"""`undrift watch`: a page that grows with its runs, for those on this machine who know its address."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import undrift
from tests.patience import patient
from tests.small import QUICK
from undrift.cli import main
from undrift.core.run_files import SWEEP
from undrift.core.seals import write_sealed

pytest.importorskip("uvicorn", reason="needs undrift[watch]")
pytest.importorskip("starlette", reason="needs undrift[watch]")
CHROMIUM = shutil.which("chromium")
FEW = QUICK | {"rounds": 6, "eval_every": 1, "checkpoint_every": 1}
EVIL = "<img src=x onerror=alert(1)>"


@contextlib.contextmanager
def watching(folder: Path) -> Iterator[str]:
    """The address that the command prints."""
    command = [sys.executable, "-m", "undrift", "watch", str(folder), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            found = re.match(r"(http://127\.0\.0\.1:\d+/[\w-]{32}/) shows ", process.stdout.readline())
            assert found, process.stderr.read()
            yield found[1]
            process.send_signal(signal.SIGINT)
            assert process.wait(patient(10)) == 0 and process.stderr.read() == ""
        finally:
            process.kill()


def ask(
    address: str, path: str | None = None, method: str = "GET", host: str | None = None
) -> tuple[int, dict[str, str], str]:
    place, token = address.removeprefix("http://").split("/", 1)
    with contextlib.closing(http.client.HTTPConnection(place, timeout=10)) as connection:
        connection.request(method, f"/{token}" if path is None else path, headers={"Host": host or place})
        answer = connection.getresponse()
        return answer.status, {k.lower(): v for k, v in answer.headers.items()}, answer.read().decode()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = tmp_path_factory.mktemp("runs")
    undrift.run(FEW, out=root / EVIL.replace("/", ""))
    return root


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    with watching(folder) as found:
        yield found


def test_only_this_machine_with_the_token_and_only_to_read(address: str, folder: Path) -> None:
    before = {file: file.stat().st_mtime_ns for file in folder.rglob("*")}
    code, headers, text = ask(address)
    assert code == 200 and "<h2>" in text and EVIL not in text and "&lt;img src=x" in text
    assert (
        "frame-ancestors 'none'" in headers["content-security-policy"] and headers["referrer-policy"] == "no-referrer"
    )
    assert "access-control-allow-origin" not in headers and "server" not in headers
    port = address.split(":")[2].split("/")[0]
    token = address.rstrip("/").rpartition("/")[2]
    assert ask(address, host=f"localhost:{port}")[0] == 200
    for path, method, host, wanted in (
        (None, "GET", "evil.example", 400),  # a name of another site that leads to this machine
        (None, "GET", f"evil.example:{port}", 400),
        ("/", "GET", None, 404),
        ("/wrong/", "GET", None, 403),
        ("/wrong/events", "GET", None, 403),
        (f"/{token[:-1]}/", "GET", None, 403),
        (f"/{token}", "GET", None, 404),
        (f"/{token}/run.toml", "GET", None, 404),
        (f"/{token}/../run.toml", "GET", None, 404),
        (f"/{token}/%2e%2e/%2e%2e/etc/passwd", "GET", None, 404),
        (None, "POST", None, 405),
        (None, "DELETE", None, 405),
        (None, "PUT", None, 405),
    ):
        code, _, text = ask(address, path, method, host)
        assert code == wanted and len(text) < 100, (path, method, host, code)
    assert {file: file.stat().st_mtime_ns for file in folder.rglob("*")} == before


def test_it_listens_on_loopback_alone(address: str) -> None:
    port = int(address.split(":")[2].split("/")[0])
    sockets = [line.split()[1:4] for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listening = [place for place, _, state in sockets if state == "0A" and int(place.split(":")[1], 16) == port]
    assert listening == [f"0100007F:{port:04X}"]


def test_the_stream_gives_the_document_and_then_only_news(address: str) -> None:
    place, token = address.removeprefix("http://").split("/", 1)
    connection = http.client.HTTPConnection(place, timeout=3)
    connection.request("GET", f"/{token}events")
    answer = connection.getresponse()
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    content = json.loads(answer.readline().removeprefix(b"data: "))
    assert content["live"]["counts"] == {"finished": 1} and answer.readline() == b"\n"
    with pytest.raises(TimeoutError):  # nothing has changed
        answer.readline()
    connection.close()


def test_what_cannot_be_served_is_said(tmp_path: Path, address: str, capsys: pytest.CaptureFixture[str]) -> None:
    port = address.split(":")[2].split("/")[0]
    assert main(["watch", str(tmp_path), "--port", port]) == 2
    assert f"port {port} cannot be listened on" in capsys.readouterr().err
    assert main(["watch", str(tmp_path / "none")]) == 2
    assert "is no folder; give one that holds runs, or will" in capsys.readouterr().err


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("there is no chromium; apt install chromium")
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


def until(look: Any, wanted: Any) -> None:
    """Wait until the page says it."""
    end = time.monotonic() + 20
    while (found := look()) != wanted and time.monotonic() < end:
        time.sleep(0.1)
    assert found == wanted


def test_a_page_of_nothing_says_what_it_waits_for(browser: Any, tmp_path: Path) -> None:
    page = browser.new_page()
    page.set_default_timeout(20_000)
    with watching(tmp_path) as address:
        page.goto(address)
        page.get_by_text("This page fills in as soon as").wait_for()
        assert page.locator(".tile").count() == 0 and not page.locator("progress").is_visible()
        undrift.run(FEW, out=tmp_path / "a")
        page.locator(".tile", has_text="rounds").wait_for()
        assert page.locator("progress").is_visible()
        page.close()


def test_a_page_grows_with_a_run_and_keeps_what_was_chosen(browser: Any, tmp_path: Path) -> None:
    undrift.run(FEW, out=tmp_path / "a")
    undrift.run(FEW, algorithm="scaffold", seed=1, out=tmp_path / EVIL)
    page = browser.new_page(viewport={"width": 700, "height": 900})
    page.set_default_timeout(20_000)
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("dialog", lambda dialog: (said.append(dialog.message), dialog.dismiss()))

    def row(name: str) -> list[str]:
        found = page.locator("#live ~ .card tbody tr", has=page.get_by_role("rowheader", name=name, exact=True))
        return [found.locator("td").nth(k).inner_text() for k in (0, 1)] if found.count() else []

    def told() -> str:
        page.mouse.move(0, 0)
        box = page.locator(".u-over").first
        box.scroll_into_view_if_needed()
        place = box.bounding_box()
        page.mouse.move(place["x"] + 0.99 * place["width"], place["y"] + 60)
        return str(page.locator(".tip:visible").inner_text())

    with watching(tmp_path) as address:
        page.goto(address)
        assert page.locator("img").count() == 0 and EVIL in page.locator("#live ~ .card").inner_text()
        section = page.locator("section", has=page.locator("h2", has_text="Results so far"))
        section.locator(".controls select").first.select_option("bytes")
        section.locator(".key", has_text="scaffold").locator("input").uncheck()
        page.locator("summary", has_text="Versions and machine").click()
        section.locator(".wide").first.evaluate("e => { e.scrollLeft = 40; }")
        page.locator("#live ~ .card thead th", has_text="rounds").locator("button").focus()

        loop = iter(undrift.rounds(FEW | {"rounds": 200}, algorithm="fedavgm", out=tmp_path / "b"))
        next(loop)
        until(lambda: row("b"), ["running", "1 of 200"])  # another method: the page is drawn again
        for _ in range(2, 31):
            next(loop)
        until(lambda: row("b"), ["running", "30 of 200"])  # more rounds: numbers are put in place
        assert page.locator("#live").evaluate("e => e.parentElement.querySelectorAll('.tile').length") >= 4
        focused = page.evaluate("document.activeElement.textContent")
        assert focused.startswith("rounds") and page.locator("details[open] dl").count() == 1
        assert section.locator(".wide").first.evaluate("e => e.scrollLeft") == 40
        assert section.locator(".controls select").first.input_value() == "bytes"
        assert not section.locator(".key", has_text="scaffold").locator("input").is_checked()
        assert section.locator(".key", has_text="fedavgm").locator("input").is_checked()
        lines = told().split("\n")
        assert lines[0].startswith("bytes ") and lines[1] == "fedavgm rounds=200, seed 0" and len(lines) == 3
        before = page.locator(".u-over").first.element_handle()
        next(loop)
        until(lambda: row("b"), ["running", "31 of 200"])
        assert before.is_visible(), "the chart is the same one, with a point more"
        loop.close()  # type: ignore[attr-defined]
        until(lambda: row("b")[0], "stopped")
        write_sealed(tmp_path / SWEEP, {"runs": {"b": 200, "c": 7}, "failed": {}})
        until(lambda: row("c"), ["to come", "0 of 7"])
        assert page.evaluate("document.documentElement.scrollWidth") == 700 and "Simulated" in page.title()
        assert said == []
    page.locator(".pulse.lost").wait_for()
    page.close()


@pytest.mark.parametrize(("width", "theme"), [(390, "dark"), (768, "light"), (1280, "light"), (1280, "dark")])
def test_a_live_page_fits_and_everybody_can_use_it(browser: Any, address: str, width: int, theme: str) -> None:
    from importlib import resources

    axe = resources.files("axe_playwright_python").joinpath("axe.min.js").read_text()
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=theme, bypass_csp=True)
    page = context.new_page()
    page.goto(address)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    page.evaluate(axe + ";0")
    found = page.evaluate("axe.run().then((r) => r.violations.map((v) => [v.id, v.nodes.map((n) => n.html)]))")
    assert found == []
    context.close()
