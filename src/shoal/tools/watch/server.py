"""Serve the live page of one run: a page, its state as server-sent events, and its figures for Prometheus.

Any process that reaches the port can send requests, also a web page of another site in a local browser. So each request
needs the token, must be a GET, and must name this server in its Host and Origin.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from html import escape
from importlib import resources
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers, QueryParams
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from shoal.control.channel import is_equal_secret
from shoal.run_folder import RunFolder
from shoal.tools.draw.pages import page_policy, page_script, page_style
from shoal.tools.watch.figures import snapshot as snapshot_of
from shoal.tools.watch.figures import update as update_of
from shoal.tools.watch.prometheus import CONTENT_TYPE, format_metrics
from shoal.tools.watch.run_state import LiveState

# How often the folder is read: with and without a viewer. A viewer that connects is served at once.
POLL_S = 1.0
_IDLE_S = 3.0
# Without news, viewers get the figures anyway: they show how long ago the last event was.
_HEARTBEAT_S = 5.0
_MOST_VIEWERS = 50
_MOST_WAITING = 20
# How long viewers have at the end to receive the last state.
_LAST_STATE_S = 0.3
_NICENESS = 5
_LOCAL_NAMES = frozenset(("localhost", "127.0.0.1", "[::1]"))
_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


@dataclass(eq=False)
class Viewer:
    """A page that is open somewhere. A slow one misses updates and then gets the whole state again."""

    messages: asyncio.Queue[str | None] = field(default_factory=lambda: asyncio.Queue(_MOST_WAITING))
    needs_snapshot: bool = True

    def send(self, message: str | None) -> None:
        try:
            self.messages.put_nowait(message)
        except asyncio.QueueFull:
            while not self.messages.empty():
                self.messages.get_nowait()
            self.needs_snapshot = True
            if message is None:
                self.messages.put_nowait(None)


class LivePage:
    """Follows a run and sends its state to all viewers."""

    def __init__(self, run: RunFolder) -> None:
        self._state = LiveState(run)
        self._viewers: set[Viewer] = set()
        self._wake = asyncio.Event()
        self._is_closing = False
        self.closed = asyncio.Event()
        # Read and serialized in one thread at a time; the event loop continues.
        self._lock = asyncio.Lock()

    def close(self) -> None:
        """End the streams of all viewers, so that the server can end."""
        self._is_closing = True
        self.closed.set()
        self._wake.set()
        for viewer in self._viewers:
            viewer.send(None)

    async def follow(self) -> None:
        """Read the folder and send what is new, until this is closed."""
        sent_at = 0.0
        while not self._is_closing:
            is_due = asyncio.get_running_loop().time() - sent_at > (POLL_S if self._state.is_behind else _HEARTBEAT_S)
            if await self.send_news(is_due):
                sent_at = asyncio.get_running_loop().time()
            pause_s = 0.0 if self._state.is_behind else POLL_S if self._viewers else _IDLE_S
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), pause_s)
            self._wake.clear()

    async def send_news(self, is_due: bool = True) -> bool:
        """Read the folder once; return whether viewers got anything. With `is_due` they do."""
        async with self._lock:
            viewers = [viewer for viewer in self._viewers if not viewer.needs_snapshot]
            waiting = [viewer for viewer in self._viewers if viewer.needs_snapshot]
            update, snapshot = await asyncio.to_thread(self._read, is_due and bool(viewers), bool(waiting))
            if update is None:
                waiting, viewers = [*waiting, *viewers], []
            for viewer in viewers:
                if update:
                    viewer.send(update)
            for viewer in waiting:
                viewer.needs_snapshot = False
                viewer.send(snapshot)
            return bool(update or waiting)

    def _read(self, is_due: bool, needs_snapshot: bool) -> tuple[str | None, str]:
        """Return the update for viewers that are up to date, None if they need the snapshot too; and the snapshot."""
        self._state.poll()
        # A long run is read at full speed, and shown once a second meanwhile.
        if not (is_due or needs_snapshot or (self._state.has_news and not self._state.is_behind)):
            return "", ""
        update = update_of(self._state)
        snapshot = _message("state", snapshot_of(self._state)) if needs_snapshot or update is None else ""
        return None if update is None else _message("update", update), snapshot

    async def stream(self) -> AsyncIterator[str]:
        """Yield the messages for one viewer."""
        viewer = Viewer()
        self._viewers.add(viewer)
        self._wake.set()
        try:
            while not self._is_closing and (message := await viewer.messages.get()) is not None:
                yield message
        finally:
            self._viewers.discard(viewer)

    async def show_page(self, request: Request) -> Response:
        page, policy = render_page(self._state.run.path.name)
        return HTMLResponse(page, headers={"Content-Security-Policy": policy})

    async def show_events(self, request: Request) -> Response:
        if len(self._viewers) >= _MOST_VIEWERS:
            return PlainTextResponse(f"{_MOST_VIEWERS} pages are open already: close one.\n", 503)
        return StreamingResponse(self.stream(), media_type="text/event-stream")

    async def show_state(self, request: Request) -> Response:
        """Return the whole state as one JSON document, for programs."""
        async with self._lock:
            text = await asyncio.to_thread(self._read_all)
        return Response(text, media_type="application/json")

    def _read_all(self) -> str:
        # What `poll` reads here is still news for the viewers.
        self._state.poll()
        return json.dumps(snapshot_of(self._state), allow_nan=False)

    async def show_metrics(self, request: Request) -> Response:
        """Return the figures of this moment for Prometheus."""
        async with self._lock:
            text = await asyncio.to_thread(self._read_metrics)
        return Response(text, media_type=CONTENT_TYPE)

    def _read_metrics(self) -> str:
        self._state.poll()
        return format_metrics(self._state)


class Guard:
    """Passes on only a GET with the token whose Host and Origin are this server's.

    The Host check stops a web page whose name was made to point here (DNS rebinding); the token stops other users of
    this machine.
    """

    def __init__(self, app: ASGIApp, token: str, names: frozenset[str] = frozenset()) -> None:
        self._app = app
        self._token = token
        self._names = _LOCAL_NAMES | {name.lower() for name in names}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        refusal = self._refusal(scope)
        if refusal is not None:
            await PlainTextResponse(f"{refusal[1]}\n", refusal[0], headers=_HEADERS)(scope, receive, send)
            return

        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                extra = [(name.lower().encode(), value.encode()) for name, value in _HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *extra]}
            await send(message)

        await self._app(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "").lower()
        if not self._is_own(host, scope):
            return 403, "This server is not called that. Open the address that shoal watch printed."
        # Another port of this machine is another program's page.
        if headers.get("origin", f"http://{host}").lower() not in (f"http://{host}", f"https://{host}"):
            return 403, "Another web site asked for this. Open the address that shoal watch printed."
        if scope["method"] != "GET":
            return 405, "Only GET is answered: the page can look at a run and cannot change it."
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = bearer if scheme.lower() == "bearer" else QueryParams(scope["query_string"]).get("token", "")
        if not is_equal_secret(given, self._token):
            return (
                403,
                "The token is missing or wrong. Open the whole address that shoal watch printed.",
            )
        return None

    def _is_own(self, host: str, scope: Scope) -> bool:
        name = host_name(host)
        server = scope.get("server")
        address = str(server[0]).lower() if server else ""
        return name in self._names or (bool(address) and name.strip("[]") == address)


def host_name(host: str) -> str:
    """Return a Host header without its port, which differs behind `ssh -L`."""
    return (host.partition("]")[0] + "]" if host.startswith("[") else host.partition(":")[0]).lower()


def make_app(page: LivePage, token: str, names: frozenset[str] = frozenset()) -> ASGIApp:
    routes = [
        Route("/", page.show_page),
        Route("/events", page.show_events),
        Route("/state", page.show_state),
        Route("/metrics", page.show_metrics),
    ]
    return Guard(Starlette(routes=routes), token, names)


def render_page(name: str) -> tuple[str, str]:
    """Return the page and its content security policy, which allows only the page's own script and style."""
    style, script = page_style("shoal.tools.watch"), page_script("shoal.tools.watch")
    page = (resources.files("shoal.tools.watch") / "assets" / "page.html").read_text(encoding="utf-8")
    page = page.replace("{{name}}", escape(name)).replace("{{style}}", style).replace("{{script}}", script)
    return page, f"{page_policy(script, style)}; connect-src 'self'; form-action 'none'; frame-ancestors 'none'"


def _message(event: str, document: dict[str, Any]) -> str:
    return f"event: {event}\ndata: {json.dumps(document, allow_nan=False, separators=(',', ':'))}\n\n"


class _PageServer(uvicorn.Server):
    """Ends the viewers' streams when a signal comes: uvicorn would wait for them."""

    def __init__(self, config: uvicorn.Config, page: LivePage) -> None:
        super().__init__(config)
        self._page = page

    async def main_loop(self) -> None:
        """Wait for the end. uvicorn's own loop looks ten times a second, which costs as much as reading the run."""
        await self._page.closed.wait()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        asyncio.get_running_loop().call_soon_threadsafe(self._page.close)


async def serve(
    run: RunFolder, listener: socket.socket, token: str, names: frozenset[str] = frozenset(), until: int | None = None
) -> None:
    """Serve the page until a signal comes or the pipe `until` is closed."""
    page = LivePage(run)
    config = uvicorn.Config(
        make_app(page, token, names),
        log_config=None,
        log_level="critical",
        access_log=False,
        lifespan="off",
        http="h11",
        ws="none",
        loop="asyncio",
        server_header=False,
        timeout_graceful_shutdown=2,
        limit_concurrency=4 * _MOST_VIEWERS,
    )
    server = _PageServer(config, page)
    follower = asyncio.create_task(page.follow())
    ending: set[asyncio.Task[None]] = set()

    async def end() -> None:
        """Send the last state; the run's own process waits for that."""
        await page.send_news()
        await asyncio.sleep(_LAST_STATE_S)
        server.should_exit = True
        page.close()

    def on_pipe() -> None:
        if until is not None and not os.read(until, 1024):
            asyncio.get_running_loop().remove_reader(until)
            ending.add(asyncio.create_task(end()))

    if until is not None:
        asyncio.get_running_loop().add_reader(until, on_pipe)
    try:
        await server.serve(sockets=[listener])
    finally:
        page.close()
        await follower


def main() -> None:
    """Serve the page beside a run: orders come on stdin as a line of JSON, and the end of stdin ends it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.nice(_NICENESS)
    # Unbuffered: the end of the pipe must be seen by the event loop.
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as stdin:
        orders = json.loads(stdin.readline())
    listener = socket.socket(fileno=orders["listener"])
    asyncio.run(serve(RunFolder(Path(orders["run"])), listener, orders["token"], until=sys.stdin.fileno()))


if __name__ == "__main__":
    main()
