"""Which way the ranks of one machine exchange gradients, and how they all come to the same one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn

from shoal.config.schema import SyncConfig
from shoal.errors import RunFailed
from shoal.sync.shared.kin import Kin, find_kin
from shoal.sync.shared.meet import Together, listening, meet
from shoal.sync.waiting import await_work
from shoal.sync.wires import Wire, make_wire
from shoal.sync.world import World, beside

Way = Literal["gloo", "copies", "shared"]


@dataclass(frozen=True)
class Inside:
    """`note` says why it is not shared memory where somebody might expect that."""

    way: Way = "gloo"
    note: str = ""


GLOO = Inside()


def wanted(config: SyncConfig, world: World, model: nn.Module) -> Inside:
    """What to try, before anybody has looked at the machines. The same on every rank."""
    if config.inside == "gloo" or world.size == 1:
        return GLOO
    if world.backend != "gloo" or world.device.type != "cpu":
        return _refuse(config, f"the ranks compute on {world.device.type} and exchange by {world.backend}")
    if sys.platform != "linux":
        return _refuse(config, "only Linux has memory without a name that processes hand to each other")
    is_mixed = len({parameter.dtype for parameter in model.parameters()}) > 1
    if config.inside == "copies" or config.measure == "barrier" or is_mixed:
        return Inside("copies")
    return Inside("shared")


def come_together(
    config: SyncConfig, world: World, way: Way, row_bytes: Callable[[Kin], int]
) -> tuple[Inside, Together | None]:
    """Finds out who shares our machine and opens the memory, on all ranks of the world or on none."""
    with listening() as (address, listener):
        kin = find_kin(world, address)
        if len(kin.firsts) == world.size:
            # Nothing to remark where nobody asked for it: one rank a machine is what most clusters are.
            return (GLOO if config.inside == "auto" else _refuse(config, "no two ranks share a machine")), None
        if len(kin.firsts) == 1 and config.wire != "fp32" and config.inside == "auto":
            return Inside("gloo", f"nothing would travel as {config.wire} inside one machine"), None
        # The second lane waits for the wire between machines, too, which has a deadline of its own.
        lane_s = (config.timeout_s,) if len(kin.firsts) == 1 else (config.timeout_s, 2 * config.timeout_s)
        together, trouble = None, ""
        try:
            together = meet(kin, listener, row_bytes(kin), lane_s)
        except OSError as error:
            trouble = f"no shared memory on {world.node}: {error}"
    if _everybody(world, together is not None):
        return Inside(way), together
    if together is not None:
        together.close()
    return _refuse(config, trouble or "another rank of this run has no shared memory"), None


def between_machines(config: SyncConfig, world: World, kin: Kin, model: nn.Module) -> Wire | None:
    """What the first rank of every machine sends that machine's sums by; None on all others, and for one machine.

    All ranks of the world must call it, as they must for any new group.
    """
    if len(kin.firsts) == 1:
        return None
    firsts = beside(world, config.timeout_s, kin.firsts)
    if not kin.is_first:
        return None
    return make_wire(config.wire, firsts, dict(model.named_parameters()))


def _everybody(world: World, is_there: bool) -> bool:
    flag = torch.tensor(int(is_there))
    await_work(dist.all_reduce(flag, dist.ReduceOp.MIN, group=world.group, async_op=True), world.release)
    return bool(flag)


def _refuse(config: SyncConfig, reason: str) -> Inside:
    """A wish is a wish; `auto` goes on with gloo and says why."""
    if config.inside == "auto":
        return Inside("gloo", reason)
    raise RunFailed(
        f"sync.inside={config.inside} cannot be: {reason}",
        why="ranks of one machine exchange through memory that they share",
        fix="leave it to shoal: --inside auto",
    )
