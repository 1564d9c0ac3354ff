"""The runs on this machine: which there are, what they do, and what is left of those that nobody keeps."""

from __future__ import annotations

import contextlib
import json
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from shoal.cluster.hosts.cluster import HostsCluster
from shoal.cluster.hosts.setup import ReadyHost
from shoal.cluster.hosts.spec import Host, HostsSpec
from shoal.cluster.hosts.ssh import on_each, run_script, values_or_raise
from shoal.cluster.node import RunFiles
from shoal.cluster.target import On, parse_on
from shoal.config.load import load_config
from shoal.control.processes import (
    AGENT,
    SUPERVISOR,
    RunProcess,
    ask,
    await_end,
    end,
    find,
    find_supervisor,
    is_alive,
    is_kept,
)
from shoal.errors import HostError, RunFailed, ShoalError
from shoal.events import RANK_EVENTS, Event, parse_event, read_last_events
from shoal.launch.logs import LogFollower
from shoal.run_folder import RunFolder
from shoal.runs.follow import POLL_S, RunEvents, SupervisorLog
from shoal.runs.start import MakeDisplay, ScriptDisplay
from shoal.runs.supervisor import read_job
from shoal.terminal import printable_json
from shoal.tools.report.membership import last_members
from shoal.tools.report.rank_log import collect

_TAIL_BYTES = 16384


@dataclass(frozen=True)
class RunState:
    """`state`: running; unkept, when its agents go on without a supervisor; left over, when only ranks or
    their children are there, which no process will ever end; or folder removed, when its processes are about to end
    because the run folder was deleted."""

    run: Path
    what: str
    on: str
    state: str
    step: int | None
    steps: int | None
    processes: tuple[RunProcess, ...]

    @property
    def age_s(self) -> float:
        return max(found.age_s for found in self.processes)


def running_runs() -> list[RunState]:
    by_run: dict[Path, list[RunProcess]] = {}
    for found in find():
        by_run.setdefault(found.run, []).append(found)
    return [describe(run, processes) for run, processes in sorted(by_run.items())]


def leftovers(states: Iterable[RunState]) -> list[RunProcess]:
    return [found for state in states if state.state != "running" for found in state.processes]


def describe(path: Path, processes: list[RunProcess]) -> RunState:
    run = RunFolder(path)
    parts = {found.part for found in processes}
    state = "running" if is_kept(processes) else "unkept" if AGENT in parts else "left over"
    if processes and run.is_removed():
        state = "folder removed"
    what, on, steps = _purpose(run)
    return RunState(path, what, on, state, _last_step(run), steps, tuple(processes))


def where(run: RunFolder) -> On | None:
    """The cluster of a run, if that can still be told."""
    _, on, _ = _purpose(run)
    with contextlib.suppress(ShoalError):
        return parse_on(on)
    return None


def _purpose(run: RunFolder) -> tuple[str, str, int | None]:
    """What it trains or runs, where, and for how many steps; as far as its folder still says so."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, ShoalError):
        if run.config.is_file():
            config = load_config(run.config)
            return config.run.preset, config.run.on, config.train.steps
        job = read_job(run)
        word = job.script[1] if job.script[0] == "-m" else job.script[0]
        return Path(word).name, job.on, None
    return "", "", None


def _last_step(run: RunFolder) -> int | None:
    """From the end of rank 0's events; the file may be long."""
    with contextlib.suppress(OSError):
        events = read_last_events(run.events(0), _TAIL_BYTES)
        return next((int(event["step"]) for event in reversed(events) if event["event"] == "step"), None)
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
                    "pid": found.pid,
                    "part": found.part,
                    "node": found.node,
                    "age_s": round(found.age_s, 1),
                    "command": found.command,
                }
                for found in state.processes
            ],
        }
        for state in states
    ]
    return printable_json({"runs": document}, indent=2)


# SECTION trials/stopping
# Ending a run from outside: it is asked first, and then exactly its own processes are ended.


# A step of a large model on a slow machine, and the checkpoint after it, take their time.
ASK_S = 60.0
_END_S = 8.0
_LAST_BYTES = 1 << 16


class StopResult(Enum):
    """How a run came to its end, in the words of `shoal stop`."""

    NOT_RUNNING = "was not running"
    STOPPED = "finished its step and stopped"
    ENDED = "was ended"


def stop(run: RunFolder, wait_s: float | None = None) -> StopResult:
    """Asks the supervisor, or the agents where there is none. `wait_s` None: as long as a step and a checkpoint may
    take,
    or as the ranks of a script were given to end."""
    if not find(run.path):
        return StopResult.NOT_RUNNING
    if wait_s is None:
        wait_s = max(ASK_S, grace_of(run) + _END_S)
    ask(_heads(run))
    if wait_s and await_end(lambda: find(run.path), wait_s):
        is_script = not run.config.is_file()
        return StopResult.ENDED if is_script and _had_to_be_killed(run) else StopResult.STOPPED
    ask(_heads(run))
    if not await_end(lambda: find(run.path), _END_S):
        end_processes(find(run.path))
    return StopResult.ENDED


def grace_of(run: RunFolder) -> float:
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        job = json.loads(run.job.read_bytes())
        return float(job["grace_s"]) if job["script"] else 0.0
    return 0.0


def end_processes(processes: list[RunProcess]) -> None:
    end(processes)
    if not await_end(lambda: filter(is_alive, processes), _END_S):
        left = ", ".join(f"{found.pid} ({found.command})" for found in processes if is_alive(found))
        raise RunFailed(f"processes do not end: {left}", why="the kernel has not finished with them")


def _had_to_be_killed(run: RunFolder) -> bool:
    """Whether an agent killed ranks of a script's last launch, because they did not stop in time."""
    for journal in run.path.glob("agents/*.jsonl"):
        events = read_last_events(journal, _LAST_BYTES)
        launch = events[-1].get("launch") if events else None
        if any(each["event"] == "ended" and each["by_us"] and each.get("launch") == launch for each in events):
            return True
    return False


def _heads(run: RunFolder) -> list[RunProcess]:
    found = find(run.path)
    for part in (SUPERVISOR, AGENT):
        if heads := [each for each in found if each.part == part]:
            return heads
    return found


# SECTION trials/elsewhere
# Runs on other machines: the same questions, asked there over SSH.


_ANSWER_S = 120.0


def ask_each(spec: HostsSpec, words_for: Callable[[HostsCluster], Sequence[str]]) -> dict[str, Any | ShoalError]:
    """What `shoal … --json` says on each host, by its name. One that is off keeps no other from being asked."""

    def ask(host: Host) -> Any:
        alone = HostsCluster.prepare(spec.model_copy(update={"hosts": (host,)}), RunFiles(), lambda text: None)
        return _ask(alone.ready[host.name], spec, words_for(alone))

    return on_each(spec.hosts, ask)


def runs_on(spec: HostsSpec) -> dict[str, list[dict[str, Any]] | ShoalError]:
    said = ask_each(spec, lambda cluster: ("ps",))
    return {name: each if isinstance(each, ShoalError) else each["runs"] for name, each in said.items()}


def stop_on(spec: HostsSpec, run: RunFolder, now: bool) -> dict[str, str]:
    """What became of the run on each host. Raises, after all were asked, when one of them could not be."""

    def words(cluster: HostsCluster) -> Sequence[str]:
        return ("stop", "--here", cluster.folder(cluster.nodes[0], run.path), *(("--now",) if now else ()))

    return {name: said.get("outcome", "not_running") for name, said in values_or_raise(ask_each(spec, words)).items()}


def _ask(ready: ReadyHost, spec: HostsSpec, words: Sequence[str]) -> Any:
    program = shlex.join([ready.python, "-P", "-m", "shoal", *words, "--json"])
    script = f"cd /\nPYTHONPATH={shlex.quote(ready.pythonpath)}\nexport PYTHONPATH\nexec {program}"
    done = run_script(ready.host, spec, script, deadline_s=_ANSWER_S)
    if "is not a run folder" in done.stderr:
        return {}
    try:
        return json.loads(done.stdout)
    except ValueError:
        raise HostError(
            f"{ready.host.name} did not answer {shlex.join(['shoal', *words])}", why=done.stderr.strip()[-500:]
        ) from None


# SECTION trials/attaching
# Joining a run in the middle: what it has said that still matters, then everything new, to its end.


_ENTERED = b'{"event":"membership"'
_OPENING = (b'{"event":"start"', b'{"event":"shard"', _ENTERED)


def attach_training(run: RunFolder, watch: MakeDisplay) -> None:
    """Raises what the run says went wrong. A run that is over already is told the same way."""
    config = load_config(run.config)
    keeping, supervisor = SupervisorLog(run), find_supervisor(run.path)
    news = RunEvents(run)
    with contextlib.closing(watch(config)) as display:
        display(opening(run))
        for notes in _until_over(keeping, supervisor):
            display([*notes, *news.poll()])
    keeping.raise_error()


def attach_script(run: RunFolder, display: ScriptDisplay) -> None:
    keeping, supervisor = SupervisorLog(run), find_supervisor(run.path)
    logs = LogFollower(run, shows_current=display.is_live)
    with contextlib.closing(display):
        for notes in _until_over(keeping, supervisor):
            for note in notes:
                display.note(note["text"])
            display.lines(logs.poll(), logs.current())
        display.lines(logs.last_words())
    keeping.raise_error()


def _until_over(keeping: SupervisorLog, supervisor: RunProcess | None) -> Iterator[list[Event]]:
    """The supervisor's notes, look by look; once more after its end."""
    while supervisor is not None and is_alive(supervisor):
        yield keeping.poll()
        time.sleep(POLL_S)
    yield keeping.poll()


def opening(run: RunFolder) -> list[Event]:
    """How the newest launch began on each rank that takes part: what it is, its part of the data, who is with it."""
    events = [event for rank in run.event_files() for event in _opening_of(run, rank)]
    members = last_members(collect(events))
    return [event for event in events if event["rank"] in members]


def _opening_of(run: RunFolder, rank: int) -> list[Event]:
    found: list[Event] = []
    previous = b""
    with contextlib.suppress(FileNotFoundError), run.events(rank).open("rb") as file:
        for line in file:
            # Picked before they are parsed: there may be a million steps in between.
            if line.startswith(_OPENING) and (event := parse_event(line, RANK_EVENTS)) is not None:
                found = [*_kept(found, event, previous.startswith(_ENTERED)), event]
            previous = line
    return found


def _kept(before: list[Event], event: Event, named_first: bool) -> list[Event]:
    """What still holds of what a rank has said: a new process begins anew, and may have named its generation just
    before; of several generations the last counts."""
    match event["event"]:
        case "start":
            return before[-1:] if named_first else []
        case "membership":
            return [each for each in before if each["event"] != "membership"]
        case _:
            return before
