"""One training run from configuration to manifest: what `train`, `demo` and `bench` all do."""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import re
import select
import shlex
import shutil
import stat
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Protocol

from shoal.cluster.hosts.spec import HostsSpec
from shoal.cluster.target import JoinSpec, LocalSpec, parse_on, rank_count, settled, weights_of
from shoal.config.load import change_settings, load_config, refuse_without_effect, typed_settings
from shoal.config.manifest import Manifest
from shoal.config.presets import Overrides
from shoal.config.schema import Config
from shoal.cost.batch_plan import learning_rate, scaled_lr
from shoal.data.prepare import check_shares, create_run, reopen_run
from shoal.errors import DataError, RunFailed, UsageError
from shoal.events import Event
from shoal.launch.logs import LogFollower, LogLine
from shoal.run_folder import RunFolder
from shoal.runs.confirm import require_terminal
from shoal.runs.follow import RunEvents, SupervisorLog, await_running, follow, kept
from shoal.runs.supervisor import RunJob, read_job, start_supervisor
from shoal.tools.report.manifest import read_manifest
from shoal.tools.report.membership import last_members
from shoal.tools.report.rank_log import RankLog, collect
from shoal.tools.report.verify import verify_run
from shoal.units import count, format_si


class TrainDisplay(Protocol):
    """Shows events as they come, until it is closed."""

    def __call__(self, events: list[Event]) -> None: ...
    def close(self) -> None: ...


MakeDisplay = Callable[[Config], TrainDisplay]

# shoal's own flags take no secret on the command line but the code of `join`; a script's or a later one's may.
_SECRET = re.compile(r"token(?!s|izer)|passw|secret|credential|api.?key|^-*code$", re.IGNORECASE)
_PASSWORD = re.compile(r"(://[^/@:\s]*:)[^/@\s]*@")
_HIDDEN = "HIDDEN"
# Reading and hashing so much takes a second or more.
_LONG_CHECK_BYTES = 500e6


def train_new(
    config: Config,
    out: Path,
    watch: MakeDisplay,
    detach: bool = False,
    before: Callable[[RunFolder], object] = lambda run: None,
    confirm: bool = False,
) -> tuple[RunFolder, Manifest | None]:
    """A new run; `before` sees its folder before anything is started, `watch` makes the display. None for one that was
    let go. `confirm`: the owner is asked at the terminal before a machine that joins gets anything."""
    if confirm:
        refuse_confirm(config.run.on)
    config = _with_cluster(config)
    run = create_run(config, out, rank_count(parse_on(config.run.on)))
    before(run)
    return run, _train(run, watch, RunJob(confirm=confirm), detach)


def refuse_confirm(on: str) -> None:
    """Where `--confirm` could ask nothing: no machine joins by itself, or there is no terminal."""
    if not isinstance(parse_on(on), JoinSpec):
        raise UsageError(
            f"--confirm does not go with --on {on}",
            why="it asks before a machine that joins by itself is let in, and here none does",
            fix="leave --confirm out, or write for example: --on join:2 --confirm",
        )
    require_terminal()


def _with_cluster(config: Config) -> Config:
    """What the cluster itself says of the run: where its file is for good, and how its machines share the work."""
    said = {"on": settled(config.run.on), "weights": config.run.weights or weights_of(parse_on(config.run.on))}
    return config.model_copy(update={"run": config.run.model_copy(update=said)})


def train_on(
    path: Path,
    watch: MakeDisplay,
    changes: Overrides | None = None,
    detach: bool = False,
    lineage: str = "",
    confirm: bool = False,
) -> tuple[RunFolder, Manifest | None]:
    """Goes on with a run from its newest checkpoint; of this `lineage`, if one is named.

    `changes` are settings for the rest of the run. A run that has done all its steps only goes on with more of them, or
    from another lineage.
    """
    run = RunFolder.open(path)
    run.refuse_unwritable()
    if confirm:
        refuse_confirm(load_config(run.config).run.on)

    def prepare() -> list[str]:
        config, changed = change_settings(load_config(run.config), changes or {})
        refuse_without_effect(config, typed_settings(changes, ()))
        if "weights" in (changes or {}).get("run", {}):
            check_shares(config, rank_count(parse_on(config.run.on)))
        # Before the cluster is looked at: a finished run needs none.
        done = None if lineage else refuse_finished(run, config.train.steps)
        world_size = rank_count(parse_on(config.run.on))
        check_shares(config, world_size)
        notes = [f"changed for the rest of the run: {'; '.join(changed)}"] if changed else []
        notes += rate_note(load_config(run.config), config, world_size, done)
        reopen_run(path, config, lineage, changed)
        return notes

    return run, _train(run, watch, RunJob(resume=True, confirm=confirm), detach, prepare)


def refuse_finished(run: RunFolder, steps: int) -> int:
    """Refuse to go on with a run that has done so many steps or more; return how many it has done.

    A finished run of which something is missing or damaged goes on: it writes that again from a checkpoint.
    """
    logs = collect(run.read_all_events())
    members = [logs[rank] for rank in last_members(logs) if rank in logs]
    done = max((_last_step(log) for log in members), default=0)
    folder = shlex.quote(str(run.path))
    if steps < done:
        raise UsageError(
            f"{run.path} has done {done} steps already, more than {steps}",
            why="a run goes on from its newest checkpoint, and never back",
            fix=f"ask for more steps: shoal train --resume {folder} --steps {2 * done}",
        )
    if steps == done and members and all(log.ended == "finished" for log in members) and _is_whole(run):
        raise UsageError(
            f"{run.path} is finished: it has done its {done} steps",
            why="there is nothing left to train",
            fix=f"continue it with more steps: shoal train --resume {folder} --steps {2 * done}; or look at it: shoal "
            f"report {folder}",
        )
    return done


def _is_whole(run: RunFolder) -> bool:
    """Whether nothing of a finished run is missing or damaged; says that it looks where that takes a while."""
    size = sum(path.stat().st_size for path in run.checkpoints.rglob("*") if path.is_file())
    if size > _LONG_CHECK_BYTES:
        sys.stderr.write(f"{run.path} has done its steps; checking that its {format_si(size, 'B')} are undamaged …\n")
    return verify_run(run).ok


def _last_step(log: RankLog) -> int:
    """The step at which a rank ended, or the furthest that it has recorded."""
    if log.ended is not None and isinstance(log.end.get("step"), int):
        return int(log.end["step"])
    return int(log.steps[-1]) if len(log.steps) else 0


def rate_note(before: Config, after: Config, world_size: int, done: int | None) -> list[str]:
    """What another number of steps means for the learning rate; `done` is None where it is not known how many are."""
    steps = after.train.steps
    if before.train.steps == steps or (done is not None and done >= steps):
        return []
    note = f"the learning rate follows one schedule over {count(steps, 'step')} from here on"
    if done is None:
        return [note]
    peak = scaled_lr(after.train, world_size, after.sync.accumulate)
    was, now = (learning_rate(done + 1, peak, config.train) for config in (before, after))
    return [
        f"{note}: at step {done + 1} it is {now:.3g}, and not {was:.3g} as with {count(before.train.steps, 'step')}"
    ]


def _train(
    run: RunFolder, watch: MakeDisplay, job: RunJob, detach: bool, prepare: Callable[[], list[str]] = list
) -> Manifest | None:
    """The lock on the folder is the supervisor's once it has started; ours goes at once. `prepare` returns notes."""
    with contextlib.ExitStack() as stack:
        held = stack.enter_context(contextlib.ExitStack())
        lock = held.enter_context(run.held())
        job = replace(job, commands=(*(_earlier_commands(run) if job.resume else ()), command_line(sys.argv)))
        notes = prepare()
        config = load_config(run.config)
        news, keeping = RunEvents(run), SupervisorLog.from_now(run)
        stack.enter_context(contextlib.closing(display := watch(config)))
        display([{"event": "note", "rank": None, "text": text} for text in notes])
        supervisor = stack.enter_context(kept(lambda: start_supervisor(run, job, lock)))
        held.close()
        if detach:
            await_running(supervisor, keeping, display)
            return None
        follow(run, supervisor, keeping, lambda notes: display([*notes, *news.poll()]))
    return the_manifest(run)


def _earlier_commands(run: RunFolder) -> tuple[str, ...]:
    """None where an older shoal started the run, or a launcher of another kind."""
    try:
        return read_job(run).commands
    except DataError:
        return ()


def command_line(words: Sequence[str]) -> str:
    """As somebody could type it again, without anything secret: the manifest is shown around."""
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
    # `python -m shoal` gives the path of `shoal/__main__.py`.
    return shlex.join([program.parent.name if program.name == "__main__.py" else program.name, *shown])


def the_manifest(run: RunFolder) -> Manifest:
    manifest = read_manifest(run)
    if manifest is None:
        raise RunFailed(
            f"{run.manifest} is missing or broken, although the run ended well",
            fix=f"make it again: python -m shoal.tools.report.manifest {run.path}",
        )
    return manifest


def default_out(name: str) -> Path:
    """`runs/grammar-20260131-235959`, with a number behind it when two start in the same second."""
    stem = f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    candidates = (Path("runs") / (stem if count == 1 else f"{stem}-{count}") for count in range(1, 1000))
    return next(path for path in candidates if not path.exists())


# SECTION trials/scripts
# Anybody's script from its start to its end: what `shoal run` does.


class ScriptDisplay(Protocol):
    """Where the lines of ranks and notes about the run are shown. `is_live`: it shows unfinished lines too."""

    is_live: bool

    def lines(self, lines: Sequence[LogLine], current: Sequence[LogLine] = ()) -> None: ...
    def note(self, text: str) -> None: ...
    def close(self) -> None: ...


def run_anything(job: RunJob, out: Path, detach: bool, display: ScriptDisplay) -> RunFolder:
    """Raises with the script's own exit code."""
    python, about_python = choose_python(job.python, job.on, os.environ)
    source, about_stdin = choose_stdin(job.on, detach)
    job = replace(job, on=settled(job.on), python=python, has_stdin=source is not StdinSource.NONE)
    run = RunFolder.create(out, is_training=False)
    for text in filter(None, (about_python, about_stdin)):
        display.note(text)
    keeping = SupervisorLog.from_now(run)
    logs = LogFollower(run, shows_current=display.is_live)

    def look(notes: list[Event]) -> None:
        for note in notes:
            display.note(note["text"])
        if not detach:
            display.lines(logs.poll(), logs.current())

    with contextlib.ExitStack() as held, contextlib.ExitStack() as relayed:
        lock = held.enter_context(run.held())
        stdin = relayed.enter_context(relay_terminal()) if source is StdinSource.TERMINAL else None
        with kept(lambda: start_supervisor(run, job, lock, stdin)) as supervisor:
            held.close()
            if stdin is not None:
                os.close(stdin)
            if detach:
                await_running(supervisor, keeping, look)
                return run
            try:
                follow(run, supervisor, keeping, look)
            finally:
                display.lines(logs.last_words())
                display.close()
    return run


_HAS_TORCH = "import importlib.util, sys; sys.exit(0 if importlib.util.find_spec('torch') else 3)"
_ASK_PYTHON_S = 30.0
_LOOK_AT_TERMINAL_S = 0.1
_CLOSE_S = 1.0
_MOST_TYPED_BYTES = 4096


def choose_python(asked: str, on: str, env: Mapping[str, str]) -> tuple[str, str]:
    """The Python that runs a script, empty for each machine's own, and a note about the choice.

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
    found = shutil.which(asked, path=env.get("PATH"))
    if found is None:
        raise UsageError(
            f"--python {asked} is no program",
            why="the ranks of the script are started with it",
            fix="write the one that this prints: python -c 'import sys; print(sys.executable)'",
        )
    if not has_torch(found):
        raise UsageError(
            f"{found} has no torch",
            why="the ranks of the script are started with it, because of --python",
            fix=f"install it there: {found} -m pip install torch; or leave --python out",
        )
    # Not resolved: an environment's python is a link, and its packages are found by the link's place.
    return str(Path(found).absolute())


def active_environment(env: Mapping[str, str]) -> Path | None:
    """The environment that the user activated, unless shoal itself runs from it. conda's `base` is always active."""
    conda = "" if env.get("CONDA_DEFAULT_ENV") == "base" else env.get("CONDA_PREFIX", "")
    name = env.get("VIRTUAL_ENV") or conda
    if not name or not os.access(Path(name) / "bin" / "python", os.X_OK):
        return None
    return None if os.path.realpath(name) == os.path.realpath(sys.prefix) else Path(name)


def has_torch(python: str) -> bool:
    try:
        # Not here: a folder or file named torch in the current one is no torch.
        done = subprocess.run(
            [python, "-c", _HAS_TORCH], cwd="/", stdin=subprocess.DEVNULL, capture_output=True, timeout=_ASK_PYTHON_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(
            f"{python} cannot be run: {error}", why="the ranks of the script are started with it", fix="--python PYTHON"
        ) from None
    return done.returncode == 0


class StdinSource(Enum):
    """What rank 0 reads as its standard input."""

    NONE = "nothing"
    # A pipe or a file is handed to it.
    OURS = "our standard input"
    # Its lines are passed on, since the rank is in another session: the kernel would not keep it from reading what is
    # typed for the shell.
    TERMINAL = "the terminal"


def choose_stdin(on: str, detach: bool, fd: int = 0) -> tuple[StdinSource, str]:
    """Whether rank 0 gets our standard input, as it would under torchrun, and a note where it cannot have it."""
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
    return StdinSource.NONE if stat.S_ISCHR(kind) else StdinSource.OURS, ""


def is_in_foreground(terminal: int) -> bool:
    """Whether what is typed there is for us: not in the background of a shell, nor on another session's terminal."""
    with contextlib.suppress(OSError):
        return os.tcgetpgrp(terminal) == os.getpgrp()
    return False


@contextlib.contextmanager
def relay_terminal(fd: int = 0) -> Iterator[int]:
    """A pipe's end from which lines can be read that are typed while this process is in the foreground. The caller
    closes it once the reader has it."""
    reading, writing = os.pipe()
    over = threading.Event()
    thread = threading.Thread(target=_relay, args=(fd, writing, over), name="terminal", daemon=True)
    thread.start()
    try:
        yield reading
    finally:
        over.set()
        thread.join(_CLOSE_S)


def _relay(terminal: int, writing: int, over: threading.Event) -> None:
    """Looks before it reads: a background process that reads its terminal is stopped by the kernel."""
    with contextlib.suppress(OSError):
        while not over.is_set():
            ready, _, _ = select.select((terminal,), (), (), _LOOK_AT_TERMINAL_S)
            if not ready:
                continue
            if not is_in_foreground(terminal):
                over.wait(_LOOK_AT_TERMINAL_S)
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
