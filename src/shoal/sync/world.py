"""The world: a rank's view of its process group. Made once per generation and passed explicitly, never global.

`join_world` forms it from the environment of a launcher with a fixed set of ranks, `form_world` from an agent's order
to enter a generation. Every wait has a deadline, and a missing rank is named.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from shoal.config.defaults import JOIN_TIMEOUT_S, SYNC_TIMEOUT_S
from shoal.control.membership.types import NEVER, Ballot, Lineage
from shoal.control.rank_env import Placement
from shoal.control.rank_messages import EnterGeneration
from shoal.errors import RunFailed, UsageError
from shoal.host.facts import boot_id, interface_to
from shoal.host.network import link_mbps
from shoal.sync.communication import communication
from shoal.sync.interruptible import GroupInterrupt, await_work
from shoal.sync.kv_store_client import AgentStore
from shoal.sync.process_groups import (
    GroupForming,
    GroupNotFormed,
    RankMissing,
    Warn,
    abort_nccl_group,
    form_main_group,
    form_nccl_group,
    form_second_group,
    form_second_nccl_group,
    pair_key,
    warn_in_log,
)
from shoal.units import rank_list

# gloo's connect timeout; gloo waits five times as long. All ranks have reported to the store by then, so a connection
# that is missing after that time never comes. In a generation the ranks have just been ordered to enter.
_CONNECT_S, _GENERATION_CONNECT_S = 1.0, 0.5
# A launch reports soon that its first group cannot be formed; a running training tries longer.
_FIRST_ATTEMPTS, _LATER_ATTEMPTS = 5, 20
_POLL_S = 0.02

# Of a world with fixed membership.
_NO_LINEAGE = Lineage(name=NEVER)
_NO_GROUP = cast(dist.ProcessGroup, dist.GroupMember.NON_GROUP_MEMBER)


@dataclass(frozen=True)
class World:
    """A rank's view of its process group. Unpacks to `(rank, world_size)` for scripts that want just these."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    node: str
    backend: str
    device: torch.device
    interface: str | None
    group: dist.ProcessGroup
    # torch holds only the C++ half of a store: without this reference an AgentStore would lose its Python methods.
    store: dist.Store
    # The ranks' permanent numbers, which name their files. They last as long as the run; `rank` is only a place here.
    ids: tuple[int, ...]
    # The node of each rank; empty where it is not known of all.
    nodes: tuple[str, ...] = ()
    generation: Ballot = NEVER
    lineage: Lineage = _NO_LINEAGE
    # Of the ranks that share a run folder, this one writes its checkpoints and its ledger.
    keeps_files: bool = True
    link_mbps: int | None = None
    # Ends waits when the generation is over.
    release: GroupInterrupt | None = None
    # Proves that a connection belongs to this world, see `process_groups`. Empty: a further group agrees on its own.
    pair_key: bytes = field(default=b"", repr=False)
    # Receives warnings about groups that are formed later.
    warn: Warn = warn_in_log
    # The device of every rank, `cpu` or the name of a GPU that no other machine has; empty where it is not known.
    devices: tuple[str, ...] = ()
    # NCCL's group for gradients, where every rank has a GPU of its own. Everything else goes through `group`.
    gpu_group: dist.ProcessGroup | None = None

    def __iter__(self) -> Iterator[int]:
        return iter((self.rank, self.size))

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def is_node_main(self) -> bool:
        """Whether this rank reads the interface counters of its node: one rank of every node does."""
        return self.local_rank == 0

    @property
    def control_device(self) -> torch.device:
        """Where tensors that the ranks exchange beside gradients are: gloo's collectives are the processor's."""
        return torch.device("cpu") if self.backend == "gloo" else self.device

    @property
    def has_gpus(self) -> bool:
        """Whether any rank computes on a GPU."""
        return any(device != "cpu" for device in self.devices)

    @property
    def id(self) -> int:
        return self.ids[self.rank]

    @property
    def names(self) -> tuple[str, ...]:
        """The ranks as messages call them."""
        return _rank_names(self.ids, self.nodes or ("",) * self.size)


@dataclass(frozen=True)
class RankIdentity:
    """What stays the same for a rank in all its generations."""

    node: str
    device: torch.device
    interface: str | None
    link_mbps: int | None
    release: GroupInterrupt
    # Receives warnings about a group that was formed.
    warn: Warn = warn_in_log


def _rank_names(ids: Sequence[int], nodes: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"rank {id}" + (f" on {node}" if node else "") for id, node in zip(ids, nodes, strict=True))


def choose_device(wanted: str, placement: Placement) -> torch.device:
    """Return this rank's device. `auto` is a GPU for every local rank, or the CPU for all of them: two ranks on one GPU
    are slower than one. With `cuda` they share it if there are fewer."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cuda" and not gpus:
        raise UsageError(
            f"rank {placement.rank} on {placement.node} is to use a GPU, but torch {torch.__version__} sees none",
            why=f"its build is for {runtime}, and finds none" if (runtime := gpu_runtime()) else "it is a CPU build",
            fix="find out why, and which build to install: shoal doctor; or train there with --device cpu",
        )
    if wanted == "cpu" or not gpus or (wanted == "auto" and gpus < placement.local_world_size):
        return torch.device("cpu")
    return torch.device("cuda", placement.local_rank % gpus)


def choose_interface(placement: Placement) -> str | None:
    """Set and return the interface that gloo uses: the one that leads to the peers.

    By default gloo publishes the address that the host name resolves to, which is 127.0.1.1 on Debian.
    """
    if placement.world_size == 1:
        return None
    if "GLOO_SOCKET_IFNAME" not in os.environ and (name := interface_to(placement.master_addr)):
        os.environ["GLOO_SOCKET_IFNAME"] = name
    return os.environ.get("GLOO_SOCKET_IFNAME")


def gpu_runtime() -> str | None:
    """Return what torch was built for: `CUDA 13.0`, `ROCm 7.2.26015`, or None for the processor alone."""
    if torch.version.hip:
        return f"ROCm {torch.version.hip.partition('-')[0]}"
    return f"CUDA {torch.version.cuda}" if torch.version.cuda else None


def device_name(device: torch.device) -> str:
    """Return `cpu`, or the GPU's own name, which is the same in every process that uses it and nowhere else."""
    if device.type != "cuda":
        return "cpu"
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    # Older ROCm builds know no uuid.
    return f"gpu {uuid or f'{device.index} of {boot_id() or socket.gethostname()}'}"


# A world with fixed membership, from the environment of a launcher.


@communication()
def join_world(
    placement: Placement,
    device: torch.device,
    backend: str | None = None,
    join_timeout_s: float = JOIN_TIMEOUT_S,
    timeout_s: float = SYNC_TIMEOUT_S,
    warn: Warn = warn_in_log,
) -> World:
    """Wait for the other ranks at the store and form the group; raise an error that names missing ranks.

    Before the group exists peers may still be importing torch, so the store waits `join_timeout_s`. Afterwards a
    collective that takes longer than `timeout_s` means that a rank is gone.
    """
    interface = choose_interface(placement)
    base = _open_store(placement, join_timeout_s)
    store = dist.PrefixStore(f"shoal/{placement.restarts}", base)
    devices = await_ranks(store, placement.rank, placement.world_size, join_timeout_s, device_name(device))
    chosen = backend or "gloo"
    label = f"world {placement.restarts}"
    key = b"" if placement.world_size == 1 else pair_key(base, store, label, placement.rank)
    forming = GroupForming(store, placement.rank, placement.world_size, key, label, _CONNECT_S, warn=warn)
    group = form_group(forming, device, chosen, timeout_s)
    gpu_group = _form_gpu_group(devices, device, timeout_s, None) if backend is None else None
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
        devices=devices,
        gpu_group=gpu_group,
    )


def _open_store(placement: Placement, timeout_s: float) -> dist.Store:
    if placement.world_size == 1:
        return dist.HashStore()
    if placement.agent_fd is not None:
        return AgentStore(placement.agent_fd, timedelta(seconds=timeout_s))
    is_server = placement.rank == 0 and not placement.store_is_served
    try:
        return _tcp_store(placement, timeout_s, is_server)
    except (RuntimeError, dist.DistError) as error:
        raise RunFailed(
            f"rank {placement.rank} cannot reach the store at {placement.master_addr}:{placement.master_port}",
            why=str(error).splitlines()[0],
            fix="check that rank 0 is running and that no firewall stands between the machines",
        ) from error


def _tcp_store(placement: Placement, timeout_s: float, is_server: bool) -> dist.TCPStore:
    return dist.TCPStore(
        placement.master_addr,
        placement.master_port,
        world_size=None,
        is_master=is_server,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
    )


def await_ranks(store: dist.Store, rank: int, size: int, timeout_s: float, word: str = "here") -> tuple[str, ...]:
    """Report to the store and wait until all ranks have, so that a missing rank can be named.

    Return the words that the ranks left there.
    """
    keys = [f"here/{number}" for number in range(size)]
    store.set(keys[rank], word)
    began = time.monotonic()
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except (RuntimeError, dist.DistError) as error:
        try:
            missing = [number for number, key in enumerate(keys) if not store.check([key])]
        except (RuntimeError, dist.DistError):
            # The store itself is gone by now.
            missing = []
        ranks = rank_list(missing) if missing else "rank ?"
        waited_s = time.monotonic() - began
        if waited_s < timeout_s:
            raise GroupNotFormed(
                f"the world did not form: machines were lost after {waited_s:.0f} s, before {ranks} of {size} came",
                why="a machine, its agent or the network stopped answering while the ranks were starting",
                fix="look at the logs of the agents in the run folder, and check the network: shoal doctor",
            ) from error
        raise RankMissing(
            f"the world did not form: {ranks} of {size} did not come within {timeout_s:.0f} s",
            why="those processes were not started, died early, or cannot reach the others",
            fix="look at their logs; raise sync.join_timeout_s only if a machine is merely slow to start",
        ) from error
    return tuple(store.get(key).decode() for key in keys)


def unjoined_world(placement: Placement, device: torch.device) -> World:
    """Return the world of a rank that has not met its peers yet: it has its own number and no group."""
    return World(
        rank=0,
        size=1,
        local_rank=placement.local_rank,
        local_size=placement.local_world_size,
        node=placement.node,
        backend="gloo",
        device=device,
        interface=None,
        group=_NO_GROUP,
        store=dist.HashStore(),
        ids=(placement.rank,),
        keeps_files=False,
    )


# A world of one generation, from an agent's order.


@communication()
def form_world(
    enter: EnterGeneration, store: dist.Store, place: RankIdentity, meet_s: float, timeout_s: float
) -> World:
    """Form the group of a generation under the generation's own keys. Raise `PeerLost` or `GroupNotFormed` when a rank
    does not come."""
    base = store if enter.size > 1 else dist.HashStore()
    keys = dist.PrefixStore(enter.prefix, base)
    devices = await_ranks(keys, enter.rank, enter.size, meet_s, device_name(place.device))
    key = b"" if enter.size == 1 else pair_key(store, keys, enter.prefix, enter.rank)
    forming = GroupForming(
        store=keys,
        rank=enter.rank,
        size=enter.size,
        key=key,
        label=enter.prefix,
        connect_s=_GENERATION_CONNECT_S,
        names=_rank_names(enter.ids, enter.nodes),
        release=place.release,
        warn=place.warn,
        attempts=_FIRST_ATTEMPTS if enter.first else _LATER_ATTEMPTS,
    )
    group = form_group(forming, place.device, "gloo", timeout_s)
    gpu_group = _form_gpu_group(devices, place.device, timeout_s, place.release)
    return World(
        rank=enter.rank,
        size=enter.size,
        local_rank=enter.local_rank,
        local_size=enter.local_size,
        node=place.node,
        backend="gloo",
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
        devices=devices,
        gpu_group=gpu_group,
    )


# The group of a world.


@communication()
def form_group(forming: GroupForming, device: torch.device, backend: str, timeout_s: float) -> dist.ProcessGroup:
    """Form torch's default group, over gloo or NCCL."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if backend == "gloo":
        return form_main_group(forming, timeout_s)
    return form_nccl_group(forming, device, timeout_s)


def _form_gpu_group(
    devices: Sequence[str], device: torch.device, timeout_s: float, release: GroupInterrupt | None
) -> dist.ProcessGroup | None:
    """Form NCCL's group for gradients, where every rank has a GPU of its own. All ranks decide alike."""
    if len(devices) == 1 or "cpu" in devices or len(set(devices)) < len(devices):
        return None
    group = form_second_nccl_group(list(range(len(devices))), timeout_s, device)
    if release is not None:
        release.at_end(lambda: abort_nccl_group(group))
    return group


@communication()
def with_second_group(world: World, timeout_s: float, ranks: Sequence[int] | None = None) -> World:
    """Return a world of the same ranks, or of some of them, with a second group. All ranks of the world must call it.

    Collectives that run at the same time as those of the steps need their own group: gloo matches the messages of two
    ranks by the order in which each rank started them, which is fixed only inside one group.
    """
    members = list(range(world.size)) if ranks is None else list(ranks)
    rank = members.index(world.rank) if world.rank in members else None
    if world.backend == "gloo":
        group = form_second_group(_second_group_forming(world, members, rank, timeout_s), members, timeout_s)
    else:
        group = form_second_nccl_group(members, timeout_s)
    return replace(world, rank=world.rank if rank is None else rank, size=len(members), group=group)


def _second_group_forming(world: World, members: list[int], rank: int | None, timeout_s: float) -> GroupForming:
    label = f"group {distributed_c10d._world.group_count}"
    store = dist.PrefixStore(label, distributed_c10d._get_default_store())
    key = b""
    if world.size > 1:
        # Ranks reach this point at different times, so they wait for each other before gloo's short connect timeout.
        await_ranks(store, world.rank, world.size, timeout_s)
        key = world.pair_key or pair_key(world.store, store, label, world.rank)
    return GroupForming(
        store=store,
        rank=rank,
        size=len(members),
        key=key,
        label=label,
        connect_s=_CONNECT_S,
        names=tuple(world.names[member] for member in members),
        release=world.release,
        warn=world.warn,
        is_followed=len(members) < world.size,
    )


def set_collective_timeout(world: World, timeout_s: float) -> None:
    """Set the timeout of the group's collectives, for a rank that waits for peers with more work."""
    if world.backend == "gloo":
        distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), world.group)


@communication()
def barrier(world: World, timeout_s: float | None = None) -> None:
    """Wait for all ranks; `timeout_s` is for work that may take longer than a collective."""
    if world.backend != "gloo":
        dist.barrier(group=world.group)
        return
    options = dist.BarrierOptions()
    if timeout_s is not None:
        options.timeout = timedelta(seconds=timeout_s)
    await_work(world.group.barrier(options), world.release)


def leave_world(world: World) -> None:
    """Destroy the group, after a barrier: no rank closes its sockets while a peer still needs them."""
    barrier(world)
    dist.destroy_process_group()


def without_group(world: World) -> World:
    """Return the world without its groups. The last holder of a group waits for its threads."""
    return replace(world, group=_NO_GROUP, gpu_group=None)


# The number of this attempt, where torchrun restarts its ranks. Each torchrun agent counts only the failures that it
# saw itself (TORCHELASTIC_RESTART_COUNT); an agent that joined later, or saw others waiting before its own worker
# ended, counts fewer. All attempts of a job use one store, so a rank could take a dead rank's keys for its peer's. So
# the ranks of an attempt first agree on its number.


def common_attempt(placement: Placement, timeout_s: float) -> int:
    """Return the number of this attempt: 0 for the first. Without a store that outlives the ranks there is only one."""
    if not placement.store_is_served:
        return placement.restarts
    try:
        store = dist.PrefixStore("shoal/attempts", _tcp_store(placement, timeout_s, is_server=False))
        return agree_on_attempt(store, placement.rank, placement.world_size, timeout_s)
    except (RuntimeError, dist.DistError) as error:
        raise RunFailed(
            f"rank {placement.rank} cannot use the store at {placement.master_addr}:{placement.master_port}",
            why=str(error).splitlines()[0],
            fix="check that the torchrun that serves it is running and that no firewall stands between the machines",
        ) from error


def agree_on_attempt(store: dist.Store, rank: int, world_size: int, timeout_s: float) -> int:
    """Rank 0 takes a new number. The others register under it, and continue when rank 0 has counted them.

    A rank may still read an older number. It registers there too, is not counted, and reads again. torchrun starts the
    ranks of an attempt only after all ranks of the previous one have ended.
    """
    process = secrets.token_hex(8)
    deadline = time.monotonic() + timeout_s
    if rank == 0:
        number = store.add("last", 1)
        store.set("number", str(number))
        store.set(f"{number}/0", process)
        keys = [f"{number}/{peer}" for peer in range(world_size)]
        _wait_until(lambda: all(store.check([key]) for key in keys), deadline)
        store.set(f"{number}/counted", json.dumps([store.get(key).decode() for key in keys]))
        return number - 1
    _wait_until(lambda: _was_counted(store, rank, process), deadline)
    return int(store.get("number")) - 1


def _was_counted(store: dist.Store, rank: int, process: str) -> bool:
    if not store.check(["number"]):
        return False
    number = int(store.get("number"))
    # Overwrites an older value: of two processes with the same rank the later one lives.
    store.set(f"{number}/{rank}", process)
    return store.check([f"{number}/counted"]) and json.loads(store.get(f"{number}/counted"))[rank] == process


def _wait_until(is_done: Callable[[], bool], deadline: float) -> None:
    while not is_done():
        if time.monotonic() > deadline:
            raise RuntimeError("not all ranks of this attempt came in time")
        time.sleep(_POLL_S)
