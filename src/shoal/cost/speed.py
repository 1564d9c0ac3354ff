"""How fast a machine computes: the protocol, and the answer of a data sheet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from shoal.cost.catalogue import Machine
from shoal.cost.lever import Lever
from shoal.cost.step import RankWork
from shoal.cost.wire import MEMORY_BYTES, cpu_encode_s
from shoal.cost.workload import Workload

# Of a parameter in one update: AdamW reads four floats and writes three; clipping reads, reads and writes; clearing.
_UPDATE_BYTES = 4 * 11
# Operations of an update against those of forward and backward, as the times of small models on an H200 show them.
_UPDATE_STARTS = 0.2


class Speed(Protocol):
    def in_world(self, world_size: int) -> Speed:
        """The same machines while so many ranks take part; those of one machine are in each other's way."""
        ...

    def work(self, workload: Workload, rank: int, micro_batch: int, micro_batches: int) -> RankWork:
        """What `rank` computes in a step with so many micro-batches of `micro_batch` sequences."""
        ...

    def encode_s(self, lever: Lever, rank: int, parameters: int) -> float:
        """What making the wire format out of all gradients and back takes the rank; `wire.cpu_encode_s` knows CPUs."""
        ...

    def memory_bytes(self, rank: int) -> float:
        """What the rank may fill."""
        ...


@runtime_checkable
class HasKinds(Protocol):
    """Of a speed that knows which ranks are alike: asking one of them is enough, of sixteen thousand."""

    def kind(self, rank: int) -> int: ...


def rank_kinds(speed: Speed, world_size: int) -> list[int]:
    """Ranks with the same number are equally fast; each is a kind of its own where nobody knows better."""
    return [speed.kind(rank) for rank in range(world_size)] if isinstance(speed, HasKinds) else list(range(world_size))


@dataclass(frozen=True)
class SheetSpeed:
    """From the catalogue. Node k is `machines[k]`, and the last one repeats; a CPU is shared by its node's ranks, a
    GPU is not."""

    machines: tuple[Machine, ...]
    ranks_per_node: int = 1

    def in_world(self, world_size: int) -> SheetSpeed:
        return self

    def machine(self, rank: int) -> Machine:
        return self.machines[self.kind(rank)]

    def kind(self, rank: int) -> int:
        return min(rank // self.ranks_per_node, len(self.machines) - 1)

    def work(self, workload: Workload, rank: int, micro_batch: int, micro_batches: int) -> RankWork:
        machine, part = self.machine(rank), self._part(rank)
        tokens = micro_batch * workload.seq_len
        computing_s = tokens * workload.flops_per_token / (part * machine.flops(workload.gradient_bytes))
        # A GPU computes while the next operations are started: the slower of both counts.
        starting_s = machine.layer_s * workload.shape.layers
        busy_s = max(computing_s, starting_s)
        updating_s = _UPDATE_BYTES * workload.parameters / (part * machine.memory_bytes_per_s)
        return RankWork(
            micro_batches=micro_batches,
            forward_s=busy_s / 3,
            backward_s=busy_s * 2 / 3,
            optimizer_s=max(updating_s, _UPDATE_STARTS * starting_s),
            busy_cores=part * machine.cores,
            spread=machine.spread,
        )

    def encode_s(self, lever: Lever, rank: int, parameters: int) -> float:
        machine, part = self.machine(rank), self._part(rank)
        moving_s = MEMORY_BYTES[lever.wire] * parameters / (part * machine.memory_bytes_per_s)
        if machine.kind == "gpu":
            return moving_s
        return max(moving_s, cpu_encode_s(lever, parameters, part * machine.cores))

    def memory_bytes(self, rank: int) -> float:
        return self._part(rank) * self.machine(rank).memory_bytes

    def _part(self, rank: int) -> float:
        return 1 / self.ranks_per_node if self.machine(rank).kind == "cpu" else 1.0
