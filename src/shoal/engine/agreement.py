"""Whether the programs of all ranks train the same: the same data, and the same model with the same optimizers.

Programs differ by mistake: a width that depends on the rank, data made with another seed, a layer that is frozen on one
machine. Exchanged tensors would then have other sizes or other meanings, and the error would be about connections,
samples or memory. So ranks compare descriptions first, and name the first difference.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

from torch import Tensor

from shoal.engine.batches import Source
from shoal.engine.training_state import TrainingState
from shoal.errors import UsageError
from shoal.sync.replicas import gather_integers
from shoal.sync.world import World
from shoal.units import rank_list

# Options of optimizers that change how an update is computed and not what: a GPU and a processor may have other ones.
_IMPLEMENTATION = {"params", "fused", "foreach", "capturable", "differentiable"}
# Bytes of a description that travel when ranks differ.
_TEXT_BYTES = 240


def check_same_data(world: World, source: Source) -> None:
    rows = gather_integers(world, [-1 if source.count is None else source.count, source.fingerprint()])
    if len({tuple(row) for row in rows}) == 1:
        return
    counts = [count for count, _ in rows]
    other = next(rank for rank, row in enumerate(rows) if row != rows[0])
    seen = (
        f"rank 0 has a dataset of {counts[0]:,} samples, {rank_list([world.ids[other]])} one of {counts[other]:,}"
        if counts[other] != counts[0]
        else f"the datasets of rank 0 and {rank_list([world.ids[other]])} have the same length and other samples"
    )
    raise UsageError(
        seen,
        why="each sample of an epoch is used once by one rank, so all ranks must have the same data in the same order",
        fix="give every rank the whole dataset: shoal divides it; data made at random needs the same seed on every "
        "rank: torch.manual_seed(…) before it is made",
    )


def check_same_training(world: World, state: TrainingState, reference: int | None = None) -> None:
    """Raise `UsageError` if the models, optimizers or other attached objects of two ranks differ.

    At a launch every rank raises. Ranks that join the others later compare themselves with `reference`, and only those
    that differ raise: they do not end the run. Options of the optimizers, such as the learning rate, are compared at a
    launch only: they change while a run trains.
    """
    source = reference or 0
    lines = list(describe_training(state, has_options=reference is None))
    sums = [zlib.crc32(line.encode()) for line in lines]
    rows = gather_integers(world, [len(lines), zlib.crc32("\n".join(lines).encode())])
    different = [rank for rank, row in enumerate(rows) if row != rows[source]]
    if not different:
        return
    longest = max(count for count, _ in rows)
    columns = gather_integers(world, sums + [0] * (longest - len(sums)))
    pairs = zip(columns[source], columns[different[0]], strict=True)
    at = next((number for number, (one, other) in enumerate(pairs) if one != other), 0)
    texts = _gather_texts(world, lines[at] if at < len(lines) else "nothing more")
    if reference is None or world.rank in different:
        raise UsageError(
            f"the ranks train different things: rank {world.ids[source]} has {texts[source]}, "
            f"and rank {world.ids[different[0]]} {texts[different[0]]}",
            why="gradients and weights are exchanged by their places, so all ranks must build the same model, "
            "optimizers and other attached objects",
            fix="build them on every rank from the same versions and arguments, without session.rank and world_size",
        )


def describe_training(state: TrainingState, has_options: bool) -> Iterator[str]:
    """Yield a line for every parameter, buffer, optimizer, group of parameters and other attached object."""
    for name, parameter in state.model.named_parameters():
        is_frozen = "" if parameter.requires_grad else ", frozen"
        yield f"the parameter {name} with {_shape(parameter)}{is_frozen}"
    for name, buffer in state.model.named_buffers():
        yield f"the buffer {name} with {_shape(buffer)}"
    for optimizer in state.optimizers:
        kind = type(optimizer).__name__
        for number, group in enumerate(optimizer.param_groups):
            options = [f"{key}={value}" for key, value in sorted(group.items()) if key not in _IMPLEMENTATION]
            values = f" with {', '.join(options)}" if has_options else ""
            yield f"the group {number} of {kind} over {len(group['params'])} parameters{values}"
    for other in state.others:
        yield f"a {type(other).__qualname__}"


def _shape(tensor: Tensor) -> str:
    sizes = " × ".join(map(str, tensor.shape)) or "one"
    return f"{sizes} numbers of type {str(tensor.dtype).removeprefix('torch.')}"


def _gather_texts(world: World, text: str) -> list[str]:
    """Return a short text of every rank, on all ranks."""
    raw = text.encode()[:_TEXT_BYTES]
    rows = gather_integers(world, [len(raw), *raw.ljust(_TEXT_BYTES)])
    return [bytes(row[1 : 1 + row[0]]).decode(errors="replace") for row in rows]
