"""Keeps this rank's computing on cores of its own, apart from the other ranks of the same machine."""

from __future__ import annotations

import hashlib
import os
import socket
from pathlib import Path

import torch
import torch.distributed as dist

from shoal.control.cores import deal_cores, usable_cores
from shoal.sync.waiting import await_work
from shoal.sync.world import World


def pin(world: World, wish: str) -> tuple[int, ...] | None:
    """Pins the calling thread and those it will start; the cores, or None where all stays as it was.

    gloo's threads are there by now and stay free: they go to whatever core has nothing to do. Emulated nodes share the
    cores of one machine, so what counts is not who is on the same node but who is on the same machine.
    """
    if wish == "off" or world.device.type != "cpu":
        return None
    machines = _machines(world)
    neighbours = [rank for rank, machine in enumerate(machines) if machine == machines[world.rank]]
    cores = deal_cores(usable_cores(), neighbours.index(world.rank), len(neighbours), torch.get_num_threads())
    if cores is None or (wish == "auto" and len(neighbours) == 1):
        return None
    return pin_to(cores, wish)


def pin_to(cores: tuple[int, ...] | None, wish: str) -> tuple[int, ...] | None:
    """These cores, where it is wished and allowed."""
    if cores is None or wish == "off":
        return None
    try:
        os.sched_setaffinity(0, cores)
    except OSError:
        # A container may forbid it; then whoever runs it has decided.
        return None
    return cores


def _machines(world: World) -> list[int]:
    """A number for every rank's machine, equal for those on the same one."""
    mine = torch.tensor([_machine_id()], dtype=torch.int64, device=world.device)
    everyone = [torch.empty_like(mine) for _ in range(world.size)]
    await_work(dist.all_gather(everyone, mine, group=world.group, async_op=True), world.release)
    return [int(number) for number in everyone]


def _machine_id() -> int:
    try:
        name = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    except OSError:
        name = socket.gethostname()
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7])
