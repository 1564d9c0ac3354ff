"""Which attempt this is, where torchrun starts its ranks again: a number that all ranks agree on.

Each torchrun agent counts for itself in TORCHELASTIC_RESTART_COUNT, and only the failures that it saw: an agent that
noticed others waiting before its own worker had ended, or that came later, counts fewer. All attempts of a job use one
store, so a rank could take the words of a dead one for its peer's. The ranks of an attempt settle its number first.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from shoal.control.placement import Placement
from shoal.errors import RunFailed

_POLL_S = 0.02


def common_attempt(placement: Placement, timeout_s: float) -> int:
    """0 for the first one of a job. Without a store that outlives the ranks there is no other."""
    if not placement.store_is_served:
        return placement.restarts
    try:
        store = dist.TCPStore(
            placement.master_addr,
            placement.master_port,
            is_master=False,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
        )
        return settle(dist.PrefixStore("shoal/attempts", store), placement.rank, placement.world_size, timeout_s)
    except (RuntimeError, dist.DistError) as error:
        raise RunFailed(
            f"rank {placement.rank} cannot use the store at {placement.master_addr}:{placement.master_port}",
            why=str(error).splitlines()[0],
            fix="check that the torchrun that serves it is running and that no firewall stands between the machines",
        ) from error


def settle(store: dist.Store, rank: int, world_size: int, timeout_s: float) -> int:
    """Rank 0 takes a number that nobody had; the others answer to it, and go on when it has counted their own answer.

    An older number may still stand there when a rank looks. It answers to that too, but was not counted, and looks
    again. torchrun starts nobody of an attempt before all ranks of the one before have ended.
    """
    me = secrets.token_hex(8)
    deadline = time.monotonic() + timeout_s
    if rank == 0:
        number = store.add("last", 1)
        store.set("number", str(number))
        _answer(store, number, rank, me)
        _wait(lambda: all(_has(store, f"{number}/{each}") for each in range(world_size)), deadline)
        names = [store.get(f"{number}/{each}").decode() for each in range(world_size)]
        store.set(f"{number}/counted", json.dumps(names))
        return number - 1
    _wait(lambda: _was_counted(store, rank, me), deadline)
    return int(store.get("number")) - 1


def _was_counted(store: dist.Store, rank: int, me: str) -> bool:
    if not _has(store, "number"):
        return False
    number = int(store.get("number"))
    _answer(store, number, rank, me)
    return _has(store, f"{number}/counted") and json.loads(store.get(f"{number}/counted"))[rank] == me


def _answer(store: dist.Store, number: int, rank: int, me: str) -> None:
    """Over whatever stands there: of two with the same rank the later one lives."""
    store.set(f"{number}/{rank}", me)


def _has(store: dist.Store, key: str) -> bool:
    return bool(store.check([key]))


def _wait(done: Callable[[], bool], deadline: float) -> None:
    while not done():
        if time.monotonic() > deadline:
            raise RuntimeError("not all ranks of this attempt came in time")
        time.sleep(_POLL_S)
