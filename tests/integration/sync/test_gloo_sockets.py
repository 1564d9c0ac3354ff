"""Gloo's ports after the ranks have met: real ranks, and strangers who come too late."""

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


def come_late(world: World, _: None) -> tuple[int, int, int, float]:
    """Ports shut, strangers that got in, files that are open since, and what an exchange still gives."""
    before = open_files(os.getpid())
    shut = close_listeners()
    ports = listening(os.getpid())
    assert len(ports) == shut
    let_in = 0
    for at in ports:
        with socket.socket() as stranger:
            stranger.settimeout(0.3)
            let_in += stranger.connect_ex((at.address, at.port)) == 0
    total = torch.ones(1)
    dist.all_reduce(total)
    return shut, let_in, open_files(os.getpid()) - before, float(total)


def test_who_comes_after_the_ranks_have_met_is_not_heard(tmp_path: Path) -> None:
    for shut, let_in, more, total in run_ranks(come_late, 2, tmp_path, None):
        assert (shut >= 1, let_in, more, total) == (True, 0, 0, 2.0)


def form_again(world: World, _: None) -> float:
    close_listeners()
    later = dist.new_group([0, 1], backend="gloo")
    total = torch.ones(1)
    dist.all_reduce(total, group=later)
    close_listeners()
    dist.all_reduce(total, group=later)
    return float(total)


def test_a_later_group_forms_all_the_same(tmp_path: Path) -> None:
    assert run_ranks(form_again, 2, tmp_path, None) == [4.0, 4.0]


def strangers_at_the_ports_of_a_group_of_one(world: World, _: None) -> int:
    """Files that are open since strangers connected to the ports of that group; -1 where it has none."""
    drop_groups()
    earlier = listening(os.getpid())
    store = dist.PrefixStore("alone", world.store)
    form_main_group(GroupForming(store=store, rank=0, size=1, key=b"", label="alone", connect_s=10.0), timeout_s=10.0)
    ports = [at for at in listening(os.getpid()) if at not in earlier]
    before = open_files(os.getpid())
    for at in ports:
        with socket.socket() as stranger:
            stranger.settimeout(0.3)
            stranger.connect_ex((at.address, at.port))
    time.sleep(0.3)
    total = torch.ones(1)
    dist.all_reduce(total)
    return open_files(os.getpid()) - before if ports else -1


def test_a_group_of_one_hears_no_stranger(tmp_path: Path) -> None:
    """gloo listens for it as well, and would keep every connection."""
    assert run_ranks(strangers_at_the_ports_of_a_group_of_one, 1, tmp_path, None) == [0]
