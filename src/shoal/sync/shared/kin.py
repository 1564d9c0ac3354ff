"""Kin: the ranks of a world that run on the same machine, and can therefore share memory."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from shoal.sync.waiting import await_work
from shoal.sync.world import World

_DIGEST_BYTES = 32
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")


@dataclass(frozen=True)
class Kin:
    """`ranks` share our machine, in the order of the world; `firsts` are the first of every machine's.

    `address` is where the first of ours listens."""

    ranks: tuple[int, ...]
    index: int
    firsts: tuple[int, ...]
    address: bytes

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def is_first(self) -> bool:
        return self.index == 0


def find_kin(world: World, address: bytes) -> Kin:
    """Everybody says on which machine it is, and where it would listen: one small all-gather."""
    mine = torch.frombuffer(bytearray(_machine(world.node) + address), dtype=torch.uint8)
    rows = [torch.empty_like(mine) for _ in range(world.size)]
    await_work(dist.all_gather(rows, mine, group=world.group, async_op=True), world.release)
    said = [bytes(row.tolist()) for row in rows]
    groups = group_by_machine([each[:_DIGEST_BYTES] for each in said])
    ours = next(group for group in groups if world.rank in group)
    return Kin(ours, ours.index(world.rank), tuple(group[0] for group in groups), said[ours[0]][_DIGEST_BYTES:])


def group_by_machine(machines: Sequence[bytes]) -> list[tuple[int, ...]]:
    """Ranks with the same machine, by what each rank said; groups in the order of their first ranks."""
    found: dict[bytes, list[int]] = {}
    for rank, machine in enumerate(machines):
        found.setdefault(machine, []).append(rank)
    return [tuple(ranks) for ranks in found.values()]


def _machine(node: str) -> bytes:
    """The node's name alone would not do: under torchrun it is the same on every machine. Nor would the kernel's
    boot: an emulated lab's nodes have that in common, and are to talk over their links. A machine that does not say
    what it is has nothing in common with any."""
    try:
        facts = (node, _BOOT_ID.read_text().strip(), str(_NETWORK.readlink()), str(os.getuid()))
    except OSError:
        return secrets.token_bytes(_DIGEST_BYTES)
    return hashlib.sha256("\n".join(facts).encode()).digest()
