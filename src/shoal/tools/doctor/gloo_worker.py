"""`python -m shoal.tools.doctor.gloo_worker`: test gloo between every two ranks, then among all of them.

This is what a training does first, on any network. Every all-reduce has a timeout of seconds.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from datetime import timedelta
from itertools import combinations
from pathlib import Path

import torch
import torch.distributed as dist

from shoal.control.rank_env import Placement, use_private_caches
from shoal.errors import ForeignConnection, RunFailed, ShoalError
from shoal.events import EventLog
from shoal.run_folder import RunFolder
from shoal.sync.kv_store_client import AgentStore
from shoal.sync.process_groups import GroupForming, form_bare_group, pair_key

# gloo waits five times this for a connection; every rank has passed a barrier by then.
_CONNECT_S = 0.5
# An all-reduce of 256 kB takes half a second at 10 Mbit/s.
_EXCHANGE_S = 4.0
_BARRIER_S = 40.0
_ELEMENTS = 1 << 16


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m shoal.tools.doctor.gloo_worker")
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    try:
        use_private_caches()
        placement = Placement.from_env(os.environ)
    except ShoalError as error:
        sys.stderr.write(error.render())
        return error.exit_code
    torch.set_num_threads(1)
    store = AgentStore(placement.agent_fd or 0, timedelta(seconds=60))
    log = EventLog(RunFolder(options.folder).events(placement.rank), placement.rank)
    ranks = tuple(range(placement.world_size))
    whole_group = [ranks] if len(ranks) > 2 else []
    # A rank that has imported torch before the others would wait for them in gloo and report a failure (seen on a
    # busy machine).
    _barrier(store, "here", placement.world_size)
    for members in [*combinations(ranks, 2), *whole_group]:
        if placement.rank in members:
            outcome = try_group(store, placement.rank, members)
            log.write("proof", node=placement.node, members=list(members), **outcome)
        _barrier(store, f"after/{members}", placement.world_size)
    return 0


def try_group(store: dist.Store, rank: int, members: tuple[int, ...]) -> dict[str, object]:
    """All-reduce among these ranks; return whether the sum was right, how long it took, and gloo's error if any."""
    name = "proof/" + "-".join(map(str, members))
    began = time.perf_counter()
    warnings: list[ShoalError] = []

    def outcome(is_ok: bool, detail: str) -> dict[str, object]:
        return {"ok": is_ok, "detail": detail, "after_s": round(time.perf_counter() - began, 3)}

    try:
        keys = dist.PrefixStore(name, store)
        key = pair_key(store, keys, name, members.index(rank))
        names = tuple(f"rank {member}" for member in members)
        group = form_bare_group(
            GroupForming(keys, members.index(rank), len(members), key, name, _CONNECT_S, names, warn=warnings.append)
        )
        tensor = torch.full((_ELEMENTS,), float(rank + 1))
        options = dist.AllreduceOptions()
        options.timeout = timedelta(seconds=_EXCHANGE_S)
        group.allreduce([tensor], options).wait()
    except ForeignConnection as error:
        return outcome(False, f"{error.seen} ({error.fix})")
    except (RuntimeError, RunFailed) as error:
        return outcome(False, str(error).split("\n")[0])
    if not bool((tensor == float(sum(member + 1 for member in members))).all()):
        return outcome(False, "wrong sum")
    return outcome(True, " ".join(warning.seen for warning in warnings))


def _barrier(store: dist.Store, name: str, count: int) -> None:
    """Wait for all ranks through the agents, which reach each other even where gloo does not."""
    store.add(name, 1)
    deadline = time.monotonic() + _BARRIER_S
    while int(store.add(name, 0)) < count:
        if time.monotonic() > deadline:
            sys.exit(f"not all ranks reached {name!r} within {_BARRIER_S:.0f} s")
        time.sleep(0.01)


if __name__ == "__main__":
    sys.exit(main())
