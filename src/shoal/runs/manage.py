"""Manages runs from outside: lists those on this machine or on hosts, stops them, and attaches to them."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.config.defaults import ASK_S
from shoal.control.membership.settings import STACKS_WAIT_S
from shoal.control.processes import (
    AGENT,
    SUPERVISOR,
    TEMPLATE,
    RunProcess,
    ask_to_stop,
    find_processes,
    find_supervisor,
    has_supervisor,
    is_alive,
    kill_processes,
    wait_until_ended,
)
from shoal.control.rank_stacks import RankStacks, StackFrame, ask_for_stacks, rank_of, read_stacks, stack_lines
from shoal.errors import HostError, Interrupted, RunFailed, ShoalError, from_dict
from shoal.event_schema import RANK_EVENTS, parse_event
from shoal.events import Event, EventLog, read_last_events
from shoal.records.documents import read_document
from shoal.run_folder import RunFolder, special_file_in
from shoal.terminal import printable_json

if TYPE_CHECKING:
    from shoal.cluster.hosts.cluster import HostsCluster
    from shoal.cluster.hosts.spec import Host, HostsSpec
    from shoal.cluster.target import On
    from shoal.config.schema import EngineConfig
    from shoal.runs.follow import SupervisorLog
    from shoal.runs.start import MakeDisplay, ScriptDisplay


_END_S = 8.0
_STEP_TAIL_BYTES = 16384
_JOURNAL_TAIL_BYTES = 1 << 16
_STACKS_POLL_S = 0.1
_REMOTE_TIMEOUT_S = 120.0
_MEMBERSHIP = b'{"event":"membership"'
_STEP = b'{"event":"step"'
_OPENING = (b'{"event":"start"', b'{"event":"shard"', _MEMBERSHIP)


@dataclass(frozen=True)
class RunState:
    run: Path
    what: str  # the preset or the script
    on: str
    # running; unsupervised: its agents run without a supervisor; left over: only ranks or their children are there,
    # which no process will ever end; folder removed: its processes are about to end because the run folder was deleted.
    state: str
    step: int | None
    steps: int | None
    processes: tuple[RunProcess, ...]

    @property
    def age_s(self) -> float:
        return max(process.age_s for process in self.processes)


def running_runs() -> list[RunState]:
    by_run: dict[Path, list[RunProcess]] = {}
    for process in find_processes():
        by_run.setdefault(process.run, []).append(process)
    return [describe(run, processes) for run, processes in sorted(by_run.items())]


def leftovers(states: Iterable[RunState]) -> list[RunProcess]:
    return [process for state in states if state.state != "running" for process in state.processes]


def describe(path: Path, processes: list[RunProcess]) -> RunState:
    run = RunFolder(path)
    parts = {process.part for process in processes}
    # A template is alone before its run has a folder, and ends with the command that has started it.
    is_beginning = parts == {TEMPLATE}
    is_running = is_beginning or has_supervisor(processes)
    state = "running" if is_running else "unsupervised" if AGENT in parts else "left over"
    if processes and not is_beginning and run.is_removed():
        state = "folder removed"
    what, on, steps = _read_purpose(run)
    return RunState(path, what, on, state, _last_step(run)[0], steps, tuple(processes))


def cluster_of(run: RunFolder) -> On | None:
    """Return the cluster of a run, if its folder still names one."""
    from shoal.cluster.target import parse_on

    _, on, _ = _read_purpose(run)
    with contextlib.suppress(ShoalError):
        return parse_on(on)
    return None


def _read_purpose(run: RunFolder) -> tuple[str, str, int | None]:
    """Return what the run trains or executes, where, and for how many steps, as far as its folder still holds that.

    The files are read as they are: to check them takes longer than the whole of `shoal ps`.
    """
    # LookupError: the folder of a training that is being removed may have lost its config.toml and still have a
    # job.json, which names no script.
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
        config = read_document(run.config)
        host = run.joined_host()
        joined = f"joined {host}" if host else ""
        steps = config.get("train", {}).get("steps")
        steps = steps if isinstance(steps, int) else None
        if config.keys() & {"model", "data"} or (config and not run.job.is_file()):
            return str(config["run"]["preset"]), joined or str(config["run"]["on"]), steps
        if joined:
            return str(read_document(run.script)["name"]), joined, steps
        job = read_document(run.job)
        script = job["script"]
        return Path(script[1] if script[0] == "-m" else script[0]).name, str(job["on"]), steps
    return "", "", None


def _last_step(run: RunFolder) -> tuple[int | None, float | None]:
    """Return the last step and its loss from the end of a rank's events: of rank 0 where it is in this folder."""
    with contextlib.suppress(OSError):
        files = run.event_files()
        events = read_last_events(files[min(files)], _STEP_TAIL_BYTES) if files else []
        for event in reversed(events):
            if event["event"] == "step":
                return int(event["step"]), _number(event.get("loss"))
    return None, None


@dataclass(frozen=True)
class PastRun:
    """A run folder, as its manifest or what else is in it describes it. None: not known."""

    run: Path
    what: str  # the preset or the script
    on: str
    # finished, ended early (a loop that was left by break), interrupted, failed, unfinished or damaged; of one that
    # has not ended, that of `RunState`
    state: str
    created: str | None  # in UTC
    step: int | None
    steps: int | None
    loss: float | None
    speed: float | None  # of the last number of ranks
    unit: str  # what the speed counts: tokens or samples
    size_bytes: int


def past_runs(folder: Path, states: Iterable[RunState]) -> list[PastRun]:
    """Return the runs in a folder and in the folders within it, the newest first. `states`: those of live runs."""
    going_on = {state.run: state for state in states}
    runs = [
        read_past_run(RunFolder(path), going_on.get(path.resolve()))
        for pattern in ("*", "*/*")
        for path in sorted(folder.glob(pattern))
        if any((path / name).is_file() for name in ("config.toml", "job.json"))
    ]
    return sorted(runs, key=lambda run: run.created or "", reverse=True)


def read_past_run(run: RunFolder, going_on: RunState | None = None) -> PastRun:
    if special_file_in(run.path) is not None:
        return PastRun(run.path, "?", "?", "damaged", None, None, None, None, None, "tokens", 0)
    manifest = read_document(run.manifest)
    what, on, steps = _read_purpose(run)
    unit = str(manifest.get("unit", "tokens"))
    speeds = manifest.get(f"{unit}_per_sec")
    speed = speeds.get(str(manifest.get("world_size"))) if isinstance(speeds, dict) else None
    state = going_on.state if going_on else str(manifest.get("status", "unfinished"))
    if state == "unfinished":
        state = _state_by_supervisor(run, has_steps_left=bool(manifest))
    # A manifest may be older than the last steps: `shoal verify` and `shoal report` write one of a live run.
    has_ended = going_on is None and manifest.get("status", "unfinished") != "unfinished"
    step, loss = (None, None) if has_ended else _last_step(run)
    return PastRun(
        run.path,
        str(manifest.get("preset") or what),
        str(manifest.get("on") or on),
        state,
        _time(manifest.get("created")) or _created(run),
        step or _count(manifest.get("steps")),
        _count(manifest.get("steps_planned")) or steps,
        _number(manifest.get("final_loss")) if loss is None else loss,
        _number(speed),
        unit,
        sum(path.lstat().st_size for path in run.path.rglob("*") if path.is_file() and not path.is_symlink()),
    )


def _state_by_supervisor(run: RunFolder, has_steps_left: bool) -> str:
    """Return how a run ended whose ranks recorded no end: scripts without a session, with an error, or hung ones."""
    last = next(reversed(read_last_events(run.supervisor, _JOURNAL_TAIL_BYTES)), {})
    if last.get("event") != "ended":
        return "unfinished"
    return {0: "ended early" if has_steps_left else "finished", Interrupted.exit_code: "interrupted"}.get(
        last["code"], "failed"
    )


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _count(value: object) -> int | None:
    return value if isinstance(value, int) else None


def _time(value: object) -> str | None:
    with contextlib.suppress(ValueError):
        return datetime.fromisoformat(value).isoformat() if isinstance(value, str) else None
    return None


def _created(run: RunFolder) -> str | None:
    with contextlib.suppress(OSError):
        files = [path.stat().st_mtime for path in (run.config, run.job) if path.is_file()]
        return datetime.fromtimestamp(min(files), UTC).isoformat(timespec="seconds") if files else None
    return None


def as_json(states: list[RunState]) -> str:
    document = [
        {
            "run": str(state.run),
            "what": state.what,
            "on": state.on,
            "state": state.state,
            "step": state.step,
            "steps": state.steps,
            "age_s": round(state.age_s, 1),
            "processes": [
                {
                    "pid": process.pid,
                    "part": process.part,
                    "node": process.node,
                    "age_s": round(process.age_s, 1),
                    "command": process.command,
                }
                for process in state.processes
            ],
        }
        for state in states
    ]
    return printable_json({"runs": document}, indent=2)


class StopResult(Enum):
    """How a run came to its end, in the words of `shoal stop`."""

    NOT_RUNNING = "was not running"
    STOPPED = "finished its step and stopped"
    ENDED = "was ended"


def stop_run(run: RunFolder, wait_s: float | None = None) -> StopResult:
    """Ask the supervisor to stop, or the agents if there is none; end the run's processes if that takes too long.

    By default wait as long as a step and a checkpoint may take, or as long as the ranks of a script may take to end.
    """
    from shoal.runs.slurm_job import stop_job
    from shoal.runs.supervisor import is_script

    if wait_s is None:
        wait_s = max(ASK_S, grace_of(run) + _END_S)
    if not find_processes(run.path):
        has_saved = stop_job(run, wait_s) if run.slurm.is_file() else None
        return {None: StopResult.NOT_RUNNING, True: StopResult.STOPPED, False: StopResult.ENDED}[has_saved]
    ask_to_stop(_heads(run))
    if wait_s and wait_until_ended(lambda: find_processes(run.path), wait_s):
        return StopResult.ENDED if is_script(run) and _had_to_be_killed(run) else StopResult.STOPPED
    ask_to_stop(_heads(run))
    if not wait_until_ended(lambda: find_processes(run.path), _END_S):
        end_processes(find_processes(run.path))
        if run.supervisor.exists():
            # It was killed, too.
            end = Interrupted("ended by shoal stop: its processes did not end when they were asked to")
            EventLog(run.supervisor, 0, private=True).write("ended", code=end.exit_code, **end.as_dict())
    if run.slurm.is_file():
        # What was ended here only follows the job.
        stop_job(run, 0)
    return StopResult.ENDED


def grace_of(run: RunFolder) -> float:
    """Return how many seconds the ranks of a script have to end; 0 for a training."""
    job = read_document(run.job)
    with contextlib.suppress(ValueError, LookupError, TypeError):
        return float(job["grace_s"]) if job["script"] else 0.0
    return 0.0


def end_processes(processes: list[RunProcess]) -> None:
    kill_processes(processes)
    if not wait_until_ended(lambda: filter(is_alive, processes), _END_S):
        left = ", ".join(f"{process.pid} ({process.command})" for process in processes if is_alive(process))
        raise RunFailed(f"processes do not end: {left}", why="the kernel has not finished with them")


def _had_to_be_killed(run: RunFolder) -> bool:
    """Return whether an agent killed ranks of a script's last launch, because they did not stop in time."""
    for journal in run.journals():
        events = read_last_events(journal, _JOURNAL_TAIL_BYTES)
        launch = events[-1].get("launch") if events else None
        if any(event["event"] == "ended" and event["by_agent"] and event.get("launch") == launch for event in events):
            return True
    return False


def _heads(run: RunFolder) -> list[RunProcess]:
    """Return the run's supervisor, else its agents, else all its processes."""
    processes = find_processes(run.path)
    for part in (SUPERVISOR, AGENT):
        if heads := [process for process in processes if process.part == part]:
            return heads
    return processes


@dataclass(frozen=True)
class RankAnswer:
    """The stacks of one rank, or why there are none."""

    rank: int
    node: str
    pid: int
    place: str = ""  # the line of the user's code that it is in
    threads: tuple[tuple[StackFrame, ...], ...] = ()
    lines: tuple[str, ...] = ()  # as they are printed
    missing: str = ""


def stacks_here(run: RunFolder, only: int | None = None) -> list[RankAnswer]:
    """Return the stacks of the run's ranks on this machine, or of one of them."""
    ranks: dict[int, RunProcess] = {}
    for process in find_processes(run.path):
        # The children of a rank have its marks, too; the rank itself leads their session.
        with contextlib.suppress(ProcessLookupError):
            if (rank := rank_of(process.part)) is not None and os.getsid(process.pid) == process.pid:
                ranks[rank] = process
    chosen = {rank: process for rank, process in sorted(ranks.items()) if only in (None, rank)}
    asked = {rank for rank, process in chosen.items() if ask_for_stacks(run, process.part, process.pid)}
    stacks: dict[int, RankStacks | None] = {}
    deadline = time.monotonic() + STACKS_WAIT_S
    while time.monotonic() < deadline:
        time.sleep(_STACKS_POLL_S)
        before, stacks = stacks, {rank: read_stacks(run, chosen[rank].part) for rank in asked}
        # A rank writes line by line: it has written all when nothing was added.
        if stacks == before and None not in stacks.values():
            break
    return [_answer(rank, process, rank in asked, stacks.get(rank)) for rank, process in chosen.items()]


def _answer(rank: int, process: RunProcess, was_asked: bool, stacks: RankStacks | None) -> RankAnswer:
    if stacks is not None:
        lines = tuple(stack_lines(stacks))
        return RankAnswer(rank, process.node, process.pid, str(stacks.place), stacks.threads, lines)
    why = f"it did not answer within {STACKS_WAIT_S:.0f} s: it is stopped, or its machine is very busy"
    if not was_asked:
        why = "it is still starting, or its script has not made its shoal.Session"
    return RankAnswer(rank, process.node, process.pid, missing=f"{why}; see it with: py-spy dump --pid {process.pid}")


def stacks_on(spec: HostsSpec, run: RunFolder, only: int | None) -> list[RankAnswer]:
    """Return the stacks of the run's ranks on the hosts. Raise, after all were asked, if a host did not answer."""
    from pydantic import TypeAdapter

    from shoal.cluster.hosts.ssh import values_or_raise

    def words(cluster: HostsCluster) -> Sequence[str]:
        chosen = () if only is None else (f"--rank={only}",)
        return ("stacks", "--here", cluster.folder(cluster.nodes[0], run.path), *chosen)

    answers = TypeAdapter(list[RankAnswer])
    replies = values_or_raise(_ask_hosts(spec, words)).values()
    return sorted(
        (answer for reply in replies for answer in answers.validate_python(reply.get("ranks", []))),
        key=lambda answer: answer.rank,
    )


def runs_on(spec: HostsSpec) -> dict[str, list[dict[str, Any]] | ShoalError]:
    """Return the output of `shoal ps` on each host, or the error of one that did not answer."""
    replies = _ask_hosts(spec, lambda cluster: ("ps",))
    return {name: reply if isinstance(reply, ShoalError) else reply["runs"] for name, reply in replies.items()}


def stop_on(spec: HostsSpec, run: RunFolder, now: bool) -> dict[str, str]:
    """Stop the run on each host and return the outcomes. Raise, after all were asked, if a host did not answer."""
    from shoal.cluster.hosts.ssh import values_or_raise

    def words(cluster: HostsCluster) -> Sequence[str]:
        return ("stop", "--here", cluster.folder(cluster.nodes[0], run.path), *(("--now",) if now else ()))

    replies = values_or_raise(_ask_hosts(spec, words))
    return {name: reply.get("outcome", "not_running") for name, reply in replies.items()}


def _ask_hosts(spec: HostsSpec, words_for: Callable[[HostsCluster], Sequence[str]]) -> dict[str, Any | ShoalError]:
    """Run `shoal … --json` on each host over SSH and return the replies. A host that is off delays no other."""
    from shoal.cluster.hosts.cluster import HostsCluster
    from shoal.cluster.hosts.ssh import on_each, run_script
    from shoal.cluster.node import RunFiles

    def ask_host(host: Host) -> Any:
        cluster = HostsCluster.prepare(spec.model_copy(update={"hosts": (host,)}), RunFiles(), lambda text: None)
        ready, words = cluster.ready[host.name], words_for(cluster)
        program = shlex.join([ready.python, "-P", "-m", "shoal", *words, "--json"])
        script = f"cd /\nPYTHONPATH={shlex.quote(ready.pythonpath)}\nexport PYTHONPATH\nexec {program}"
        done = run_script(ready.host, spec, script, deadline_s=_REMOTE_TIMEOUT_S)
        if "is not a run folder" in done.stderr:
            return {}
        try:
            return json.loads(done.stdout)
        except ValueError:
            raise HostError(
                f"{ready.host.name} did not answer {shlex.join(['shoal', *words])}", why=done.stderr.strip()[-500:]
            ) from None

    return on_each(spec.hosts, ask_host)


def attach_training(run: RunFolder, watch: MakeDisplay) -> None:
    """Show a training from now to its end and raise its error; also for a run that has ended already."""
    from shoal.config.load import load_settings
    from shoal.runs.follow import RunEvents, SupervisorLog

    config = load_settings(run.config)
    if not run.supervisor.exists():
        _attach_unsupervised(run, config, watch)
        return
    log, is_going_on = SupervisorLog(run), _condition(run)
    rank_events = RunEvents(run)
    with contextlib.closing(watch(config)) as display:
        display(read_opening(run))
        for notes in _poll_notes(log, is_going_on):
            display([*notes, *rank_events.poll()])
    log.raise_error()


def _attach_unsupervised(run: RunFolder, config: EngineConfig, watch: MakeDisplay) -> None:
    """Follow a training that torchrun or a shell started: its rank 0 holds the folder's lock until the end."""
    from shoal.runs.follow import POLL_S, RunEvents

    rank_events = RunEvents(run)
    with contextlib.closing(watch(config)) as display:
        display(read_opening(run))
        while not run.is_removed() and run.is_held():
            display(rank_events.poll())
            time.sleep(POLL_S)
        display(rank_events.poll())
    if run.is_removed():
        raise run.removed()
    raise_recorded_end(run, config)


def raise_recorded_end(run: RunFolder, config: EngineConfig) -> None:
    """Raise how a training without a supervisor ended, unless it finished. Only its events say so."""
    from shoal.config.schema import Config
    from shoal.records.summary import summarize

    summary = summarize(run.read_all_events())
    steps = f"step {summary.steps_done:,} of {config.train.steps:,}"
    resume = f'start it again with shoal.Session(..., out="{run.path}")'
    if isinstance(config, Config):
        resume = f"shoal train --resume {shlex.quote(str(run.path))}"
    resume = run.rejoin_advice() or resume
    match summary.status:
        case "failed":
            error = from_dict(summary.faults[0])
            error.fix = run.name_in(error.fix)
            raise error
        case "interrupted":
            raise Interrupted(f"{run.path} was stopped after {steps}", fix=resume)
        case "unfinished":
            raise RunFailed(
                f"{run.path} ended after {steps} without an end",
                why="its processes were killed, or its script left the loop over the session",
                fix=resume,
            )


def attach_script(run: RunFolder, display: ScriptDisplay, show_events: Callable[[list[Event]], None]) -> None:
    """Show a script's output and its end, and raise its error; `show_events` shows the notes and what else happens."""
    from shoal.launch.logs import LogFollower
    from shoal.runs.follow import SupervisorLog

    log, is_going_on = SupervisorLog(run), _condition(run)
    logs = LogFollower(run, shows_current=display.is_live)
    with contextlib.closing(display):
        for notes in _poll_notes(log, is_going_on):
            show_events(notes)
            display.lines(logs.poll(), logs.current())
        display.lines(logs.last_words())
    log.raise_error()


def _condition(run: RunFolder) -> Callable[[], bool]:
    """Return what tells whether the run continues: by its supervisor here, or by its job of Slurm."""
    from shoal.runs.slurm_job import JobWatch

    if supervisor := find_supervisor(run.path):
        return lambda: is_alive(supervisor)
    return JobWatch(run) if run.slurm.is_file() else lambda: False


def _poll_notes(log: SupervisorLog, is_going_on: Callable[[], bool]) -> Iterator[list[Event]]:
    """Yield the supervisor's new notes at each poll, and once more after its end."""
    from shoal.runs.follow import POLL_S

    while is_going_on():
        yield log.poll()
        time.sleep(POLL_S)
    yield log.poll()


def read_opening(run: RunFolder) -> list[Event]:
    """Return how the newest launch began on each member and how far it is.

    That is its start, its shard of the data, its last generation and its last step.
    """
    from shoal.records.history import last_members
    from shoal.records.rank_log import read_rank_logs

    events = [event for rank in run.event_files() for event in _opening_of(run, rank)]
    members = last_members(read_rank_logs(events))
    return [event for event in events if event["rank"] in members]


def _opening_of(run: RunFolder, rank: int) -> list[Event]:
    opening: list[Event] = []
    previous = last_step = b""
    with contextlib.suppress(FileNotFoundError), run.events(rank).open("rb") as file:
        for line in file:
            # Selected before they are parsed: there may be a million steps in between.
            if line.startswith(_OPENING) and (event := parse_event(line, RANK_EVENTS)) is not None:
                if event["event"] == "start":
                    # A new process. It may have written its generation just before its start.
                    opening, last_step = opening[-1:] if previous.startswith(_MEMBERSHIP) else [], b""
                elif event["event"] == "membership":
                    # Only the last generation counts.
                    opening = [earlier for earlier in opening if earlier["event"] != "membership"]
                opening.append(event)
            elif line.startswith(_STEP):
                last_step = line
            previous = line
    if (step := parse_event(last_step, RANK_EVENTS)) is not None:
        opening.append(step)
    return opening
