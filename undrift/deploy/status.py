"""`undrift deploy status` and `page`: how a deployment is doing, from its folder alone. Nothing is written."""

from __future__ import annotations

import html
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

from undrift.core import stopping
from undrift.core.errors import BadRunFolder, BadSetting
from undrift.core.names import printable
from undrift.core.run_files import DEPLOYED, ROUNDS, SETTINGS, VISITS, read_settings
from undrift.core.seals import read_lines, read_sealed
from undrift.deploy.keys import LOOPBACK

Row = tuple[str, ...]
COLUMNS = ("client", "asked", "answered", "last answer", "works", "sent", "why not, at last")
AGAIN = 10  # seconds after which a browser asks again
PLAIN = "Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'"
PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><meta http-equiv="refresh" content="{again}">
<title>{title}</title><style>body{{font:15px sans-serif;margin:2em}}td,th{{padding:.2em 1em .2em 0;text-align:left}}</style>
<h1>{title}</h1><ul>{lines}</ul><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></html>"""


class Status(NamedTuple):
    """What there is to say of a run: a title, a few lines, and a row for each client."""

    title: str
    lines: list[str]
    rows: list[Row]


def read_status(folder: Path) -> Status:
    """The status of the run in a folder, while it runs or afterwards."""
    if not (folder / DEPLOYED).exists():
        raise BadRunFolder(f"{folder} holds no deployed run (no {DEPLOYED}); give the folder `out` of a deployment")
    held = read_sealed(folder / DEPLOYED)
    names: list[str] = held["names"]
    if not (folder / SETTINGS).exists():  # written when the clients are there
        return Status(f"run {held['token']}", ["it waits for its clients"], [row_of(name, []) for name in names])
    settings, run = read_settings(folder)
    rounds = list(read_lines(folder / ROUNDS, run)) if (folder / ROUNDS).exists() else []
    visits = list(read_lines(folder / VISITS, "")) if (folder / VISITS).exists() else []
    lines = [f"round {len(rounds)} of {settings['rounds']}"]
    if rounds:
        last = rounds[-1]
        lines += [
            f"the last round took {last['seconds']:.1f} s; {last['clients'] - last['dropped']} of {last['clients']} clients "
            f"count; {ago((folder / ROUNDS).stat().st_mtime)}",
            f"{size(sum(r['wire_down'] for r in rounds))} down and {size(sum(r['wire_up'] for r in rounds))} up so far",
        ]
        scored = [r for r in rounds if r.get("accuracy") is not None]
        lines += [f"accuracy {scored[-1]['accuracy']:.4f} after round {scored[-1]['round']}"] if scored else []
        if last.get("epsilon") is not None:
            lines.append(f"epsilon {last['epsilon']:.3g} at delta {settings['privacy_delta']:g}")
    title = f"{settings['algorithm']} on {settings['dataset']}, run {held['token']}"
    return Status(title, lines, [row_of(name, [v for v in visits if v["client"] == name]) for name in names])


def row_of(name: str, visits: list[dict[str, Any]]) -> Row:
    """One client: how often it was asked and answered, how long it works, and why it did not answer at last."""
    answered = [v for v in visits if v["outcome"] == "answered"]
    works = f"{sum(v['seconds'] for v in answered) / len(answered):.1f} s" if answered else ""
    latest = f"round {answered[-1]['round']}" if answered else "never"
    failed = [f"round {v['round']}: {v['outcome']}" for v in visits if v["outcome"] != "answered"]
    sent = size(sum(v["bytes_up"] for v in visits))
    return name, str(len(visits)), str(len(answered)), latest, works, sent, printable(failed[-1]) if failed else ""


def size(count: int) -> str:
    """A number of bytes for people.

    >>> size(512), size(3_400_000)
    ('512 B', '3.4 MB')
    """
    value, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while value >= 1000 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.0f} {units[0]}" if units[0] == "B" else f"{value:.1f} {units[0]}"


def ago(moment: float) -> str:
    return f"it ended {max(0.0, time.time() - moment):.0f} s ago"


def as_text(status: Status) -> str:
    rows = [COLUMNS, *status.rows]
    widths = [max(len(row[n]) for row in rows) for n in range(len(COLUMNS))]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([status.title, *status.lines, "", *table])


def as_page(status: Status) -> str:
    """An HTML page without scripts; what clients wrote is text in it."""

    def cells(tag: str, row: Row) -> str:
        return "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row)

    return PAGE.format(
        again=AGAIN, title=html.escape(status.title), lines="".join(f"<li>{html.escape(s)}</li>" for s in status.lines),
        head=cells("th", COLUMNS), body="".join(f"<tr>{cells('td', row)}</tr>" for row in status.rows),
    )  # fmt: skip


class Reader(BaseHTTPRequestHandler):
    """Answers GET / from this machine with the page, and everything else with an error."""

    server: Window
    timeout = 10.0  # seconds that a request may take to come

    def do_GET(self) -> None:
        name = self.headers.get("Host", "").rpartition(":")[0]
        if self.path != "/" or name not in (LOOPBACK, "localhost"):  # another site's name may lead here
            self.send_error(404)
            return
        try:
            text, code = as_page(read_status(self.server.folder)), 200
        except BadRunFolder as error:
            text, code = html.escape(str(error)), 503
        content = text.encode()
        self.send_response(code)
        for header, value in (PLAIN, ("Content-Type", "text/html; charset=utf-8"), ("Cache-Control", "no-store")):
            self.send_header(header, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *given: Any) -> None:
        pass


class Window(ThreadingHTTPServer):
    """Serves the page of one folder, on loopback."""

    daemon_threads = True

    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder
        super().__init__((LOOPBACK, port), Reader)


def serve_page(folder: Path, port: int, say: Callable[[str], None]) -> None:
    """Serve the page until a signal comes."""
    read_status(folder)
    try:
        window = Window(folder, port)
    except (OSError, OverflowError) as error:
        raise BadSetting(f"port {port} cannot be listened on: {error}; give another --port") from error
    with window:
        window.timeout = 0.5
        say(f"http://{LOOPBACK}:{window.server_port}/ shows {folder}")
        while not stopping.stop_signal():
            window.handle_request()
    raise stopping.notice()
