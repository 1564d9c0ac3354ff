"""Checkpoints: safetensors and JSON, a manifest of SHA-256 sums written last, put in place by one rename.

    checkpoints/step-00000050/
        model.safetensors  optimizer.safetensors  state.json  ledger.json  manifest.json  [rank-0.safetensors …]

Neither `torch.load` nor safetensors notices a flipped bit (measured: 0 of 40 each), so sums are checked before a byte
is used. A folder that fails is renamed to `….corrupt` and the one before it is tried. `ledger.json` has the length and
the SHA-256 of the ledger, so that a later cut or change of the ledger is noticed.

A checkpoint that was the best one when it was written has `best.json`, with the value by which the program judges. The
best of these is kept beside the newest ones.

Where replicas differ, every rank writes a shard, `rank-N.safetensors`, beside the common state in the folder of its own
machine. All shards of one save carry the same mark: a shard of the same step from an earlier launch, left on a machine
that was away for a while, does not fit and is refused.

All files are on disk before the rename, and the rename is before an older checkpoint is removed: after a kill or a
power cut at any moment the folder holds a whole checkpoint, if it ever held one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from shoal.engine.training_state import StateTree
from shoal.errors import CheckpointError
from shoal.events import FileMark, sync_path

_NAME = re.compile(r"step-(\d{8})")
_MODEL, _OPTIMIZER, _STATE, _MANIFEST = "model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"
_LEDGER, _BEST = "ledger.json", "best.json"
_FORMAT = 1
Counts = TypeVar("Counts")


@dataclass(frozen=True)
class Shares:
    """How the global batch of the next step is divided, where shares follow the ranks' speeds."""

    micro_batch: int
    ids: tuple[int, ...]  # Of the ranks, in their order.
    shares: tuple[int, ...]  # Their samples.
    speeds: dict[int, float]  # By rank id, relative to each other.


@dataclass(frozen=True)
class Progress:
    """The position of a training."""

    step: int  # Steps done.
    cursor: int  # Global position of the next sample.
    generation: str = "0-0"  # See docs/faults.md.
    lineage: str = "0-0"
    history: tuple[tuple[str, int], ...] = ()  # The lineages before this one, and the step after which each was left.
    shares: Shares | None = None


@dataclass(frozen=True)
class RankShards:
    """The shards that were saved beside the common state, one for every rank."""

    ranks: int
    mark: int  # The same in all shards of one save, and in no other.
    step: int  # Where a run continues that has only the common state.
    cursor: int
    in_flight: int = 0  # Outer exchanges that were under way between replicas.


@dataclass(frozen=True)
class BestValue:
    """The value by which a program calls a checkpoint the best one so far."""

    step: int
    value: float
    lower: bool  # Lower is better.

    def is_better_than(self, other: BestValue | None) -> bool:
        return other is None or (self.value < other.value if self.lower else self.value > other.value)


@dataclass(frozen=True)
class Checkpoint:
    progress: Progress
    model: Mapping[str, Tensor]
    optimizer: StateTree  # Of the optimizers and other objects; in outer modes that of the outer optimizer.
    shards: RankShards | None = None
    # What is in the folder already, because it was written piece by piece.
    has_weights_file: bool = False
    has_optimizer_file: bool = False


class DamagedCheckpoint(CheckpointError):
    """The bytes are not those that were written. A file that merely cannot be read now may be whole."""


def no_checkpoint(path: Path, reasons: Sequence[str]) -> CheckpointError:
    return CheckpointError(
        f"no checkpoint to resume from in {path}",
        why="; ".join(reasons) or "the run ended before its first checkpoint",
        fix="start anew: shoal train … --out NEW_FOLDER",
    )


class CheckpointFolder:
    def __init__(self, path: Path, keep: int) -> None:
        self.path = path
        self._keep = keep

    def save(self, checkpoint: Checkpoint) -> Path:
        self.begin(checkpoint.progress.step)
        return self.complete(checkpoint)

    def begin(self, step: int) -> None:
        """Make the hidden folder into which ranks write their shards before it is completed."""
        for leftover in self.path.glob(".step-*.tmp"):
            shutil.rmtree(leftover, ignore_errors=True)
        with self._as_unwritten(step):
            self.unfinished(step).mkdir(parents=True)
            sync_path(self.path.parent)

    def complete(
        self,
        checkpoint: Checkpoint,
        before_rename: Callable[[], None] = lambda: None,
        ledger: FileMark | None = None,
        best: BestValue | None = None,
    ) -> Path:
        """Write the checkpoint atomically: a kill leaves the older checkpoints and at most a hidden folder.

        `before_rename` raises if the checkpoint must not be put in place any more. `ledger` is the mark of the ledger
        when it was put on disk, `best` the value of a checkpoint that is the best one so far.
        """
        step = checkpoint.progress.step
        final = self.folder(step)
        with self._as_unwritten(step):
            _write(self.unfinished(step), checkpoint, ledger, best)
            before_rename()
            # An older checkpoint of the same step is renamed first and removed last: a kill must not leave none.
            replaced = final.with_name(f".{final.name}.old")
            if final.exists():
                shutil.rmtree(replaced, ignore_errors=True)
                final.rename(replaced)
            self.unfinished(step).rename(final)
            sync_path(final.parent)
            shutil.rmtree(replaced, ignore_errors=True)
        # Only now, when the newest one is in place with its name on disk.
        folders = self._newest_first()
        kept = best_of(_read_best_values(folders))
        for folder in folders[self._keep :]:
            if kept is None or folder != self.folder(kept.step):
                shutil.rmtree(folder, ignore_errors=True)
        return final

    def best_values(self) -> list[BestValue]:
        """Return the values of the checkpoints here that were the best ones when they were written, newest first."""
        return _read_best_values(self._list_for_reader())

    def load_best(self) -> Checkpoint:
        """Read the best checkpoint."""
        best = best_of(self.best_values())
        if best is None:
            raise CheckpointError(
                f"no checkpoint in {self.path} is marked as the best one",
                why="the program marks it with session.best(value)",
                fix="take the newest one: leave --best out",
            )
        return read_checkpoint(self.folder(best.step))

    def folder(self, step: int) -> Path:
        return self.path / f"step-{step:08d}"

    def unfinished(self, step: int) -> Path:
        return self.path / f".step-{step:08d}.tmp"

    def unfinished_files(self, step: int) -> tuple[Path, Path]:
        """Return the files into which divided weights, and the tensors of divided optimizers, are written."""
        return self.unfinished(step) / _MODEL, self.unfinished(step) / _OPTIMIZER

    def load_latest(
        self, set_aside: bool = False, on_error: Callable[[CheckpointError], None] = lambda error: None
    ) -> Checkpoint:
        """Read the newest whole checkpoint. With `set_aside` (for a process that writes here) rename damaged ones."""
        problems: list[str] = []
        for folder in self._newest_first() if set_aside else self._list_for_reader():
            try:
                return read_checkpoint(folder)
            except CheckpointError as error:
                problems.append(error.seen)
                on_error(error)
                if set_aside and isinstance(error, DamagedCheckpoint):
                    _set_aside(folder, "corrupt")
        raise no_checkpoint(self.path, problems)

    def newest_whole(self, on_error: Callable[[CheckpointError], None] = lambda error: None) -> Progress | None:
        """Return the progress of the newest checkpoint with correct sums; set damaged ones aside."""
        for folder in self._newest_first():
            try:
                check_sums(folder)
                if (progress := _read_progress_of(folder)) is not None:
                    return progress
            except CheckpointError as error:
                on_error(error)
                if isinstance(error, DamagedCheckpoint):
                    _set_aside(folder, "corrupt")
        return None

    def set_aside_lineage(self, lineage: str, after: int) -> None:
        """Set aside the checkpoints of an abandoned lineage, except those up to step `after`, which both share."""
        for folder in self._newest_first():
            progress = _read_progress_of(folder)
            if progress is not None and progress.lineage == lineage and progress.step > after:
                _set_aside(folder, "abandoned")
        for folder in sorted(self.path.glob("step-*.abandoned*"), reverse=True)[self._keep :]:
            shutil.rmtree(folder, ignore_errors=True)

    def set_aside_newer(self, step: int) -> None:
        """Set aside the checkpoints after `step`, to which the run has returned, so that no resume uses them."""
        for folder in self._newest_first():
            if folder.name > self.folder(step).name:
                _set_aside(folder, "superseded")

    @contextlib.contextmanager
    def _as_unwritten(self, step: int) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError) as error:
            shutil.rmtree(self.unfinished(step), ignore_errors=True)
            raise CheckpointError(
                f"cannot write the checkpoint {self.folder(step)}: {error}",
                why="older checkpoints are untouched, but there is no newer one to return to",
                fix=f"free space or fix the folder: df -h {self.path}",
            ) from error

    def _list_for_reader(self) -> list[Path]:
        """List the checkpoints, newest first, without renaming any: a training may be writing here.

        A checkpoint that is being replaced is read under its hidden name.
        """
        if not self.path.is_dir():
            return []
        folders = {path.name.removeprefix(".").removesuffix(".old"): path for path in self.path.glob(".step-*.old")}
        folders |= {path.name: path for path in self.path.iterdir() if _NAME.fullmatch(path.name)}
        return [folders[name] for name in sorted(folders, reverse=True)]

    def _newest_first(self) -> list[Path]:
        """List the checkpoints for a process that writes here, after a repair: `complete` may have been killed."""
        if not self.path.is_dir():
            return []
        with contextlib.suppress(OSError):
            for replaced in self.path.glob(".step-*.old"):
                final = self.path / replaced.name.removeprefix(".").removesuffix(".old")
                if final.exists():
                    shutil.rmtree(replaced, ignore_errors=True)
                else:
                    replaced.rename(final)
        return sorted((path for path in self.path.iterdir() if _NAME.fullmatch(path.name)), reverse=True)


def best_of(values: Sequence[BestValue]) -> BestValue | None:
    """Return the best of these values, newest first, by what the newest one calls better; of equal ones the oldest."""
    best: BestValue | None = None
    for value in reversed([value for value in values if value.lower == values[0].lower]):
        best = value if value.is_better_than(best) else best
    return best


def _read_best_values(folders: Sequence[Path]) -> list[BestValue]:
    values = []
    for folder in folders:
        with contextlib.suppress(OSError, ValueError, TypeError):
            values.append(BestValue(**json.loads((folder / _BEST).read_text())))
    return values


def read_checkpoint(folder: Path) -> Checkpoint:
    """Check every sum, then read. Any damage raises a `DamagedCheckpoint` that names the file."""
    check_sums(folder)
    with _as_checkpoint_error(folder):
        state: dict[str, Any] = json.loads((folder / _STATE).read_text())
        shards = _parse_counts(RankShards, state.pop("parts")) if "parts" in state else None
        optimizer = StateTree(TensorsOfFile(folder / _OPTIMIZER), state.pop("values"))
        return Checkpoint(read_progress(state), TensorsOfFile(folder / _MODEL), optimizer, shards)


class TensorsOfFile(Mapping[str, Tensor]):
    """The tensors of a file, each read when it is asked for: a rank may have no room for all of them."""

    def __init__(self, path: Path) -> None:
        opened: Any = safe_open(path, framework="pt")
        self._file = opened
        self._names: list[str] = list(opened.keys())

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        tensor: Tensor = self._file.get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def check_sums(folder: Path) -> None:
    """Raise `DamagedCheckpoint` unless the common files have the sums that were written, and the folder's step."""
    with _as_checkpoint_error(folder):
        manifest: dict[str, Any] = json.loads((folder / _MANIFEST).read_text())
        if manifest["format"] != _FORMAT:
            raise CheckpointError(f"{folder} has format {manifest['format']}, this version reads {_FORMAT}")
        for name in (_MODEL, _OPTIMIZER, _STATE, *({_LEDGER, _BEST} & manifest["sha256"].keys())):
            if _sha256(folder / name) != manifest["sha256"][name]:
                raise DamagedCheckpoint(f"{folder / name} is damaged: its SHA-256 is not the one written")
        step, named = json.loads((folder / _STATE).read_text())["step"], re.search(r"step-(\d+)", folder.name)
        if named is not None and step != int(named[1]):
            raise DamagedCheckpoint(f"{folder / _STATE} is damaged: it is of step {step}, unlike its folder")


def _read_progress_of(folder: Path) -> Progress | None:
    with contextlib.suppress(CheckpointError), _as_checkpoint_error(folder):
        state = json.loads((folder / _STATE).read_text())
        for name in ("parts", "values"):
            state.pop(name, None)
        return read_progress(state)
    return None


def read_progress(state: dict[str, Any]) -> Progress:
    history = tuple((str(lineage), int(step)) for lineage, step in state.pop("history", ()))
    return _parse_counts(Progress, {**state, "history": history, "shares": _parse_shares(state.get("shares"))})


def _parse_shares(document: Any) -> Shares | None:
    if document is None:
        return None
    if "micro_batches" in document:
        # Shares were whole micro-batches once.
        document["shares"] = [int(document["micro_batch"]) * int(count) for count in document["micro_batches"]]
    ids, parts = (tuple(map(int, document[name])) for name in ("ids", "shares"))
    speeds = {int(id): float(speed) for id, speed in document["speeds"].items()}
    shares = Shares(int(document["micro_batch"]), ids, parts, speeds)
    if len(ids) != len(parts) or min(*parts, shares.micro_batch, *speeds.values()) <= 0:
        raise ValueError(f"these are no shares: {document!r:.80}")
    return shares


def _parse_counts(kind: type[Counts], values: dict[str, Any]) -> Counts:
    """Make a dataclass whose `int` fields are counts: a training with other values would fail much later, if at all."""
    counts = kind(**values)
    for field in fields(counts):  # type: ignore[arg-type]
        value = getattr(counts, field.name)
        if field.type == "int" and (type(value) is not int or not 0 <= value < 1 << 63):
            raise ValueError(f"{field.name} is {value!r:.40}, which is no count")
    return counts


@contextlib.contextmanager
def _as_checkpoint_error(folder: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        missing = Path(error.filename).name if error.filename else "a file"
        raise DamagedCheckpoint(f"{folder} is incomplete: {missing} is missing") from error
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error}") from error
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedCheckpoint(f"{folder} is damaged: {error}") from error


def _write(folder: Path, checkpoint: Checkpoint, ledger: FileMark | None, best: BestValue | None = None) -> None:
    if not checkpoint.has_weights_file:
        save_file(savable(checkpoint.model), folder / _MODEL)
    if not checkpoint.has_optimizer_file:
        save_file(savable(checkpoint.optimizer.tensors), folder / _OPTIMIZER)
    shards = {"parts": asdict(checkpoint.shards)} if checkpoint.shards else {}
    values = {"values": checkpoint.optimizer.values}
    (folder / _STATE).write_text(json.dumps(asdict(checkpoint.progress) | shards | values))
    if ledger is not None:
        (folder / _LEDGER).write_text(json.dumps(asdict(ledger)))
    if best is not None:
        (folder / _BEST).write_text(json.dumps(asdict(best)))
    sums = {file.name: _sha256(file) for file in sorted(folder.iterdir())}
    (folder / _MANIFEST).write_text(json.dumps({"format": _FORMAT, "sha256": sums}, indent=1))
    for file in folder.iterdir():
        sync_path(file)
    sync_path(folder)


def _set_aside(folder: Path, why: str) -> None:
    names = (f"{folder.name}.{why}{suffix}" for suffix in ("", *(f"-{number}" for number in range(2, 1000))))
    free = next(path for name in names if not (path := folder.with_name(name)).exists())
    with contextlib.suppress(OSError):
        folder.rename(free)


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def savable(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors as a file can have them: contiguous, and none that shares its memory with another one."""
    places: set[int] = set()
    separate: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        plain = tensor.contiguous()
        separate[name] = plain.clone() if plain.data_ptr() in places else plain
        places.add(plain.data_ptr())
    return separate


def write_shard(folder: Path, rank: int, state: StateTree, mark: int) -> None:
    """Write a rank's shard into the folder of an incomplete checkpoint, whose manifest will hold its sum."""
    file = _shard_file(folder, rank)
    try:
        save_file(savable(state.tensors), file, {"mark": str(mark), "values": json.dumps(state.values)})
    except (OSError, SafetensorError) as error:
        file.unlink(missing_ok=True)
        raise CheckpointError(
            f"cannot write the part of rank {rank} in {folder}: {error}",
            why="without it a run resumed from this checkpoint continues from the common state only",
            fix=f"free space or fix the folder: df -h {folder.parent}",
        ) from error


def read_shard(folder: Path, rank: int, mark: int) -> StateTree:
    """Read a rank's shard; raise `CheckpointError` unless it is whole and of the save with this mark."""
    file = _shard_file(folder, rank)
    try:
        sums = json.loads((folder / _MANIFEST).read_text())["sha256"]
        if _sha256(file) != sums[file.name]:
            raise CheckpointError(f"{file} is damaged: its SHA-256 is not the one written")
        with safe_open(file, framework="pt") as opened:
            facts = opened.metadata() or {}
        if facts.get("mark") != str(mark):
            raise CheckpointError(f"{file} belongs to another save of this run")
        values = json.loads(facts["values"])
        if not isinstance(values, dict):
            raise CheckpointError(f"{file} was written by another version of shoal")
        return StateTree(load_file(file), values)
    except FileNotFoundError as error:
        raise CheckpointError(f"{error.filename} is missing") from error
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be used: {error}") from error


def _shard_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.safetensors"
