"""Checkpoints of divided optimizers: joined while they are written, divided while they are read.

Every machine writes a whole checkpoint, in the format of every other run: any machine alone can resume it with any
number of ranks and any sync method, export it and sample from it, and losing a machine loses nothing. No rank has room
for what all of them keep together. So moments travel bucket by bucket from their owners to the files, and at a resume
tensor by tensor from a file to those who keep its pieces.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from shoal.engine.sharded_state import ONCE, WEIGHT, DividedOptimizers, divided_mark, dtype_of_mark, join
from shoal.engine.training_state import StateTree, TrainingState, take, tensor_at, weight_name
from shoal.errors import CheckpointError
from shoal.sync.replicas import broadcast_tensors, flat_bytes
from shoal.sync.sharded.exchange import Part, PartExchange
from shoal.sync.sharded.held import flat
from shoal.sync.world import World

# How safetensors names the types that a state can have.
_TYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


@dataclass(frozen=True)
class TensorShape:
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


class TensorFile:
    """A safetensors file whose tensors are written one by one, in any order."""

    def __init__(self, path: Path, shapes: Mapping[str, TensorShape]) -> None:
        self._begins: dict[str, int] = {}
        header: dict[str, Any] = {}
        end = 0
        # By size of their numbers, largest first: each tensor then begins at a multiple of it.
        for name, tensor in sorted(shapes.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])):
            self._begins[name], begin, end = end, end, end + tensor.nbytes
            header[name] = {"dtype": _TYPES[tensor.dtype], "shape": tensor.shape, "data_offsets": [begin, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self._data_begin = 8 + len(text)
        self._file: BinaryIO = path.open("wb")
        self._file.write(struct.pack("<Q", len(text)) + text)
        self._file.truncate(self._data_begin + end)

    def write(self, name: str, tensor: Tensor) -> None:
        self._file.seek(self._data_begin + self._begins[name])
        self._file.write(flat_bytes(tensor))

    def close(self) -> None:
        self._file.close()


class JoinedWriter:
    """Writes a file, or on a rank without files nothing. After an error it takes part in the exchanges all the same."""

    def __init__(self, path: Path | None, shapes: Mapping[str, TensorShape]) -> None:
        self._path = path
        self._error: OSError | None = None
        self._file: TensorFile | None = None
        if path is not None:
            try:
                self._file = TensorFile(path, shapes)
            except OSError as error:
                self._error = error

    def write(self, name: str, tensor: Tensor) -> None:
        if self._file is None or self._error is not None:
            return
        try:
            self._file.write(name, tensor)
        except OSError as error:
            self._error = error

    def close(self) -> None:
        """Close the file; raise the error that ended the writing."""
        try:
            if self._file is not None:
                self._file.close()
        except OSError as error:
            self._error = self._error or error
        if self._error is not None and self._path is not None:
            self._path.unlink(missing_ok=True)
            raise CheckpointError(
                f"cannot write the checkpoint {self._path.parent}: {self._error}",
                why="older checkpoints are untouched, but there is no newer one to return to",
                fix=f"free space or fix the folder: df -h {self._path.parent.parent}",
            ) from self._error


def write_joined(state: TrainingState, exchange: PartExchange | None, path: Path | None) -> Any:
    """Write the whole state of the optimizers to a file, on the ranks that give one; return its values.

    All ranks of the world call it. The ranks without a file only send.
    """
    divided = state.divided
    assert divided is not None  # noqa: S101 - the caller asks only for divided optimizers
    common = state.optimizer_state()
    values, whole = _with_tensors(common.values, state)
    shapes = {name: TensorShape(tensor.dtype, tuple(tensor.shape)) for name, tensor in common.tensors.items()}
    shapes |= {place.path: place.shape for place in whole}
    writer = JoinedWriter(path, shapes)
    for name, tensor in common.tensors.items():
        writer.write(name, tensor)
    for place, tensor in _joined(divided, whole, exchange):
        writer.write(place.path, tensor)
    writer.close()
    return values


def write_joined_weights(state: TrainingState, exchange: PartExchange | None, path: Path | None) -> None:
    """Write all weights to a file, on the ranks that give one, where weights are divided. All ranks call it."""
    divided = state.divided
    assert divided is not None  # noqa: S101 - the caller asks only for divided weights
    common = state.weights()
    shapes = {name: TensorShape(tensor.dtype, tuple(tensor.shape)) for name, tensor in common.items()}
    whole = [
        _WholeTensor(weight_name(name), name, WEIGHT, TensorShape(parameter.dtype, tuple(parameter.shape)))
        for name, parameter in divided.parameters.items()
    ]
    writer = JoinedWriter(path, shapes | {tensor.path: tensor.shape for tensor in whole})
    for name, tensor in common.items():
        writer.write(name, tensor)
    for place, tensor in _joined(divided, whole, exchange):
        writer.write(place.path, tensor)
    writer.close()


def load_joined_weights(state: TrainingState, world: World, source: int, weights: Mapping[str, Tensor] | None) -> None:
    """Load the divided weights that rank `source` has, on all ranks, each what it keeps."""
    divided = state.divided
    assert divided is not None  # noqa: S101 - the caller asks only for divided weights
    for name, parameter in divided.parameters.items():
        tensor = torch.empty(parameter.shape, dtype=parameter.dtype)
        if weights is not None:
            tensor = take(weights, weight_name(name), tensor).contiguous()
        broadcast_tensors(world, source, [tensor])
        divided.fill(parameter, WEIGHT, flat(torch.empty_like(parameter).copy_(tensor)))


@dataclass(frozen=True)
class _WholeTensor:
    """A tensor of an optimizer's state that is divided among the ranks."""

    path: str  # Its name in a file.
    parameter: str
    key: str
    shape: TensorShape


def _with_tensors(values: Any, state: TrainingState) -> tuple[Any, list[_WholeTensor]]:
    """Return the values of a whole state, and the tensors that its marks stand for."""
    parameters, documents = dict(state.model.named_parameters()), list(values)
    whole: list[_WholeTensor] = []
    for index in range(len(state.optimizers)):
        label = "optimizer" if index == 0 else f"optimizer{index}"
        named = {}
        for name, entries in documents[index]["state"].items():
            named[name] = dict(entries)
            for key, value in entries.items():
                if (dtype := dtype_of_mark(value)) is not None:
                    shape = TensorShape(dtype, tuple(parameters[name].shape))
                    tensor = _WholeTensor(f"{label}.state.{name}.{key}", name, key, shape)
                    whole.append(tensor)
                    named[name][key] = tensor_at(tensor.path)
        documents[index] = {**documents[index], "state": named}
    return documents, whole


def _joined(
    divided: DividedOptimizers, whole: Sequence[_WholeTensor], exchange: PartExchange | None
) -> Iterator[tuple[_WholeTensor, Tensor]]:
    """Yield every whole tensor, joined of the owners' pieces, one bucket at a time."""
    by_parameter: dict[str, list[_WholeTensor]] = {}
    for tensor in whole:
        by_parameter.setdefault(tensor.parameter, []).append(tensor)
    names = list(divided.parameters)
    for index, bucket in enumerate(divided.layout.buckets):
        tensors = [tensor for number in bucket.parameters for tensor in by_parameter.get(names[number], ())]
        for key, dtype in sorted({(t.key, t.shape.dtype) for t in tensors}, key=str):
            joined = join_bucket(divided, index, key, dtype, exchange)
            parts = dict(zip(bucket.parameters, joined.split(bucket.sizes), strict=True))
            for number in bucket.parameters:
                for tensor in by_parameter.get(names[number], ()):
                    if (tensor.key, tensor.shape.dtype) == (key, dtype):
                        yield tensor, join(divided.parameters[names[number]], parts[number])


def join_bucket(
    divided: DividedOptimizers, index: int, key: str, dtype: torch.dtype, exchange: PartExchange | None
) -> Tensor:
    """Return what the owners of a bucket's parts have under a key; zeros for parameters without it."""
    bucket = divided.layout.buckets[index]
    joined = torch.zeros(bucket.elements, dtype=dtype)
    begin, end = bucket.part(divided.rank)
    for piece in divided.held:
        if piece.bucket == index and piece.owner == divided.rank and divided.has(piece, key):
            place = piece.place
            joined[place.offset : place.offset + place.count].copy_(divided.tensor_of(piece, key))
    if exchange is not None:
        whole = Part(0, joined)
        exchange.gather_exact(index, Part(begin, joined[begin:end].clone()), whole, dtype).result()
    return joined


def load_joined(state: TrainingState, world: World, source: int, tree: StateTree | None) -> None:
    """Load a whole state of the optimizers that rank `source` has, on all ranks, each what it keeps."""
    divided, is_source = state.divided, world.rank == source
    assert divided is not None  # noqa: S101 - the caller asks only for divided optimizers
    parameters = dict(state.model.named_parameters())
    # Imported here: a transfer of state knows replicas, which know this module.
    from shoal.engine.state_transfer import broadcast_json, broadcast_state

    marked, whole = _with_marks(tree, parameters, len(state.optimizers)) if is_source and tree else (None, [])
    common = broadcast_state(world, source, marked)
    rows = [[t.path, t.parameter, t.key, str(t.shape.dtype).removeprefix("torch.")] for t in whole]
    state.load_optimizer_state(common)
    for path, name, key, dtype in broadcast_json(world, source, rows):
        parameter = parameters[name]
        tensor = torch.empty(parameter.shape, dtype=getattr(torch, dtype))
        if is_source and tree is not None:
            tensor = tree.tensors[path].contiguous()
        broadcast_tensors(world, source, [tensor])
        divided.fill(parameter, key, flat(torch.empty_like(parameter, dtype=tensor.dtype).copy_(tensor)))


def _with_marks(
    tree: StateTree, parameters: Mapping[str, Tensor], optimizers: int
) -> tuple[StateTree, list[_WholeTensor]]:
    """Return a whole state with marks in place of the tensors that are divided, and these tensors."""
    documents = list(tree.values)
    whole: list[_WholeTensor] = []
    for index in range(min(optimizers, len(documents))):
        named = {}
        for name, entries in documents[index]["state"].items():
            named[name] = dict(entries)
            for key, value in entries.items():
                path = value.get("$tensor") if isinstance(value, dict) else None
                if path is None or key in ONCE or name not in parameters:
                    continue
                tensor = tree.tensors[path]
                if tensor.shape == parameters[name].shape:
                    whole.append(_WholeTensor(path, name, key, TensorShape(tensor.dtype, tuple(tensor.shape))))
                    named[name][key] = divided_mark(tensor.dtype)
        documents[index] = {**documents[index], "state": named}
    divided = {tensor.path for tensor in whole}
    common = {name: tree.tensors[name] for name in tree.tensors if name not in divided}
    return StateTree(common, documents), whole
