"""Do all replicas agree, bit for bit?

Ranks of a data-parallel run apply the same summed gradient to the same weights, so their final states are the same
bytes. One differing bit means that some rank trained another model, and nothing else in a run would show it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shlex
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict
from safetensors import SafetensorError, safe_open

from shoal.config.load import load_config
from shoal.errors import DataError
from shoal.events import Event
from shoal.run_folder import RunFolder, may, no_access
from shoal.tools.report.membership import elsewhere, is_joined, last_members
from shoal.tools.report.rank_log import Floats, collect

# SECTION report/statefile
# A safetensors file as named spans of raw bytes.
#
# The library's numpy reader knows no bfloat16 and loads whole tensors. A comparison of bits needs neither types nor
# more than a block at a time, so the library only checks the file here, and the bytes are read directly.


BLOCK_BYTES = 4 * 2**20  # a multiple of every element size, so that no block cuts a number in two

_NUMPY = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2",
    "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "u1",
}  # fmt: skip


@dataclass(frozen=True)
class Tensor:
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class StateFile:
    path: Path
    tensors: dict[str, Tensor]

    def blocks(self, tensor: Tensor) -> Iterator[bytes]:
        with self.path.open("rb") as file:
            file.seek(tensor.begin)
            for begin in range(tensor.begin, tensor.end, BLOCK_BYTES):
                yield file.read(min(BLOCK_BYTES, tensor.end - begin))


def open_state(path: Path) -> StateFile:
    if path.exists() and not may(path, os.R_OK):
        # The library says of such a file that it is not there.
        raise no_access(path, "be read")
    try:
        with safe_open(path, framework="np"):  # checks the header, the offsets and the length of the file
            pass
        return StateFile(path, _read_header(path))
    except (SafetensorError, OSError) as error:
        raise DataError(
            f"{path} cannot be read: {error}",
            why="the file is missing, cut off or damaged; a rank writes it as the last thing it does",
            fix=f"let the run write it again: shoal train --resume {path.parent}",
        ) from None


def as_floats(block: bytes, dtype: str) -> Floats | None:
    """The numbers of a block, or None for a type that numpy cannot widen (8-bit floats)."""
    if dtype == "BF16":
        block, dtype = (np.frombuffer(block, "<u2").astype("<u4") << np.uint32(16)).tobytes(), "F32"
    if dtype not in _NUMPY:
        return None
    with np.errstate(invalid="ignore"):  # a flipped bit can make a signalling NaN, which numpy warns of when widening
        return np.frombuffer(block, _NUMPY[dtype]).astype(np.float64)


def _read_header(path: Path) -> dict[str, Tensor]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        entries = json.loads(file.read(length))
    entries.pop("__metadata__", None)
    return {name: _tensor(entry, 8 + length) for name, entry in sorted(entries.items())}


def _tensor(entry: dict[str, list[int]], origin: int) -> Tensor:
    begin, end = entry["data_offsets"]
    return Tensor(str(entry["dtype"]), tuple(entry["shape"]), origin + begin, origin + end)


TOLERANCE = 1e-5


class ReplicaReport(BaseModel):
    """The verdict on a run's replicas, each compared with the lowest rank.

    `equal` allows differences up to `TOLERANCE`; `byte_equivalent` allows none, so a zero that changed its sign counts
    and two NaNs of the same bits do not. `max_abs_diff` is infinite where no number can say how far apart two states
    are: a tensor missing on one side, of another shape or type, or a NaN against a number. `tensors` is None where only
    digests were compared. `left_out` are ranks that wrote a state once and took no part in the end; `elsewhere` are
    those that took part and whose state lies on a machine that came later, or, seen from there, on the others.
    """

    model_config = ConfigDict(ser_json_inf_nan="strings")

    equal: bool
    byte_equivalent: bool
    max_abs_diff: float
    first_difference: str | None
    ranks: int
    tensors: int | None
    differing_ranks: list[int]
    digests: dict[int, str]
    left_out: list[int] = []
    elsewhere: list[int] = []


def compare_replicas(
    files: dict[int, Path], members: Collection[int] = (), folder: Path | None = None
) -> ReplicaReport:
    """Digests first; only files that differ are read a second time, to name what differs and by how much.

    Files are read block by block, so memory does not grow with the model. `members`, where known, are the ranks that
    took part in the end: a state that one of them never wrote is an error instead of a smaller comparison, and those of
    others are left out. `folder` is the run's, for advice.
    """
    _refuse_missing(files, members, folder)
    left_out = [rank for rank in sorted(files) if members and rank not in members]
    files = {rank: path for rank, path in files.items() if rank not in left_out}
    states = {rank: open_state(path) for rank, path in sorted(files.items())}
    digests = {rank: digest(state) for rank, state in states.items()}
    reference = states[min(states)]
    differing = [rank for rank, value in digests.items() if value != digests[min(states)]]
    differences = [found for rank in differing for found in compare_states(reference, states[rank])]
    largest = max((distance for _, distance in differences), default=0.0)
    return ReplicaReport(
        equal=largest <= TOLERANCE,
        byte_equivalent=not differing,
        max_abs_diff=largest,
        first_difference=min((name for name, _ in differences), default=None),
        ranks=len(states),
        tensors=len(reference.tensors),
        differing_ranks=differing,
        digests=digests,
        left_out=left_out,
    )


def judge_replicas(run: RunFolder) -> ReplicaReport:
    """By the states where they all are in this folder; by the digests that the ranks sent home where they stayed on
    machines with disks of their own, and where some are elsewhere: there the same digests can be read."""
    logs = collect(run.read_all_events())
    on = load_config(run.config).run.on
    away = elsewhere(logs, is_joined(on, logs))
    files, members = run.state_files(), [rank for rank in last_members(logs) if rank not in away]
    shares_disk = on.startswith(("local", "lab"))
    if away or (not shares_disk and not files.keys() >= set(members)):
        digests = final_digests(run.read_all_events())
        if digests.keys() >= set(members):
            report = compare_digests({rank: digests[rank] for rank in members})
            return report.model_copy(update={"elsewhere": list(away)})
    return compare_replicas(files, members, run.path)


def final_digests(events: Iterable[Event]) -> dict[int, str]:
    """What each rank's state was when it ended; one that has started again since has none."""
    found: dict[int, str] = {}
    for event in events:
        kind, rank = event.get("event"), event.get("rank")
        if kind == "digest" and isinstance(rank, int) and isinstance(event.get("sha256"), str):
            found[rank] = event["sha256"]
        elif kind == "start" and isinstance(rank, int):
            found.pop(rank, None)
    return found


def compare_digests(digests: dict[int, str]) -> ReplicaReport:
    """Equal or not; the states that could say by how much lie on the machines that wrote them."""
    differing = [rank for rank, value in sorted(digests.items()) if value != digests[min(digests)]]
    return ReplicaReport(
        equal=not differing,
        byte_equivalent=not differing,
        max_abs_diff=math.inf if differing else 0.0,
        first_difference=None,
        ranks=len(digests),
        tensors=None,
        differing_ranks=differing,
        digests=digests,
    )


def digest(state: StateFile) -> str:
    """SHA-256 of names, types, shapes and bytes; a file's metadata is left out, which may name its rank."""
    value = hashlib.sha256()
    for name, tensor in state.tensors.items():
        value.update(f"{name} {tensor.dtype} {tensor.shape} ".encode())
        for block in state.blocks(tensor):
            value.update(block)
    return value.hexdigest()


def compare_states(ours: StateFile, theirs: StateFile) -> Iterator[tuple[str, float]]:
    """Every tensor that differs in any bit, with the largest distance between its numbers."""
    for name in sorted(ours.tensors.keys() | theirs.tensors.keys()):
        a, b = ours.tensors.get(name), theirs.tensors.get(name)
        if a is None or b is None or (a.dtype, a.shape) != (b.dtype, b.shape):
            yield name, math.inf
            continue
        pairs = zip(ours.blocks(a), theirs.blocks(b), strict=True)
        distances = [max_distance(x, y, a.dtype) for x, y in pairs if x != y]
        if distances:
            yield name, max(distances)


def max_distance(ours: bytes, theirs: bytes, dtype: str) -> float:
    """The largest distance between two blocks of numbers; infinite where it is not a number."""
    a, b = as_floats(ours, dtype), as_floats(theirs, dtype)
    if a is None or b is None:
        return math.inf
    same = (a == b) | (np.isnan(a) & np.isnan(b))  # inf - inf is not a number, but the two are the same
    with np.errstate(invalid="ignore", over="ignore"):
        distance = np.where(same, 0.0, np.abs(a - b))
    return float(np.nan_to_num(distance, nan=math.inf, posinf=math.inf).max(initial=0.0))


def _refuse_missing(files: dict[int, Path], members: Collection[int], folder: Path | None) -> None:
    missing = sorted(set(members) - files.keys())
    if files and not missing:
        return
    who = f"rank {', '.join(map(str, missing))} wrote" if files else "this run has"
    raise DataError(
        f"{who} no state-rank-N.safetensors, so there is nothing to compare",
        why="each rank writes its state when the run ends; this one is still running or ended early",
        fix="finish it, then verify again" + (f": shoal train --resume {shlex.quote(str(folder))}" if folder else ""),
    )
