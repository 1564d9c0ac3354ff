"""`shoal ps`: the runs that go on, with or without a terminal."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from shoal.cli.output import (
    LineDisplay,
    command,
    is_given,
    make_console,
    print_json,
    print_note,
    print_run,
    process_lines,
    shown,
    stdout_console,
)
from shoal.cli.progress import make_display, make_plain_display
from shoal.cluster.hosts.spec import HostsSpec, read_hosts
from shoal.config.load import load_config
from shoal.control.processes import find
from shoal.errors import ShoalError, UsageError
from shoal.launch.logs import LogFollower
from shoal.run_folder import RunFolder, user_name
from shoal.runs.follow import RunEvents, SupervisorLog
from shoal.runs.manage import (
    ASK_S,
    RunState,
    StopResult,
    as_json,
    attach_script,
    attach_training,
    opening,
    running_runs,
    runs_on,
    stop_on,
    where,
)
from shoal.runs.manage import stop as stop_run
from shoal.runs.start import the_manifest
from shoal.units import format_duration

app = typer.Typer(add_completion=False)

_WIDE = 1000


@app.command()
def ps(
    on: Annotated[
        Path | None, typer.Option(help="A hosts file: the runs on those machines.", show_default="here")
    ] = None,
    all_: Annotated[bool, typer.Option("--all", "-a", help="Every process, with its command.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False,
) -> None:
    """Which runs are going on, where their ranks are, and what earlier ones left behind."""
    if on is not None:
        print_elsewhere(runs_on(read_hosts(on)), json)
        return
    states = running_runs()
    if json:
        sys.stdout.write(as_json(states) + "\n")
    elif not states:
        sys.stdout.write("no run is going on here\n")
    else:
        print_runs(states)
        if all_:
            print_processes(states)


def print_runs(states: list[RunState]) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for title in ("run", "what", "on", "state", "step", "for", "processes"):
        table.add_column(title, overflow="fold")
    for state in states:
        step = "–" if state.step is None else f"{state.step:,}" + (f" of {state.steps:,}" if state.steps else "")
        age, count = format_duration(state.age_s), str(len(state.processes))
        texts = (shown(state.run), state.what, state.on, state.state, step, age, count)
        table.add_row(*map(escape, texts))
    console = stdout_console()
    if not console.is_terminal:
        # A folder's name is one word for whoever reads the pipe.
        console.width = _WIDE
    console.print(table)


def print_elsewhere(found: dict[str, list[dict[str, Any]] | ShoalError], json: bool) -> None:
    """A host that cannot be asked is said so, beside what the others answered."""
    if json:
        print_json({"hosts": {name: _or_error(said) for name, said in found.items()}})
        return
    for name, runs in found.items():
        if isinstance(runs, ShoalError):
            sys.stdout.write(f"{name}: {runs.seen}\n")
            continue
        sys.stdout.write(f"{name}: {'no run' if not runs else ''}\n")
        for run in runs:
            step = "–" if run["step"] is None else f"step {run['step']}"
            sys.stdout.write(f"  {run['run']}  {run['state']}  {step}  for {format_duration(run['age_s'])}\n")
            for process in run["processes"]:
                sys.stdout.write(f"    {process['pid']:>8}  {process['part']:<8}  {process['command']}\n")


def _or_error(said: list[dict[str, Any]] | ShoalError) -> Any:
    return said.as_dict() if isinstance(said, ShoalError) else said


def print_processes(states: list[RunState]) -> None:
    """Not a table: a command is long, and cut short it is of no use."""
    for state in states:
        sys.stdout.write(f"\n{shown(state.run)}\n")
        for line in process_lines(state.processes):
            sys.stdout.write(f"  {line}\n")


# SECTION cli/logs
# `shoal logs`: what the ranks of a run printed, as one.


@app.command()
def logs(
    run: Annotated[Path, typer.Argument(help="The run folder.", readable=False)],
    rank: Annotated[int | None, typer.Option(min=0, help="Of this rank only.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run ends.")] = False,
) -> None:
    """What the ranks printed, stderr included: merged in order, line by line, coloured by rank.

    While it follows, what happens goes to stderr: of a training its steps, losses and warnings, as shoal train shows
    them (not with --rank), and of any run who left, who came and how it ended.
    """
    folder = RunFolder.find(run)
    display = LineDisplay(make_console(soft_wrap=True))
    follower = LogFollower(folder, rank, shows_current=display.is_live)
    happenings = RunEventPrinter(folder, display, with_progress=rank is None) if follow else None
    count = 0
    with contextlib.closing(display):
        while True:
            over = not follow or not find(folder.path)
            lines = follower.poll()
            count += len(lines)
            display.lines(lines, follower.current() if follow else ())
            if happenings is not None:
                happenings.show()
            if over:
                break
            time.sleep(0.2)
        lines = follower.last_words()
        count += len(lines)
        display.lines(lines)
    if happenings is not None:
        happenings.show_end()
    if folder.is_removed():
        raise folder.removed()
    if not count and rank is not None:
        there = ", ".join(path.name for path in sorted(folder.path.glob("logs/*/*.log")))
        raise UsageError(
            f"rank {rank} of {run} has printed nothing",
            why=f"logs there are: {there or 'none'}",
            fix=f"shoal logs {run}",
        )


class RunEventPrinter:
    """Prints on stderr what happens to a run: the supervisor's notes, and of a training what its ranks' events say."""

    def __init__(self, run: RunFolder, lines: LineDisplay, with_progress: bool) -> None:
        self._keeping = SupervisorLog.from_now(run)
        self._news = RunEvents(run)
        self._lines = lines
        self._display = None
        if with_progress and run.config.is_file():
            self._display = make_plain_display(load_config(run.config))
            # Each rank prints its own part of the data.
            self._display([event for event in opening(run) if event["event"] != "shard"])

    def show(self) -> None:
        notes, progress = self._keeping.poll(), self._display
        if progress is None:
            for note in notes:
                self._lines.note(note["text"])
            return
        happened = [*notes, *(event for event in self._news.poll() if event["event"] != "shard")]
        if happened:
            self._lines.beside(lambda: progress(happened))

    def show_end(self) -> None:
        """How the run ended, where that was while we followed."""
        self.show()
        if self._keeping.ended is not None:
            failed = self._keeping.ended["code"]
            print_note(f"the run has ended: {self._keeping.ended.get('seen')}" if failed else "the run has ended well")


# SECTION cli/attach
# `shoal attach`: watch a run that goes on without a terminal, from wherever it is.


@app.command()
def attach(
    run: Annotated[Path, typer.Argument(help="The run folder.", readable=False)],
    json: Annotated[bool, typer.Option("--json", help="Print the manifest as JSON on stdout.")] = False,
) -> None:
    """Watch a run as if it had been started here, to the same end. Ctrl-C leaves it running; shoal stop ends it."""
    folder = RunFolder.find(run)
    try:
        if not folder.config.is_file():
            if json:
                raise UsageError(
                    "--json does not go with the run of a script",
                    why="it prints the manifest of a training, and a script has none",
                    fix=f"leave it out: shoal attach {run}",
                )
            attach_script(folder, LineDisplay(make_console(soft_wrap=True)))
            return
        attach_training(folder, make_display)
    except KeyboardInterrupt:
        sys.stderr.write(f"\nthe run goes on; to end it: {command('stop', shown(folder.path))}\n")
        return
    manifest = the_manifest(folder)
    if json:
        print_json(manifest.model_dump(mode="json"))
    else:
        print_run(folder, manifest)


# SECTION cli/stop
# `shoal stop`: end a run in good order.


_FINALITY = ("not_running", "stopped", "ended")


@app.command()
def stop(
    context: typer.Context,
    run: Annotated[Path, typer.Argument(help="The run folder.", readable=False)],
    now: Annotated[bool, typer.Option("--now", help="Don't wait for the step and the checkpoint.")] = False,
    wait_s: Annotated[
        float | None,
        typer.Option(
            "--wait",
            min=0,
            help="Seconds it may take to stop by itself.",
            show_default=f"{ASK_S:.0f}, or more for a script with a longer --grace",
        ),
    ] = None,
    here: Annotated[bool, typer.Option("--here", hidden=True, help="On this machine only.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False,
) -> None:
    """Ask a run to finish its step and save; end exactly its own processes if it doesn't."""
    if now and is_given(context, "wait_s"):
        raise UsageError("--wait has no effect with --now", why="--now waits for nothing", fix="leave one of them out")
    folder = RunFolder(run.resolve()) if find(run.resolve()) else RunFolder.find(run)
    outcome = stop_run(folder, 0.0 if now else wait_s)
    if not here and outcome is StopResult.NOT_RUNNING and isinstance(hosts := where(folder), HostsSpec):
        # Nobody keeps it here, but its agents may well go on there.
        outcome = StopResult[max(stop_on(hosts, folder, now).values(), key=_FINALITY.index).upper()]
    if outcome is StopResult.NOT_RUNNING and folder.path.stat().st_uid != os.geteuid() and folder.is_held():
        owner = user_name(folder.path.stat().st_uid)
        raise UsageError(
            f"{shown(folder.path)} is running, and user {user_name(os.geteuid())} cannot stop it",
            why=f"it belongs to user {owner}",
            fix=f"ask {owner}, or: sudo -u {owner} shoal stop {shlex.quote(str(folder.path))}",
        )
    if json:
        print_json({"run": str(folder.path), "outcome": outcome.name.lower()})
        return
    sys.stdout.write(f"{shown(folder.path)} {_words(outcome, folder)}\n")
    if not folder.supervisor.exists() and outcome is not StopResult.NOT_RUNNING:
        sys.stdout.write("its run folder was removed while the run was writing to it: nothing is saved\n")
        return
    if outcome is not StopResult.NOT_RUNNING and folder.checkpoints.is_dir():
        sys.stdout.write(f"next: {command('train', '--resume', shown(folder.path))}\n")


def _words(outcome: StopResult, run: RunFolder) -> str:
    """Of a script nothing is known but that its ranks ended by themselves; only a training has a configuration."""
    is_script = run.job.is_file() and not run.config.is_file()
    return "stopped when it was asked to" if is_script and outcome is StopResult.STOPPED else outcome.value
