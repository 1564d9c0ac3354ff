"""Gloo's listening ports after a group has formed: later connections are refused.

Exercises sync.process_groups.
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import torch
import torch.distributed as dist

from shoal.sync.interruptible import close_listeners
from shoal.sync.process_groups import GroupForming, drop_groups, form_main_group
from shoal.sync.world import World
from tests.support.ranks import run_ranks
from tests.support.sockets import listening, open_files


def connect_after_forming(world: World, _: None) -> tuple[int, int, int, float]:
    """Return closed ports, accepted foreign connections, newly open files, and the sum of a later all-reduce."""
    before = open_files(os.getpid())
    closed = close_listeners()
    ports = listening(os.getpid())
    assert len(ports) == closed
    accepted = 0
    for at in ports:
        with socket.socket() as connection:
            connection.settimeout(0.3)
            accepted += connection.connect_ex((at.address, at.port)) == 0
    total = torch.ones(1)
    dist.all_reduce(total)
    return closed, accepted, open_files(os.getpid()) - before, float(total)


def test_connections_after_the_group_formed_are_refused(tmp_path: Path) -> None:
    for closed, accepted, new_files, total in run_ranks(connect_after_forming, 2, tmp_path, None):
        assert (closed >= 1, accepted, new_files, total) == (True, 0, 0, 2.0)


def form_again(world: World, _: None) -> float:
    close_listeners()
    later = dist.new_group([0, 1], backend="gloo")
    total = torch.ones(1)
    dist.all_reduce(total, group=later)
    close_listeners()
    dist.all_reduce(total, group=later)
    return float(total)


def test_a_later_group_can_still_form(tmp_path: Path) -> None:
    assert run_ranks(form_again, 2, tmp_path, None) == [4.0, 4.0]


def connect_to_a_group_of_one(world: World, _: None) -> int:
    """Count files opened by foreign connections to the ports of the group; -1 if it has no port."""
    drop_groups()
    earlier = listening(os.getpid())
    store = dist.PrefixStore("alone", world.store)
    form_main_group(GroupForming(store=store, rank=0, size=1, key=b"", label="alone", connect_s=10.0), timeout_s=10.0)
    ports = [at for at in listening(os.getpid()) if at not in earlier]
    before = open_files(os.getpid())
    for at in ports:
        with socket.socket() as connection:
            connection.settimeout(0.3)
            connection.connect_ex((at.address, at.port))
    time.sleep(0.3)
    total = torch.ones(1)
    dist.all_reduce(total)
    return open_files(os.getpid()) - before if ports else -1


def test_a_group_of_one_refuses_foreign_connections(tmp_path: Path) -> None:
    """gloo listens for a group of one too and would keep every connection."""
    assert run_ranks(connect_to_a_group_of_one, 1, tmp_path, None) == [0]
