"""The live page's server: what it refuses, and what viewers receive. No socket is opened here."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from shoal.run_folder import RunFolder
from shoal.tools.watch.server import LivePage, host_name, make_app, render_page
from tests.support.run_samples import make_run, start, step
from tests.unit.tools.watch.test_run_state import append

TOKEN = "correct-token"  # noqa: S105 - of a server that ends with the test


def ask(run: RunFolder, path: str = "/", method: str = "GET", query: str = f"token={TOKEN}", **headers: str) -> Any:
    """Send one request to the application; return its status, headers and body."""
    given = {"host": "127.0.0.1:8000", **headers}
    scope = {
        "type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": query.encode(),
        "headers": [(name.encode(), value.encode()) for name, value in given.items()], "http_version": "1.1",
        "scheme": "http", "server": ("127.0.0.1", 8000), "client": ("127.0.0.1", 1), "root_path": "",
    }  # fmt: skip
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    async def answer() -> None:
        await make_app(LivePage(run), TOKEN)(scope, receive, send)

    asyncio.run(answer())
    body = b"".join(message.get("body", b"") for message in sent)
    return sent[0]["status"], dict(sent[0]["headers"]), body.decode()


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return make_run(tmp_path / "run", [start(0, 1), step(1)])


def test_the_page_needs_the_token(run: RunFolder) -> None:
    status, headers, body = ask(run)
    assert status == 200
    assert "script-src 'sha256-" in headers[b"content-security-policy"].decode()
    assert (headers[b"referrer-policy"], headers[b"cache-control"]) == (b"no-referrer", b"no-store")
    assert "shoal watch" in body
    for query in ("", "token=", "token=correct-toke", "token=correct-tokenn", "token=%ff"):
        status, _, body = ask(run, query=query)
        assert status == 403
        assert "token" in body
    assert ask(run, query="", authorization=f"Bearer {TOKEN}")[0] == 200


@pytest.mark.parametrize("path", ["/", "/state", "/events", "/metrics"])
@pytest.mark.parametrize(
    ("status", "changes"),
    [
        (403, {"host": "attacker.example"}),
        (403, {"host": "127.0.0.1.attacker.example:8000"}),
        (403, {"host": ""}),
        (403, {"origin": "http://attacker.example"}),
        (403, {"origin": "null"}),
        (403, {"origin": "http://[x"}),
        (403, {"origin": "http://127.0.0.1:8001"}),
        (403, {"origin": "http://localhost:8000"}),
        (405, {"method": "POST"}),
        (405, {"method": "HEAD"}),
        (405, {"method": "DELETE"}),
        (403, {"query": ""}),
    ],
)
def test_foreign_requests_are_refused(run: RunFolder, path: str, status: int, changes: dict[str, str]) -> None:
    assert ask(run, path, **changes)[0] == status


@pytest.mark.parametrize("host", ["localhost:1", "127.0.0.1", "[::1]:9", "LOCALHOST:8000"])
def test_this_machine_may_be_called_by_its_names_at_any_port(run: RunFolder, host: str) -> None:
    """Behind `ssh -L` the port is another one."""
    assert ask(run, host=host, origin=f"http://{host}")[0] == 200


def test_a_host_has_its_port_removed() -> None:
    assert [host_name(host) for host in ("a:1", "A", "[::1]:80", "[::1]", "", "a:b:c")] == [
        "a", "a", "[::1]", "[::1]", "", "a",
    ]  # fmt: skip


def test_the_state_is_one_json_document(run: RunFolder) -> None:
    status, _, body = ask(run, "/state")
    assert (status, json.loads(body)["summary"]["step"]) == (200, 1)
    assert ask(run, "/other")[0] == 404


def test_a_name_is_text_and_not_markup() -> None:
    page, _ = render_page("<script>alert(1)</script>")
    assert "<script>alert" not in page
    assert "{{" not in page


def data(message: str) -> tuple[str, dict[str, Any]]:
    event, _, text = message.partition("\ndata: ")
    document: dict[str, Any] = json.loads(text)
    return event.removeprefix("event: "), document


async def next_message(stream: AsyncIterator[str]) -> tuple[str, dict[str, Any]]:
    return data(await asyncio.wait_for(anext(stream), 20))


def test_viewers_get_everything_first_and_then_the_news(run: RunFolder) -> None:
    async def watch() -> None:
        page = LivePage(run)
        following = asyncio.create_task(page.follow())
        first = page.stream()
        kind, document = await next_message(first)
        assert (kind, document["summary"]["step"]) == ("state", 1)
        append(run.events(0), step(2))
        kind, document = await next_message(first)
        assert (kind, document["summary"]["step"], list(document["rows"])) == ("update", 2, ["0"])
        late = page.stream()
        kind, document = await next_message(late)
        assert (kind, len(document["rows"]["0"])) == ("state", 2), "a late viewer sees the whole run"
        append(run.events(0), step(3))
        for viewer in (late, first):
            while (await next_message(viewer))[1]["summary"]["step"] < 3:
                pass
        page.close()
        with pytest.raises(StopAsyncIteration):
            await asyncio.wait_for(anext(first), 5)
        await asyncio.wait_for(following, 5)

    asyncio.run(watch())


def test_a_slow_viewer_misses_updates_and_gets_the_state_again(run: RunFolder) -> None:
    async def watch() -> None:
        page = LivePage(run)
        stream = page.stream()
        waiting = asyncio.create_task(next_message(stream))
        await asyncio.sleep(0)
        for number in range(2, 40):
            append(run.events(0), step(number))
            await page.send_news()
        assert (await waiting)[0] == "state"
        kinds: list[str] = []
        while not kinds or kinds[-1] != "state":
            append(run.events(0), step(len(kinds) + 40))
            await page.send_news()
            kinds.append((await next_message(stream))[0])
        assert len(kinds) < 30, "what waits for a viewer is bounded"

    asyncio.run(watch())
