"""`shoal demo`: what a second rank gains on this machine, and what happens when a rank is killed."""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from shoal.cli.command import Request, command
from shoal.cli.options import SETTINGS, Option
from shoal.cli.output import as_command, make_console, print_json, print_paragraph, shown, stdout_console
from shoal.errors import RunFailed, UsageError
from shoal.events import Event, read_events
from shoal.run_folder import RunFolder, default_out
from shoal.units import format_duration, format_ms, pluralize

if TYPE_CHECKING:
    from shoal.config.manifest import Manifest
    from shoal.config.schema import Config, EngineConfig
    from shoal.records.scaling import ScalingPoint
    from shoal.records.verify import VerifyResult
    from shoal.runs.start import MakeDisplay, TrainDisplay
    from shoal.tools.bench.scaling import ScalingResult

_ONE, _TWO, _ALL = "one", "two", "all"
_VICTIM = 1
# A restarted rank imports torch and copies the state. The killed training continues for at least this long.
_RETURN_S = 12.0
# Two speeds that differ by less are called equal.
_NEGLIGIBLE = 0.03
# What the display of a training shows here: the start and the evaluations of four trainings would fill the screen.
_SHOWN_EVENTS = {"step", "membership", "lost", "note", "warning"}


@dataclass
class KilledRank:
    """A rank that was killed while it trained, and what followed. Times are seconds after the kill."""

    rank: int
    pid: int
    command: str
    after_step: int
    at: float  # by the wall clock
    notes: list[str]  # what shoal reported afterwards
    pause_s: float | None = None  # until the next step was committed
    back_s: float | None = None  # until a step was committed with the restarted rank
    back_at_step: int | None = None
    lost_steps: int | None = None  # committed steps that were lost or repeated


@dataclass(frozen=True, kw_only=True)
class DemoRequest(Request):
    steps: int = 40
    set_: list[str] | None = None
    out: Path | None = None
    json: bool = False


@command(
    steps=replace(SETTINGS["steps"], help="Steps of each training.", low=4),
    out=Option("The folder to create.", shown="runs/demo-TIME"),
    json=Option("Print all figures as JSON on stdout."),
)
def demo(request: DemoRequest) -> int:
    """Compare one rank with two, then kill a rank of a running training and see the run continue.

    A small GPT learns English verb forms: on one rank with one core, on two ranks with one core each, and in one
    process that uses all cores. A fourth training loses a rank to kill -9 and is verified afterwards. All of it runs
    on this machine, without root, in under two minutes on two cores.
    """
    from shoal.host.topology import this_topology, threads_for
    from shoal.tools.bench.scaling import measure_scaling, scaling_document

    began, cores, folder = time.monotonic(), threads_for(this_topology(), 1), request.out or default_out("demo")
    config = _demo_config(request)
    titles = _titles(cores, are_all=cores == this_topology().usable)
    make_console(stderr=True).print(f"A small GPT learns English verb forms, in {len(titles) + 1} trainings:")
    result = measure_scaling(_rows(config, titles), folder, _numbered(titles))
    for row in result.rows:
        if row.error is not None:
            raise row.error
    if not request.json:
        _print_speeds(result, cores)
    run, killed = _train_and_kill(config, folder / "killed", result, len(titles) + 1)
    verdict, manifest, report = _write_results(run, killed, result)
    took_s = time.monotonic() - began
    if request.json:
        figures = {
            **scaling_document(result),
            "killed": asdict(killed),
            "verify": verdict.model_dump(mode="json"),
            "manifest": manifest.model_dump(mode="json"),
            "report": str(report),
            "seconds": took_s,
        }
        figures["runs"][run.path.name] = str(run.path)
        print_json(figures)
    else:
        _print_kill(killed, run, verdict)
        sys.stdout.write(
            f"\nreport:  {shown(report)}\npicture: {shown(result.picture)}\nThe demo took {took_s:.0f} s.\n"
        )
        sys.stdout.write(f"{_next_steps()}\n")
    return 0 if verdict.ok else 1


def _write_results(run: RunFolder, killed: KilledRank, result: ScalingResult) -> tuple[VerifyResult, Manifest, Path]:
    """Verify the run that lost a rank; write the manifests and reports of both runs of two ranks."""
    from shoal.records.manifest import write_derived_files
    from shoal.records.verify import verify_run
    from shoal.tools.report.page import write_report

    verdict = verify_run(run)
    killed.lost_steps = len(verdict.ledger.missing) + verdict.ledger.redone + verdict.ledger.abandoned
    curve = _speed_by_ranks(result)
    # Of the undisturbed run as well: it is the one to compare with one process.
    for compared, replicas in ((result.runs[_TWO], None), (run, verdict.replicas)):
        manifest = write_derived_files(compared, replicas, curve)
        report = write_report(compared, curve)
    return verdict, manifest, report


def _next_steps() -> str:
    """Return the commands of a first training of one's own; with that of the environment where shoal is not on PATH."""
    words = ("train", "--on", "local:2", "--data", "YOUR-TEXT.txt")
    activate = Path(sys.prefix) / "bin" / "activate"
    if shutil.which("shoal") or not activate.is_file():
        return f"next: {as_command(*words)}"
    return f"next: . {shlex.quote(shown(activate))}\n      {shlex.join(['shoal', *words])}"


def _demo_config(request: DemoRequest) -> Config:
    from shoal.cli.bench import scaling_config
    from shoal.config.load import typed_settings

    sets = request.set_ or []
    if "run.threads" in typed_settings(None, sets):
        raise UsageError(
            "--set run.threads has no effect on shoal demo",
            why="it compares ranks with one thread each and one process with all cores",
            fix="leave it out; a training with other threads: shoal train --on local:2 --threads 2",
        )
    return scaling_config("shoal demo", "grammar", {"train": {"steps": request.steps}}, request.flags(), sets)


def _titles(cores: int, are_all: bool) -> dict[str, str]:
    titles = {_ONE: "1 rank, 1 core", _TWO: "2 ranks, 1 core each"}
    if cores > 1:
        titles[_ALL] = f"1 process, all {cores} cores" if are_all else f"1 process, {cores} fast cores"
    return titles


def _rows(config: Config, titles: dict[str, str]) -> list[Any]:
    """Return the trainings to compare; the last one's threads are all cores."""
    from shoal.tools.bench.scaling import ScalingRow, check_rows

    places = {_ONE: ("local:1", 1), _TWO: ("local:2", 1), _ALL: ("local:1", None)}
    rows = []
    for key, title in titles.items():
        on, threads = places[key]
        settings = config.model_copy(update={"run": config.run.model_copy(update={"on": on, "threads": threads})})
        rows.append(ScalingRow(key, title, settings, key, label=title))
    return check_rows(rows)


def _speed_by_ranks(result: ScalingResult) -> list[ScalingPoint]:
    """Return the points that differ in their number of ranks alone, for the report's curve."""
    return [row.median[0].model_copy(update={"name": ""}) for row in result.rows if row.key in (_ONE, _TWO)]


class _QuietDisplay:
    """Pass on only the events that the demo shows, and call `look` with all of them."""

    def __init__(self, display: TrainDisplay, look: Callable[[list[Event]], None] = lambda events: None) -> None:
        self.display = display
        self._look = look

    def __call__(self, events: list[Event]) -> None:
        self.display([event for event in events if event["event"] in _SHOWN_EVENTS])
        self._look(events)

    def close(self) -> None:
        self.display.close()


def _make_display(config: EngineConfig, number: int, title: str) -> TrainDisplay:
    from shoal.cli.progress import display_on

    console = make_console(stderr=True)
    console.print(f"[bold]{number}. {escape(title)}[/]: {pluralize(config.train.steps, 'step')}")
    return display_on(console, config, transient=True)


def _numbered(titles: dict[str, str]) -> MakeDisplay:
    """Return what makes the display of one training after the other."""
    left = list(enumerate(titles.values(), start=1))
    return lambda config: _QuietDisplay(_make_display(config, *left.pop(0)))


def _train_and_kill(config: Config, out: Path, result: ScalingResult, number: int) -> tuple[RunFolder, KilledRank]:
    """Train on two ranks, kill one in the middle, and return what happened."""
    from shoal.runs.start import start_training

    alone_s = next(row.median[0].step_s for row in result.rows if row.key == _ONE)
    kill_after = max(2, config.train.steps // 3)
    steps = max(config.train.steps, kill_after + math.ceil(_RETURN_S / alone_s))
    settings = config.model_copy(
        update={
            "run": config.run.model_copy(update={"on": "local:2", "threads": 1}),
            "train": config.train.model_copy(update={"steps": steps}),
        }
    )
    killed: list[KilledRank] = []

    def watch(config: EngineConfig) -> TrainDisplay:
        display = _make_display(config, number, "2 ranks, and kill -9 of one of them")

        def look(events: list[Event]) -> None:
            if killed:
                killed[0].notes += [event["text"] for event in events if event["event"] == "note"]
            elif any(event["event"] == "step" and event["step"] >= kill_after for event in events):
                killed.append(_kill_rank(RunFolder.open(out), max(_steps(events))))
                text = f"after step {killed[0].after_step} the demo kills rank {_VICTIM}: {killed[0].command}"
                display([{"event": "note", "rank": None, "text": text}])

        return _QuietDisplay(display, look)

    run, _ = start_training(settings, out, watch)
    if not killed:
        raise RunFailed(f"the training in {out} ended before a rank could be killed", fix="shoal demo --steps 40")
    _read_commits(run, killed[0])
    return run, killed[0]


def _steps(events: list[Event]) -> list[int]:
    return [event["step"] for event in events if event["event"] == "step"]


def _kill_rank(run: RunFolder, step: int) -> KilledRank:
    from shoal.control.processes import find_processes

    pids = [process.pid for process in find_processes(run.path) if process.part == f"rank-{_VICTIM}"]
    if not pids:
        raise RunFailed(f"rank {_VICTIM} of {run.path} is not running", fix=f"shoal logs {run.path}")
    # A rank may have children of its own, which carry its name; they are younger.
    pid, at = min(pids), time.time()
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return KilledRank(_VICTIM, pid, f"kill -9 {pid}", step, at, [])


def _read_commits(run: RunFolder, killed: KilledRank) -> None:
    """Read from the commit log when training went on, and when the killed rank took part again."""
    later = [commit for commit in read_events(run.commits) if commit["time"] > killed.at]
    without = [commit for commit in later if killed.rank not in commit["members"]]
    if not without:
        return
    killed.pause_s = without[0]["time"] - killed.at
    together = [commit for commit in later if killed.rank in commit["members"] and commit["step"] > without[0]["step"]]
    if together:
        killed.back_s, killed.back_at_step = together[0]["time"] - killed.at, together[0]["step"]


def _print_speeds(result: ScalingResult, cores: int) -> None:
    from shoal.records.explain_run import warn_of_load

    points = {row.key: row.median[0] for row in result.rows}
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for number, title in enumerate(("", "tokens/s", "speed-up", "step")):
        table.add_column(title, justify="right" if number else "left", no_wrap=True)
    for point in points.values():
        speed_up = f"{point.tokens_per_s / points[_ONE].tokens_per_s:.2f}×"
        table.add_row(escape(point.label), f"{point.tokens_per_s:,.0f}", speed_up, format_ms(point.step_s))
    console = stdout_console()
    console.print()
    console.print(table)
    for text in (explain_all_cores(points.get(_ALL), points[_TWO], cores), warn_of_load(result.points)):
        if text:
            print_paragraph(escape(text), console)
    console.print()


def explain_all_cores(alone: ScalingPoint | None, two: ScalingPoint, cores: int) -> str:
    """Compare one process that uses all cores with two ranks, and say what decides it."""
    if alone is None:
        return "This machine has one core, which both ranks share: a second rank gains nothing here."
    ratio = alone.tokens_per_s / two.tokens_per_s
    name = f"One process with {cores} threads"
    if ratio > 1 + _NEGLIGIBLE:
        verdict = f"{name} was {ratio:.2f} times as fast as two ranks"
    elif ratio < 1 - _NEGLIGIBLE:
        verdict = f"Two ranks were {1 / ratio:.2f} times as fast as one process with {cores} threads"
    else:
        verdict = f"{name} was as fast as two ranks"
    more = f" and it had {cores} cores where they had two" if cores > 2 else ""
    return (
        f"{verdict}. On one machine one process may win: its threads share one copy of the model and exchange no "
        f"gradients{more}. Ranks also use the cores of other machines, which threads cannot."
    )


def _print_kill(killed: KilledRank, run: RunFolder, verdict: VerifyResult) -> None:
    from shoal.cli.report import print_verdict, sharding_of

    console = stdout_console()
    console.print(f"\n[bold]{escape(killed.command)}[/]  (rank {killed.rank} of two, after step {killed.after_step})")
    if killed.notes:
        print_paragraph(f'shoal: "{escape(killed.notes[0])}"', console)
    pause = "no step followed" if killed.pause_s is None else f"the next step was done {killed.pause_s:.1f} s later"
    back = (
        "the run ended before the restarted rank was back"
        if killed.back_s is None
        else f"rank {killed.rank} was back at step {killed.back_at_step}, after {format_duration(killed.back_s)}"
    )
    print_paragraph(f"pause: {pause}; steps lost: {killed.lost_steps}; {back}", console)
    console.print(f"\n[bold]{escape(as_command('verify', shown(run.path)))}[/]", soft_wrap=True)
    print_verdict(verdict, sharding_of(run))
