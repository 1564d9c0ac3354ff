"""The world: who takes part in training now. Made once per generation, passed explicitly, never global."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from shoal.control.membership.types import NEVER, Ballot, Lineage
from shoal.control.rank_env import Placement
from shoal.control.rank_messages import EnterGeneration
from shoal.errors import RunFailed, ShoalError, UsageError
from shoal.host.facts import interface_to, link_mbps
from shoal.sync.interruptible import GroupInterrupt, await_work
from shoal.sync.kv_store_client import AgentStore
from shoal.sync.process_groups import (
    GroupForming,
    Warn,
    form_main_group,
    form_nccl_group,
    form_second_group,
    form_second_nccl_group,
    pair_key,
    warn_in_log,
)

# gloo waits five times as long for a connection. All ranks have reported to the store by then, so a connection that is
# not there within 5 s never will be.
CONNECT_S = 1.0

# Of a world that nobody can leave.
_NO_LINEAGE = Lineage(name=NEVER)
_NO_GROUP = cast(dist.ProcessGroup, dist.GroupMember.NON_GROUP_MEMBER)


@dataclass(frozen=True)
class World:
    """A rank's view of its process group. Unpacks to `(rank, world_size)` for scripts that want just these.

    `ids` are the ranks' own numbers, by which their files are called: the same for as long as a run lives, while a rank
    is only a place in this world. `keeps_files`: of the ranks that share a run folder, this one keeps its checkpoints
    and its ledger. `release`: frees whoever waits when the world is over. `nodes`: on which each rank is, where that is
    known of all.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    node: str
    backend: str
    device: torch.device
    interface: str | None
    group: dist.ProcessGroup
    # torch holds the C++ half of a store only: without this, a store of our own would lose its methods under the group.
    store: dist.Store
    ids: tuple[int, ...]
    nodes: tuple[str, ...] = ()
    generation: Ballot = NEVER
    lineage: Lineage = _NO_LINEAGE
    keeps_files: bool = True
    link_mbps: int | None = None
    release: GroupInterrupt | None = None
    # Proves that a connection belongs to this world, see `sync.groups`. Empty: a further group agrees on its own.
    pair_key: bytes = field(default=b"", repr=False)
    # Receives what the user should know of groups that are formed later.
    warn: Warn = warn_in_log

    def __iter__(self) -> Iterator[int]:
        return iter((self.rank, self.size))

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def is_node_main(self) -> bool:
        """One rank of every node reads that node's interface counters."""
        return self.local_rank == 0

    @property
    def id(self) -> int:
        return self.ids[self.rank]

    @property
    def names(self) -> tuple[str, ...]:
        """Of its ranks, in a sentence."""
        nodes = self.nodes or ("",) * self.size
        return tuple(f"rank {id}" + (f" on {node}" if node else "") for id, node in zip(self.ids, nodes, strict=True))


def choose_device(wanted: str, placement: Placement) -> torch.device:
    """A GPU of its own for every local rank, or the CPU for all: two ranks on one GPU are slower than one."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cuda" and gpus < placement.local_world_size:
        raise UsageError(
            f"{placement.local_world_size} ranks on {placement.node} want a GPU each, but torch sees {gpus}",
            why="every rank needs a GPU of its own, and torch must be a CUDA build",
            fix="use fewer ranks there, or --device cpu",
        )
    if wanted == "cpu" or gpus < placement.local_world_size:
        return torch.device("cpu")
    return torch.device("cuda", placement.local_rank)


def join(
    placement: Placement,
    device: torch.device,
    backend: str | None = None,
    join_timeout_s: float = 60.0,
    timeout_s: float = 60.0,
    warn: Warn = warn_in_log,
) -> World:
    """Meets the other ranks and forms the group, or says who did not come. Every wait has a deadline.

    Before the group exists peers may still be importing torch, so the store waits `join_timeout_s`; afterwards a
    collective that takes longer than `timeout_s` means that somebody is gone.
    """
    interface = choose_interface(placement)
    base = _open_store(placement, join_timeout_s)
    store = dist.PrefixStore(f"shoal/{placement.restarts}", base)
    meet(store, placement.rank, placement.world_size, join_timeout_s)
    chosen = backend or backend_for(device)
    label = f"world {placement.restarts}"
    key = b"" if placement.world_size == 1 else pair_key(base, store, label, placement.rank)
    forming = GroupForming(store, placement.rank, placement.world_size, key, label, CONNECT_S, warn=warn)
    group = form_group(forming, device, chosen, timeout_s)
    return World(
        rank=placement.rank,
        size=placement.world_size,
        local_rank=placement.local_rank,
        local_size=placement.local_world_size,
        node=placement.node,
        backend=chosen,
        device=device,
        interface=interface,
        group=group,
        store=base,
        ids=tuple(range(placement.world_size)),
        keeps_files=placement.keeps_files,
        link_mbps=placement.link_mbps or link_mbps(interface),
        pair_key=key,
        warn=warn,
    )


def nowhere(placement: Placement, device: torch.device) -> World:
    """Before a rank has met anybody: it knows its own number and nothing to exchange over."""
    return World(
        rank=0,
        size=1,
        local_rank=placement.local_rank,
        local_size=placement.local_world_size,
        node=placement.node,
        backend=backend_for(device),
        device=device,
        interface=None,
        group=_NO_GROUP,
        store=dist.HashStore(),
        ids=(placement.rank,),
        keeps_files=False,
    )


def without_group(world: World) -> World:
    """What is left of a world that is over. Whoever holds its group last waits for its threads."""
    return replace(world, group=_NO_GROUP)


def backend_for(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" else "gloo"


def form_group(forming: GroupForming, device: torch.device, backend: str, timeout_s: float) -> dist.ProcessGroup:
    """torch's default group, over gloo or NCCL."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if backend == "gloo":
        return form_main_group(forming, timeout_s)
    return form_nccl_group(forming, device, timeout_s)


def beside(world: World, timeout_s: float, ranks: Sequence[int] | None = None) -> World:
    """The same ranks, or some of them, in a group of their own. All ranks of the world must call it.

    Exchanges that go on while the steps have theirs need that: gloo pairs what two ranks send by the order in which
    they began it, which is fixed only inside a group.
    """
    members = list(range(world.size)) if ranks is None else list(ranks)
    rank = members.index(world.rank) if world.rank in members else None
    if world.backend == "gloo":
        group = form_second_group(_forming_beside(world, members, rank, timeout_s), members, timeout_s)
    else:
        group = form_second_nccl_group(members, timeout_s)
    return replace(world, rank=world.rank if rank is None else rank, size=len(members), group=group)


def _forming_beside(world: World, members: list[int], rank: int | None, timeout_s: float) -> GroupForming:
    """Ranks come to a second group whenever they have done what is before it, so they wait for each other first."""
    label = f"group {distributed_c10d._world.group_count}"
    store = dist.PrefixStore(label, distributed_c10d._get_default_store())
    key = b""
    if world.size > 1:
        meet(store, world.rank, world.size, timeout_s)
        key = world.pair_key or pair_key(world.store, store, label, world.rank)
    names = tuple(world.names[member] for member in members)
    return GroupForming(
        store=store,
        rank=rank,
        size=len(members),
        key=key,
        label=label,
        connect_s=CONNECT_S,
        names=names,
        release=world.release,
        warn=world.warn,
        is_followed=len(members) < world.size,
    )


def bear_with(world: World, timeout_s: float) -> None:
    """Lets a collective take longer: a rank that is ahead waits for peers that rightly come later."""
    if world.backend == "gloo":
        distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), world.group)


def leave(world: World) -> None:
    """After a barrier, so that no rank closes its sockets while a peer still needs them."""
    barrier(world)
    dist.destroy_process_group()


def barrier(world: World, timeout_s: float | None = None) -> None:
    """Waits for everybody; `timeout_s` is for work that may rightly take longer than an exchange."""
    options = dist.BarrierOptions()
    if timeout_s is not None and world.backend == "gloo":
        options.timeout = timedelta(seconds=timeout_s)
    if world.backend == "gloo":
        await_work(world.group.barrier(options), world.release)
    else:
        dist.barrier(group=world.group)


def choose_interface(placement: Placement) -> str | None:
    """gloo publishes what the host name resolves to, 127.0.1.1 on Debian, unless told: tell it the way to the peers."""
    if placement.world_size == 1:
        return None
    if "GLOO_SOCKET_IFNAME" not in os.environ and (name := interface_to(placement.master_addr)):
        os.environ["GLOO_SOCKET_IFNAME"] = name
    return os.environ.get("GLOO_SOCKET_IFNAME")


def _open_store(placement: Placement, timeout_s: float) -> dist.Store:
    if placement.world_size == 1:
        return dist.HashStore()
    if placement.agent_fd is not None:
        return AgentStore(placement.agent_fd, timedelta(seconds=timeout_s))
    serves = placement.rank == 0 and not placement.store_is_served
    try:
        return dist.TCPStore(
            placement.master_addr,
            placement.master_port,
            world_size=None,
            is_master=serves,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
        )
    except (RuntimeError, dist.DistError) as error:
        raise RunFailed(
            f"rank {placement.rank} cannot reach the store at {placement.master_addr}:{placement.master_port}",
            why=str(error).splitlines()[0],
            fix="check that rank 0 is running and that no firewall stands between the machines",
        ) from error


def _missing(store: dist.Store, names: list[str]) -> list[int]:
    """Empty when the store itself is gone by now."""
    try:
        return [rank for rank, name in enumerate(names) if not store.check([name])]
    except (RuntimeError, dist.DistError):
        return []


def meet(store: dist.Store, rank: int, size: int, timeout_s: float) -> None:
    """Everybody writes its name and waits for all names, so that a missing rank can be named."""
    names = [f"here/{each}" for each in range(size)]
    store.set(names[rank], "here")
    try:
        store.wait(names, timedelta(seconds=timeout_s))
    except (RuntimeError, dist.DistError) as error:
        missing = _missing(store, names)
        raise RunFailed(
            f"the world did not form: rank {', '.join(map(str, missing)) or '?'} of {size} "
            f"did not come within {timeout_s:.0f} s",
            why="those processes were not started, died early, or cannot reach the others",
            fix="look at their logs; raise sync.join_timeout_s only if a machine is merely slow to start",
        ) from error


# SECTION sync/attempt
# Which attempt this is, where torchrun starts its ranks again: a number that all ranks agree on.
#
# Each torchrun agent counts for itself in TORCHELASTIC_RESTART_COUNT, and only the failures that it saw: an agent that
# noticed others waiting before its own worker had ended, or that came later, counts fewer. All attempts of a job use
# one
# store, so a rank could take the words of a dead one for its peer's. The ranks of an attempt settle its number first.


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


# SECTION sync/membership/forming
# From an order to enter a generation to a world: the group formed under the generation's own keys.


# gloo waits five times as long. Everybody has said that it is there by then.
_CONNECT_S = 0.5
_FIRST_ATTEMPTS, _LATER_ATTEMPTS = 5, 20

_SIGNS_OF_A_LOST_PEER = (
    "Connection closed by peer",
    "Connection reset",
    "Broken pipe",
    "Timed out waiting",
    "keeps the keys",
    "in time",
    "Connect timeout",
    "connectFullMesh",
    "Socket closed",
    # What every other exchange says when one of them has met its deadline.
    "pair closure",
    "did not form",
)


@dataclass(frozen=True)
class RankIdentity:
    """What stays the same for a rank, whatever generation it is in."""

    node: str
    device: torch.device
    interface: str | None
    link_mbps: int | None
    release: GroupInterrupt
    # Receives what the user should know of a group that was formed.
    warn: Warn = warn_in_log


def form(enter: EnterGeneration, store: dist.Store, place: RankIdentity, meet_s: float, timeout_s: float) -> World:
    """Raises what torch or the store raises when somebody does not come."""
    base = store if enter.size > 1 else dist.HashStore()
    keys = dist.PrefixStore(enter.prefix, base)
    meet(keys, enter.rank, enter.size, meet_s)
    backend = backend_for(place.device)
    label = enter.prefix
    key = b"" if enter.size == 1 else pair_key(store, keys, label, enter.rank)
    names = tuple(
        f"rank {id}" + (f" on {node}" if node else "") for id, node in zip(enter.ids, enter.nodes, strict=True)
    )
    # A launch that cannot form its first group tells so soon; a training that runs holds out longer.
    attempts = _FIRST_ATTEMPTS if enter.first else _LATER_ATTEMPTS
    forming = GroupForming(
        keys, enter.rank, enter.size, key, label, _CONNECT_S, names, place.release, place.warn, attempts
    )
    group = form_group(forming, place.device, backend, timeout_s)
    return World(
        rank=enter.rank,
        size=enter.size,
        local_rank=enter.local_rank,
        local_size=enter.local_size,
        node=place.node,
        backend=backend,
        device=place.device,
        interface=place.interface if enter.size > 1 else None,
        group=group,
        store=base,
        ids=enter.ids,
        nodes=enter.nodes,
        generation=enter.generation,
        lineage=enter.lineage,
        keeps_files=enter.keeps_files,
        link_mbps=place.link_mbps,
        release=place.release,
        pair_key=key,
        warn=place.warn,
    )


def is_lost_peer(error: BaseException) -> bool:
    """Whether this is what a missing peer looks like from inside: a consequence, never a cause."""
    text = error.seen if isinstance(error, ShoalError) else str(error)
    return any(sign in text for sign in _SIGNS_OF_A_LOST_PEER)
