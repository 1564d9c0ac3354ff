"""The run folder: the paths of its files, its lock, and safe ways to open and replace files.

Training and every reader exchange data through this folder only. File names are defined here and nowhere else.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pwd
import re
import secrets
import shlex
import stat
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from shoal.errors import ControlError, DataError, RunFailed, UsageError
from shoal.events import Event, read_events, sync_path

_EVENTS = re.compile(r"rank-(\d+)\.jsonl")
_STATE = re.compile(r"state-rank-(\d+)\.safetensors")
# Letters, digits, dots, dashes and underscores, not beginning with a dot or a dash. Such a name is one part of a path,
# no option of a command, and has no meaning to a shell or in a glob pattern.
_LONGEST_NAME = 60  # of a run, without its time
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
RANK_LIMIT = 2**31
# Ranks write RUN for the run folder in the commands they advise: its path differs between their machine and the user's.
_RUN_PLACEHOLDER = re.compile(
    r"(\bshoal (?:(?:train|run) --resume|stop|verify|report|sample|attach|logs|stacks)) RUN\b"
)
_RESUME_ADVICE = "resume from the last checkpoint: shoal train --resume RUN"


def special_file_in(folder: Path) -> Path | None:
    """Return a pipe or a device among the files of a run, or a link to one; None if there is none.

    Sockets are an agent's own, and cannot be opened as a file.
    """
    for place, _, names in os.walk(folder):
        for name in names:
            path = Path(place, name)
            with contextlib.suppress(OSError):
                mode = path.stat().st_mode
                if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
                    return path
    return None


def is_plain_name(name: object) -> bool:
    return isinstance(name, str) and _PLAIN_NAME.fullmatch(name) is not None


def check_name(name: object, what: str = "node name") -> str:
    """Return `name` if it can be one part of a path, else raise `ControlError`.

    Node names come from other machines. Every method of `RunFolder` that makes a path of a name calls this, so that a
    name such as `../../.ssh` never leads out of the run folder, whichever message it arrived in.
    """
    if not isinstance(name, str) or not is_plain_name(name):
        raise ControlError(
            f"the {what} {_cut(name)} cannot be used as a file name",
            why="a name has up to 100 letters, digits, dots, dashes and underscores; a machine that sends another one "
            "has another version of shoal, or tries to reach files outside the run folder",
            fix="take part only in runs of people you trust; compare versions: shoal --version",
        )
    return name


def check_rank(rank: object) -> int:
    """Return `rank` if it is a valid rank number, else raise `ControlError`."""
    if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < RANK_LIMIT:
        raise ControlError(
            f"{_cut(rank)} is no rank number",
            why=f"ranks are numbered from 0 to {RANK_LIMIT - 1}",
            fix="compare versions on all machines: shoal --version",
        )
    return rank


def _cut(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


class _File:
    """The path of a file of the run folder, as an attribute of `RunFolder`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: RunFolder, owner: type[RunFolder]) -> Path:
        return run.path / self._name


@dataclass(frozen=True)
class RunFolder:
    path: Path

    config = _File("config.toml")
    manifest = _File("manifest.json")
    prediction = _File("prediction.json")
    timings = _File("timings.jsonl")
    commits = _File("commits.jsonl")
    checkpoints = _File("checkpoints")
    tokenizer = _File("tokenizer.json")
    data = _File("data.json")  # where this node keeps the encoded text, and the text's digest
    report = _File("report.html")
    job = _File("job.json")  # the supervisor's job; see `runs.supervisor.RunJob`
    script = _File("script.json")  # what a machine that joins a script needs; see `runs.supervisor.SharedScript`
    joined = _File("joined.json")  # where a machine that joined reached the run; see `joined_host`
    slurm = _File("slurm.json")  # the job of Slurm that this run is; see `runs.slurm_job`
    # The supervisor's events: the only file that shows whether the last launch has ended, and how.
    supervisor = _File("supervisor.jsonl")
    chaos = _File("chaos.jsonl")  # faults that were injected on purpose
    token = _File("token")
    stacks = _File("stacks")  # of each rank, when it was last asked for them; see `control.rank_stacks`

    @classmethod
    def create(cls, path: Path, is_training: bool = True) -> RunFolder:
        """Create a new, empty folder; refuse an existing one that is not empty.

        Only a training can be resumed, so a script's error does not advise it.
        """
        try:
            path.mkdir(parents=True, exist_ok=True)
            if any(path.iterdir()):
                resume = f", or continue that run: shoal train --resume {shlex.quote(str(path))}"
                can_resume = is_training and (path / "config.toml").is_file()
                raise UsageError(
                    f"the output folder {path} already exists and is not empty",
                    why="a run never overwrites another one",
                    fix=f"choose another --out{resume if can_resume else ''}",
                )
            (path / "events").mkdir()
            sync_path(path.parent)
        except OSError as error:
            raise UsageError(
                f"cannot create the output folder {path}: {error.strerror}",
                why="the run writes its events, logs and checkpoints there",
                fix="choose a folder you may write to: --out FOLDER",
            ) from None
        return cls(path.resolve())

    @contextlib.contextmanager
    def held(self) -> Iterator[int]:
        """Lock the folder: two launchers in one folder would mix two trainings beyond repair.

        The kernel releases the lock with the process, so a killed run leaves none behind. A child that inherits the
        descriptor holds the lock too, and keeps it when this process closes its own.
        """
        fd = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield fd
        except BlockingIOError:
            raise UsageError(
                f"{self.path} is being trained in right now",
                why="another shoal holds this run folder",
                fix=f"watch it: shoal attach {shlex.quote(str(self.path))}",
            ) from None
        finally:
            os.close(fd)

    def is_held(self) -> bool:
        """Return whether a launcher holds the lock, even one of another user, whose processes cannot be seen."""
        try:
            with self.held():
                return False
        except UsageError:
            return True

    def identity(self) -> str:
        """Return the run's unique id, which names its folders on other machines."""
        path = self.path / "id"
        if not path.exists():
            write_atomically(path, secrets.token_hex(4))
        return path.read_text(encoding="ascii").strip()

    def has_begun(self) -> bool:
        """Return whether the training of this folder has done a step, or has a checkpoint."""
        if self.has_checkpoint() or (self.commits.is_file() and self.commits.stat().st_size):
            return True
        return any(event["event"] == "step" for event in self.read_all_events())

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """Return the folder of a training."""
        run = cls.find(path)
        if not run.config.is_file():
            raise DataError(
                f"{path} is not the folder of a training: it has no {run.config.name}",
                why="shoal train writes one for every run, under runs/ unless --out says otherwise",
                fix=_list_runs_near(path),
            )
        return run

    @classmethod
    def find(cls, path: Path) -> RunFolder:
        """Return the folder of any run, including a script's."""
        run = cls(path.resolve())
        if run.path.is_dir() and not is_accessible(run.path, os.R_OK | os.X_OK):
            raise no_access_error(run.path, "be read")
        if not run.config.is_file() and not run.job.is_file():
            why, fix = "every run makes one, under runs/ unless --out says otherwise", _list_runs_near(path)
            # Users type the name that a listing shows.
            meant = cls(Path("runs") / path)
            if meant.config.is_file() or meant.job.is_file():
                why, fix = f"did you mean {meant.path}?", f"name it with its folder: {shlex.quote(str(meant.path))}"
            raise DataError(
                f"{path} is not a run folder: it has neither {run.config.name} nor {run.job.name}", why=why, fix=fix
            )
        if (special := special_file_in(run.path)) is not None:
            raise DataError(
                f"{special} is a pipe or a device, and no file of a run",
                why="reading it would wait for another program, or never end; shoal makes none",
                fix=f"find out who put it there, then remove it: rm {shlex.quote(str(special))}",
            )
        return run

    def name_in(self, text: str) -> str:
        """Replace RUN by this folder in the commands that a rank advises.

        A rank knows neither that a script trains, which another command resumes, nor whether there is a checkpoint.
        """
        if not self.has_checkpoint():
            text = text.replace(_RESUME_ADVICE, "start it again, since it has no checkpoint yet")
        if self.script.is_file():
            text = text.replace("shoal train --resume RUN", "shoal run --resume RUN")
        return _RUN_PLACEHOLDER.sub(lambda match: f"{match[1]} {shlex.quote(str(self.path))}", text)

    def has_checkpoint(self) -> bool:
        return any(self.checkpoints.glob("step-*"))

    def newest_checkpoint(self) -> int:
        """Return the step of the newest checkpoint; 0 if there is none."""
        names = (re.fullmatch(r"step-(\d{8})", path.name) for path in self.checkpoints.glob("step-*"))
        return max((int(name[1]) for name in names if name), default=0)

    def joined_host(self) -> str:
        """Return the host's address on a machine that joined the run; nothing elsewhere, and once it was resumed."""
        try:
            host = json.loads(self.joined.read_bytes())["host"]
        except (OSError, ValueError, LookupError, TypeError):
            return ""
        return host if isinstance(host, str) and host.isprintable() and not self.job.is_file() else ""

    def rejoin_advice(self) -> str:
        """Return how a machine that joined continues with the others after the run's end; nothing elsewhere.

        To resume the run in this folder would train on alone, apart from the host's run.
        """
        if not (host := self.joined_host()):
            return ""
        verb = "run" if self.script.is_file() else "train"
        # A run that this machine joined later does not wait for it: the host has to invite it again.
        invite = ", then shoal host RUN" if json.loads(self.joined.read_bytes()).get("late") is True else ""
        return f"on {host}: shoal {verb} --resume RUN{invite}; then here the shoal join command that it prints"

    def is_removed(self) -> bool:
        """Return whether the files that describe the run are gone; a rank may re-create the folder for a checkpoint."""
        return not (any(file.is_file() for file in (self.config, self.job, self.token)) or self.journals())

    def removed(self) -> RunFailed:
        """Return the error of a process whose run folder was deleted while it ran."""
        return RunFailed(
            f"the run folder {self.path} was removed while the run was writing to it",
            why="its processes end: they have no place for events, logs and checkpoints any more",
            fix="start a new run, and keep its folder until it has ended: shoal stop FOLDER ends one",
        )

    def journal(self, node: str) -> Path:
        """The events of a node's agent."""
        return _agent_file(self, node, "jsonl")

    def journals(self) -> list[Path]:
        return sorted((self.path / "agents").glob("*.jsonl"))

    def votes(self, node: str) -> Path:
        """The promises and votes of a node's agent; see `control.membership`."""
        return _agent_file(self, node, "votes")

    def orders(self, node: str) -> Path:
        """The orders of a node's agent while it works: enough to start it again."""
        return _agent_file(self, node, "orders")

    def invite_socket(self, node: str) -> Path:
        """The Unix socket at which a node's agent answers commands on its machine; see `agent.invite_server`."""
        return _agent_file(self, node, "sock")

    def agent_log(self, node: str) -> Path:
        """The output of a node's agent: mostly tracebacks."""
        return _agent_file(self, node, "log")

    def template_log(self, node: str) -> Path:
        """The same of the template from which the agent's ranks are forked."""
        return _agent_file(self, node, "template.log")

    def events(self, rank: int) -> Path:
        return self.path / "events" / f"rank-{check_rank(rank)}.jsonl"

    def profile(self, rank: int) -> Path:
        """What torch.profiler recorded of a rank."""
        return self.path / "profiles" / f"rank-{check_rank(rank)}.json"

    def samples(self, node: str) -> Path:
        """What was sampled of a node while it trained; see `host.node_stats`."""
        return self.path / "samples" / f"{check_name(node)}.jsonl"

    def state(self, rank: int) -> Path:
        return self.path / f"state-rank-{check_rank(rank)}.safetensors"

    def log(self, node: str, rank: int | str) -> Path:
        """Return a rank's log; `rank` may be a process name where one process runs all ranks of a node."""
        stem = f"rank-{check_rank(rank)}" if isinstance(rank, int) else check_name(rank, "process name")
        return self.logs(node) / f"{stem}.log"

    def logs(self, node: str) -> Path:
        return self.path / "logs" / check_name(node)

    def event_files(self) -> dict[int, Path]:
        return _numbered(self.path / "events", _EVENTS)

    def state_files(self) -> dict[int, Path]:
        return _numbered(self.path, _STATE)

    def read_all_events(self, skipped: Counter[str] | None = None) -> Iterator[Event]:
        """Yield every rank's events, rank by rank. `skipped` counts unreadable lines by file."""
        for path in self.event_files().values():
            yield from read_events(path, skipped)


def _agent_file(run: RunFolder, node: str, suffix: str) -> Path:
    return run.path / "agents" / f"{check_name(node)}.{suffix}"


def _list_runs_near(path: Path) -> str:
    """Return the command that lists the runs in a folder, or beside it; those in runs/ where there are none."""
    for folder in (path, path.parent):
        with contextlib.suppress(OSError):
            if folder.resolve() != Path("runs").resolve() and any(
                next(folder.glob(f"*/{name}"), None) for name in ("config.toml", "job.json")
            ):
                return f"shoal runs --in {shlex.quote(str(folder))}"
    return "shoal runs"


def no_access_error(path: Path, what: str = "be read or written") -> DataError:
    """Return the error for a file or folder that this user may not use, mostly because it is another user's."""
    place = path.absolute()
    while place != place.parent:
        with contextlib.suppress(OSError):
            place.stat()
            break
        place = place.parent
    status, me = place.stat(), user_name(os.geteuid())
    owner = user_name(status.st_uid)
    why = f"{place} belongs to user {owner}, and its mode is {stat.S_IMODE(status.st_mode):04o}"
    if owner == me:
        fix = f"allow it: chmod u+rwX {shlex.quote(str(place))}"
    else:
        # No chmod for another user's files: some files of a run hold secrets.
        fix = f"ask {owner} to do it, or do it as that user: sudo -u {owner} shoal …"
    return DataError(f"{path} cannot {what} by user {me}", why=why, fix=fix)


def is_accessible(path: Path, mode: int) -> bool:
    """Return whether this process may read (`os.R_OK`), write or enter a path, by its effective user."""
    return os.access(path, mode, effective_ids=os.access in os.supports_effective_ids)


def user_name(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def open_below(folder: Path, name: str, flags: int, make_folders: bool = False) -> int:
    """Open the regular file `folder/name` and return its descriptor, following no symbolic link below `folder`.

    Raise `OSError` where a part of `name` is a link or the file is not a regular one. Each folder is opened relative to
    the one above, so a link created between a check and the opening is not followed either.
    """
    *folders, last = _parts(folder, name)
    at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for part in folders:
            at = _enter(at, part, make_folders)
        # Not blocking: opening a named pipe would wait for its other end.
        opened = os.open(last, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644, dir_fd=at)
    finally:
        os.close(at)
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        os.close(opened)
        raise OSError(f"{folder / name} is no regular file")
    return opened


def list_below(folder: Path, name: str) -> list[str]:
    """Return the sorted names in `folder/name`; none where a part of the path is a link or missing."""
    at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for part in _parts(folder, name):
            at = _enter(at, part, make=False)
        return sorted(os.listdir(at))  # noqa: PTH208 - pathlib cannot list a descriptor
    except OSError:
        return []
    finally:
        os.close(at)


def _parts(folder: Path, name: str) -> list[str]:
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts):
        raise ControlError(f"the path {_cut(name)} leads out of {folder}", why="a path below a folder has no `..`")
    return parts


def _enter(at: int, part: str, make: bool) -> int:
    """Open a folder inside the folder `at` and return its descriptor; close `at` if that worked."""
    if make:
        with contextlib.suppress(FileExistsError):
            os.mkdir(part, dir_fd=at)
    below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
    os.close(at)
    return below


def write_atomically(path: Path, text: str) -> None:
    """Replace a file so that a reader sees the old or the new text, never half of either, even after a power cut."""
    # Not the process id: nodes of a lab share a disk, and their processes have ids of their own.
    write_durably(path, text.encode(), path.with_name(f".{path.name}.{secrets.token_hex(4)}"), 0o666)


def write_durably(path: Path, content: bytes, temporary: Path, mode: int) -> None:
    """Replace a whole file, and return once that would survive a power cut.

    Raise OSError if a byte could not be written; the old file is then still there.
    """
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with os.fdopen(fd, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_path(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _numbered(folder: Path, pattern: re.Pattern[str]) -> dict[int, Path]:
    if not folder.is_dir():
        return {}
    matches = ((pattern.fullmatch(path.name), path) for path in folder.iterdir())
    return dict(sorted((int(match[1]), path) for match, path in matches if match))


def default_out(name: str) -> Path:
    """Return `runs/grammar-20260131-235959`, with a number appended when two start in the same second."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:_LONGEST_NAME].strip("-.") or "run"
    stem = f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    candidates = (Path("runs") / (stem if number == 1 else f"{stem}-{number}") for number in range(1, 1000))
    return next(path for path in candidates if not path.exists())
