"""`undrift watch`: a page on this machine alone that shows runs as they grow. It only reads, and only the given folders.

A request chooses nothing: it is answered with the page, or with a stream of documents, and only if it knows the token in the
address. No part of it becomes the name of a file.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from undrift.core.errors import BadSetting
from undrift.jobs.live import Folders
from undrift.report.document import Defaults
from undrift.report.page import as_script, page_of, policy_of

LOOPBACK = "127.0.0.1"
PAUSE = 1.0  # seconds between two looks at the folders, at least
REST = 4.0  # times the time that a look takes: so long is the pause after it
POLL = 0.2  # seconds until a stream notices a new document
BEAT = 15.0  # seconds after which a silent stream says that it is alive
MOST = 32  # requests at a time


class Window:
    """The document of some folders, made anew while it is watched."""

    def __init__(self, paths: list[Path], defaults: Defaults | None = None) -> None:
        self.folders = Folders(paths, defaults)
        self.content: dict[str, Any] = {}
        self.text, self.version = "", 0  # the document as JSON, and how often it has changed
        self.closed = threading.Event()
        self.leaving: Callable[[], bool] = self.closed.is_set  # whether readers are to go

    def look(self) -> None:
        """Make the document anew."""
        try:
            self.content = self.folders.document()
        except Exception as error:  # a page that stands still must say so
            if not self.content:
                raise
            live = self.content["live"]
            note = f"This page could not be made anew: {type(error).__name__}: {error}"
            self.content = self.content | {"live": live | {"notes": [note]}}
        text = as_script(self.content)
        if text != self.text:
            self.text, self.version = text, self.version + 1

    def keep_looking(self) -> None:
        pause = 0.0
        while not self.closed.wait(max(PAUSE, pause)):
            began = time.monotonic()
            self.look()
            pause = REST * (time.monotonic() - began)

    async def documents(self) -> AsyncIterator[str]:
        """The events of one reader: each new document, and a sign of life when nothing is new."""
        sent, last = 0, time.monotonic()
        while not self.leaving():
            now = time.monotonic()
            if self.version != sent:
                sent, last = self.version, now
                yield f"data: {self.text}\n\n"
            elif now - last >= BEAT:
                last = now
                yield ": nothing new\n\n"
            await asyncio.sleep(POLL)


def application(window: Window, token: str) -> Any:
    """The two answers there are: the page, and the stream of documents."""
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.requests import Request
    from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
    from starlette.routing import Route

    guarded = {
        "Cache-Control": "no-store", "Referrer-Policy": "no-referrer", "X-Content-Type-Options": "nosniff",
        "Cross-Origin-Resource-Policy": "same-origin", "Cross-Origin-Opener-Policy": "same-origin",
    }  # fmt: skip

    def has_token(request: Request) -> bool:
        return secrets.compare_digest(request.path_params["token"].encode(), token.encode())

    def refuse() -> Response:
        return PlainTextResponse("Open the address that undrift watch has printed.\n", 403, guarded)

    async def page(request: Request) -> Response:
        if not has_token(request):
            return refuse()
        policy = f"{policy_of(live=True)}; frame-ancestors 'none'"
        return HTMLResponse(page_of(window.content, live=True), headers=guarded | {"Content-Security-Policy": policy})

    async def events(request: Request) -> Response:
        if not has_token(request):
            return refuse()
        return StreamingResponse(window.documents(), media_type="text/event-stream", headers=guarded)

    # Another site's name may lead to this machine; then its scripts could read what they get.
    hosts = Middleware(TrustedHostMiddleware, allowed_hosts=[LOOPBACK, "localhost"], www_redirect=False)
    app = Starlette(routes=[Route("/{token}/", page), Route("/{token}/events", events)], middleware=[hosts])
    app.router.redirect_slashes = False
    return app


def serve(paths: list[Path], port: int, say: Callable[[str], None], defaults: Defaults | None = None) -> None:
    """Serve the page until a signal comes."""
    try:
        import uvicorn

        window, token = Window(paths, defaults), secrets.token_urlsafe(24)
        app = application(window, token)
    except ImportError as error:
        raise BadSetting(f"undrift watch needs a package ({error}); pip install 'undrift[watch]'") from error
    ear = socket.socket()
    ear.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        ear.bind((LOOPBACK, port))
        ear.listen()  # who comes before the server is ready waits
    except (OSError, OverflowError) as error:
        ear.close()
        raise BadSetting(f"port {port} cannot be listened on: {error}; give another --port") from error
    window.look()
    looker = threading.Thread(target=window.keep_looking, daemon=True)
    looker.start()
    server = uvicorn.Server(
        uvicorn.Config(
            app, http="h11", ws="none", loop="asyncio", lifespan="off", access_log=False, log_level="error",
            server_header=False, proxy_headers=False, limit_concurrency=MOST, timeout_graceful_shutdown=1,
        )
    )  # fmt: skip
    window.leaving = lambda: server.should_exit
    say(f"http://{LOOPBACK}:{ear.getsockname()[1]}/{token}/ shows {', '.join(map(str, paths))}; Ctrl-C ends it")
    try:
        with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C, which is how it ends
            server.run(sockets=[ear])
    finally:
        window.closed.set()
        looker.join()
        ear.close()
