"""Compare the final states of all replicas bit for bit.

Ranks of a data-parallel run apply the same summed gradient to the same weights, so their final states are the same
bytes. One differing bit means that a rank trained another model, and nothing else in a run would show it.
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
from shoal.records.history import is_joined, last_members, ranks_elsewhere
from shoal.records.measured_script import is_measured
from shoal.records.rank_log import Floats, read_rank_logs
from shoal.run_folder import RunFolder, is_accessible, no_access_error
from shoal.units import rank_list

TOLERANCE = 1e-5
BLOCK_BYTES = 4 * 2**20  # a multiple of every element size, so that no block cuts a number in two

_NUMPY = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2",
    "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "u1",
}  # fmt: skip


class ReplicaReport(BaseModel):
    """The result for a run's replicas, each compared with the lowest rank."""

    model_config = ConfigDict(ser_json_inf_nan="strings")

    equal: bool  # differences up to TOLERANCE are allowed
    byte_equivalent: bool  # no bit differs: -0.0 against 0.0 does, two NaNs of the same bits do not
    # Infinite where no number applies: a tensor is missing, has another shape or type, or is NaN on one side.
    max_abs_diff: float
    first_difference: str | None
    ranks: int
    tensors: int | None  # None where only digests were compared
    differing_ranks: list[int]
    digests: dict[int, str]
    left_out: list[int] = []  # ranks that wrote a state once and took no part at the end
    elsewhere: list[int] = []  # ranks that took part and whose state is on another machine


def compare_replicas(
    files: dict[int, Path], members: Collection[int] = (), folder: Path | None = None
) -> ReplicaReport:
    """Compare digests first; read only files that differ a second time, to name what differs and by how much.

    Files are read block by block, so memory does not grow with the model. `members`, where known, are the ranks that
    took part at the end: a missing state of a member is an error, and states of other ranks are left out.
    """
    missing = sorted(set(members) - files.keys())
    if missing or not files:
        who = f"{rank_list(missing)} wrote" if files else "this run has"
        name = f"state-rank-{missing[0] if files and len(missing) == 1 else 'N'}.safetensors"
        resume = f": shoal train --resume {shlex.quote(str(folder))}" if folder else ""
        raise DataError(
            f"{who} no {name}, so there is nothing to compare",
            why="each rank writes its state when the run ends; this run is still going or ended early",
            fix=f"finish it, then verify again{resume}",
        )
    left_out = [rank for rank in sorted(files) if members and rank not in members]
    files = {rank: path for rank, path in files.items() if rank not in left_out}
    states = {rank: open_state(path) for rank, path in sorted(files.items())}
    digests = {rank: _digest(state) for rank, state in states.items()}
    reference = states[min(states)]
    differing = [rank for rank, value in digests.items() if value != digests[min(states)]]
    differences = [pair for rank in differing for pair in _compare_states(reference, states[rank])]
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
    """Compare the states if all are in this folder, otherwise the digests that the ranks recorded in their events.

    The ranks of a measured script whose parameters are sharded have none: `digests` of the report is empty then.
    """
    logs = read_rank_logs(run.read_all_events())
    if is_measured(logs):
        digests = final_digests(run.read_all_events())
        return compare_digests({rank: digests[rank] for rank in last_members(logs) if rank in digests})
    on = load_config(run.config).run.on
    away = ranks_elsewhere(logs, is_joined(on, logs))
    files, members = run.state_files(), [rank for rank in last_members(logs) if rank not in away]
    shares_disk = on.startswith(("local", "lab"))
    if away or (not shares_disk and not files.keys() >= set(members)):
        digests = final_digests(run.read_all_events())
        if digests.keys() >= set(members):
            report = compare_digests({rank: digests[rank] for rank in members})
            return report.model_copy(update={"elsewhere": list(away)})
        if not shares_disk and files and (absent := sorted(set(members) - files.keys())):
            raise _not_sent(run, absent, on)
    return compare_replicas(files, members, run.path)


def _not_sent(run: RunFolder, ranks: list[int], on: str) -> DataError:
    """Return the error for ranks on other machines whose states are not in this folder."""
    names = ", ".join(run.state(rank).name for rank in ranks)
    why = "its machine did not send its files: the connection was lost before the run ended"
    if on.startswith("join"):
        why = "the machine that joined did not send its files: its shoal join ended before the run did"
    return DataError(
        f"{names} did not arrive here, so the replicas cannot be compared",
        why=why,
        fix="compare the digests: shoal verify ITS-RUN-FOLDER, on that machine",
    )


def final_digests(events: Iterable[Event]) -> dict[int, str]:
    """Return the digest of each rank's final state; a rank that has started again since has none."""
    digests: dict[int, str] = {}
    for event in events:
        kind, rank = event.get("event"), event.get("rank")
        if kind == "digest" and isinstance(rank, int) and isinstance(event.get("sha256"), str):
            digests[rank] = event["sha256"]
        elif kind == "start" and isinstance(rank, int):
            digests.pop(rank, None)
    return digests


def compare_digests(digests: dict[int, str]) -> ReplicaReport:
    """Compare digests only: how far the states differ can only be measured where they are."""
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


def _digest(state: StateFile) -> str:
    """Return the SHA-256 of names, types, shapes and bytes, without the metadata, which may name the rank."""
    value = hashlib.sha256()
    for name, tensor in state.tensors.items():
        value.update(f"{name} {tensor.dtype} {tensor.shape} ".encode())
        for block in state.blocks(tensor):
            value.update(block)
    return value.hexdigest()


def _compare_states(reference: StateFile, other: StateFile) -> Iterator[tuple[str, float]]:
    """Yield every tensor that differs in any bit, with the largest distance between its numbers."""
    for name in sorted(reference.tensors.keys() | other.tensors.keys()):
        a, b = reference.tensors.get(name), other.tensors.get(name)
        if a is None or b is None or (a.dtype, a.shape) != (b.dtype, b.shape):
            yield name, math.inf
            continue
        pairs = zip(reference.blocks(a), other.blocks(b), strict=True)
        distances = [_max_distance(x, y, a.dtype) for x, y in pairs if x != y]
        if distances:
            yield name, max(distances)


def _max_distance(reference: bytes, other: bytes, dtype: str) -> float:
    """Return the largest distance between two blocks of numbers; infinite where it is not a number."""
    a, b = _as_floats(reference, dtype), _as_floats(other, dtype)
    if a is None or b is None:
        return math.inf
    same = (a == b) | (np.isnan(a) & np.isnan(b))  # inf - inf is not a number, but the two are the same
    with np.errstate(invalid="ignore", over="ignore"):
        distance = np.where(same, 0.0, np.abs(a - b))
    return float(np.nan_to_num(distance, nan=math.inf, posinf=math.inf).max(initial=0.0))


@dataclass(frozen=True)
class Tensor:
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class StateFile:
    """A safetensors file as named ranges of raw bytes.

    The library's numpy reader does not support bfloat16 and loads whole tensors. Comparing bits needs no types and
    only one block at a time. So the library checks the file, and the bytes are read directly.
    """

    path: Path
    tensors: dict[str, Tensor]  # in the order of names

    def blocks(self, tensor: Tensor) -> Iterator[bytes]:
        with self.path.open("rb") as file:
            file.seek(tensor.begin)
            for begin in range(tensor.begin, tensor.end, BLOCK_BYTES):
                yield file.read(min(BLOCK_BYTES, tensor.end - begin))


def open_state(path: Path) -> StateFile:
    if path.exists() and not is_accessible(path, os.R_OK):
        # safetensors reports such a file as missing.
        raise no_access_error(path, "be read")
    try:
        with safe_open(path, framework="np"):  # checks the header, the offsets and the length of the file
            pass
        return StateFile(path, _read_header(path))
    except (SafetensorError, OSError) as error:
        raise DataError(
            f"{path} cannot be read: {error}",
            why="the file is missing, cut off or damaged; a rank writes it at the very end of a run",
            fix=f"let the run write it again: shoal train --resume {path.parent}",
        ) from None


def _as_floats(block: bytes, dtype: str) -> Floats | None:
    """Return the numbers of a block, or None for a type that numpy cannot widen (8-bit floats)."""
    if dtype == "BF16":
        block, dtype = (np.frombuffer(block, "<u2").astype("<u4") << np.uint32(16)).tobytes(), "F32"
    if dtype not in _NUMPY:
        return None
    with np.errstate(invalid="ignore"):  # widening a signalling NaN, which a flipped bit can make, warns
        return np.frombuffer(block, _NUMPY[dtype]).astype(np.float64)


def _read_header(path: Path) -> dict[str, Tensor]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        entries = json.loads(file.read(length))
    entries.pop("__metadata__", None)
    origin = 8 + length
    tensors = {}
    for name, entry in sorted(entries.items()):
        begin, end = entry["data_offsets"]
        tensors[name] = Tensor(str(entry["dtype"]), tuple(entry["shape"]), origin + begin, origin + end)
    return tensors
