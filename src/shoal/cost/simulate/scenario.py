"""What is simulated: a cluster, what disturbs it and what is done about it. Times are seconds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from shoal.cost.simulate.straggling import Steady, Straggling
from shoal.errors import ConfigError

StepTime = Callable[[int], float]
"""Seconds that an undisturbed step takes with so many nodes."""
Scaling = Literal["strong", "weak"]
Policy = Literal["restart", "live"]

_STEADY = Steady()
_MOST_FAILURES = 200_000


@dataclass(frozen=True)
class Cluster:
    """`strong` keeps the global batch, so that fewer nodes take longer; `weak` lets each node that is gone take its
    tokens with it. Spares take the place of lost nodes; below `min_nodes` everybody waits."""

    nodes: int
    step_s: StepTime
    tokens_per_step: float
    ranks_per_node: int = 1
    scaling: Scaling = "strong"
    min_nodes: int = 1
    spares: int = 0

    def __post_init__(self) -> None:
        _need_count("a cluster of", self.nodes, "nodes", "--nodes 8")
        _need_count("nodes with", self.ranks_per_node, "ranks each", "--ranks-per-node 1")
        _need_above_zero("tokens a step", self.tokens_per_step, "--tokens-per-step 32768")
        _need_not_negative("spare nodes", self.spares, "--spares 0")
        if not 1 <= self.min_nodes <= self.nodes:
            raise ConfigError(
                f"a training of {self.nodes} nodes that needs at least {self.min_nodes} of them",
                why="it needs at least one node, and no more than there are",
                fix=f"choose --min-nodes from 1 to {self.nodes}",
            )
        for nodes in {self.min_nodes, self.nodes}:
            _need_above_zero(f"step time with {nodes} nodes", self.step_s(nodes), "--step-s 0.5")

    def tokens(self, nodes: int) -> float:
        """Of one step."""
        return self.tokens_per_step * (nodes / self.nodes if self.scaling == "weak" else 1.0)

    @property
    def ideal_tokens_per_s(self) -> float:
        return self.tokens_per_step / self.step_s(self.nodes)


@dataclass(frozen=True)
class Failures:
    """Each node fails after an exponential time. A part of the failures (a switch, the store) stops everybody but
    breaks no node."""

    mtbf_s: float = math.inf
    all_share: float = 0.0

    def __post_init__(self) -> None:
        _need_above_zero("time between failures of a node", self.mtbf_s, "--mtbf-hours 1000", infinite=True)
        if not 0 <= self.all_share <= 1:
            raise ConfigError(
                f"a part of {self.all_share:g} of the failures cannot hit all nodes",
                why="a part is between 0 and 1",
                fix="write for example: --all-share 0.1",
            )


@dataclass(frozen=True)
class Recovery:
    """`restart`: everybody is stopped, started again and resumes from the last checkpoint, as torchrun does; also when
    a node comes back. `live`: the survivors regroup and redo the step; who comes back copies the state from them."""

    policy: Policy
    detect_s: float
    restart_s: float
    regroup_s: float
    rejoin_s: float
    repair_s: float

    def __post_init__(self) -> None:
        for name in ("detect", "restart", "regroup", "rejoin"):
            _need_not_negative(f"{name} time", getattr(self, f"{name}_s"), f"--{name}-s 10")
        _need_not_negative("repair time", self.repair_s, "--repair-minutes 10", infinite=True)


@dataclass(frozen=True)
class Checkpoints:
    """Every so many steps (None: never). Training stands still for `cost_s`, or, hidden, goes on while it is written;
    until it is whole, the one before counts."""

    every: int | None
    cost_s: float
    hidden: bool = False

    def __post_init__(self) -> None:
        _need_not_negative("time of a checkpoint", self.cost_s, "--checkpoint-s 5")
        if self.every is not None:
            _need_count("a checkpoint every", self.every, "steps", "--checkpoint-every 100")


@dataclass(frozen=True)
class Scenario:
    cluster: Cluster
    failures: Failures
    recovery: Recovery
    checkpoints: Checkpoints
    horizon_s: float
    straggling: Straggling = _STEADY

    def __post_init__(self) -> None:
        _need_above_zero("simulated time", self.horizon_s, "--hours 24")
        self._check_failures()
        self._check_hidden()

    def _check_failures(self) -> None:
        apart_s = self.failures.mtbf_s / self.cluster.nodes
        if self.horizon_s / apart_s > _MOST_FAILURES:
            raise ConfigError(
                f"a failure every {apart_s:.2g} s makes {self.horizon_s / apart_s:,.0f} of them",
                why=f"no training goes on under these; more than {_MOST_FAILURES:,} are not simulated",
                fix="raise --mtbf-hours, or simulate fewer --hours",
            )

    def _check_hidden(self) -> None:
        every, step_s = self.checkpoints.every, self.cluster.step_s(self.cluster.nodes)
        if self.checkpoints.hidden and every is not None and self.checkpoints.cost_s > every * step_s:
            raise ConfigError(
                f"a checkpoint of {self.checkpoints.cost_s:g} s is not whole when the next begins, "
                f"{every * step_s:.3g} s later",
                why="hidden checkpoints are written while training goes on, one at a time",
                fix=f"use --checkpoint-every {math.ceil(self.checkpoints.cost_s / step_s)} or more",
            )


def divided_work(step_s: float, nodes: int, scaling: Scaling) -> StepTime:
    """For want of a prediction: the work of a strong step is dealt to whoever is there, a weak one takes the same."""
    if scaling == "weak":
        return lambda there: step_s
    return lambda there: step_s * nodes / there


def from_table(seconds: Mapping[int, float]) -> StepTime:
    """Between the sizes of a table, and beyond them, as if work were divided; exact at its own sizes."""
    sizes = sorted(seconds)

    def step_s(nodes: int) -> float:
        below = max((size for size in sizes if size <= nodes), default=sizes[0])
        above = min((size for size in sizes if size >= nodes), default=sizes[-1])
        if below == above:
            return seconds[below] * below / nodes
        # Straight in 1/n: exact for divided work plus a constant.
        part = (1 / nodes - 1 / above) / (1 / below - 1 / above)
        return seconds[above] + part * (seconds[below] - seconds[above])

    return step_s


def _need_count(before: str, value: int, after: str, example: str) -> None:
    if value < 1:
        raise ConfigError(
            f"{before} {value} {after} cannot be simulated", why="there is at least 1", fix=f"for example: {example}"
        )


def _need_above_zero(what: str, value: float, example: str, infinite: bool = False) -> None:
    if not value > 0 or (math.isinf(value) and not infinite):
        raise ConfigError(
            f"{what}: {value:g} cannot be simulated", why="it is a number above zero", fix=f"for example: {example}"
        )


def _need_not_negative(what: str, value: float, example: str, infinite: bool = False) -> None:
    if not value >= 0 or (math.isinf(value) and not infinite):
        raise ConfigError(
            f"{what}: {value:g} cannot be simulated", why="it is zero or above", fix=f"for example: {example}"
        )
