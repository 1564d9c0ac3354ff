"""Groups that fail to form, and forming again afterwards.

Exercises sync.process_groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shoal.control.membership.types import Ballot, Lineage, State
from shoal.control.rank_messages import EnterGeneration
from shoal.sync import process_groups
from shoal.sync.interruptible import GroupInterrupt
from shoal.sync.process_groups import GroupForming, drop_groups
from shoal.sync.world import RankIdentity, World, barrier, form_group, form_world
from tests.support.ranks import run_ranks


def order(world: World) -> EnterGeneration:
    ballot = Ballot(7, 0)
    return EnterGeneration(
        generation=ballot,
        lineage=Lineage(name=ballot),
        rank=world.rank,
        local_rank=world.rank,
        local_size=world.size,
        ids=(0, 1),
        nodes=("here", "here"),
        state=State(step=0),
        source=0,
        first=False,
        has_state=True,
        keeps_files=False,
        launched=2,
    )


@contextmanager
def short_timeouts() -> Iterator[None]:
    """Shorten the wait for missing peers."""
    saved = process_groups._PROOF_S, process_groups._SLACK_S
    process_groups._PROOF_S = process_groups._SLACK_S = 0.2
    yield
    process_groups._PROOF_S, process_groups._SLACK_S = saved


def form_alone_then_together(world: World) -> int:
    """Rank 0 fails to form a gloo group alone; then both ranks form one."""
    store, place = world.store, RankIdentity("here", torch.device("cpu"), "lo", None, GroupInterrupt())
    barrier(world)
    drop_groups()
    if world.rank == 0:
        alone = dist.PrefixStore("alone", store)
        with short_timeouts(), pytest.raises(RuntimeError):
            form_group(GroupForming(alone, 0, 2, b"key", "alone", 0.2), place.device, "gloo", timeout_s=5)
        drop_groups()
    again = form_world(order(world), store, place, meet_s=20, timeout_s=10)
    numbers = torch.tensor([again.rank + 1])
    dist.all_reduce(numbers, group=again.group)
    return int(numbers[0])


def test_a_group_forms_after_one_rank_has_failed_to_form_it(tmp_path: Path) -> None:
    assert run_ranks(form_alone_then_together, 2, tmp_path) == [3, 3]
