"""What the live page costs: CPU of its server beside a run, the delay of a step, and how a long run is read.

    python benchmarks/watch_cost.py                     10 steps/s on 8 ranks for a minute, with 2 viewers
    python benchmarks/watch_cost.py --long 100000       only read 100,000 steps × 8 ranks (writes 350 MB to /tmp): the
                                                        page in Chromium, and the report

The events are written by this process, as ranks write them; the server is `shoal watch` in a process of its own.
"""

from __future__ import annotations

import http.client
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from _common import options
from shoal.config.load import build_config, to_toml
from shoal.event_schema import PHASES
from shoal.run_folder import RunFolder

RANKS = 8


def make_run(folder: Path) -> RunFolder:
    run = RunFolder.create(folder)
    run.config.write_text(to_toml(build_config()), encoding="utf-8")
    start = {
        "event": "start", "world_size": RANKS, "params": 1_000_000, "threads": 1, "micro_batch": 8, "device": "cpu",
        "backend": "gloo", "resumed_from": 0, "tokens_per_step": 8192, "global_batch": 64, "steps": 1_000_000,
    }  # fmt: skip
    for rank in range(RANKS):
        line = json.dumps({**start, "rank": rank, "time": time.time(), "node": f"node{rank}"})
        run.events(rank).write_text(line + "\n", encoding="utf-8")
    return run


def step_line(step: int, rank: int, at: float) -> str:
    times = {f"{phase}_s": 0.0142857 + (step * 7 + rank) % 13 * 1e-4 for phase in PHASES}
    fields = {"loss": 2.5 + 1 / step, "samples": 64, "grad_norm": 0.75, "lr": 0.001, "tokens": 8192, "wire_bytes": 123}
    record = {"event": "step", "rank": rank, "time": at, "step": step, **fields, **times, "step_s": sum(times.values())}
    return json.dumps({**record, "allreduce_s": 0.02, "hidden_s": 0.01}, separators=(",", ":")) + "\n"


class Viewer(threading.Thread):
    """Receives what a page receives; notes how long after its end each step arrived."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._url = urlsplit(url)
        self.delays_s: list[float] = []
        self.received = 0

    def run(self) -> None:
        connection = http.client.HTTPConnection(self._url.netloc)
        connection.request("GET", f"/events?{self._url.query}")
        reply = connection.getresponse()
        while line := reply.readline():
            self.received += len(line)
            if line.startswith(b"data: "):
                now, document = time.time(), json.loads(line[6:])
                self.delays_s += [now - record[1] for record in document["recent"].get("0", ())]


def serve(run: RunFolder) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-m", "shoal", "watch", str(run.path), "--json"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert server.stdout is not None
    text = ""
    while not text.endswith("}\n"):
        text += server.stdout.readline()
    return server, json.loads(text)["url"]


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def measure_live(folder: Path, steps_per_s: float, seconds: float, viewers: int) -> None:
    run = make_run(folder)
    server, url = serve(run)
    try:
        watching = [Viewer(url) for _ in range(viewers)]
        for viewer in watching:
            viewer.start()
        time.sleep(3)
        process = psutil.Process(server.pid)
        files = [run.events(rank).open("a", encoding="utf-8", buffering=1) for rank in range(RANKS)]
        before, began = cpu_s(process), time.perf_counter()
        for step in range(1, int(seconds * steps_per_s) + 1):
            for rank, file in enumerate(files):
                file.write(step_line(step, rank, time.time()))
            time.sleep(max(0.0, began + step / steps_per_s - time.perf_counter()))
        used, wall = cpu_s(process) - before, time.perf_counter() - began
        for file in files:
            file.close()
        print(
            f"{viewers} viewers: server {100 * used / wall:.2f}% of one core, {process.memory_info().rss / 1e6:.0f} MB"
        )
        if delays := [delay for viewer in watching for delay in viewer.delays_s]:
            late = sorted(delays)[int(0.95 * len(delays))]
            print(f"   a step is shown after {statistics.median(delays):.2f} s (median), {late:.2f} s (95%)")
            print(f"   a viewer received {watching[0].received / wall / 1e3:.1f} kB/s")
    finally:
        server.kill()
        server.wait()


# Run in the page before its own script: counts what is received, and notes when the first state and all of it came.
COUNT = """
window.seen = {bytes: 0, messages: 0, first: null, whole: null};
const Real = EventSource;
window.EventSource = class extends Real {
  addEventListener(name, take) {
    super.addEventListener(name, (event) => {
      seen.bytes += event.data.length; seen.messages += 1;
      take(event);
      seen.first ??= performance.now();
      if (S.summary.loaded >= 1) seen.whole ??= performance.now();
    });
  }
};
"""
# The gaps between frames while the pointer moves over a chart.
FRAMES = """
new Promise((done) => {
  const gaps = [], chart = document.getElementById("strips"), box = chart.getBoundingClientRect();
  let last = performance.now();
  const next = (now) => {
    gaps.push(now - last); last = now;
    const at = {clientX: box.left + (gaps.length * 7) % box.width, clientY: box.top + 20};
    chart.dispatchEvent(new PointerEvent("pointermove", at));
    if (gaps.length % 30 === 0) draw();
    gaps.length < 180 ? requestAnimationFrame(next) : done(gaps.slice(1).sort((a, b) => a - b));
  };
  requestAnimationFrame(next);
})
"""


def measure_long(folder: Path, steps: int) -> None:
    """Open the page of a long run in a browser; write its report, and that of two of its ranks."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from tests.support.browser import open_browser

    run = make_run(folder)
    for rank in range(RANKS):
        with run.events(rank).open("a", encoding="utf-8") as file:
            file.writelines(step_line(step, rank, 1.79e9 + step / 10) for step in range(1, steps + 1))
    size = sum(path.stat().st_size for path in run.event_files().values())
    print(f"{steps:,} steps × {RANKS} ranks, {size / 1e6:.0f} MB of events", flush=True)
    server, url = serve(run)
    try:
        process = psutil.Process(server.pid)
        with open_browser() as page:
            page.resize(1280, 1600)
            page.call("Page.addScriptToEvaluateOnNewDocument", source=COUNT)
            page.open(url)
            page.wait_for("window.seen && seen.whole", timeout_s=900)
            seen = page.evaluate("seen")
            paint_ms = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
            gaps_ms = page.evaluate(FRAMES)
            page.screenshot(Path(tempfile.gettempdir()) / "watch-long.png")
        print(f"   page: painted after {paint_ms / 1e3:.2f} s, first state after {seen['first'] / 1e3:.2f} s, all of "
              f"it after {seen['whole'] / 1e3:.0f} s ({cpu_s(process):.0f} s of CPU)")  # fmt: skip
        print(f"   received {seen['bytes'] / 1e6:.1f} MB in {seen['messages']} messages; server "
              f"{process.memory_info().rss / 1e6:.0f} MB of memory")  # fmt: skip
        late = gaps_ms[int(0.95 * len(gaps_ms))]
        print(f"   frames while the pointer moves: {statistics.median(gaps_ms):.0f} ms (median), {late:.0f} ms (95%), "
              f"{gaps_ms[-1]:.0f} ms (longest)", flush=True)  # fmt: skip
    finally:
        server.kill()
        server.wait()
    for ranks in (2, RANKS):
        for rank in range(ranks, RANKS):
            run.events(rank).rename(folder / f"aside-{rank}")
        began = time.perf_counter()
        subprocess.run([sys.executable, "-m", "shoal", "report", str(run.path)], check=True, stdout=subprocess.DEVNULL)
        took_s, page_bytes = time.perf_counter() - began, run.report.stat().st_size
        print(f"   report of {ranks} ranks: {took_s:.1f} s, {page_bytes / 1e6:.1f} MB")
        for rank in range(ranks, RANKS):
            (folder / f"aside-{rank}").rename(run.events(rank))


def main() -> None:
    parser = options(__doc__, quick={"seconds": 2.0})
    parser.add_argument("--steps-per-s", type=float, default=10.0)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--long", type=int, default=0, metavar="STEPS")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.long:
            measure_long(Path(folder) / "long", arguments.long)
            return
        for viewers in (0, 1, 2):
            measure_live(Path(folder) / f"run-{viewers}", arguments.steps_per_s, arguments.seconds, viewers)


if __name__ == "__main__":
    main()
