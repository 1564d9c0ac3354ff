"""Compare replicas bit by bit while they train, and repair those that differ.

Every rank sums the same gradients and takes the same steps, so a bit that flips in one rank's memory stays in that rank
alone, and silently spoils the gradients of all ranks from then on. If a majority agrees, the others copy its state. If
none does (for instance with two ranks), all return to the newest checkpoint: replicas were compared before it was
written, so all of them agreed on it.

A GPU and a processor round differently, though: the same update of the same numbers differs in last bits. In a world
with both, ranks on a GPU take the state of a rank on a processor at each comparison.

Of a divided model, two ranks keep each part. If they differ, there is no majority: other ranks have the weights as the
part's owner has sent them, right or wrong.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from shoal.engine.checkpoint import CheckpointFolder
from shoal.engine.part_copies import ROUNDING, CopyDifference, copy_from_owners, find_differing_copies
from shoal.engine.replica import Replica
from shoal.engine.resume import resume_training
from shoal.engine.saving import replica_state
from shoal.engine.state_transfer import broadcast_json
from shoal.engine.training_state import StateTree
from shoal.errors import CheckpointError, RunFailed
from shoal.sync.replicas import broadcast_integers, broadcast_tensors, combine_digests, gather_integers, tensor_digests
from shoal.sync.step_stats import max_over_world
from shoal.units import rank_names

_NO_CHECKPOINT = -1


@dataclass(frozen=True)
class Difference:
    odd: tuple[int, ...]  # The ranks that differ from the majority; all ranks if there is no majority.
    source: int | None  # The lowest rank of the majority.
    tensor: str  # The first tensor by name that differs.
    part: int | None = None  # The owner of the part of a divided model whose two copies differ.


def find_difference(names: Sequence[str], digests_by_rank: Sequence[Sequence[int]]) -> Difference:
    """Find the odd ranks by their digests of the same tensors, of which some differ."""
    rows = [tuple(row) for row in digests_by_rank]
    usual, count = Counter(rows).most_common(1)[0]
    has_majority = 2 * count > len(rows)
    odd = tuple(rank for rank, row in enumerate(rows) if row != usual or not has_majority)
    return Difference(odd, rows.index(usual) if has_majority else None, _first_differing(names, rows))


def find_rounding(devices: Sequence[str], names: Sequence[str], digests: Sequence[Sequence[int]]) -> Difference | None:
    """Find the ranks on GPUs if they differ from those on processors, and ranks of one kind agree."""
    kinds = [device == "cpu" for device in devices]
    rows = [tuple(row) for row in digests]
    if len(set(kinds)) < 2 or len(set(zip(kinds, rows, strict=True))) > 2:
        return None
    source = kinds.index(True)
    odd = tuple(rank for rank, is_processor in enumerate(kinds) if not is_processor)
    return Difference(odd, source, _first_differing(names, rows))


def _first_differing(names: Sequence[str], rows: Sequence[Sequence[int]]) -> str:
    columns = zip(*rows, strict=True)
    return min(name for name, digests in zip(names, columns, strict=True) if len(set(digests)) > 1)


def _difference_of(copies: Sequence[CopyDifference]) -> Difference:
    first = next((copy for copy in copies if not copy.is_rounding), copies[0])
    return Difference((first.owner, first.holder), None, first.tensor, first.owner)


class Comparison:
    """Compares and repairs the replicas. The step alone decides when: a rank that has just joined must do the same."""

    def __init__(self, replica: Replica, checkpoints: CheckpointFolder, settle: Callable[[], object]) -> None:
        self._replica = replica
        self._settle = settle  # Waits for the statistics of all steps so far.
        self._checkpoints = checkpoints
        self._has_aligned = False

    def is_due(self, step: int) -> bool:
        """Return whether to compare after `step`: every `digest_every` steps, and after the last step.

        A step inside a round is postponed to the round's end: replicas would have to wait for each other before that.
        """
        every, outer = self._replica.config.members.digest_every, self._replica.outer
        is_common_step = outer.common_step(step) == step
        stride = 1 if outer.differs_now else outer.round_steps
        is_last = step == self._replica.config.train.steps
        return is_last or (is_common_step and step // every > (step - stride) // every)

    def compare(self, is_end: bool = False) -> bool:
        """Return True if all replicas are equal, if need be after a copy; False if the training went back.

        At the end of a training there is no going back: it fails.
        """
        copies = find_differing_copies(self._replica)
        if copies and not self._align_copies(copies):
            self._go_back(_difference_of(copies), is_end)
            return False
        differing = self._gather_digests()
        if differing is None:
            return True
        names, digests = differing
        rounding = find_rounding(self._replica.world.devices, names, digests)
        if rounding is not None and rounding.source is not None and self._have_equal_norms():
            self._copy_state(rounding, rounding.source)
            self._report_rounding(rounding)
            return True
        difference = find_difference(names, digests)
        if difference.source is None:
            self._go_back(difference, is_end)
            return False
        self._copy_state(difference, difference.source)
        source_id = self._replica.world.ids[difference.source]
        action = f"its whole state was copied from rank {source_id}"
        self._report(difference, self._replica.progress.step, action, healed_from=source_id)
        return True

    def _align_copies(self, copies: Sequence[CopyDifference]) -> bool:
        """Give copies that differ by rounding the numbers of their owners; return whether all differ by that."""
        replica, divided = self._replica, self._replica.state.divided
        if divided is None or not all(copy.is_rounding for copy in copies):
            return False
        with replica.outer.common():
            copy_from_owners(divided, replica.world)
        if remaining := find_differing_copies(replica):
            raise self._explain_unrepaired(_difference_of(remaining), copies[0].tensor)
        ids = replica.world.ids
        why = "they round differently than the owners of these parts. That is done at each comparison from now on"
        pairs = ", ".join(f"rank {ids[copy.holder]} took those of rank {ids[copy.owner]}" for copy in copies)
        self._record_aligned([ids[copy.holder] for copy in copies], copies[0].tensor, f"copied moments: {pairs}: {why}")
        return True

    def _gather_digests(self) -> tuple[list[str], list[list[int]]] | None:
        """Return the names of the tensors and every rank's digests of them; None if all ranks have the same."""
        replica = self._replica
        if replica.world.size == 1:
            return None
        with replica.outer.common():
            digests = tensor_digests(replica_state(replica))
        if len({number for [number] in gather_integers(replica.world, [combine_digests(digests)])}) == 1:
            return None
        return list(digests), gather_integers(replica.world, list(digests.values()))

    def _have_equal_norms(self) -> bool:
        """Whether the tensors of all replicas are as similar as rounding leaves them."""
        replica = self._replica
        with replica.outer.common():
            tensors = [tensor for tensor in replica_state(replica).values() if tensor.is_floating_point()]
            norms = [float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) for tensor in tensors]
        # A NaN compares with nothing: it counts as the largest number and as the smallest.
        highest = max_over_world(replica.world, [math.inf if math.isnan(norm) else norm for norm in norms])
        lowest = max_over_world(replica.world, [math.inf if math.isnan(norm) else -norm for norm in norms])
        pairs = zip(highest, lowest, strict=True)
        return all(math.isfinite(high) and high + low <= ROUNDING * high for high, low in pairs)

    def _copy_state(self, difference: Difference, source: int) -> None:
        """Copy the state of a rank to the odd ranks."""
        replica = self._replica
        is_odd = replica.world.rank in difference.odd
        if is_odd:
            # Its bits are wrong: no other rank may continue from them, even if the copy fails.
            replica.fence.mark_overwritten()
        with replica.outer.common():
            # The others keep their own state: losing the source during the copy costs nothing.
            broadcast_tensors(replica.world, source, replica_state(replica).values(), keep=is_odd)
            common = {name: tensor.clone() for name, tensor in replica.common_weights().items()}
            optimizer = broadcast_json(replica.world, source, replica.state.optimizer_state().values)
        if is_odd:
            # Outside a common step a replica has weights of its own, derived from the wrong ones.
            replica.state.load_weights(common)
            replica.state.load_optimizer_state(StateTree(replica.state.optimizer_state().tensors, optimizer))
        self._check_repaired(difference)
        replica.fence.set_step(replica.outer.common_step(replica.progress.step))

    def _go_back(self, difference: Difference, is_end: bool) -> None:
        """Return all ranks to the newest checkpoint."""
        replica, step = self._replica, self._replica.progress.step
        # Statistics of the steps so far must not be taken for those of the steps that are repeated.
        self._settle()
        replica.recorder.commit()
        saved_step = self._find_saved_step()
        # Other members rely on the state that the generation began with: going back behind it takes a new launch.
        if is_end or saved_step == _NO_CHECKPOINT or saved_step < replica.fence.min_step:
            self._record(difference, step)
            raise self._explain_end(difference, saved_step)
        history = replica.history
        replica.fence.mark_overwritten()
        resume_training(replica, self._checkpoints, lambda *_: None, lineage="")
        # The same lineage continues.
        replica.set_history(history)
        replica.fence.set_step(replica.outer.common_step(replica.progress.step))
        self._check_repaired(difference)
        back_to = replica.progress.step
        replica.recorder.forget_committed(after=back_to)
        action = f"all went back to step {back_to}, the last they had agreed on, and do the steps since then again"
        self._report(difference, step, action, back_to=back_to)

    def _find_saved_step(self) -> int:
        """Return, on all ranks alike, the step of the newest checkpoint in the first rank's folder."""
        saved_step = _NO_CHECKPOINT
        if self._replica.world.is_main:
            with suppress(CheckpointError):
                saved_step = self._checkpoints.load_latest(set_aside=True).progress.step
        return broadcast_integers(self._replica.world, 0, [saved_step])[0]

    def _check_repaired(self, difference: Difference) -> None:
        differing, copies = self._gather_digests(), find_differing_copies(self._replica)
        if differing is not None:
            raise self._explain_unrepaired(find_difference(*differing), difference.tensor)
        if copies and not all(copy.is_rounding for copy in copies):
            raise self._explain_unrepaired(_difference_of(copies), difference.tensor)

    def _explain_unrepaired(self, remaining: Difference, tensor: str) -> RunFailed:
        return RunFailed(
            f"{self._describe(remaining, self._replica.progress.step)}, right after all had been made equal",
            why=f"before that it was {tensor}: the memory of one of these machines is unreliable",
            fix="test it (memtester 1G 1) before you resume: shoal train --resume RUN",
        )

    def _explain_end(self, difference: Difference, saved_step: int) -> RunFailed:
        seen = self._describe(difference, self._replica.progress.step)
        if saved_step == _NO_CHECKPOINT:
            return RunFailed(
                seen,
                why="no majority shows which of them is right, and there is no checkpoint yet to go back to. Either "
                "the program changes the model on one rank, or a bit changed in memory",
                fix="look for code that changes the model outside of step.update; if there is none, test the memory of "
                "these machines (memtester 1G 1)",
            )
        return RunFailed(
            f"{seen}: what was done since step {saved_step} is not saved",
            why="no majority shows which of them is right",
            fix=f"resume from step {saved_step}, the last they agreed on: shoal train --resume RUN",
        )

    def _report(
        self, difference: Difference, step: int, action: str, healed_from: int | None = None, back_to: int | None = None
    ) -> None:
        recorder = self._replica.recorder
        self._record(difference, step, healed_from, back_to)
        if self._replica.world.is_main:
            fix = "if it happens again, test the memory of their machines: memtester 1G 1"
            recorder.warn(
                RunFailed(f"{self._describe(difference, step)}: {action}", why="a bit changed in memory", fix=fix),
                step=step,
            )

    def _record(
        self, difference: Difference, step: int, healed_from: int | None = None, back_to: int | None = None
    ) -> None:
        fields: dict[str, object] = {"tensor": difference.tensor, "healed_from": healed_from, "back_to": back_to}
        if difference.part is not None:
            fields["part"] = self._replica.world.ids[difference.part]
        self._replica.recorder.event("divergence", step=step, ranks=self._odd_ids(difference), **fields)

    def _report_rounding(self, difference: Difference) -> None:
        """Record that ranks on GPUs took the state of a rank on a processor, and explain it the first time."""
        replica, ranks = self._replica, self._odd_ids(difference)
        source = replica.world.ids[difference.source or 0]
        why = (
            f"{rank_names(ranks)}, on a GPU, took the state of rank {source}, on a processor: they round differently. "
            "That is done at each comparison and checkpoint from now on"
        )
        self._record_aligned(ranks, difference.tensor, why, source=source)

    def _record_aligned(self, ranks: Sequence[int], tensor: str, why: str, **fields: int) -> None:
        first = {} if self._has_aligned else {"why": why}
        self._has_aligned = True
        recorder, step = self._replica.recorder, self._replica.progress.step
        recorder.event("aligned", step=step, ranks=list(ranks), tensor=tensor, **fields, **first)

    def _describe(self, difference: Difference, step: int) -> str:
        if difference.part is not None:
            return (
                f"after step {step} {rank_names(self._odd_ids(difference))} have different copies of the part of rank "
                f"{self._replica.world.ids[difference.part]}, first in {difference.tensor}"
            )
        than = "than the others" if difference.source is not None else "than each other"
        have = "has" if len(difference.odd) == 1 else "have"
        return f"after step {step} {rank_names(self._odd_ids(difference))} {have} another {difference.tensor} {than}"

    def _odd_ids(self, difference: Difference) -> list[int]:
        return [self._replica.world.ids[rank] for rank in difference.odd]
