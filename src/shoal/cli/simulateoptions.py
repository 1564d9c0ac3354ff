"""The knobs of `shoal plan --simulate`: what each is called, what it means, and where its default comes from.

`plan` declares its options with the annotations below and hands the values over as `SimulateOptions`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from shoal.cost.simulate.scenario import StepTime

_PANEL = "Simulation (--simulate)"


def _option(flag: str, text: str) -> typer.models.OptionInfo:
    found: typer.models.OptionInfo = typer.Option(flag, help=text, rich_help_panel=_PANEL)
    return found


Simulate = Annotated[bool, _option("--simulate", "Simulate training over time: stragglers, failures, recovery.")]
Hours = Annotated[float, _option("--hours", "How long to train, in simulated hours.")]
RanksPerNode = Annotated[int, _option("--ranks-per-node", "Ranks on each node; the slowest of all ends a step.")]
StepS = Annotated[float | None, _option("--step-s", "Seconds an undisturbed step takes; otherwise as planned.")]
TokensPerStep = Annotated[float | None, _option("--tokens-per-step", "Tokens in a step; otherwise as planned.")]
MtbfHours = Annotated[float, _option("--mtbf-hours", "Mean time between failures of one node; inf: never.")]
AllShare = Annotated[float, _option("--all-share", "Part of the failures that stop every node, such as a switch's.")]
RecoveryKind = Annotated[
    str, _option("--recovery", "restart from a checkpoint as torchrun does, live: regroup without, or both.")
]
CheckpointEvery = Annotated[
    str, _option("--checkpoint-every", "Steps between checkpoints; best: by Young and Daly; never.")
]
CheckpointS = Annotated[float, _option("--checkpoint-s", "Seconds a checkpoint takes.")]
HiddenCheckpoints = Annotated[bool, _option("--hidden-checkpoints", "Checkpoints are written while training goes on.")]
DetectS = Annotated[float, _option("--detect-s", "Seconds until a lost node is noticed.")]
RestartS = Annotated[float, _option("--restart-s", "Seconds from then to the next step, when everybody is restarted.")]
RegroupS = Annotated[float, _option("--regroup-s", "Seconds from then to the next step, when survivors regroup.")]
RejoinS = Annotated[float, _option("--rejoin-s", "Seconds that all wait while a node that joins copies the state.")]
RepairMinutes = Annotated[float, _option("--repair-minutes", "Minutes until a lost node is back.")]
Straggler = Annotated[
    str, _option("--straggler", "none, lognormal:SIGMA, or a run folder to fit the spread of its steps to.")
]
MinNodes = Annotated[int, _option("--min-nodes", "With fewer nodes than this everybody waits.")]
Spares = Annotated[int, _option("--spares", "Nodes that stand by and take the place of lost ones.")]
Seeds = Annotated[int, _option("--seeds", "How many trainings are simulated; the bands are over them.")]
Seed = Annotated[int, _option("--seed", "The same seed gives the same figures.")]


@dataclass(frozen=True)
class SimulateOptions:
    """`step_s` may be a number, or plan's own prediction by number of nodes."""

    nodes: int
    step_s: float | StepTime
    tokens_per_step: float
    hours: float = 24.0
    ranks_per_node: int = 1
    scaling: str = "strong"
    # Meta's research cluster: a failure every 7.9 h on 128 nodes (arXiv 2410.21680). Laptops that sleep do far worse.
    mtbf_hours: float = 1000.0
    all_share: float = 0.0
    recovery: str = "both"
    checkpoint_every: str = "best"
    # 124M parameters and their moments are 1.5 GB; SHA-256 alone takes 1.4 s for 496 MB on one core.
    checkpoint_s: float = 5.0
    hidden_checkpoints: bool = False
    # After 20 s without a sign of life a run that cannot go on is ended; one that can notices after 2.5 s.
    detect_s: float = 20.0
    # torchrun took 82 s from a killed node to the next step, noticing included (three emulated nodes, torch 2.13).
    restart_s: float = 62.0
    # Kill of a rank to the survivors' next step with DDP wrapped again: 0.5 s (three ranks, torch 2.13).
    regroup_s: float = 0.5
    # The same 1.5 GB over gloo at 0.95 Gbit/s.
    rejoin_s: float = 12.5
    # A machine that reboots, or somebody who walks over: an assumption.
    repair_minutes: float = 10.0
    straggler: str = "none"
    min_nodes: int = 1
    spares: int = 0
    seeds: int = 20
    seed: int = 0
