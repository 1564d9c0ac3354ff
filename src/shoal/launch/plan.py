"""The launch plan: what starts where, with which variables. Pure; `shoal train --dry-run` prints it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from shoal.cluster.node import Node
from shoal.config.schema import RunConfig
from shoal.control.placement import Placement


@dataclass(frozen=True)
class Command:
    """One process to start. `ranks` are those it stands for: one, or all of a node's under torchrun and spawn."""

    name: str
    node: Node
    ranks: tuple[int, ...]
    argv: tuple[str, ...]
    env: dict[str, str]
    serves_store: bool = False


@dataclass(frozen=True)
class Meeting:
    """Where the ranks find each other: an address we have bound already, so no port is guessed."""

    address: str
    port: int
    fd: int


def plan_ranks(run: RunConfig, folder: Path, node: Node, meeting: Meeting, resume: bool) -> list[Command]:
    """The commands that make a world of `node.slots` ranks out of one node."""
    if run.launcher == "torchrun":
        return [_torchrun(run, folder, node, resume)]
    if run.launcher == "spawn":
        return [_spawn(run, folder, node, resume)]
    return [_rank(run, folder, node, meeting, rank, resume) for rank in range(node.slots)]


def threads_per_rank(run: RunConfig, node: Node) -> int:
    return run.threads or max(1, node.cores // node.slots)


def _rank(run: RunConfig, folder: Path, node: Node, meeting: Meeting, rank: int, resume: bool) -> Command:
    placement = Placement(
        rank=rank,
        world_size=node.slots,
        local_rank=rank,
        local_world_size=node.slots,
        node=node.name,
        master_addr=meeting.address,
        master_port=meeting.port,
        store_fd=meeting.fd if rank == 0 else None,
        launcher="shoal",
    )
    argv = (sys.executable, "-m", "shoal.train.worker", *_arguments(folder, resume))
    env = {**_common_env(run, node), **placement.to_env()}
    return Command(f"rank-{rank}", node, (rank,), argv, env, serves_store=rank == 0)


def _torchrun(run: RunConfig, folder: Path, node: Node, resume: bool) -> Command:
    worker = ("-m", "shoal.train.worker", *_arguments(folder, resume))
    flags = ("--standalone", f"--nproc-per-node={node.slots}")
    argv = (sys.executable, "-m", "torch.distributed.run", *flags, *worker)
    env = {**_common_env(run, node), "SHOAL_NODE": node.name, "SHOAL_LAUNCHER": "torchrun"}
    return Command("torchrun", node, tuple(range(node.slots)), argv, env)


def _spawn(run: RunConfig, folder: Path, node: Node, resume: bool) -> Command:
    flags = ("--ranks", str(node.slots), *_arguments(folder, resume))
    argv = (sys.executable, "-m", "shoal.train.spawn", *flags)
    return Command("spawn", node, tuple(range(node.slots)), argv, _common_env(run, node))


def _arguments(folder: Path, resume: bool) -> tuple[str, ...]:
    # Not `--run`: torchrun takes it for an abbreviation of its own --run-path, even behind the module's name.
    return ("--folder", str(folder), *(("--resume",) if resume else ()))


def _common_env(run: RunConfig, node: Node) -> dict[str, str]:
    return {
        "OMP_NUM_THREADS": str(threads_per_rank(run, node)),
        "GLOO_SOCKET_IFNAME": node.interface,
        "PYTHONUNBUFFERED": "1",
    }
