"""A plan: what so many machines would make of a training, row by row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shoal.cost.collectives import payload_factor
from shoal.cost.lever import Lever
from shoal.cost.predict import Prediction, Setting, predict
from shoal.cost.speed import Speed
from shoal.cost.step import RankWork
from shoal.cost.workload import Workload


@dataclass(frozen=True)
class Row:
    """So many nodes. Speed-up is against the fastest of all known nodes alone, one base for a whole plan; efficiency is
    against these nodes, each alone, added up."""

    nodes: int
    prediction: Prediction
    speedup: float
    efficiency: float
    # The fastest node and what it trains alone, with the same batch.
    base: str
    base_tokens_per_s: float

    @property
    def payload_factor(self) -> float:
        return payload_factor(self.prediction.world_size)

    @property
    def ratio(self) -> float:
        """Communication against computing: hidden behind backward at best as long as it is below two thirds."""
        return self.prediction.step.comm_s / self.prediction.step.compute_s

    def as_dict(self) -> dict[str, object]:
        step, prediction = self.prediction.step, self.prediction
        return {
            "nodes": self.nodes,
            "ranks": prediction.world_size,
            "payload_factor": self.payload_factor,
            "wire_bytes": prediction.wire_bytes,
            "comm_s": step.comm_s,
            "comm_latency_s": step.latency_s,
            "compute_s": step.compute_s,
            "exposed_s": step.exposed_s,
            "wait_s": step.wait_s,
            "optimizer_s": step.optimizer_s,
            "other_s": step.other_s,
            "step_s": step.step_s,
            "comm_to_compute": self.ratio,
            "tokens": prediction.tokens,
            "tokens_per_s": prediction.tokens_per_s,
            "speedup": self.speedup,
            "base": self.base,
            "base_tokens_per_s": self.base_tokens_per_s,
            "efficiency": self.efficiency,
            "micro_batch": prediction.deal.micro_batch,
            "micro_batches": max(prediction.deal.micro_batches),
            "memory_bytes": prediction.memory.total,
            "fits": prediction.fits,
        }


@dataclass(frozen=True)
class Plan:
    workload: Workload
    lever: Lever
    setting: Setting
    rows: tuple[Row, ...]

    @property
    def best(self) -> Row:
        return max(self.rows, key=lambda row: row.prediction.tokens_per_s)


def make_plan(workload: Workload, lever: Lever, setting: Setting, nodes: Sequence[int]) -> Plan:
    return Plan(workload, lever, setting, tuple(make_row(workload, lever, setting, count) for count in nodes))


def make_row(workload: Workload, lever: Lever, setting: Setting, nodes: int) -> Row:
    world_size = nodes * setting.ranks_per_node
    prediction = predict(workload, lever, setting, world_size)
    known = len(setting.node_names)
    alone = [one_node(workload, lever, setting, node).tokens_per_s for node in range(known)]
    base = max(range(known), key=lambda node: alone[node])
    added_up = sum(alone[min(node, known - 1)] for node in range(nodes))
    speed = prediction.tokens_per_s
    return Row(nodes, prediction, speed / alone[base], speed / added_up, setting.node_names[base], alone[base])


def one_node(workload: Workload, lever: Lever, setting: Setting, node: int = 0) -> Prediction:
    """The same training on one of the nodes alone."""
    speed = _From(setting.speed, node * setting.ranks_per_node) if node else setting.speed
    return predict(workload, replace(lever, balanced=False), replace(setting, speed=speed), setting.ranks_per_node)


@dataclass(frozen=True)
class _From:
    """The same machines without the first few ranks."""

    speed: Speed
    first: int

    def in_world(self, world_size: int) -> _From:
        return _From(self.speed.in_world(world_size), self.first)

    def work(self, workload: Workload, rank: int, micro_batch: int, micro_batches: int) -> RankWork:
        return self.speed.work(workload, self.first + rank, micro_batch, micro_batches)

    def encode_s(self, lever: Lever, rank: int, parameters: int) -> float:
        return self.speed.encode_s(lever, self.first + rank, parameters)

    def memory_bytes(self, rank: int) -> float:
        return self.speed.memory_bytes(self.first + rank)
