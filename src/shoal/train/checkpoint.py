"""Checkpoints: safetensors and JSON, a manifest of SHA-256 sums written last, put in place by one rename.

    checkpoints/step-00000050/
        model.safetensors  optimizer.safetensors  state.json  ledger.json  manifest.json  [rank-0.safetensors …]

Neither `torch.load` nor safetensors notices a flipped bit (measured: 0 of 40 each), so sums are checked before a byte
is used. A folder that fails is set aside as `….corrupt` and the one before it is tried. Where replicas differ, every
rank puts its own part beside what is common, in the folder of its own machine; see `train/part.py`. `ledger.json` says
how long the ledger was, and its SHA-256: a ledger that was cut or changed later is noticed by it.

Everything is on disk before the rename, and the rename before an older checkpoint goes: after a kill or a power cut at
any moment the folder holds a whole checkpoint, if it ever held one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.errors import CheckpointError
from shoal.events import FileMark, sync_path
from shoal.sync.replicas import flat_bytes

_NAME = re.compile(r"step-(\d{8})")
_MODEL, _OPTIMIZER, _STATE, MANIFEST = "model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"
_LEDGER = "ledger.json"
_FORMAT = 1
Counts = TypeVar("Counts")


@dataclass(frozen=True)
class Progress:
    """How far training has come: steps done, and the global position of the next sample; in which generation, of which
    lineage (`docs/faults.md`). `history`: the lineages before it, and the step after which each was left."""

    step: int
    cursor: int
    generation: str = "0-0"
    lineage: str = "0-0"
    history: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class RankShards:
    """What was saved beside the common state: a part of each of so many ranks.

    `mark` is the same in all parts of one save and in no other. `step` and `cursor` are where a run goes on that has
    nothing but the common state; `flying` is what was on its way between replicas.
    """

    ranks: int
    mark: int
    step: int
    cursor: int
    flying: int = 0


@dataclass(frozen=True)
class Checkpoint:
    progress: Progress
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    parts: RankShards | None = None


class CheckpointFolder:
    def __init__(self, path: Path, keep: int) -> None:
        self.path = path
        self._keep = keep

    def save(self, checkpoint: Checkpoint) -> Path:
        self.begin(checkpoint.progress.step)
        return self.complete(checkpoint)

    def begin(self, step: int) -> None:
        """Makes the hidden folder in which ranks put their parts, if they have any, before it is completed."""
        self._sweep()
        with self._as_unwritten(step):
            self.unfinished(step).mkdir(parents=True)
            sync_path(self.path.parent)

    def complete(
        self, checkpoint: Checkpoint, may: Callable[[], None] = lambda: None, ledger: FileMark | None = None
    ) -> Path:
        """Whole or not at all: a kill at any point leaves the older checkpoints and at most a hidden leftover. `may`
        raises if it must not be put in place any more. `ledger` is what the ledger was when it was put on disk."""
        step = checkpoint.progress.step
        with self._as_unwritten(step):
            _write(self.unfinished(step), checkpoint, ledger)
            may()
            _put_in_place(self.unfinished(step), self.folder(step))
        self._drop_old()
        return self.folder(step)

    def folder(self, step: int) -> Path:
        return self.path / f"step-{step:08d}"

    def unfinished(self, step: int) -> Path:
        return self.path / f".step-{step:08d}.tmp"

    def load_latest(
        self, set_aside: bool = False, tell: Callable[[CheckpointError], None] = lambda error: None
    ) -> Checkpoint:
        """The newest one that is whole. `set_aside` renames damaged ones on the way, for those who will write here;
        `tell` hears of each."""
        refused: list[str] = []
        for folder in self._newest_first() if set_aside else self._readable_first():
            try:
                return read_checkpoint(folder)
            except CheckpointError as error:
                refused.append(error.seen)
                tell(error)
                if set_aside and isinstance(error, DamagedCheckpoint):
                    _set_aside(folder, "corrupt")
        raise CheckpointError(
            f"no checkpoint to resume from in {self.path}",
            why="; ".join(refused) or "the run ended before its first checkpoint",
            fix="start anew: shoal train … --out NEW_FOLDER",
        )

    def newest_whole(self, tell: Callable[[CheckpointError], None] = lambda error: None) -> Progress | None:
        """How far the newest one has come whose files have the sums that were written; damaged ones are set aside."""
        for folder in self._newest_first():
            try:
                check_sums(folder)
                if (found := _peek(folder)) is not None:
                    return found
            except CheckpointError as error:
                tell(error)
                if isinstance(error, DamagedCheckpoint):
                    _set_aside(folder, "corrupt")
        return None

    def set_aside_lineage(self, lineage: str, after: int) -> None:
        """For a machine whose training was given up for another one's: what both had in common is common still."""
        for folder in self._newest_first():
            found = _peek(folder)
            if found is not None and found.lineage == lineage and found.step > after:
                _set_aside(folder, "abandoned")
        for folder in sorted(self.path.glob("step-*.abandoned*"), reverse=True)[self._keep :]:
            shutil.rmtree(folder, ignore_errors=True)

    def set_aside_newer(self, step: int) -> None:
        """For a run that went back to `step`: it would otherwise be resumed from what it has left behind."""
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

    def _readable_first(self) -> list[Path]:
        """For those who only read: a training may be writing here, so nothing is renamed. One that is just being
        replaced is read where it lies."""
        if not self.path.is_dir():
            return []
        found = {path.name: path for path in self.path.glob(".step-*.old")}
        found = {name.removeprefix(".").removesuffix(".old"): path for name, path in found.items()}
        found |= {path.name: path for path in self.path.iterdir() if _NAME.fullmatch(path.name)}
        return [found[name] for name in sorted(found, reverse=True)]

    def _newest_first(self) -> list[Path]:
        """For those who write here."""
        if not self.path.is_dir():
            return []
        with contextlib.suppress(OSError):
            self._restore_replaced()
        return sorted((path for path in self.path.iterdir() if _NAME.fullmatch(path.name)), reverse=True)

    def _restore_replaced(self) -> None:
        """After a kill between the two renames of `_put_in_place`."""
        for replaced in self.path.glob(".step-*.old"):
            final = self.path / replaced.name.removeprefix(".").removesuffix(".old")
            if final.exists():
                shutil.rmtree(replaced, ignore_errors=True)
            else:
                replaced.rename(final)

    def _drop_old(self) -> None:
        """Only after the newest one is in place, with its name on disk."""
        for folder in self._newest_first()[self._keep :]:
            shutil.rmtree(folder, ignore_errors=True)

    def _sweep(self) -> None:
        for leftover in self.path.glob(".step-*.tmp"):
            shutil.rmtree(leftover, ignore_errors=True)


def read_checkpoint(folder: Path) -> Checkpoint:
    """Checks every sum, then reads. Any damage is one `DamagedCheckpoint` that names the file."""
    check_sums(folder)
    with _as_checkpoint_error(folder):
        state: dict[str, Any] = json.loads((folder / _STATE).read_text())
        parts = _counted(RankShards, state.pop("parts")) if "parts" in state else None
        return Checkpoint(read_progress(state), load_file(folder / _MODEL), load_file(folder / _OPTIMIZER), parts)


def check_sums(folder: Path) -> None:
    """Raises `DamagedCheckpoint` unless the common files are what was written."""
    with _as_checkpoint_error(folder):
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
        if manifest["format"] != _FORMAT:
            raise CheckpointError(f"{folder} has format {manifest['format']}, this version reads {_FORMAT}")
        for name in (_MODEL, _OPTIMIZER, _STATE):
            if sha256_of(folder / name) != manifest["sha256"][name]:
                raise DamagedCheckpoint(f"{folder / name} is damaged: its SHA-256 is not the one written")


def _peek(folder: Path) -> Progress | None:
    with contextlib.suppress(CheckpointError), _as_checkpoint_error(folder):
        state = json.loads((folder / _STATE).read_text())
        state.pop("parts", None)
        return read_progress(state)
    return None


def read_progress(state: dict[str, Any]) -> Progress:
    history = tuple((str(lineage), int(step)) for lineage, step in state.pop("history", ()))
    return _counted(Progress, {**state, "history": history})


def _counted(kind: type[Counts], numbers: dict[str, Any]) -> Counts:
    """A training that went on from anything else than whole numbers would fail much later, if at all."""
    found = kind(**numbers)
    for each in fields(found):  # type: ignore[arg-type]
        number = getattr(found, each.name)
        if each.type == "int" and (type(number) is not int or not 0 <= number < 1 << 63):
            raise ValueError(f"{each.name} is {number!r:.40}, which is no count")
    return found


class DamagedCheckpoint(CheckpointError):
    """Its bytes are not those that were written; a file that merely cannot be read now may be whole."""


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


def _write(folder: Path, checkpoint: Checkpoint, ledger: FileMark | None) -> None:
    save_file(checkpoint.model, folder / _MODEL)
    save_file(checkpoint.optimizer, folder / _OPTIMIZER)
    parts = {"parts": asdict(checkpoint.parts)} if checkpoint.parts else {}
    (folder / _STATE).write_text(json.dumps(asdict(checkpoint.progress) | parts))
    if ledger is not None:
        (folder / _LEDGER).write_text(json.dumps(asdict(ledger)))
    sums = {file.name: sha256_of(file) for file in sorted(folder.iterdir())}
    (folder / MANIFEST).write_text(json.dumps({"format": _FORMAT, "sha256": sums}, indent=1))
    for file in folder.iterdir():
        sync_path(file)
    sync_path(folder)


def _put_in_place(temporary: Path, final: Path) -> None:
    """A checkpoint of the same step is moved aside first and removed last: a kill in between must not leave none."""
    replaced = final.with_name(f".{final.name}.old")
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    temporary.rename(final)
    sync_path(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _set_aside(folder: Path, why: str) -> None:
    names = (f"{folder.name}.{why}{suffix}" for suffix in ("", *(f"-{number}" for number in range(2, 1000))))
    free = next(path for name in names if not (path := folder.with_name(name)).exists())
    with contextlib.suppress(OSError):
        folder.rename(free)


def sha256_of(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


# SECTION train/part
# One rank's own part of a checkpoint: `rank-N.safetensors`, beside the common state on the rank's own machine.
#
# It carries the mark of its save. A part of the same step from another life of the run, left on a machine that was away
# for a while, does not fit and is refused.


def write_part(folder: Path, rank: int, tensors: Mapping[str, Tensor], mark: int) -> None:
    """Into the folder of a checkpoint that is not complete yet: its manifest will hold the sum."""
    file = _file(folder, rank)
    try:
        save_file(dict(tensors), file, metadata={"mark": str(mark)})
    except (OSError, SafetensorError) as error:
        file.unlink(missing_ok=True)
        raise CheckpointError(
            f"cannot write the part of rank {rank} in {folder}: {error}",
            why="without it a run resumed from this checkpoint goes on from the common state only",
            fix=f"free space or fix the folder: df -h {folder.parent}",
        ) from error


def read_part(folder: Path, rank: int, mark: int) -> dict[str, Tensor]:
    """Whole, undamaged and of this very save, or a `CheckpointError` that says what it is instead."""
    file = _file(folder, rank)
    try:
        sums = json.loads((folder / MANIFEST).read_text())["sha256"]
        if sha256_of(file) != sums[file.name]:
            raise CheckpointError(f"{file} is damaged: its SHA-256 is not the one written")
        with safe_open(file, framework="pt") as opened:
            found = (opened.metadata() or {}).get("mark")
        if found != str(mark):
            raise CheckpointError(f"{file} belongs to another life of this run")
        return load_file(file)
    except FileNotFoundError as error:
        raise CheckpointError(f"{error.filename} is missing") from error
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be used: {error}") from error


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.safetensors"


# SECTION train/state
# What a replica is: weights, the optimizer's moments, and how far it has come. One naming for files and digests.


_MOMENTS = ("exp_avg", "exp_avg_sq")


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}


def moments(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Named after their parameters; empty before the first step."""
    return {
        f"optimizer.{moment}.{name}": state[moment]
        for name, parameter in model.named_parameters()
        if (state := optimizer.state.get(parameter))
        for moment in _MOMENTS
    }


def empty_moments(model: nn.Module) -> dict[str, Tensor]:
    """Room for moments that somebody else is about to send."""
    return {
        f"optimizer.{moment}.{name}": torch.empty_like(parameter)
        for name, parameter in model.named_parameters()
        for moment in _MOMENTS
    }


@torch.no_grad()
def fill(room: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in room.items():
        tensor.copy_(_take(tensors, name, tensor))


@torch.no_grad()
def load_weights(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        parameter.copy_(_take(tensors, f"model.{name}", parameter))


def load_moments(model: nn.Module, optimizer: Optimizer, tensors: dict[str, Tensor], step: int) -> None:
    for name, parameter in model.named_parameters():
        optimizer.state[parameter] = {
            # The fused kernel wants its count as a tensor beside the parameter.
            "step": torch.tensor(float(step), device=parameter.device),
            **{
                moment: _take(tensors, f"optimizer.{moment}.{name}", parameter).to(parameter.device)
                for moment in _MOMENTS
            },
        }


def digest(tensors: dict[str, Tensor]) -> str:
    """SHA-256 over names and bytes; equal digests are equal replicas."""
    hasher = hashlib.sha256()
    for name in sorted(tensors):
        hasher.update(name.encode())
        hasher.update(flat_bytes(tensors[name]))
    return hasher.hexdigest()


def _take(tensors: Mapping[str, Tensor], name: str, like: Tensor) -> Tensor:
    tensor = tensors.get(name)
    if tensor is None or tensor.shape != like.shape or tensor.dtype != like.dtype:
        found = "nothing" if tensor is None else f"{tuple(tensor.shape)} {tensor.dtype}"
        raise CheckpointError(
            f"the checkpoint has {found} for {name}, the model wants {tuple(like.shape)} {like.dtype}",
            why="it was written by a run with another model",
            fix="resume with the configuration of the run that wrote it",
        )
    return tensor
