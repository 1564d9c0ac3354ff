"""The live page: a real server, a real browser and a real training.

Exercises `shoal watch`.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from shoal.run_folder import RunFolder
from tests.support.browser import open_browser
from tests.support.programs import TINY, read_jsonl, set_flags, shoal_command
from tests.support.run_samples import make_run, start, step
from tests.support.waiting import wait_until
from tests.unit.tools.watch.test_run_state import agent_event, append, ready


def make_watched_run(folder: Path) -> RunFolder:
    """Create the folder of a run that continues on two nodes, as far as its files show."""
    run = make_run(folder, [start(0, 2, node="node1", steps=200), start(1, 2, node="node2", steps=200)])
    for node, address in (("node1", "10.0.0.1"), ("node2", "10.0.0.2")):
        generation = {"id": "1-0", "members": ["node1", "node2"], "step": 0}
        append(run.journal(node), ready(node, address), agent_event("generation", node, **generation))
    add_steps(run, 1, 50)
    return run


def add_steps(run: RunFolder, first: int, last: int, ranks: tuple[int, ...] = (0, 1)) -> None:
    for rank in ranks:
        append(run.events(rank), *(step(number, rank) for number in range(first, last + 1)))


@contextlib.contextmanager
def serving(run: RunFolder, *options: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Start `shoal watch`; yield the page's address."""
    command = shoal_command("watch", run.path, "--json", *options)
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        text = ""
        while line := server.stdout.readline():
            text += line
            if line == "}\n":
                break
        yield json.loads(text)["url"], server
    finally:
        server.kill()
        server.communicate()


def get(url: str, path: str = "/", method: str = "GET", token: bool = True, **headers: str) -> tuple[int, str]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=30)
    with contextlib.closing(connection):
        connection.request(method, f"{path}?{parts.query if token else ''}", headers=headers)
        reply = connection.getresponse()
        return reply.status, reply.read().decode()


def test_a_page_is_served_to_those_who_have_the_token(tmp_path: Path) -> None:
    run = make_watched_run(tmp_path / "run")
    with serving(run) as (url, server):
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{32}", url)
        assert get(url)[0] == 200
        assert get(url, token=False)[0] == 403
        assert get(url, method="POST")[0] == 405
        assert get(url, Host="attacker.example")[0] == 403
        summary = json.loads(get(url, "/state")[1])["summary"]
        assert (summary["step"], summary["status"]) == (50, "running")
        # A viewer that is connected does not keep the server.
        parts = urlsplit(url)
        viewer = http.client.HTTPConnection(parts.netloc, timeout=30)
        viewer.request("GET", f"/events?{parts.query}")
        stream = viewer.getresponse()
        assert stream.readline() == b"event: state\n"
        server.send_signal(signal.SIGINT)
        _, errors = server.communicate(timeout=30)
        viewer.close()
        assert (server.returncode, "Traceback" in errors) == (0, False), errors


@pytest.mark.long
def test_the_page_shows_no_figures_of_what_is_not_there(tmp_path: Path) -> None:
    """It once began with "step 0 of 200 (0%)", and kept the last bars and loads of a node that was away."""
    run = make_run(tmp_path / "run", [start(0, 2, node="node1", steps=200), start(1, 2, node="node2", steps=200)])
    for node in ("node1", "node2"):
        members = agent_event("generation", node, id="1-0", members=["node1", "node2"], step=0)
        append(run.journal(node), ready(node, "10.0.0.1"), members)
    append(run.path / "samples" / "node2.jsonl", {"time": 1.0, "clock": 0.75})
    with serving(run) as (url, _), open_browser() as page:
        page.open(url)
        page.wait_for("document.querySelector('#progress-text')?.textContent.startsWith('waiting for the first step')")
        assert "generation" not in page.text("#figures")
        add_steps(run, 1, 20)
        page.wait_for("document.querySelector('#progress-text').textContent.startsWith('step 20 of 200')")
        page.wait_for("document.querySelector('[data-node=node2] .load') !== null")
        bars = "[...document.querySelectorAll('#ranks > div:nth-child(2) b')]"
        widths = f"{bars}.map((bar) => bar.getBoundingClientRect().width)"
        assert max(page.evaluate(widths)) > 0
        append(run.journal("node1"), agent_event("generation", "node1", id="2-0", members=["node1"], step=20))
        add_steps(run, 21, 30, ranks=(0,))
        page.wait_for("document.querySelector('#nodes .away')?.dataset.node === 'node2'")
        assert page.evaluate("document.querySelector('[data-node=node2] .load')") is None
        assert max(page.evaluate(widths), default=0) == 0
        assert "changes of members" in page.text("#figures")


@pytest.mark.long
def test_a_real_browser_shows_the_run_as_it_goes_on(tmp_path: Path) -> None:
    run = make_watched_run(tmp_path / "run")
    with serving(run) as (url, server), open_browser() as page:
        page.open(url.partition("?")[0])
        page.wait_for("document.body.innerText.includes('token is missing or wrong')")
        page.open(url)
        page.wait_for("document.querySelector('#progress-text')?.textContent.startsWith('step 50 of 200')")
        assert "10.0.0.2" in page.text("#nodes")
        assert page.evaluate("document.querySelectorAll('#nodes .present').length") == 2
        # The load of a node, where it is sampled. News arrive without a reload.
        append(run.path / "samples" / "node2.jsonl", {"time": 1.0, "clock": 0.75, "other_cores": 1.5, "steal": 0.0})
        add_steps(run, 51, 60)
        page.wait_for("document.querySelector('#progress-text').textContent.startsWith('step 60')")
        page.wait_for("document.querySelector('[data-node=node2] .load')?.innerText.includes('75%')")
        # A lost node is marked, on the time line too.
        text = "node2 is silent. node1 goes on, as generation 2, with step 61"
        append(
            run.journal("node1"),
            agent_event("announce", "node1", generation="2-0", text=text),
            agent_event("generation", "node1", id="2-0", members=["node1"], step=60),
        )
        with run.events(0).open("ab") as file:
            file.write(b"damaged\n")
        add_steps(run, 61, 80, ranks=(0,))
        page.wait_for("document.querySelector('#nodes .away')?.dataset.node === 'node2'")
        assert text in page.text("#events [data-kind=members]")
        page.wait_for("document.querySelector('#skipped').textContent.startsWith('1 line of the run folder')")
        assert page.evaluate("document.querySelector('#loss').chart.placed.length") == 1
        # A step's numbers, by mouse and by keyboard.
        page.evaluate("document.querySelector('#timeline').scrollIntoView({block: 'center'})")
        x, y = page.evaluate(
            "(() => { const box = document.querySelector('#timeline').getBoundingClientRect(), hit = view.hits.at(-1);"
            " return [box.left + (hit[0] + hit[1]) / 2, box.top + hit[2] + 8]; })()"
        )
        page.click(x, y)
        page.wait_for("document.querySelector('#detail caption')?.textContent.startsWith('Step ')")
        page.evaluate("document.querySelector('#timeline').focus()")
        page.press("End")
        assert page.text("#detail caption") == "Step 80 in ms"
        page.press("ArrowLeft")
        assert page.text("#detail caption") == "Step 79 in ms"
        # A pointer over a chart shows its values, and when it leaves, the chart is as it was before.
        pixels = "document.querySelector('#strips').toDataURL()"
        before = page.evaluate(pixels)
        move = "document.querySelector('#strips').dispatchEvent(new PointerEvent('{}', {{clientX: 300, clientY: 300}}))"
        page.evaluate(move.format("pointermove"))
        assert "rank 0: " in page.text("#tip")
        assert page.evaluate(pixels) != before
        page.evaluate(move.format("pointerleave"))
        assert page.evaluate("document.querySelector('#tip').hidden")
        assert page.evaluate(pixels) == before
        # A reload, another size and the dark colours show the whole run.
        page.resize(390, 800)
        page.set_scheme("dark")
        page.call("Page.reload")
        page.wait_for("document.querySelector('#progress-text')?.textContent.startsWith('step 80')")
        page.wait_for("document.querySelector('#nodes .away') !== null")
        assert page.evaluate("S.rows.get(0).length") == 80
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "wider than a phone"
        server.send_signal(signal.SIGINT)
        page.wait_for("!document.querySelector('#banner').hidden")


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_training_is_watched_from_its_start_to_its_end(tmp_path: Path) -> None:
    """--watch: the page is there before the first step, shows a killed rank, and ends with the run."""
    run = RunFolder(tmp_path / "run")
    settings = set_flags(*TINY, "train.compile=off", "train.eval_every=1000000")
    command = shoal_command("train", "--watch", "--out", run.path, "--steps", "1000000", *settings)
    log = tmp_path / "stderr"
    with log.open("w") as stderr:
        training = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr)
    try:
        wait_until(lambda: "watch: http" in log.read_text(), 60)
        url = re.findall(r"watch: (\S+)", log.read_text())[0]

        def state() -> dict[str, Any]:
            document: dict[str, Any] = json.loads(get(url, "/state")[1])
            return document

        wait_until(lambda: state()["summary"]["step"] >= 5, 90)
        assert state()["summary"]["status"] == "running"
        started = [event for event in read_jsonl(run.journal("local")) if event["event"] == "started"]
        os.kill(started[0]["processes"]["rank-1"], signal.SIGKILL)
        wait_until(lambda: {"fault", "members"} <= {mark["kind"] for mark in state()["marks"]}, 60)
        generation = state()["summary"]["generation"]
        assert generation != "1-0"
    finally:
        training.send_signal(signal.SIGINT)
        training.wait(90)
    with pytest.raises(OSError, match="refused"):
        get(url, "/state")
