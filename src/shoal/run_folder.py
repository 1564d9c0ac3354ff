"""The run folder: the only bridge between training and every reader. Names of files live here and nowhere else."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
import re
import secrets
import shlex
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import ControlError, DataError, RunFailed, UsageError
from shoal.events import Event, read_events, sync_path

_EVENTS = re.compile(r"rank-(\d+)\.jsonl")
_STATE = re.compile(r"state-rank-(\d+)\.safetensors")
# Letters, digits, dots, dashes and underscores; the first character is neither a dot nor a dash. Such a name is one
# part of a path, no option of a command, and means nothing to a shell or in a glob pattern.
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
RANK_LIMIT = 2**31
# Ranks advise commands for "RUN": the folder is another one on their machine than on the user's.
_NAMELESS = re.compile(r"(\bshoal (?:train --resume|stop|verify|report|sample|attach|logs)) RUN\b")


def is_plain_name(name: object) -> bool:
    return isinstance(name, str) and _PLAIN_NAME.fullmatch(name) is not None


def check_name(name: object, what: str = "node name") -> str:
    """Return `name` if it can be one part of a path, else raise `ControlError`.

    Names of nodes come from other machines. Every method of `RunFolder` that makes a path of a name calls this, so a
    name such as `../../.ssh` never leads out of the run folder, whichever message it came in.
    """
    if not isinstance(name, str) or not is_plain_name(name):
        raise ControlError(
            f"the {what} {_cut(name)} cannot be used as a file name",
            why="a name has up to 100 letters, digits, dots, dashes and underscores; another machine that sends "
            "something else has another shoal, or tries to reach files outside the run folder",
            fix="take part only in runs of people you trust; compare versions: shoal --version",
        )
    return name


def check_rank(rank: object) -> int:
    """Return `rank` if it can be the number of a rank, else raise `ControlError`."""
    if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < RANK_LIMIT:
        raise ControlError(
            f"{_cut(rank)} is no number of a rank",
            why=f"ranks are numbered from 0 to {RANK_LIMIT - 1}",
            fix="compare versions on all machines: shoal --version",
        )
    return rank


def _cut(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


@dataclass(frozen=True)
class RunFolder:
    path: Path

    @classmethod
    def create(cls, path: Path, is_training: bool = True) -> RunFolder:
        """A new, empty folder; an existing one that holds anything is never written into.

        Only a training can be resumed, so a script is not told to."""
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
        """Ours alone while it is written: two launchers in one folder would mix two trainings beyond repair.

        The lock is on the folder itself and goes with the process, so a killed run leaves none behind. A child that
        inherits the descriptor holds it too, and goes on holding it when we let go.
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
        """Whether a launcher holds the folder, also one of another user, whose processes cannot be seen."""
        try:
            with self.held():
                return False
        except UsageError:
            return True

    def refuse_unwritable(self) -> None:
        """Refuse to go on with a run whose processes could write nothing, as that of another user."""
        for path in (self.path, *(path for path in (self.supervisor, self.config, self.checkpoints) if path.exists())):
            if not may(path, os.W_OK):
                raise self._unwritable(path)

    def _unwritable(self, path: Path) -> UsageError:
        owner, resume = path.stat().st_uid, f"shoal train --resume {shlex.quote(str(self.path))}"
        if os.statvfs(path).f_flag & os.ST_RDONLY:
            why = "its file system is read-only, and a run goes on in its own folder"
            fix = f"see how it is mounted: findmnt -T {shlex.quote(str(path))}"
        elif owner == os.geteuid():
            why = "its permissions forbid it, and a run goes on in its own folder"
            fix = f"allow it: chmod u+w {shlex.quote(str(path))}; then {resume}"
        else:
            why = f"it belongs to user {user_name(owner)}, and a run goes on in its own folder"
            fix = f"go on as that user: sudo -u {user_name(owner)} {resume}"
        return UsageError(
            f"user {user_name(os.geteuid())} cannot write to {path}",
            why=why,
            fix=f"{fix}; or start a run of your own: shoal train --out FOLDER",
        )

    def identity(self) -> str:
        """The same for as long as the run lives, and no other run's: its folders on other machines are named by it."""
        path = self.path / "id"
        if not path.exists():
            write_atomically(path, secrets.token_hex(4))
        return path.read_text(encoding="ascii").strip()

    def discard(self) -> None:
        """Removes a folder that could not be made into a run: the next try with its name must not be refused."""
        shutil.rmtree(self.path, ignore_errors=True)

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """The folder of a training."""
        run = cls.find(path)
        if not run.config.is_file():
            raise DataError(
                f"{path} is not the folder of a training: it has no {run.config.name}",
                why="shoal train writes one for every run, under runs/ unless --out says otherwise",
                fix="ls runs/",
            )
        return run

    @classmethod
    def find(cls, path: Path) -> RunFolder:
        """The folder of any run, a script's too."""
        run = cls(path.resolve())
        if run.path.is_dir() and not may(run.path, os.R_OK | os.X_OK):
            raise no_access(run.path, "be read")
        if not run.config.is_file() and not run.job.is_file():
            raise DataError(
                f"{path} is not a run folder: it has neither {run.config.name} nor {run.job.name}",
                why="every run makes one, under runs/ unless --out says otherwise",
                fix="ls runs/",
            )
        return run

    def name_in(self, text: str) -> str:
        """The advice of a rank with this folder in the commands that it names."""
        return _NAMELESS.sub(lambda found: f"{found[1]} {shlex.quote(str(self.path))}", text)

    def is_removed(self) -> bool:
        """Whether nothing is left that says what the run is; a rank may make the folder anew for a checkpoint."""
        return not (self.config.is_file() or self.job.is_file() or self.journals())

    def removed(self) -> RunFailed:
        """The error of a process whose run folder was deleted under it."""
        return RunFailed(
            f"the run folder {self.path} was removed while the run was writing to it",
            why="its processes end: there is no place for their events, logs and checkpoints any more",
            fix="start anew, and keep the folder until the run has ended: shoal stop FOLDER ends one",
        )

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    @property
    def manifest(self) -> Path:
        return self.path / "manifest.json"

    @property
    def prediction(self) -> Path:
        return self.path / "prediction.json"

    @property
    def timings(self) -> Path:
        return self.path / "timings.jsonl"

    @property
    def commits(self) -> Path:
        return self.path / "commits.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def tokenizer(self) -> Path:
        return self.path / "tokenizer.json"

    @property
    def data(self) -> Path:
        """Where this node keeps the encoded text, and its digest."""
        return self.path / "data.json"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def job(self) -> Path:
        """What the supervisor is to do; see `trials.supervisor`."""
        return self.path / "job.json"

    @property
    def supervisor(self) -> Path:
        """Who keeps the run, and how it ended: the only file that says whether the last launch is over."""
        return self.path / "supervisor.jsonl"

    @property
    def chaos(self) -> Path:
        """Faults that were injected on purpose."""
        return self.path / "chaos.jsonl"

    @property
    def token(self) -> Path:
        return self.path / "token"

    def journal(self, node: str) -> Path:
        """What the agent of a node has to say."""
        return self._agent_file(node, "jsonl")

    def journals(self) -> list[Path]:
        """Of all agents there are any of."""
        return sorted((self.path / "agents").glob("*.jsonl"))

    def votes(self, node: str) -> Path:
        """What the agent of a node has promised the others; see `control.membership`."""
        return self._agent_file(node, "votes")

    def orders(self, node: str) -> Path:
        """What the agent of a node was told, while it works: enough to start it again."""
        return self._agent_file(node, "orders")

    def door(self, node: str) -> Path:
        """The socket at which commands on its machine ask the agent of a node; see `launch.sponsor`."""
        return self._agent_file(node, "door")

    def agent_log(self, node: str) -> Path:
        """What the agent of a node printed: tracebacks, mostly."""
        return self._agent_file(node, "log")

    def _agent_file(self, node: str, suffix: str) -> Path:
        return self.path / "agents" / f"{check_name(node)}.{suffix}"

    def events(self, rank: int) -> Path:
        return self.path / "events" / f"rank-{check_rank(rank)}.jsonl"

    def state(self, rank: int) -> Path:
        return self.path / f"state-rank-{check_rank(rank)}.safetensors"

    def log(self, node: str, rank: int | str) -> Path:
        """`rank` may be a launcher's name where one process speaks for all ranks of a node."""
        stem = f"rank-{check_rank(rank)}" if isinstance(rank, int) else check_name(rank, "process name")
        return self.logs(node) / f"{stem}.log"

    def logs(self, node: str) -> Path:
        """The folder in which the ranks of a node have their logs."""
        return self.path / "logs" / check_name(node)

    def text(self, name: str) -> Path:
        """One of the small files that a launcher or a host sends to a machine with another disk."""
        texts = {path.name: path for path in (self.config, self.tokenizer, self.data)}
        if name not in texts:
            raise ControlError(
                f"the file {_cut(name)} was sent for the run folder",
                why=f"only {', '.join(texts)} are sent that way",
                fix="compare versions on all machines: shoal --version",
            )
        return texts[name]

    def event_files(self) -> dict[int, Path]:
        return _numbered(self.path / "events", _EVENTS)

    def state_files(self) -> dict[int, Path]:
        return _numbered(self.path, _STATE)

    def read_all_events(self) -> Iterator[Event]:
        """Every rank's events, rank after rank."""
        for path in self.event_files().values():
            yield from read_events(path)


def no_access(path: Path, what: str = "be read or written") -> DataError:
    """The error of a user who may not use a file or folder, mostly because it is another user's."""
    place = path.absolute()
    while not _can_see(place) and place != place.parent:
        place = place.parent
    status, me = place.stat(), user_name(os.geteuid())
    owner = user_name(status.st_uid)
    whose = f"{place} belongs to user {owner}, and its mode is {stat.S_IMODE(status.st_mode):04o}"
    # No chmod for what is another user's: some files of a run hold secrets.
    theirs = f"ask {owner} to do it, or do it as that user: sudo -u {owner} shoal …"
    fix = theirs if owner != me else f"allow it: chmod u+rwX {shlex.quote(str(place))}"
    return DataError(f"{path} cannot {what} by user {me}", why=whose, fix=fix)


def may(path: Path, mode: int) -> bool:
    """Whether this process may read (`os.R_OK`), write or enter it, as the user that it acts for."""
    return os.access(path, mode, effective_ids=os.access in os.supports_effective_ids)


def _can_see(path: Path) -> bool:
    try:
        path.stat()
    except OSError:
        return False
    return True


def user_name(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def open_below(folder: Path, name: str, flags: int, make_folders: bool = False) -> int:
    """Open the regular file `folder/name` and return its descriptor; no symbolic link below `folder` is followed.

    Raises `OSError` where a part of `name` is a link or the file is no regular one. Each folder is opened relative to
    the one above, so a link that is put in place between a check and the opening is not followed either.
    """
    *folders, last = _parts(folder, name)
    at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for part in folders:
            at = _enter(at, part, make_folders)
        # Not blocking: to open a named pipe would wait for its other end.
        opened = os.open(last, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644, dir_fd=at)
    finally:
        os.close(at)
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        os.close(opened)
        raise OSError(f"{folder / name} is no regular file")
    return opened


def list_below(folder: Path, name: str) -> list[str]:
    """The names of what lies in `folder/name`, in order; nothing where a part of it is a link or is missing."""
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
    """The descriptor of a folder in the folder `at`, which is closed if that worked."""
    if make:
        with contextlib.suppress(FileExistsError):
            os.mkdir(part, dir_fd=at)
    below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
    os.close(at)
    return below


def write_atomically(path: Path, text: str) -> None:
    """A reader sees the old file or the new one, never half of either; after a power cut, too."""
    write_durably(path, text.encode(), path.with_name(f".{path.name}.{os.getpid()}"), 0o666)


def write_durably(path: Path, content: bytes, temporary: Path, mode: int) -> None:
    """Replaces a file as a whole. Returns when that would survive a power cut; raises OSError where a byte could not
    be written, and then the old file is still there."""
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
    found = ((pattern.fullmatch(path.name), path) for path in folder.iterdir())
    return dict(sorted((int(match[1]), path) for match, path in found if match))
