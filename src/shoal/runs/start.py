"""Starts and resumes trainings (`train`, `demo`, `host`, `bench`, `chaos`) and users' scripts (`shoal run`)."""

from __future__ import annotations

import array
import contextlib
import fcntl
import json
import os
import re
import select
import shlex
import shutil
import socket
import stat
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from shoal import __version__
from shoal.cluster.cluster import planned_nodes
from shoal.cluster.hosts.spec import HostsSpec
from shoal.cluster.lab import LabSpec, starting_template
from shoal.cluster.node import Rendezvous
from shoal.cluster.target import ExistingLab, JoinSpec, LocalSpec, absolute_on, parse_on, place_ranks, rank_count
from shoal.config.load import (
    change_settings,
    load_config,
    load_settings,
    merge,
    refuse_fixed,
    refuse_without_effect,
    typed_settings,
)
from shoal.config.manifest import Manifest
from shoal.config.presets import Overrides
from shoal.config.schema import Config, EngineConfig, RunConfig
from shoal.cost.batch_plan import learning_rate, scaled_lr
from shoal.data.prepare import check_shares, create_run, reopen_run
from shoal.errors import DataError, RunFailed, ShoalError, UsageError
from shoal.events import Event, read_events
from shoal.launch.logs import LogFollower, LogLine
from shoal.launch.memory_check import check_memory
from shoal.launch.plan import plan_ranks
from shoal.records.history import last_members
from shoal.records.manifest import read_manifest
from shoal.records.rank_log import RankLog, read_rank_logs
from shoal.records.verify import verify_run
from shoal.run_folder import RunFolder, is_accessible, user_name
from shoal.runs.confirm import require_terminal
from shoal.runs.follow import STOPPING_SCRIPT, RunEvents, SupervisorLog, await_running, follow, forwarding_signals
from shoal.runs.slurm_job import is_requeued, refuse_running_job
from shoal.runs.supervisor import RunJob, is_script, read_job, start_supervisor
from shoal.units import format_si, pluralize


class TrainDisplay(Protocol):
    """Shows events as they arrive, until it is closed."""

    def __call__(self, events: list[Event]) -> None: ...
    def close(self) -> None: ...


MakeDisplay = Callable[[EngineConfig], TrainDisplay]

# Of shoal's own options only the code of `join` is secret; a script's, or one of a later version, may be.
_SECRET = re.compile(r"token(?!s|izer)|passw|secret|credential|api.?key|^-*code$", re.IGNORECASE)
_PASSWORD = re.compile(r"(://[^/@:\s]*:)[^/@\s]*@")
_HIDDEN = "HIDDEN"
# Reading and hashing this much takes a second or more.
_LONG_CHECK_BYTES = 500e6
_HAS_TORCH = "import importlib.util, sys; sys.exit(0 if importlib.util.find_spec('torch') else 3)"
_HAS_SHOAL = f"import shoal, shoal.engine.measure, sys; sys.exit(shoal.__version__ != {__version__!r})"
_PYTHON_TIMEOUT_S = 30.0
_TERMINAL_POLL_S = 0.1
_CLOSE_S = 1.0
_MOST_TYPED_BYTES = 4096


def start_training(
    config: Config,
    out: Path,
    watch: MakeDisplay,
    detach: bool = False,
    before: Callable[[RunFolder], object] = lambda run: None,
    confirm: bool = False,
) -> tuple[RunFolder, Manifest | None]:
    """Start a new run. Return its folder, and its manifest unless it was detached.

    `before` is called with the folder before any process starts; `watch` makes the display. With `confirm` the owner is
    asked at the terminal before a machine that joins gets anything.
    """
    if confirm:
        refuse_confirm(config.run.on)
    if is_requeued(RunFolder(out)):
        manifest = read_manifest(RunFolder(out))
        if manifest is not None and manifest.status == "finished":
            # Another training of the same job was interrupted.
            return RunFolder(out), manifest
        return resume_training(out, watch, detach=detach)
    config = place_ranks(config)
    # Before there is a folder. What other machines have free is compared by the launcher, which asks their agents.
    check_memory(config, planned_nodes(config.run.on))
    # First of all: importing torch takes longer than everything else until the first step.
    with _importing_for_lab(config.run, out.absolute()) as template:
        run = create_run(config, out, rank_count(parse_on(config.run.on)))
        before(run)
        return run, _train(run, watch, RunJob(confirm=confirm), detach, template=template)


@contextlib.contextmanager
def _importing_for_lab(config: RunConfig, run: Path) -> Iterator[socket.socket | None]:
    """Start the template from which the ranks of a lab are forked; yield its socket, None on any other cluster."""
    variables = None
    # A hosts file that is gone, or a lab that is not up, is an error later, of a run that needs it.
    with contextlib.suppress(ShoalError):
        if config.launcher == "shoal" and isinstance(parse_on(config.on), LabSpec | ExistingLab):
            nodes = planned_nodes(config.on)
            rank, *_ = plan_ranks(config, lambda node: str(run), nodes, Rendezvous(nodes[0].address, 0), resume=False)
            variables = rank.env
    with contextlib.nullcontext() if variables is None else starting_template(run, variables) as template:
        yield template


def refuse_confirm(on: str) -> None:
    """Refuse `--confirm` where it has no use: no machine joins by itself, or there is no terminal."""
    if not isinstance(parse_on(on), JoinSpec):
        raise UsageError(
            f"--confirm does not go with --on {on}",
            why="it asks before a machine that joins by itself is let in, and here none does",
            fix="leave --confirm out, or write for example: --on join:2 --confirm",
        )
    require_terminal()


def resume_training(
    path: Path,
    watch: MakeDisplay,
    changes: Overrides | None = None,
    detach: bool = False,
    lineage: str = "",
    confirm: bool = False,
) -> tuple[RunFolder, Manifest | None]:
    """Resume a run from its newest checkpoint, or from the newest of `lineage`. Return like `train_new`.

    A run that has done no step is started from the beginning.
    `changes` are settings for the rest of the run. A run that has done all its steps is resumed only with more of them,
    or from another lineage.
    """
    run = RunFolder.open(path)
    refuse_unwritable(run)
    _refuse_script(run)
    if confirm:
        refuse_confirm(load_config(run.config).run.on)

    def prepare() -> list[str]:
        config, changed = change_settings(load_config(run.config), changes or {})
        refuse_without_effect(config, typed_settings(changes, ()))
        if "weights" in (changes or {}).get("run", {}):
            check_shares(config, rank_count(parse_on(config.run.on)))
        # Before the cluster is checked: a finished run needs none.
        if not lineage:
            refuse_finished(run, config.train.steps)
        world_size = rank_count(parse_on(config.run.on))
        check_shares(config, world_size)
        notes = [f"changed for the rest of the run: {'; '.join(changed)}"] if changed else []
        notes += alone_note(run)
        if not has_begun:
            notes.append("the run has done no step yet: it starts from the beginning")
        saved = None if lineage else run.newest_checkpoint() or None
        notes += rate_note(load_config(run.config), config, world_size, saved)
        reopen_run(path, config, lineage, changed)
        return notes

    # A run that was interrupted before its first step has no checkpoint, and needs none.
    has_begun = bool(lineage) or _has_begun(run)
    changed, _ = change_settings(load_config(run.config), changes or {})
    with _importing_for_lab(changed.run, run.path) as template:
        return run, _train(run, watch, RunJob(resume=has_begun, confirm=confirm), detach, prepare, template)


def refuse_unwritable(run: RunFolder) -> None:
    """Refuse to resume a run whose files this user cannot write, such as another user's."""
    for path in (run.path, *(path for path in (run.supervisor, run.config, run.checkpoints) if path.exists())):
        if not is_accessible(path, os.W_OK):
            raise _unwritable_error(run, path)


def _unwritable_error(run: RunFolder, path: Path) -> UsageError:
    owner, resume = path.stat().st_uid, f"shoal train --resume {shlex.quote(str(run.path))}"
    if os.statvfs(path).f_flag & os.ST_RDONLY:
        why = "its file system is read-only, and a run is resumed in its own folder"
        fix = f"see how it is mounted: findmnt -T {shlex.quote(str(path))}"
    elif owner == os.geteuid():
        why = "its permissions forbid it, and a run is resumed in its own folder"
        fix = f"allow it: chmod u+w {shlex.quote(str(path))} && {resume}"
    else:
        why = f"it belongs to user {user_name(owner)}, and a run is resumed in its own folder"
        fix = f"go on as that user: sudo -u {user_name(owner)} {resume}"
    return UsageError(
        f"user {user_name(os.geteuid())} cannot write to {path}",
        why=why,
        fix=f"{fix}\nor start a run of your own: shoal train --out FOLDER",
    )


def _has_begun(run: RunFolder) -> bool:
    """Return whether the run may have done a step. The files of hosts arrive here late, or not at all."""
    if run.has_begun():
        return True
    has_hosts = isinstance(parse_on(load_config(run.config).run.on), HostsSpec)
    return has_hosts and any(event["event"] == "running" for event in read_events(run.supervisor))


def _refuse_script(run: RunFolder) -> None:
    """Refuse to resume a user's training: shoal does not have its model."""
    config = load_settings(run.config)
    if not isinstance(config, Config):
        raise UsageError(
            f"{run.path} is the training of a script, {config.run.preset}, and not of shoal's GPT",
            why="shoal train has no model and no data for it",
            fix=f"shoal run --resume {shlex.quote(str(run.path))}"
            if is_script(run)
            else run.rejoin_advice() or f'start the script again with shoal.Session(..., out="{run.path}")',
        )


def refuse_finished(run: RunFolder, steps: int, verb: str = "train") -> None:
    """Refuse to resume a run that has already done `steps` steps or more.

    A finished run with missing or damaged files is resumed: it writes them again from a checkpoint.
    """
    logs = read_rank_logs(run.read_all_events())
    members = [logs[rank] for rank in last_members(logs) if rank in logs]
    done = max((_last_step(log) for log in members), default=0)
    folder = shlex.quote(str(run.path))
    if steps < done:
        raise UsageError(
            f"{run.path} has done {pluralize(done, 'step')} already, more than {steps:,}",
            why="a run is resumed from its newest checkpoint, and never goes back",
            fix=f"ask for more steps: shoal {verb} --resume {folder} --steps {2 * done}",
        )
    is_early = any(log.end.get("is_early") is True for log in members)
    if (steps == done or is_early) and members and all(log.ended == "finished" for log in members) and _is_whole(run):
        raise UsageError(
            f"{run.path} is finished: it has done its {pluralize(done, 'step')}",
            why="there is nothing left to train",
            fix=f"continue it with more steps: shoal {verb} --resume {folder} --steps {2 * done}\n"
            f"or look at it: shoal report {folder}",
        )


def _is_whole(run: RunFolder) -> bool:
    """Return whether no file of a finished run is missing or damaged; print a note first if the check takes long."""
    size = sum(path.stat().st_size for path in run.checkpoints.rglob("*") if path.is_file())
    if size > _LONG_CHECK_BYTES:
        sys.stderr.write(f"{run.path} has done its steps; checking that its {format_si(size, 'B')} are undamaged …\n")
    return verify_run(run).ok


def _last_step(log: RankLog) -> int:
    """Return the step at which a rank ended, or the last that it has recorded."""
    if log.ended is not None and isinstance(log.end.get("step"), int):
        return int(log.end["step"])
    return int(log.steps.numbers[-1]) if len(log.steps) else 0


def alone_note(run: RunFolder) -> list[str]:
    """Warn where a machine that joined a run resumes it: that is a training of its own, with one rank."""
    if not (host := run.joined_host()):
        return []
    return [
        f"this machine joined the run of {host}; it now goes on alone, apart from that run. "
        f"To go on with the others, stop this and do instead: {run.rejoin_advice()}"
    ]


def rate_note(before: Config, after: Config, world_size: int, saved: int | None) -> list[str]:
    """Describe what another number of steps means for the learning rate.

    `saved` is the step of the checkpoint from which the run continues; None if it is unknown.
    """
    steps = after.train.steps
    if before.train.steps == steps or (saved is not None and saved >= steps):
        return []
    note = f"the learning rate follows one schedule over {pluralize(steps, 'step')} from here on"
    if saved is None:
        return [note]
    peak = scaled_lr(after.train, world_size, after.sync.accumulate)
    was, now = (f"{learning_rate(saved + 1, peak, config.train):.3g}" for config in (before, after))
    if was == now:
        return [note]
    return [f"{note}: at step {saved + 1} it is {now}, and not {was} as with {pluralize(before.train.steps, 'step')}"]


def _train(
    run: RunFolder,
    watch: MakeDisplay,
    job: RunJob,
    detach: bool,
    prepare: Callable[[], list[str]] = list,
    template: socket.socket | None = None,
) -> Manifest | None:
    """Start the supervisor and follow it. `prepare` runs under the folder's lock and returns notes.

    The supervisor inherits the lock; this process releases its own at once.
    """
    with contextlib.ExitStack() as stack:
        lock_scope = stack.enter_context(contextlib.ExitStack())
        lock = lock_scope.enter_context(run.held())
        refuse_running_job(run)
        job = replace(job, commands=(*_earlier_commands(run), command_line(sys.argv)))
        notes = prepare()
        config = load_config(run.config)
        rank_events, log = RunEvents(run), SupervisorLog.from_now(run)
        stack.enter_context(contextlib.closing(display := watch(config)))
        display([{"event": "note", "rank": None, "text": text} for text in notes])
        fd = None if template is None else template.fileno()
        start = partial(start_supervisor, run, job, lock, template=fd)
        supervisor = stack.enter_context(forwarding_signals(start))
        lock_scope.close()
        if template is not None:
            template.close()
        if detach:
            await_running(supervisor, log, display)
            return None
        follow(supervisor, log, lambda notes: display([*notes, *rank_events.poll()]))
    return require_manifest(run)


def _earlier_commands(run: RunFolder) -> tuple[str, ...]:
    """Return the earlier command lines; none if an older shoal or another launcher started the run."""
    try:
        return read_job(run).commands
    except DataError:
        return ()


def command_line(words: Sequence[str]) -> str:
    """Return a command line that can be typed again, without secrets: people share the manifest."""
    shown: list[str] = []
    is_secret = False
    for word in words[1:]:
        name, equals, _ = word.partition("=")
        named = _SECRET.search(name) is not None
        if is_secret:
            shown.append(_HIDDEN)
        else:
            shown.append(f"{name}={_HIDDEN}" if named and equals else _PASSWORD.sub(rf"\1{_HIDDEN}@", word))
        is_secret = named and not equals and not is_secret and word.startswith("-")
    program = Path(words[0])
    # For `python -m shoal` this is the path of `shoal/__main__.py`.
    return shlex.join([program.parent.name if program.name == "__main__.py" else program.name, *shown])


def require_manifest(run: RunFolder) -> Manifest:
    manifest = read_manifest(run)
    if manifest is None:
        raise RunFailed(
            f"{run.manifest} is missing or broken, although the run ended well",
            fix=f"make it again: python -m shoal.records.manifest {run.path}",
        )
    return manifest


class ScriptDisplay(Protocol):
    """Shows the lines of the ranks and notes about the run."""

    is_live: bool  # it shows unfinished lines too

    def lines(self, lines: Sequence[LogLine], current: Sequence[LogLine] = ()) -> None: ...
    def note(self, text: str) -> None: ...
    def close(self) -> None: ...


# Given the folder of a script's run before it starts, returns what shows the supervisor's notes and the ranks' events.
WatchScript = Callable[[RunFolder], Callable[[list[Event]], object]]


def _show_nothing(run: RunFolder) -> Callable[[list[Event]], object]:
    return lambda notes: None


def resume_script(
    path: Path, session: dict[str, Any], detach: bool, display: ScriptDisplay, watch: WatchScript = _show_nothing
) -> RunFolder:
    """Run the script of an earlier run again in its folder: its session continues from the newest checkpoint.

    `session` has the settings that change, section by section.
    """
    run = RunFolder.open(path)
    refuse_unwritable(run)
    job = read_job(run)
    if not job.script:
        raise UsageError(
            f"{path} is not the run of a script",
            why="shoal train started it",
            fix=f"shoal train --resume {shlex.quote(str(path))}",
        )
    with run.held():
        # Before the checks below: what they say about an ended run is not true of a running one.
        pass
    if not run.has_checkpoint():
        raise UsageError(
            f"{path} has no checkpoint to continue from",
            why="the script has no shoal.Session, or ended before its first checkpoint",
            fix="start it anew: shoal run …",
        )
    refuse_fixed({key: key for key in typed_settings(session, ())}, EngineConfig)
    config, _ = change_settings(load_settings(run.config), session)
    refuse_without_effect(config, typed_settings(session, ()))
    refuse_finished(run, config.train.steps, verb="run")
    changed = merge([json.loads(job.session), session])
    return start_script(replace(job, resume=True, session=json.dumps(changed)), path, detach, display, watch)


def start_script(
    job: RunJob,
    out: Path,
    detach: bool,
    display: ScriptDisplay,
    watch: WatchScript = _show_nothing,
    before: Callable[[RunFolder], object] = lambda run: None,
) -> RunFolder:
    """Run a user's script to its end, or until it is detached. The raised error has the script's own exit code.

    `before` is called with the folder before any process starts.
    """
    python, about_python = choose_python(job.python, job.on, os.environ)
    if job.measure and python:
        require_shoal(python)
    source, about_stdin = choose_stdin(job.on, detach)
    job = replace(job, on=absolute_on(job.on), python=python, has_stdin=source is not StdinSource.NONE)
    if is_again := is_requeued(RunFolder(out)):
        run = RunFolder.find(out)
        job = replace(job, resume=run.has_checkpoint())
    else:
        run = RunFolder.open(out) if job.resume else RunFolder.create(out, is_training=False)
    before(run)
    commands = (*(_earlier_commands(run) if job.resume else ()), command_line(sys.argv))
    job = replace(job, commands=commands)
    for text in filter(None, (about_python, about_stdin)):
        display.note(text)
    log = SupervisorLog.from_now(run)
    logs = LogFollower(run, only_new=job.resume or is_again, shows_current=display.is_live)
    show = watch(run)

    def look(notes: list[Event]) -> None:
        # Before the events: a rank records an error before it prints it, and the display hides what is recorded.
        lines = [] if detach else logs.poll()
        show(notes)
        if not detach:
            display.lines(lines, logs.current())

    with contextlib.ExitStack() as lock_scope, contextlib.ExitStack() as relay_scope:
        lock = lock_scope.enter_context(run.held())
        refuse_running_job(run)
        stdin = relay_scope.enter_context(relay_terminal()) if source is StdinSource.TERMINAL else None
        with forwarding_signals(lambda: start_supervisor(run, job, lock, stdin), STOPPING_SCRIPT) as supervisor:
            lock_scope.close()
            if stdin is not None:
                os.close(stdin)
            if detach:
                await_running(supervisor, log, look)
                return run
            try:
                follow(supervisor, log, look)
            finally:
                display.lines(logs.last_words())
                display.close()
    return run


def choose_python(asked: str, on: str, env: Mapping[str, str]) -> tuple[str, str]:
    """Return the Python that runs a script (empty: each machine's own) and a note about the choice.

    An activated environment is the user's choice of Python; shoal may be installed in another one.
    """
    if isinstance(parse_on(on), HostsSpec):
        return asked, ""
    if asked:
        return _check_python(asked, env), ""
    prefix = active_environment(env)
    if prefix is None:
        return "", ""
    python = str(prefix / "bin" / "python")
    if has_torch(python):
        return python, f"the script runs with {python}, of the activated environment (another one: --python PYTHON)"
    return "", (
        f"the script runs with {sys.executable}: the activated environment {prefix} has no torch "
        f"(to change that: {python} -m pip install torch)"
    )


def _check_python(asked: str, env: Mapping[str, str]) -> str:
    python = shutil.which(asked, path=env.get("PATH"))
    if python is None:
        raise UsageError(
            f"--python {asked} is no program",
            why="the ranks of the script are started with it",
            fix="write the one that this prints: python -c 'import sys; print(sys.executable)'",
        )
    if not has_torch(python):
        raise UsageError(
            f"{python} has no torch",
            why="the ranks of the script are started with it, because of --python",
            fix=f"install it there: {python} -m pip install torch; or leave --python out",
        )
    # Not resolved: the python of an environment is a link, and Python finds its packages by the link's place.
    return str(Path(python).absolute())


def active_environment(env: Mapping[str, str]) -> Path | None:
    """Return the environment that the user activated, unless shoal runs from it. conda's `base` is always active."""
    conda = "" if env.get("CONDA_DEFAULT_ENV") == "base" else env.get("CONDA_PREFIX", "")
    name = env.get("VIRTUAL_ENV") or conda
    if not name or not os.access(Path(name) / "bin" / "python", os.X_OK):
        return None
    return None if os.path.realpath(name) == os.path.realpath(sys.prefix) else Path(name)


def require_shoal(python: str) -> None:
    """Refuse `--measure` with a Python that has not this shoal: there the script is run by a program of shoal."""
    if not _succeeds(python, _HAS_SHOAL):
        raise UsageError(
            f"{python} has no shoal {__version__}",
            why="with --measure, the Python that runs the script records its steps by a module of shoal",
            fix=f"install it there: {python} -m pip install shoal; or leave --measure out",
        )


def has_torch(python: str) -> bool:
    return _succeeds(python, _HAS_TORCH)


def _succeeds(python: str, code: str) -> bool:
    try:
        # In `/`: a folder or file named torch in the current folder is not torch.
        done = subprocess.run(
            [python, "-c", code],
            cwd="/",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PYTHON_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(
            f"{python} cannot be run: {error}", why="the ranks of the script are started with it", fix="--python PYTHON"
        ) from None
    return done.returncode == 0


class StdinSource(Enum):
    """What rank 0 reads as its standard input."""

    NONE = "nothing"
    INHERITED = "our standard input"  # a pipe or a file
    # This process reads lines and passes them on: the rank is in another session, where the kernel would let it read
    # what is typed for the shell.
    TERMINAL = "the terminal"


def choose_stdin(on: str, detach: bool, fd: int = 0) -> tuple[StdinSource, str]:
    """Return what rank 0 reads, as it would under torchrun, and a note if waiting input cannot be passed on."""
    try:
        kind = os.fstat(fd).st_mode
    except OSError:
        return StdinSource.NONE, ""
    if detach or not isinstance(parse_on(on), LocalSpec):
        why = "the run is detached" if detach else "only rank 0 of local:N can read it"
        note = f"what is piped into shoal run is not passed on: {why}. Let the script read a file"
        return StdinSource.NONE, note if _has_waiting_input(fd, kind) else ""
    if os.isatty(fd):
        return StdinSource.TERMINAL if is_in_foreground(fd) else StdinSource.NONE, ""
    return StdinSource.NONE if stat.S_ISCHR(kind) else StdinSource.INHERITED, ""


def is_in_foreground(terminal: int) -> bool:
    """Return whether terminal input is for this process: not if it is in the background or in another session."""
    with contextlib.suppress(OSError):
        return os.tcgetpgrp(terminal) == os.getpgrp()
    return False


@contextlib.contextmanager
def relay_terminal(fd: int = 0) -> Iterator[int]:
    """Yield the reading end of a pipe that gets the lines typed while this process is in the foreground.

    The caller closes it once the reader has it.
    """
    reading, writing = os.pipe()
    is_over = threading.Event()
    thread = threading.Thread(target=_relay, args=(fd, writing, is_over), name="terminal", daemon=True)
    thread.start()
    try:
        yield reading
    finally:
        is_over.set()
        thread.join(_CLOSE_S)


def _relay(terminal: int, writing: int, is_over: threading.Event) -> None:
    """Copy terminal input. Check before reading: the kernel stops a background process that reads its terminal."""
    with contextlib.suppress(OSError):
        while not is_over.is_set():
            ready, _, _ = select.select((terminal,), (), (), _TERMINAL_POLL_S)
            if not ready:
                continue
            if not is_in_foreground(terminal):
                is_over.wait(_TERMINAL_POLL_S)
                continue
            if not (typed := os.read(terminal, _MOST_TYPED_BYTES)):
                break
            os.write(writing, typed)
    os.close(writing)


def _has_waiting_input(fd: int, kind: int) -> bool:
    if stat.S_ISREG(kind):
        return os.fstat(fd).st_size > 0
    if not stat.S_ISFIFO(kind):
        return False
    waiting = array.array("i", [0])
    fcntl.ioctl(fd, termios.FIONREAD, waiting)
    return waiting[0] > 0
