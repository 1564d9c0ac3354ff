"""Tests that take minutes or need a browser: the demo, its report page, and kills during a checkpoint.

Exercises `shoal demo`, `shoal report`, engine.checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from shoal.control.processes import find_processes
from shoal.host.topology import this_topology
from shoal.tools.report.page import write_report
from tests.support.browser import open_browser
from tests.support.needs import need_tool
from tests.support.programs import TINY, set_flags, shoal, shoal_command, steps_of
from tests.support.run_samples import all_events, demo_points, make_run
from tests.support.waiting import wait_until

pytestmark = pytest.mark.long


def rendered_document(page: Path, profile: Path) -> str:
    """Return the page's document after a real browser has run its scripts."""
    browser = need_tool("chromium", "chromium-browser", "google-chrome")
    quiet = ("--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run")
    argv = [browser, "--headless", "--no-sandbox", "--disable-gpu", *quiet, f"--user-data-dir={profile}"]
    argv += ["--virtual-time-budget=5000", "--dump-dom", page.as_uri()]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=90, check=True)
    return done.stdout


def drawn_charts(document: str) -> int:
    """Count the charts that have said what they show."""
    return len(re.findall(r"<canvas[^>]* aria-label=", document))


def test_the_report_renders_in_a_real_browser(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", all_events(), "data.path='</script><script>document.title=1</script>'")
    document = rendered_document(write_report(run, demo_points()), tmp_path / "profile")
    assert drawn_charts(document) == 5, "a chart is missing"
    assert "<title>run · finished</title>" in document, "a path of the run was executed as a script"


def test_a_chart_shows_values_zooms_and_hides_a_series(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", all_events(2, 60), "data.path='x'")
    other = make_run(tmp_path / "<b>other", all_events(2, 60))
    file = tmp_path / "compared.html"
    assert shoal("report", run.path, other.path, "-o", file).returncode == 0
    with open_browser() as page:
        page.resize(1280, 900)
        page.open(file.as_uri())
        page.wait_for("typeof charts === 'object' && charts[0]?.frame")
        page.evaluate("charts[0].canvas.scrollIntoView({block: 'center'})")
        assert "<b>other" in page.text(".legend"), "a name is markup"
        box = page.evaluate("charts[0].canvas.getBoundingClientRect().toJSON()")
        left, right, y = box["left"] + 0.3 * box["width"], box["left"] + 0.6 * box["width"], box["top"] + 100

        def mouse(kind: str, x: float, buttons: int = 0, clicks: int = 1) -> None:
            button = "left" if kind != "mouseMoved" or buttons else "none"
            page.call(
                "Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button, buttons=buttons, clickCount=clicks
            )

        mouse("mouseMoved", left)
        assert re.match(r"step 1\d\nrun: \d\.\d+\n<b>other: ", page.text("#tip")), page.text("#tip")
        mouse("mousePressed", left, 1)
        mouse("mouseMoved", right, 1)
        mouse("mouseReleased", right)
        first, last = page.evaluate("charts[0].zoom")
        assert 15 < first < 22 < 33 < last < 39
        assert "show all" in page.text(".legend")
        for clicks in (1, 2):
            mouse("mousePressed", left, 1, clicks)
            mouse("mouseReleased", left, 0, clicks)
        assert page.evaluate("charts[0].zoom") is None
        for hidden in (1, 0):
            page.evaluate("document.querySelector('.legend button').click()")
            assert page.evaluate("charts[0].hidden.size") == hidden
        # The keyboard shows the same values.
        page.evaluate("charts[0].canvas.focus()")
        page.press("End")
        assert page.text("#tip").startswith("step 60\n")
        page.press("ArrowLeft")
        assert page.text("#tip").startswith("step 59\n")


def test_a_comparison_on_a_phone_keeps_the_names_of_its_runs(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, all_events()).path for name in ("a-run-with-a-long-name", "second")]
    done = shoal("report", *runs, "--out", tmp_path / "compared.html")
    assert done.returncode == 0, done.stderr
    with open_browser() as page:
        page.resize(390, 800)
        page.open((tmp_path / "compared.html").as_uri())
        page.wait_for("document.querySelector('.scroll') !== null")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "wider than a phone"
        page.evaluate("document.querySelector('.scroll').scrollLeft = 400")
        left = "document.querySelector('.scroll tbody tr > :first-child').getBoundingClientRect().left"
        assert page.evaluate(left) >= 0, "its figures have no name"


def test_a_report_is_printed_as_a_pdf_beside_its_page(tmp_path: Path) -> None:
    need_tool("chromium", "chromium-browser", "google-chrome")
    run = make_run(tmp_path / "run", all_events())
    done = shoal("report", run.path, "-o", tmp_path / "shared.pdf", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert (document["report"], document["pdf"]) == (str(tmp_path / "shared.html"), str(tmp_path / "shared.pdf"))
    assert (tmp_path / "shared.pdf").read_bytes().startswith(b"%PDF-")


@pytest.mark.timeout(400)
def test_the_demo_trains_kills_a_rank_and_writes_a_report(tmp_path: Path) -> None:
    done = shoal("demo", "--steps", "12", "--out", tmp_path / "demo", "--json", timeout_s=380)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert [(row["ranks"], row["threads"]) for row in document["rows"][:2]] == [(1, 1), (2, 1)]
    assert [row["ranks"] for row in document["rows"][2:]] == ([1] if this_topology().usable > 1 else [])
    assert all(row["tokens_per_s"] > 0 for row in document["rows"])
    assert Path(document["picture"]).read_bytes().startswith(b"\x89PNG")
    killed, manifest = document["killed"], document["manifest"]
    assert killed["command"] == f"kill -9 {killed['pid']}"
    assert killed["command"] in done.stderr, "the user does not see the kill"
    assert "lost 1 of its 2 ranks" in killed["notes"][0]
    assert killed["notes"][0][:60] in " ".join(done.stderr.split())
    assert killed["lost_steps"] == 0
    assert 0 < killed["pause_s"] < killed["back_s"]
    assert manifest["members"] == [0, 1], "the killed rank is not back"
    assert document["verify"]["ok"] is True
    assert manifest["byte_equivalent"] is True
    assert drawn_charts(rendered_document(Path(document["report"]), tmp_path / "profile")) >= 5
    undisturbed = json.loads((Path(document["runs"]["two"]) / "manifest.json").read_text())
    speeds = [row["tokens_per_s"] for row in document["rows"][:2]]
    for compared in (undisturbed, manifest):
        assert [compared["tokens_per_sec_1proc"], compared["tokens_per_sec_2proc"]] == pytest.approx(speeds)
        assert compared["lesson_notes"].startswith("Two ranks were ")
    assert undisturbed["byte_equivalent"] is True
    one, two = (steps_of(Path(document["runs"][name])) for name in ("one", "two"))
    assert [step["loss"] for step in two] == pytest.approx([step["loss"] for step in one], rel=1e-3)


@pytest.mark.timeout(600)
def test_a_kill_at_any_moment_of_a_checkpoint_loses_nothing(tmp_path: Path) -> None:
    """Save after every step and repeatedly kill all processes at a random moment, in one folder."""
    run, rng, reached = tmp_path / "run", random.Random(5), 0
    settings = set_flags(*TINY, "train.checkpoint_every=1", "train.eval_every=1000000", "train.compile=off")
    command = shoal_command("train", "--out", run, "--steps", "1000000", *settings)
    for _ in range(3):
        training = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            wait_for_step(run, reached + 3, training)
            time.sleep(rng.random() * 0.2)
        finally:
            kill_all_processes_of(run)
            training.kill()
            training.wait()
        newest = max(int(path.name[5:13]) for path in (run / "checkpoints").glob("step-*"))
        assert newest >= reached, "a checkpoint was lost"
        assert not list((run / "checkpoints").glob("*.corrupt")), "a kill left a broken checkpoint behind"
        reached, command = newest, shoal_command("train", "--resume", run)
    done = shoal("train", "--resume", run, "--steps", str(reached + 2))
    assert done.returncode == 0, done.stderr
    assert shoal("verify", run).returncode == 0
    assert not list((run / "checkpoints").glob(".step-*"))


def kill_all_processes_of(run: Path) -> None:
    """Kill supervisor, agent and rank, as a power cut would, until none is left."""

    def killed() -> bool:
        left = find_processes(run)
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        return not left

    wait_until(killed)


def wait_for_step(run: Path, step: int, training: subprocess.Popen[bytes]) -> None:
    def is_reached() -> bool:
        assert training.poll() is None, (run / "logs/local/rank-0.log").read_text()[-2000:]
        return any((run / "checkpoints").glob(f"step-{step:08d}")) or newest_step(run) > step

    wait_until(is_reached, 180, why=lambda: f"step {step}, the newest is {newest_step(run)}")


def newest_step(run: Path) -> int:
    steps = [int(path.name[5:13]) for path in (run / "checkpoints").glob("step-????????")]
    return max(steps, default=0)
