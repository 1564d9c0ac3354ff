"""Forms process groups. Every gloo group of shoal is formed here, and its connections are proved before first use.

gloo assigns a rank's place to the first connection that sends the right sequence number, and these numbers are the
ranks 0, 1, 2, … (torch 2.13: its listener reads eight bytes and checks nothing else). A process that connects before
the true peer gets the peer's place: the peer believes that it is connected, and the first collective waits for its
timeout.

So each two ranks exchange a keyed digest over the very connection that joins them. When one is missing or wrong, all
ranks of the group drop it and form it again on new ports. They agree on that through the store, which does not depend
on gloo. Not prevented: a process that has a peer's place and sends gloo's own message header for a buffer that does not
exist aborts the rank (an uncaught C++ exception in gloo's thread), which is then handled as a rank that died.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import select
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from shoal.control.channel import is_equal_secret
from shoal.errors import ForeignConnection, RunFailed, ShoalError
from shoal.sync.interruptible import (
    GroupInterrupt,
    accepted_and_opened,
    close_listeners,
    count_accepted,
    listeners,
)
from shoal.sync.kv_store_client import AgentStore

G = TypeVar("G")
Warn = Callable[[ShoalError], None]

# gloo waits five times its timeout for a connection (measured: 3 s gave 15 s).
_GLOO_TIMEOUT_FACTOR = 5
# How long a rank waits for digests after every rank has its connections: the first where it has accepted more
# connections than there are peers; otherwise the second, since a loaded machine may be slow.
_SUSPICIOUS_S, _PROOF_S = 2.0, 6.0
# A rank that has all digests waits this much longer for slow or briefly stopped ranks.
_SLACK_S = 3.0
# How often a waiting rank checks whether another rank has failed already.
_CHECK_VERDICT_S = 0.25
_ATTEMPTS = 5
_MAX_ADDRESSES = 3
_DIGEST_BYTES = 32


class GroupNotFormed(RunFailed):
    """A group could not be formed because a rank is missing or unreachable."""


class RankMissing(GroupNotFormed):
    """A rank did not come to its group in time."""


def warn_in_log(error: ShoalError) -> None:
    """Write the warning to the rank's log, for the time before a recorder exists."""
    sys.stderr.write(error.render().replace("error:", "warning:", 1))


@dataclass(frozen=True)
class GroupForming:
    """One rank's part in forming one group. All fields but `rank` are the same on every rank."""

    store: dist.Store  # holds the keys of this group alone
    rank: int | None  # the place in the new group; None on a rank that is not a member and only follows the attempts
    size: int
    key: bytes  # a secret that a foreign process does not know, see `pair_key`
    label: str  # distinguishes the groups that use the same key
    connect_s: float  # gloo's timeout while it connects
    names: tuple[str, ...] = ()  # the ranks as messages call them; empty: by their place in the group
    release: GroupInterrupt | None = None
    warn: Warn = warn_in_log
    attempts: int = _ATTEMPTS
    is_followed: bool = False  # ranks that are not members follow the attempts


@dataclass(frozen=True)
class FormingReport:
    """What one rank saw of a failed attempt."""

    unproven: tuple[int, ...] = ()  # peers whose digest was wrong, or missing although all ranks were connected
    error: str = ""  # gloo's error; it may be the consequence of another rank's failure
    timed_out: bool = False  # gloo's whole connect timeout passed: a firewall, or a network that is down
    accepted: tuple[str, ...] = ()  # remote ends of the connections that this process accepted
    opened: tuple[str, ...] = ()  # local ends of the connections that it opened


def form_proven(forming: GroupForming, make: Callable[[int], G], drop: Callable[[list[G]], None]) -> G:
    """Form the group, again if necessary, until every pair of ranks has proved itself on both sides.

    `make(attempt)` forms the group under store keys that depend on the attempt; `drop` ends the groups in its list and
    holds the last reference to them. After the last attempt raise `ForeignConnection`, or `GroupNotFormed` where
    connections were closed and none was foreign. Raise the error of gloo or the store when a peer is missing or
    unreachable. A group of one has nothing to prove, but gloo listens for it as well.
    """
    open_before = listeners()
    if forming.size == 1:
        group = make(0)
        close_listeners(except_inodes=open_before)
        return group
    for attempt in range(forming.attempts):
        keys = dist.PrefixStore(f"pairs/{attempt}", forming.store)
        held: list[G] = []
        try:
            error, report = _attempt(forming, keys, attempt, make, held)
            reports = None if report is None else _exchange_reports(forming, keys, report, error)
        except BaseException:
            drop(held)
            raise
        if reports is None:
            # gloo would accept every later connection as well, and keep it until the rank ends.
            close_listeners(except_inodes=open_before)
            return held.pop()
        drop(held)
        if _is_unreachable(reports):
            raise error or GroupNotFormed(f"the group did not form: {_first_error(reports)}")
        failure = explain(forming, reports)
        if attempt + 1 == forming.attempts:
            is_foreign = bool(foreign_ends(reports)) or any(report.unproven for report in reports)
            raise (ForeignConnection if is_foreign else GroupNotFormed)(
                f"the group could not be formed in {forming.attempts} attempts: " + failure.seen.rpartition("; ")[0],
                why="a process that is not part of the run keeps connecting to the ports of the ranks",
                fix=failure.fix,
            ) from error
        if forming.rank == 0:
            forming.warn(failure)
    raise AssertionError("a group has at least one attempt")


def _attempt(
    forming: GroupForming, keys: dist.Store, attempt: int, make: Callable[[int], G], held: list[G]
) -> tuple[Exception | None, FormingReport | None]:
    """Make and prove a group, and append it to `held`. Return gloo's error on this rank, and this rank's report if the
    attempt failed on any rank."""
    error: Exception | None = None
    unproven: tuple[int, ...] | None = None
    began = time.monotonic()
    try:
        held.append(make(attempt))
        if forming.rank is not None:
            unproven = _prove(held[0], forming, keys, attempt)
    except (RuntimeError, dist.DistError) as raised:
        error = raised
    took_s = time.monotonic() - began
    if _is_proven(forming, keys, is_ok=error is None and unproven is None):
        return None, None
    accepted, opened = accepted_and_opened()
    return error, FormingReport(
        unproven=unproven or (),
        error=str(error).strip().split("\n")[0] if error else "",
        timed_out=error is not None and took_s > 0.9 * _GLOO_TIMEOUT_FACTOR * forming.connect_s,
        accepted=tuple(sorted(accepted)),
        opened=tuple(sorted(opened)),
    )


def _is_proven(forming: GroupForming, keys: dist.Store, is_ok: bool) -> bool:
    """Return whether the attempt succeeded on every member.

    A member knows it from the confirmations of all others; a rank that only follows reads the verdict from the store.
    One failing member is enough: the others check the verdict while they wait.
    """
    if forming.rank is None:
        keys.wait(["verdict"], timedelta(seconds=_longest_s(forming)))
        return bool(keys.get("verdict") == b"ok")
    if not is_ok:
        keys.set("verdict", "failed")
    elif forming.is_followed and forming.rank == 0:
        keys.set("verdict", "ok")
    return is_ok


def _longest_s(forming: GroupForming) -> float:
    return _GLOO_TIMEOUT_FACTOR * forming.connect_s + _PROOF_S + _SLACK_S


def pair_key(base: dist.Store, store: dist.Store, label: str, rank: int) -> bytes:
    """Return the key by which all ranks of a world prove themselves over the group's own connections.

    Under shoal's agents each agent derives it from the run's token, and it crosses no network. Elsewhere (torchrun,
    scripts) the first rank puts a random one into torch's store: it is unknown to a process that does not read that
    store, but the store is open to everything that reaches its port.
    """
    if isinstance(base, AgentStore):
        return base.derive_key(label)
    if rank == 0:
        store.set("pair-key", secrets.token_hex(_DIGEST_BYTES))
    return bytes(store.get("pair-key"))


def pair_digest(key: bytes, label: str, attempt: int, connection: int, sender: int, receiver: int) -> bytes:
    """Return what `sender` sends to `receiver`. It depends on the direction, so that a peer cannot echo it."""
    text = json.dumps(["shoal pair", label, attempt, connection, sender, receiver])
    return hmac.new(key, text.encode(), hashlib.sha256).digest()


def _prove(group: Any, forming: GroupForming, keys: dist.Store, attempt: int) -> tuple[int, ...] | None:
    """Exchange digests with every peer, and then confirmations that all digests were right.

    Return None when every rank of the group has proved itself to every other; otherwise the peers whose digest is
    missing or wrong, or an empty tuple where only another rank has failed. It polls the buffers instead of waiting in
    gloo: gloo's own timeout would close all other pairs, and a wait inside gloo does not end with the generation.
    """
    own = forming.rank
    assert own is not None  # noqa: S101 - only members prove themselves
    # gloo has a connection to each peer for every interface in its list, and chooses one by the tag modulo their
    # number.
    connections = len(os.environ.get("GLOO_SOCKET_IFNAME", "").split(","))
    peers = [peer for peer in range(forming.size) if peer != own]
    digests = [(peer, tag) for peer in peers for tag in range(connections)]
    confirmations = [(peer, connections) for peer in peers]
    incoming = {place: torch.zeros(_DIGEST_BYTES, dtype=torch.uint8) for place in digests + confirmations}
    expected = {(peer, tag): pair_digest(forming.key, forming.label, attempt, tag, peer, own) for peer, tag in incoming}

    def send(peer: int, tag: int) -> dist.Work:
        digest = pair_digest(forming.key, forming.label, attempt, tag, own, peer)
        work: dist.Work = group.send([torch.frombuffer(bytearray(digest), dtype=torch.uint8)], peer, tag)
        return work

    # Receives first: a peer's digest then implies that the peer is ready to receive this rank's.
    works = [group.recv([tensor], peer, tag) for (peer, tag), tensor in incoming.items()]
    wait = _ProofWait(forming, keys)
    for places in (digests, confirmations):
        works += [send(peer, tag) for peer, tag in places]
        while missing := [p for p in places if not is_equal_secret(incoming[p].numpy().tobytes(), expected[p])]:
            if wait.is_over():
                is_unproven = wait.is_own_timeout and places is digests
                return tuple(sorted({peer for peer, _ in missing})) if is_unproven else ()
    for work in works:
        work.wait(timedelta(seconds=_PROOF_S))
    return None


class _ProofWait:
    """Decides how long a rank waits for digests."""

    def __init__(self, forming: GroupForming, keys: dist.Store) -> None:
        self._forming = forming
        self._keys = keys
        self._began = time.monotonic()
        self._check_at = self._began + _CHECK_VERDICT_S
        self._all_connected_at: float | None = None
        self._is_counted = False
        self._pause_s = 0.0001
        # Whether this rank stopped because its own time was up, and not because another rank failed.
        self.is_own_timeout = True

    def is_over(self) -> bool:
        """Pause briefly, then return whether the wait has ended."""
        if self._forming.release is not None:
            self._forming.release.check()
        # Not time.sleep: it waits for a point in time, which may be past under an emulated clock (libfaketime: EINVAL).
        select.select((), (), (), self._pause_s)
        self._pause_s = min(1.5 * self._pause_s, 0.01)
        now = time.monotonic()
        if now < self._check_at:
            return False
        self._check_at = now + _CHECK_VERDICT_S
        if self._keys.check(["verdict"]):
            self.is_own_timeout = False
            return True
        if self._all_connected_at is None:
            if self._are_all_connected():
                self._all_connected_at = now
            return now - self._began > _longest_s(self._forming)
        waited_s = now - self._all_connected_at
        if waited_s > _SUSPICIOUS_S and any(count >= self._forming.size for count in count_accepted().values()):
            return True
        return waited_s > _PROOF_S

    def _are_all_connected(self) -> bool:
        """Return whether all ranks wait for digests: a rank that waits has its connections."""
        waiting = self._keys.add("waiting", 0 if self._is_counted else 1)
        self._is_counted = True
        return int(waiting) >= self._forming.size


def _exchange_reports(
    forming: GroupForming, keys: dist.Store, own: FormingReport, error: Exception | None
) -> list[FormingReport]:
    """Return the reports of all ranks. When a rank does not report it is gone: raise this rank's own error, if any."""
    names = [f"report/{rank}" for rank in range(forming.size)]
    if forming.rank is not None:
        keys.set(names[forming.rank], json.dumps(vars(own)))
    try:
        keys.wait(names, timedelta(seconds=_longest_s(forming)))
    except (RuntimeError, dist.DistError) as missing:
        raise error or missing from None
    return [_read_report(json.loads(keys.get(name))) for name in names]


def _read_report(fields: dict[str, Any]) -> FormingReport:
    return FormingReport(**fields | {name: tuple(fields[name]) for name in ("unproven", "accepted", "opened")})


def foreign_ends(reports: list[FormingReport]) -> list[str]:
    """Return the remote ends of accepted connections that no rank of the group opened.

    Return none where gloo raised an error on a rank: its connections are closed by then, and would be missing among the
    opened ones.
    """
    if any(report.error for report in reports):
        return []
    opened = {end for report in reports for end in report.opened}
    return sorted({end for report in reports for end in report.accepted} - opened)


def explain(forming: GroupForming, reports: list[FormingReport]) -> ForeignConnection:
    """Describe a failed attempt as a warning."""
    foreign = foreign_ends(reports)
    pairs = {(min(rank, peer), max(rank, peer)) for rank, report in enumerate(reports) for peer in report.unproven}
    where = " and ".join(f"between {_name(forming, one)} and {_name(forming, two)}" for one, two in sorted(pairs)[:3])
    if not pairs:
        at = ", ".join(_name(forming, rank) for rank, report in enumerate(reports) if report.error)
        where = f"of {at or 'a rank'}"
    if foreign:
        listed = ", ".join(foreign[:_MAX_ADDRESSES]) + (" and others" if len(foreign) > _MAX_ADDRESSES else "")
        seen = f"a foreign connection from {listed} took the place of the connection {where} while the group formed"
    elif pairs:
        seen = f"the connection {where} did not prove that it belongs to this run while the group formed"
    else:
        seen = f"a connection {where} was closed while the group formed: {_first_error(reports)}"
    addresses = sorted({end.rpartition(":")[0].strip("[]") for end in foreign})[:_MAX_ADDRESSES]
    look = f"find the process on {', '.join(addresses)}: ss -tnp" if addresses else "look for it: ss -tnp"
    return ForeignConnection(
        f"{seen}; the group is formed again on new ports",
        why="gloo accepts the first connection that sends a rank's number; a process that is not part of the run was "
        "faster, or a machine stood still for seconds",
        fix=f"{look}; keep other machines out by a firewall or WireGuard: docs/security.md",
    )


def _is_unreachable(reports: list[FormingReport]) -> bool:
    """Return whether gloo's whole timeout passed without a foreign connection: new ports do not help then."""
    return any(report.timed_out for report in reports) and not any(report.unproven for report in reports)


def _first_error(reports: list[FormingReport]) -> str:
    """Return the first sentence of gloo's error; gloo adds advice that does not apply here."""
    return next((report.error.split(". ")[0] for report in reports if report.error), "it was closed")


def _name(forming: GroupForming, rank: int) -> str:
    return forming.names[rank] if forming.names else f"rank {rank}"


def form_main_group(forming: GroupForming, timeout_s: float) -> dist.ProcessGroup:
    """Form torch's default group, over gloo."""

    def make(attempt: int) -> dist.ProcessGroup:
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(f"attempt/{attempt}", forming.store),
            rank=forming.rank or 0,
            world_size=forming.size,
            timeout=timedelta(seconds=forming.connect_s),
        )
        group = dist.group.WORLD
        assert group is not None  # noqa: S101 - init_process_group has just made it
        return group

    group = form_proven(forming, make, drop_groups)
    distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)
    return group


def form_second_group(forming: GroupForming, ranks: list[int] | None, timeout_s: float) -> dist.ProcessGroup:
    """Form a further group of ranks of the default group. Every rank of the default group must call it, members or not:
    torch counts its groups, and writes the number into their keys."""

    def make(attempt: int) -> dist.ProcessGroup:
        made: dist.ProcessGroup = dist.new_group(ranks, timedelta(seconds=forming.connect_s), "gloo")
        return made

    def drop(held: list[dist.ProcessGroup]) -> None:
        if held and forming.rank is not None:
            dist.destroy_process_group(held[0])
        _free_in_thread(held)

    group = form_proven(forming, make, drop)
    if forming.rank is not None:
        distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)
    return group


def form_nccl_group(forming: GroupForming, device: torch.device, timeout_s: float) -> dist.ProcessGroup:
    """Form torch's default group, over NCCL. Its connections are not proved: NCCL has its own bootstrap, and no
    race of this kind is known there."""
    dist.init_process_group(
        "nccl",
        store=forming.store,
        rank=forming.rank or 0,
        world_size=forming.size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device,
    )
    group = dist.group.WORLD
    assert group is not None  # noqa: S101 - init_process_group has just made it
    return group


def form_second_nccl_group(ranks: list[int], timeout_s: float, device: torch.device | None = None) -> dist.ProcessGroup:
    group: dist.ProcessGroup = dist.new_group(ranks, timedelta(seconds=timeout_s), "nccl", device_id=device)
    return group


def abort_nccl_group(group: dist.ProcessGroup) -> None:
    """End all collectives of a group at once, also those that wait for a peer that is gone. Call it from any thread."""
    with suppress(RuntimeError, ValueError):
        distributed_c10d._abort_process_group(group)


def form_bare_group(forming: GroupForming) -> Any:
    """Form a gloo group outside torch's list of groups, for a trial."""

    def make(attempt: int) -> Any:
        keys = dist.PrefixStore(f"attempt/{attempt}", forming.store)
        return dist.ProcessGroupGloo(keys, forming.rank or 0, forming.size, timedelta(seconds=forming.connect_s))

    return form_proven(forming, make, _free_in_thread)


def drop_groups(held: list[dist.ProcessGroup] | None = None) -> None:
    """Drop the default group and all others, in any state, even half-formed. The caller's own reference may be in
    `held`."""
    groups = [] if held is None else held
    if dist.is_initialized():
        groups += list(distributed_c10d._world.pg_map)
        dist.destroy_process_group()
    _free_in_thread(groups)
    # torch numbers its groups and writes the number into their keys. A group that did not form counts too, but only on
    # the ranks that got that far: from then on the ranks would look for each other under different keys (seen).
    distributed_c10d._world.group_count = 0


def _free_in_thread(groups: list[Any]) -> None:
    """Free groups in a thread: freeing one waits for its threads, which may be stuck in gloo until a timeout."""
    if groups:
        threading.Thread(target=groups.clear, daemon=True).start()
