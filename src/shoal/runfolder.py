"""The run folder: the only bridge between training and every reader. Names of files live here and nowhere else."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import DataError, UsageError
from shoal.events import Event, read_events, sync_path

_EVENTS = re.compile(r"rank-(\d+)\.jsonl")
_STATE = re.compile(r"state-rank-(\d+)\.safetensors")


@dataclass(frozen=True)
class RunFolder:
    path: Path

    @classmethod
    def create(cls, path: Path) -> RunFolder:
        """A new, empty folder; an existing one that holds anything is never written into."""
        try:
            path.mkdir(parents=True, exist_ok=True)
            if any(path.iterdir()):
                raise UsageError(
                    f"the output folder {path} already exists and is not empty",
                    why="a run never overwrites another one",
                    fix=f"choose another --out, or continue that run: shoal train --resume {shlex.quote(str(path))}",
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
        if not run.config.is_file() and not run.job.is_file():
            raise DataError(
                f"{path} is not a run folder: it has neither {run.config.name} nor {run.job.name}",
                why="every run makes one, under runs/ unless --out says otherwise",
                fix="ls runs/",
            )
        return run

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
        """What the keeper is to do; see `trials.keeper`."""
        return self.path / "job.json"

    @property
    def keeper(self) -> Path:
        """Who keeps the run, and how it ended: the only file that says whether the last launch is over."""
        return self.path / "keeper.jsonl"

    @property
    def chaos(self) -> Path:
        """Faults that were injected on purpose."""
        return self.path / "chaos.jsonl"

    @property
    def token(self) -> Path:
        return self.path / "token"

    def journal(self, node: str) -> Path:
        """What the agent of a node has to say."""
        return self.path / "agents" / f"{node}.jsonl"

    def journals(self) -> list[Path]:
        """Of all agents there are any of."""
        return sorted((self.path / "agents").glob("*.jsonl"))

    def votes(self, node: str) -> Path:
        """What the agent of a node has promised the others; see `control.membership`."""
        return self.path / "agents" / f"{node}.votes"

    def orders(self, node: str) -> Path:
        """What the agent of a node was told, while it works: enough to start it again."""
        return self.path / "agents" / f"{node}.orders"

    def door(self, node: str) -> Path:
        """The socket at which commands on its machine ask the agent of a node; see `launch.sponsor`."""
        return self.path / "agents" / f"{node}.door"

    def events(self, rank: int) -> Path:
        return self.path / "events" / f"rank-{rank}.jsonl"

    def state(self, rank: int) -> Path:
        return self.path / f"state-rank-{rank}.safetensors"

    def log(self, node: str, rank: int | str) -> Path:
        """`rank` may be a launcher's name where one process speaks for all ranks of a node."""
        stem = f"rank-{rank}" if isinstance(rank, int) else rank
        return self.path / "logs" / node / f"{stem}.log"

    def event_files(self) -> dict[int, Path]:
        return _numbered(self.path / "events", _EVENTS)

    def state_files(self) -> dict[int, Path]:
        return _numbered(self.path, _STATE)

    def read_all_events(self) -> Iterator[Event]:
        """Every rank's events, rank after rank."""
        for path in self.event_files().values():
            yield from read_events(path)


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
