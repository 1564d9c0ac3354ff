"""`shoal ps`, `logs`, `stacks`, `attach` and `stop`: manage running runs."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import sys
import time
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from shoal.cli.command import command
from shoal.cli.options import Option, argument
from shoal.cli.output import (
    as_command,
    make_console,
    print_detached,
    print_json,
    print_note,
    print_paragraph,
    print_run,
    print_table,
    process_lines,
    shown,
)
from shoal.config.defaults import ASK_S
from shoal.config.presets import Overrides, did_you_mean
from shoal.control.processes import find_processes
from shoal.errors import ShoalError, UsageError, from_dict
from shoal.events import Event
from shoal.run_folder import RunFolder, user_name
from shoal.terminal import begin_stage, end_stage
from shoal.units import Unit, format_duration, format_loss, format_si, format_speed

if TYPE_CHECKING:
    from shoal.cli.progress import LineDisplay
    from shoal.runs.manage import PastRun, RunState, StopResult
    from shoal.runs.start import TrainDisplay, WatchScript


_STATES = ("running", "finished", "ended early", "interrupted", "failed", "unfinished", "unsupervised", "left over")
STARTING = "starting the ranks"
# Outcomes of a stop on several machines: the last of these that any machine reports counts.
_STOP_ORDER = ("not_running", "stopped", "ended")


@command(
    on=Option("A hosts file: list the runs on those machines.", shown="here"),
    all_=Option("Also list every process with its command.", flags="--all -a"),
)
def ps(on: Path | None = None, all_: bool = False, json: bool = False) -> None:
    """List the runs on this machine, their ranks, and processes left over from earlier runs."""
    from shoal.runs.manage import as_json, running_runs, runs_on

    if on is not None:
        from shoal.cluster.hosts.spec import read_hosts

        _print_hosts(runs_on(read_hosts(on)), json)
        return
    states = running_runs()
    if json:
        sys.stdout.write(as_json(states) + "\n")
    elif not states:
        sys.stdout.write("no run is active on this machine\n")
    else:
        _print_runs(states)
        if all_:
            _print_processes(states)


def _print_runs(states: list[RunState]) -> None:
    rows = []
    for state in states:
        step = "–" if state.step is None else f"{state.step:,}" + (f" of {state.steps:,}" if state.steps else "")
        age, count = format_duration(state.age_s), str(len(state.processes))
        rows.append((shown(state.run), state.what, state.on, state.state, step, age, count))
    print_table(("run", "what", "on", "state", "step", "for", "processes"), rows)


def _print_hosts(replies: dict[str, list[dict[str, Any]] | ShoalError], json: bool) -> None:
    """Print the runs of each host, or why the host could not be asked."""
    if json:
        hosts = {name: reply.as_dict() if isinstance(reply, ShoalError) else reply for name, reply in replies.items()}
        print_json({"hosts": hosts})
        return
    for name, runs in replies.items():
        if isinstance(runs, ShoalError):
            sys.stdout.write(f"{name}: {runs.seen}\n")
            continue
        sys.stdout.write(f"{name}: {'no run' if not runs else ''}\n")
        for run in runs:
            step = "–" if run["step"] is None else f"step {run['step']}"
            sys.stdout.write(f"  {run['run']}  {run['state']}  {step}  for {format_duration(run['age_s'])}\n")
            for process in run["processes"]:
                sys.stdout.write(f"    {process['pid']:>8}  {process['part']:<8}  {process['command']}\n")


def _print_processes(states: list[RunState]) -> None:
    """Print every process in full: in a table, long commands would be cut."""
    for state in states:
        sys.stdout.write(f"\n{shown(state.run)}\n")
        for line in process_lines(state.processes):
            sys.stdout.write(f"  {line}\n")


@command(
    text=argument("Only runs with this in their name, preset or place."),
    folder=Option("Where the run folders are.", flags="--in"),
    state=Option(f"Only runs in this state: {', '.join(_STATES)}.", shown="any"),
    delete=Option("Delete this run folder; may be repeated."),
    yes=Option("With --delete: do not ask."),
)
def runs(
    text: str = "",
    folder: Path = Path("runs"),
    state: str | None = None,
    delete: list[Path] | None = None,
    yes: bool = False,
    json: bool = False,
) -> None:
    """List past and present runs, the newest first: where, steps, loss, speed and state. Delete those not needed."""
    from shoal.runs.manage import past_runs, running_runs

    if delete:
        _delete_runs([RunFolder.find(path) for path in delete], yes)
        return
    if state is not None and state not in _STATES:
        raise UsageError(
            f"there is no state {state!r}",
            why=did_you_mean(state, _STATES) or f"the states are {', '.join(_STATES)}",
            fix=f"for example: shoal runs --state {_STATES[1]}",
        )
    listed = [
        run
        for run in past_runs(folder, running_runs())
        if text in f"{run.run} {run.what} {run.on}" and state in (None, run.state)
    ]
    if json:
        print_json({"runs": [{**asdict(run), "run": str(run.run)} for run in listed]})
    elif not listed:
        which = "no such run" if text or state else "no run"
        print_paragraph(f"{which} in {escape(shown(folder))}/; another folder: shoal runs --in FOLDER")
    else:
        _print_past_runs(listed)


def _print_past_runs(runs: list[PastRun]) -> None:
    rows = []
    for run in runs:
        created = datetime.fromisoformat(run.created).astimezone().strftime("%Y-%m-%d %H:%M") if run.created else "–"
        steps = "–" if run.step is None else f"{run.step:,}" + (f" of {run.steps:,}" if run.steps != run.step else "")
        loss = "–" if run.loss is None else format_loss(run.loss)
        speed = "–" if run.speed is None else format_speed(run.speed, Unit(run.unit))
        rows.append((shown(run.run), run.state, steps, loss, speed, run.on, created))
    # Where the table is too wide, its last columns are printed below.
    print_table(("run", "state", "steps", "loss", "speed", "on", "started"), rows)


def _delete_runs(folders: list[RunFolder], yes: bool) -> None:
    """Delete run folders after a confirmation; refuse one that is running."""
    from shoal.runs.manage import read_past_run
    from shoal.runs.slurm_job import refuse_running_job

    for folder in folders:
        refuse_running_job(folder)
        if find_processes(folder.path) or folder.is_held():
            raise UsageError(
                f"{shown(folder.path)} is running",
                why="its processes still write to the folder",
                fix=f"stop it first: {as_command('stop', shown(folder.path))}",
            )
    for folder in folders:
        run = read_past_run(folder)
        what = f"{shown(folder.path)} ({run.state}, {run.step or 0:,} steps, {format_si(run.size_bytes, 'B')})"
        if not yes:
            if not sys.stdin.isatty():
                raise UsageError(
                    f"{what} was not deleted",
                    why="there is no terminal to ask at",
                    fix="if you are sure, add --yes",
                )
            sys.stderr.write(f"delete {what} with its checkpoints? [y/N] ")
            sys.stderr.flush()
            if sys.stdin.readline().strip().lower() not in ("y", "yes"):
                sys.stdout.write(f"kept {shown(folder.path)}\n")
                continue
        shutil.rmtree(folder.path)
        sys.stdout.write(f"deleted {what}\n")


@command(
    rank=Option("Print only this rank.", low=0),
    follow=Option("Keep printing until the run ends.", flags="--follow -f"),
)
def logs(run: Path, rank: int | None = None, follow: bool = False) -> None:
    """Print the output of all ranks, stderr included: in order, line by line, coloured by rank.

    Progress goes to stderr: steps, losses and warnings of a training (not with --rank), and for any run which members
    left or joined and how it ended. With --follow, both continue until the run ends.
    """
    from shoal.cli.progress import LineDisplay
    from shoal.launch.logs import LogFollower

    folder = RunFolder.find(run)
    display = LineDisplay(make_console(soft_wrap=True))
    follower = LogFollower(folder, rank, shows_current=display.is_live)
    events = None
    if follow or rank is None:
        events = RunEventPrinter(folder, display, with_progress=rank is None, is_whole=True)
    count = 0
    with contextlib.closing(display):
        while True:
            is_over = not follow or not find_processes(folder.path)
            lines = follower.poll()
            count += len(lines)
            display.lines(lines, follower.current() if follow else ())
            if events is not None:
                events.show()
            if is_over:
                break
            # A run that prints nothing is followed too, and does not start.
            end_stage()
            time.sleep(0.2)
        lines = follower.last_words()
        count += len(lines)
        display.lines(lines)
    if events is not None:
        events.show_end()
    if folder.is_removed():
        raise folder.removed()
    if not count and rank is not None:
        names = ", ".join(path.name for path in sorted(folder.path.glob("logs/*/*.log")))
        raise UsageError(
            f"rank {rank} of {run} has printed nothing",
            why=f"logs there are: {names or 'none'}",
            fix=f"shoal logs {run}",
        )


class RunEventPrinter:
    """Print on stderr what happens to a run: the supervisor's notes and, for a training, its ranks' events."""

    def __init__(
        self, run: RunFolder, lines: LineDisplay, with_progress: bool, is_new: bool = False, is_whole: bool = False
    ) -> None:
        """With `is_new` the run is about to be launched, and its folder may have settings of an earlier launch.

        With `is_whole`, what has happened so far is printed too.
        """
        from shoal.runs.follow import RunEvents, SupervisorLog

        self._keeping = SupervisorLog(run) if is_whole else SupervisorLog.from_now(run)
        self._news = RunEvents(run, all_launches=is_whole)
        self._is_whole = is_whole
        self._lines = lines
        self._run = run
        self._with_progress, self._is_new = with_progress, is_new
        self._display: TrainDisplay | None = None
        if not is_new:
            self._open_display()

    def _open_display(self) -> None:
        """Show progress as soon as the run is a training: a script becomes one when it makes its `shoal.Session`."""
        from shoal.cli.progress import StatusDisplay, make_plain_display
        from shoal.config.load import load_settings
        from shoal.runs.manage import read_opening

        if self._display is None and self._with_progress and self._run.config.is_file():
            config = load_settings(self._run.config)
            has_status = self._is_new and self._lines.is_live
            self._display = StatusDisplay(self._lines, config) if has_status else make_plain_display(config)
            if not self._is_whole:
                # Without `shard`: each rank prints its own part of the data.
                self._display([event for event in read_opening(self._run) if event["event"] != "shard"])

    def show(self, notes: list[Event] | None = None) -> None:
        """Print these notes of the supervisor, or those since the last call, and the ranks' events since then."""
        own_notes = self._keeping.poll()
        notes = own_notes if notes is None else notes
        if self._keeping.running and self._lines.status == STARTING:
            self._lines.status = ""
        events = [event for event in self._news.poll() if event["event"] != "shard"]
        if self._is_whole:
            events.sort(key=lambda event: float(event["time"]))
        if self._is_new:
            # The launcher names this error once, and the ranks that failed in the same way.
            faults = [event for event in events if event["event"] == "fault"]
            self._lines.hidden |= {(e["rank"], line) for e in faults for line in from_dict(e).render().splitlines()}
        if events:
            self._open_display()
        if (progress := self._display) is None:
            for note in notes:
                self._lines.note(note["text"])
        elif notes or events:
            self._lines.beside(lambda: progress([*notes, *events]))

    def show_end(self) -> None:
        """Print how the run ended, if it ended while it was followed."""
        self.show()
        if self._keeping.ended is not None:
            failed = self._keeping.ended["code"]
            print_note(f"the run has ended: {self._keeping.ended.get('seen')}" if failed else "the run has ended well")


def watch_script(with_progress: bool) -> tuple[LineDisplay, WatchScript]:
    """Return what shows the lines of a script that is about to be launched, and what shows its session beside them."""
    from shoal.cli.progress import LineDisplay

    display = LineDisplay(make_console(soft_wrap=True))
    display.status = STARTING
    return display, lambda run: RunEventPrinter(run, display, with_progress, is_new=True).show


def resume_session(path: Path, changes: Overrides, detach: bool, json: bool = False) -> None:
    """Continue the session of a script's run from its newest checkpoint."""
    from shoal.runs.start import resume_script

    display, watch = watch_script(with_progress=not detach)
    print_script_end(resume_script(path, dict(changes), detach, display, watch), detach, json)


def print_script_end(run: RunFolder, detach: bool, json: bool = False) -> None:
    from shoal.records.manifest import read_manifest

    if detach:
        print_detached(run, json)
    elif (manifest := read_manifest(run)) is not None:
        # The script trained with shoal.Session. Its stdout is its own.
        print_run(run, manifest, stderr=True)
    else:
        sys.stderr.write(f"run folder: {shown(run.path)}\n")


@command(
    rank=Option("Print only this rank.", low=0),
    here=Option("On this machine only.", is_hidden=True),
)
def stacks(run: Path, rank: int | None = None, here: bool = False, json: bool = False) -> int:
    """Print what every rank is doing now: its Python stack, the most recent call last, also of a rank that hangs.

    A `>` marks the innermost line of your own code. The ranks continue undisturbed. Exit code 1: a rank has not
    answered.
    """
    from shoal.cluster.hosts.spec import HostsSpec
    from shoal.runs.manage import cluster_of, stacks_here, stacks_on

    folder = RunFolder.find(run)
    begin_stage("asking the ranks for their stacks")
    answers = stacks_here(folder, rank)
    if not here and isinstance(hosts := cluster_of(folder), HostsSpec):
        answers += stacks_on(hosts, folder, rank)
    if not answers and not here:
        raise _no_stacks(folder, rank)
    if json:
        print_json({"run": str(folder.path), "ranks": [asdict(answer) for answer in answers]})
    else:
        for answer in answers:
            head = f"rank {answer.rank} on {answer.node} (process {answer.pid}) is at {answer.place}"
            text = "\n".join((head, *answer.lines)) if answer.lines else f"rank {answer.rank}: {answer.missing}"
            sys.stdout.write(f"{text}\n\n")
    return int(any(answer.missing for answer in answers))


def _no_stacks(folder: RunFolder, rank: int | None) -> UsageError:
    if not find_processes(folder.path):
        return UsageError(
            f"{shown(folder.path)} is not running here",
            why="it has ended, or its machines cannot be reached from here",
            fix=f"what its ranks printed: {as_command('logs', shown(folder.path))}",
        )
    which = "has no rank on this machine or its hosts" if rank is None else f"has no rank {rank} here or on its hosts"
    return UsageError(
        f"{shown(folder.path)} {which}",
        why="ranks that shoal's agents start are asked; a machine that joined lists its own",
        fix=f"list its processes: {as_command('ps', '--all')}",
    )


@command(json=Option("Print the manifest as JSON on stdout."))
def attach(run: Path, json: bool = False) -> None:
    """Watch a run as if it had been started here. Ctrl-C leaves it running; shoal stop ends it."""
    from shoal.cli.progress import LineDisplay, make_display
    from shoal.runs.manage import attach_script, attach_training
    from shoal.runs.start import require_manifest
    from shoal.runs.supervisor import is_script

    folder = RunFolder.find(run)
    try:
        if not folder.config.is_file() and json:
            raise UsageError(
                "--json does not go with the run of a script",
                why="it prints the manifest of a training; a script has none",
                fix=f"leave it out: shoal attach {run}",
            )
        if not folder.config.is_file() or (is_script(folder) and not json):
            # Its own output, and beside it the progress of one that trains with shoal.Session.
            lines = LineDisplay(make_console(soft_wrap=True))
            attach_script(folder, lines, RunEventPrinter(folder, lines, with_progress=True).show)
            if not folder.config.is_file():
                return
        else:
            attach_training(folder, make_display)
    except KeyboardInterrupt:
        sys.stderr.write(f"\nthe run continues; to stop it: {as_command('stop', shown(folder.path))}\n")
        return
    manifest = require_manifest(folder)
    if json:
        print_json(manifest.model_dump(mode="json"))
    else:
        print_run(folder, manifest)


@command(
    now=Option("Do not wait for the current step and the checkpoint."),
    wait_s=Option(
        "Seconds that it has to stop by itself.",
        flags="--wait",
        low=0,
        shown=f"{ASK_S:.0f}, or more for a script with a longer --grace",
    ),
    here=Option("On this machine only.", is_hidden=True),
)
def stop(run: Path, now: bool = False, wait_s: float | None = None, here: bool = False, json: bool = False) -> None:
    """Ask a run to finish its step and save. If it does not, end its own processes and no others."""
    from shoal.cluster.hosts.spec import HostsSpec
    from shoal.runs.manage import StopResult, cluster_of, stop_on
    from shoal.runs.manage import stop_run as stop_run

    if now and wait_s is not None:
        raise UsageError("--wait has no effect with --now", why="--now waits for nothing", fix="leave one of them out")
    folder = RunFolder(run.resolve()) if find_processes(run.resolve()) else RunFolder.find(run)
    begin_stage("ending its processes" if now else "waiting for the end of its step and a checkpoint; not with --now")
    outcome = stop_run(folder, 0.0 if now else wait_s)
    if not here and outcome is StopResult.NOT_RUNNING and isinstance(hosts := cluster_of(folder), HostsSpec):
        # It has no supervisor here, but its agents may still run on the hosts.
        outcome = StopResult[max(stop_on(hosts, folder, now).values(), key=_STOP_ORDER.index).upper()]
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
    sys.stdout.write(f"{shown(folder.path)} {_outcome_text(outcome, folder)}\n")
    if not folder.supervisor.exists() and outcome is not StopResult.NOT_RUNNING:
        sys.stdout.write("its run folder was removed while the run was writing to it: nothing is saved\n")
        return
    if outcome is not StopResult.NOT_RUNNING:
        print_resume(folder)


def print_resume(folder: RunFolder) -> None:
    """Print the command that resumes a run, if it has a checkpoint; where a machine joined, how it continues."""
    from shoal.runs.supervisor import is_script

    if advice := folder.rejoin_advice():
        sys.stdout.write(f"next: {advice}\n")
    elif folder.has_checkpoint():
        verb = "run" if is_script(folder) else "train"
        sys.stdout.write(f"next: {as_command(verb, '--resume', shown(folder.path))}\n")


def _outcome_text(outcome: StopResult, run: RunFolder) -> str:
    """Describe the outcome. Of a script without a session only its exit is known, not that it saved."""
    from shoal.runs.manage import StopResult
    from shoal.runs.supervisor import has_session_events, is_script

    is_plain = is_script(run) and not has_session_events(run)
    return "stopped when it was asked to" if is_plain and outcome is StopResult.STOPPED else outcome.value
