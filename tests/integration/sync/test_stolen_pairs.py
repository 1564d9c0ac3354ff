"""Attacks on gloo groups while they form: another user's process connects in place of a rank.

Exercises sync.process_groups.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shoal.control.rank_env import Placement
from shoal.errors import ForeignConnection, ShoalError
from shoal.sync import process_groups
from shoal.sync import world as worlds
from shoal.sync.fence import GenerationEnded
from shoal.sync.interruptible import GroupInterrupt
from shoal.sync.process_groups import (
    FormingReport,
    GroupForming,
    drop_groups,
    explain,
    foreign_ends,
    form_main_group,
    pair_digest,
)
from shoal.sync.world import RankIdentity, World, barrier, form_world, with_second_group
from shoal.tools.doctor import gloo_worker
from tests.integration.engine.test_recover import check_run, make_run
from tests.integration.sync.test_group_forming import order
from tests.support.paths import SCRIPTS
from tests.support.ranks import run_ranks
from tests.support.scripted_agent import ScriptedAgent
from tests.support.sockets import listening

SCRIPT = SCRIPTS / "gloo_stranger.py"


@contextlib.contextmanager
def attacker(mode: str) -> Iterator[str]:
    """Run the attacking process and yield the name of the socket on which it receives ports."""
    name = f"attacker-{secrets.token_hex(8)}"
    with subprocess.Popen([sys.executable, str(SCRIPT), name, mode], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"ready\n"
            yield name
        finally:
            process.kill()


def attack(name: str, port: int) -> None:
    """Return when the attacker has taken every connection at this port."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(20)
        connection.connect("\0" + name)
        connection.sendall(str(port).encode())
        assert connection.recv(4) == b"done"


class AttackedStore(dist.Store):
    """Let the attacker connect to every new gloo port of this process before a peer can learn its address. gloo
    listens first and publishes its address afterwards."""

    def __init__(self, base: dist.Store, attacker: str, times: int) -> None:
        super().__init__()
        self.base = base
        self.attacker = attacker
        self.left = times
        self.seen = {end.port for end in listening(os.getpid())}

    def attack_new_ports(self) -> None:
        new = {end.port for end in listening(os.getpid())} - self.seen
        self.seen |= new
        if new and self.left > 0:
            self.left -= 1
            for port in new:
                attack(self.attacker, port)

    def set(self, key: str, value: str | bytes) -> None:
        self.attack_new_ports()
        self.base.set(key, value)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        return self.base.get(key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self.base.wait(keys, timeout or timedelta(seconds=20))

    def check(self, keys: list[str]) -> bool:
        return self.base.check(keys)

    def add(self, key: str, amount: int) -> int:
        return self.base.add(key, amount)


def total(world: World) -> float:
    numbers = torch.tensor([float(world.rank + 1)])
    dist.all_reduce(numbers, group=world.group)
    return float(numbers[0])


def make_identity(warnings: list[ShoalError]) -> RankIdentity:
    return RankIdentity("here", torch.device("cpu"), "lo", None, GroupInterrupt(), warnings.append)


def form_attacked(world: World, name: str, times: int) -> tuple[float, list[str]]:
    """Form a generation whose ports are attacked; return an all-reduce's sum and the warnings.

    An undetected attack ends with the timeout of a collective, which is longer than the deadline of the ranks.
    """
    warnings: list[ShoalError] = []
    store = AttackedStore(world.store, name, times)
    barrier(world)
    drop_groups()
    formed = form_world(order(world), store, make_identity(warnings), meet_s=20, timeout_s=600)
    return total(formed), [warning.seen for warning in warnings]


LONG_MODES = [pytest.param(mode, marks=pytest.mark.long) for mode in ("garbage", "echo")]


@pytest.mark.parametrize("mode", ["silent", "close", "digest", *LONG_MODES])
def test_an_attacked_group_is_formed_again(mode: str, tmp_path: Path) -> None:
    with attacker(mode) as name:
        answers = run_ranks(form_attacked, 2, tmp_path, name, 1)
    assert [sum_ for sum_, _ in answers] == [3.0, 3.0]
    [warning] = answers[0][1]
    assert answers[1][1] == [], "only one rank must warn"
    assert "rank 0" in warning or "rank 1" in warning
    assert "formed again on new ports" in warning
    if mode == "silent":
        assert "a foreign connection from 127.0.0.1:" in warning
        assert "between rank 0 on here and rank 1 on here" in warning


class AttackedAttempts(AttackedStore):
    """Attack the ports of these attempts, on these ranks: while the address is unknown, or known and not read yet."""

    def __init__(self, base: dist.Store, attacker: str, rank: int, attempts: tuple[int, ...], is_known: bool) -> None:
        super().__init__(base, attacker, 1000)
        self.rank = rank
        self.attempts = attempts
        self.is_known = is_known

    def attempt_of(self, key: str) -> int | None:
        return int(key.partition("attempt/")[2].partition("/")[0]) if "/cpu//" in key else None

    def set(self, key: str, value: str | bytes) -> None:
        if not self.is_known and self.attempt_of(key) in self.attempts:
            self.attack_new_ports()
        self.base.set(key, value)  # type: ignore[arg-type]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        if self.is_known and self.attempt_of(keys[0]) in self.attempts:
            self.attack_new_ports()
            marks = [f"attacked/{self.attempt_of(keys[0])}/{rank}" for rank in (0, 1)]
            self.base.set(marks[self.rank], "")
            self.base.wait(marks, timedelta(seconds=20))
        super().wait(keys, timeout)


# Moments of forming. Of the first ones: the ranks whose ports are attacked, in which attempts, whether their address is
# known by then, and the warnings that follow; None where it depends on which of the two ranks dials.
EARLY: dict[str, tuple[tuple[int, ...], tuple[int, ...], bool, int | None]] = {
    "rank 0 has an address": ((0,), (0,), False, None),
    "rank 1 has an address": ((1,), (0,), False, None),
    "both have addresses": ((0, 1), (0,), False, 1),
    "both addresses are known": ((0, 1), (0,), True, 1),
    "the group is formed again": ((0, 1), (0, 1), False, 2),
    "the group is formed a third time": ((0, 1), (0, 1, 2), True, 3),
}
# The others come after gloo has connected the ranks: nothing is left to take, so there is no warning.
LATE = {
    "gloo has connected": "_prove",
    "digests are exchanged": "_ProofWait",
    "all ranks are proven": "close_listeners",
}


def form_in_window(world: World, name: str, window: str) -> tuple[float, list[str]]:
    warnings: list[ShoalError] = []
    ranks, attempts, is_known, _ = EARLY.get(window, ((), (), False, 0))
    store = AttackedAttempts(world.store, name, world.rank, attempts if world.rank in ranks else (), is_known)
    barrier(world)
    drop_groups()
    if window in LATE:
        original = getattr(process_groups, LATE[window])

        def attack_first(*arguments: object, **options: object) -> object:
            store.attack_new_ports()
            return original(*arguments, **options)

        setattr(process_groups, LATE[window], attack_first)
    formed = form_world(order(world), store, make_identity(warnings), meet_s=20, timeout_s=600)
    if window == "the group is in use":
        for port in {end.port for end in listening(os.getpid())} - store.seen:
            with pytest.raises(TimeoutError):
                socket.create_connection(("127.0.0.1", port), timeout=1)
    else:
        assert bool(store.attempts or window in LATE) == (store.left < 1000), "this window was never reached"
    return total(formed), [warning.seen for warning in warnings]


@pytest.mark.long
@pytest.mark.parametrize("window", [*EARLY, *LATE, "the group is in use"])
def test_a_foreign_connection_that_comes_first_never_takes_part(window: str, tmp_path: Path) -> None:
    with attacker("silent") as name:
        answers = run_ranks(form_in_window, 2, tmp_path, name, window)
    assert [sum_ for sum_, _ in answers] == [3.0, 3.0]
    expected = EARLY[window][3] if window in EARLY else 0
    assert len(answers[0][1]) == expected if expected is not None else len(answers[0][1]) <= 1
    assert all("a foreign connection from 127.0.0.1:" in warning for warning in answers[0][1])


def form_by_torch_alone(world: World, name: str) -> str:
    store = AttackedAttempts(world.store, name, world.rank, (0,), is_known=True)
    barrier(world)
    drop_groups()
    keys = dist.PrefixStore("attempt/0", store)
    dist.init_process_group("gloo", store=keys, rank=world.rank, world_size=2, timeout=timedelta(seconds=2))
    with pytest.raises(RuntimeError) as raised:
        dist.all_reduce(torch.ones(1))
    drop_groups()
    dist.init_process_group("gloo", store=dist.PrefixStore("end", world.store), rank=world.rank, world_size=2)
    return str(raised.value)


@pytest.mark.long
def test_without_a_proof_the_foreign_connection_has_the_place_of_a_rank(tmp_path: Path) -> None:
    """So the attacks of this file do come first."""
    with attacker("silent") as name:
        for error in run_ranks(form_by_torch_alone, 2, tmp_path, name):
            assert "imed out" in error or "closed" in error, error


def test_without_an_attack_there_is_no_warning(tmp_path: Path) -> None:
    for sum_, warnings in run_ranks(form_attacked, 2, tmp_path, "", 0):
        assert (sum_, warnings) == (3.0, [])


def never_form(world: World, name: str) -> tuple[str, str, str]:
    store = AttackedStore(dist.PrefixStore("again", world.store), name, 1000)
    barrier(world)
    drop_groups()
    with pytest.raises(ForeignConnection) as raised:
        form_main_group(GroupForming(store, world.rank, 2, b"key", "never", 0.5, attempts=2), 60)
    dist.init_process_group("gloo", store=dist.PrefixStore("end", world.store), rank=world.rank, world_size=2)
    return raised.value.seen, raised.value.why, raised.value.fix


@pytest.mark.long
def test_the_error_after_the_last_attempt_has_cause_and_fix(tmp_path: Path) -> None:
    with attacker("silent") as name:
        for seen, why, fix in run_ranks(never_form, 2, tmp_path, name):
            assert seen.startswith("the group could not be formed in 2 attempts: a foreign connection from 127.0.0.1:")
            assert "keeps connecting" in why
            assert "127.0.0.1: ss -tnp" in fix
            assert "docs/security.md" in fix


def join_attacked(world: World, name: str) -> tuple[float, list[str]]:
    """Join without elastic membership, as probe and `members.on_loss=end` do."""
    store = AttackedStore(world.store, name, 1)
    worlds._open_store = lambda placement, timeout_s: store
    barrier(world)
    drop_groups()
    warnings: list[ShoalError] = []
    placement = Placement(world.rank, 2, world.rank, 2)
    joined = worlds.join_world(placement, torch.device("cpu"), "gloo", warn=warnings.append)
    return total(joined), [warning.seen for warning in warnings]


def test_a_fixed_world_is_proved_too(tmp_path: Path) -> None:
    with attacker("silent") as name:
        answers = run_ranks(join_attacked, 2, tmp_path, name)
    assert [sum_ for sum_, _ in answers] == [3.0, 3.0]
    assert [len(warnings) for _, warnings in answers] == [1, 0]


def form_second_attacked(world: World, name: str, members: list[int]) -> tuple[float, list[str]]:
    """Form the first group undisturbed; the second one, of some ranks only, is attacked."""
    warnings: list[ShoalError] = []
    store = AttackedStore(world.store, name, 0)
    barrier(world)
    drop_groups()
    placement = Placement(world.rank, 3, world.rank, 3)
    worlds._open_store = lambda placement, timeout_s: store
    joined = worlds.join_world(placement, torch.device("cpu"), "gloo", warn=warnings.append)
    store.left = int(world.rank in members)
    second = with_second_group(joined, 60, members)
    third = with_second_group(joined, 60)
    assert total(third) == 6.0
    return total(second) if world.rank in members else 0.0, [warning.seen for warning in warnings]


def test_a_second_group_of_some_ranks_is_proved_too(tmp_path: Path) -> None:
    with attacker("silent") as name:
        answers = run_ranks(form_second_attacked, 3, tmp_path, name, [0, 2])
    assert [sum_ for sum_, _ in answers] == [3.0, 0.0, 3.0]
    [warning] = answers[0][1]
    assert "between rank 0 and rank 2" in warning


def probe_attacked(world: World, name: str) -> dict[str, object]:
    return gloo_worker.try_group(AttackedStore(world.store, name, 1), world.rank, (0, 1))


def test_the_doctors_group_is_proved_too(tmp_path: Path) -> None:
    with attacker("silent") as name:
        answers = run_ranks(probe_attacked, 2, tmp_path, name)
    assert [answer["ok"] for answer in answers] == [True, True]
    assert "a foreign connection" in str(answers[0]["detail"])


def form_with_several_connections(world: World, name: str) -> tuple[float, list[str]]:
    """Open two connections to every peer; the attacker takes the second ones."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo,lo"
    return form_attacked(world, name, 1)


@pytest.mark.long
def test_every_connection_of_a_pair_is_proved(tmp_path: Path) -> None:
    with attacker("silent") as name:
        answers = run_ranks(form_with_several_connections, 2, tmp_path, name)
    assert [sum_ for sum_, _ in answers] == [3.0, 3.0]
    assert len(answers[0][1]) == 1


def prove_with_another_key(world: World) -> str:
    process_groups._PROOF_S = 1.0
    barrier(world)
    drop_groups()
    store = dist.PrefixStore("keys", world.store)
    key = f"key {world.rank}".encode()
    with pytest.raises(ForeignConnection) as raised:
        form_main_group(GroupForming(store, world.rank, 2, key, "two keys", 0.5, attempts=1), 60)
    dist.init_process_group("gloo", store=dist.PrefixStore("end", world.store), rank=world.rank, world_size=2)
    return raised.value.seen


def test_a_peer_with_another_key_is_foreign(tmp_path: Path) -> None:
    for seen in run_ranks(prove_with_another_key, 2, tmp_path):
        assert "the connection between rank 0 and rank 1 did not prove that it belongs to this run" in seen


def wait_for_proof(world: World) -> bool:
    """Rank 1 connects and sends nothing; meanwhile rank 0's generation ends. Without its end rank 0 would wait for
    longer than the deadline of the ranks."""
    process_groups._PROOF_S = 600.0
    barrier(world)
    drop_groups()
    store, release = dist.PrefixStore("over", world.store), GroupInterrupt()
    if world.rank == 1:
        connected = dist.ProcessGroupGloo(dist.PrefixStore("attempt/0/0//cpu/", store), 1, 2, timedelta(seconds=30))
        store.set("connected", "")
        store.wait(["released"], timedelta(seconds=60))
        del connected
        os._exit(0)

    def end_generation() -> None:
        store.wait(["connected"], timedelta(seconds=30))
        time.sleep(0.5)
        release.end()

    threading.Thread(target=end_generation, daemon=True).start()
    with pytest.raises(GenerationEnded):
        form_main_group(GroupForming(store, 0, 2, b"key", "over", 5.0, release=release), 60)
    store.set("released", "")
    return True


@pytest.mark.long
def test_a_rank_waiting_for_a_proof_is_released_when_its_generation_ends(tmp_path: Path) -> None:
    assert run_ranks(wait_for_proof, 2, tmp_path, dying=[1])[0]


def test_a_digest_depends_on_every_field_of_a_connection() -> None:
    original = (b"key", "gen-1-0", 0, 0, 1, 2)
    changed: list[tuple[bytes, str, int, int, int, int]] = [
        (b"another", "gen-1-0", 0, 0, 1, 2),
        (b"key", "gen-2-0", 0, 0, 1, 2),
        (b"key", "gen-1-0", 1, 0, 1, 2),
        (b"key", "gen-1-0", 0, 1, 1, 2),
        # A digest reflected to its sender is not a proof.
        (b"key", "gen-1-0", 0, 0, 2, 1),
        (b"key", "gen-1-0", 0, 0, 1, 3),
    ]
    assert len({pair_digest(*fields) for fields in [original, *changed]}) == len(changed) + 1
    assert pair_digest(*original) == pair_digest(*original)
    assert len(pair_digest(*original)) == 32


def test_connections_that_no_rank_opened_are_foreign() -> None:
    listener = FormingReport(unproven=(1,), accepted=("10.0.0.2:40", "10.0.0.9:66"))
    dialer = FormingReport(unproven=(0,), opened=("10.0.0.2:40",))
    assert foreign_ends([listener, dialer]) == ["10.0.0.9:66"]
    # Its sockets are closed, so its connections are unknown.
    failed = FormingReport(error="Connection closed by peer")
    assert foreign_ends([listener, failed]) == []


def test_a_warning_names_the_ranks_and_the_address() -> None:
    forming = GroupForming(dist.HashStore(), 0, 2, b"", "", 0.5, names=("rank 4 on a", "rank 7 on b"))
    reports = [FormingReport(unproven=(1,), accepted=("10.0.0.9:66",)), FormingReport(unproven=(0,))]
    warning = explain(forming, reports)
    assert "10.0.0.9:66 took the place of the connection between rank 4 on a and rank 7 on b" in warning.seen
    assert "find the process on 10.0.0.9: ss -tnp" in warning.fix
    assert "did not prove" in explain(forming, [FormingReport(unproven=(1,)), FormingReport()]).seen


@pytest.mark.long
def test_a_training_continues_when_its_regrouping_is_attacked(tmp_path: Path) -> None:
    # An undetected attack would end with the timeout of a collective, long after this test's.
    run = make_run(tmp_path / "run", "sync.inside=gloo", "sync.timeout_s=600")
    with attacker("silent") as name, ScriptedAgent(run, 3) as agent:
        agent.start(0, 1, 2)
        agent.form((0, 1, 2))
        agent.await_step(0, 5)
        seen = {end.port for rank in agent.ranks.values() for end in listening(rank.process.pid)}
        attacked = set()

        def attack_new_ports(number: int, key: str) -> None:
            new = {end.port for end in listening(agent.ranks[number].process.pid)} - seen
            seen.update(new)
            if new and number not in attacked:
                attacked.add(number)
                for port in new:
                    attack(name, port)

        agent.before_set = attack_new_ports
        agent.kill(2)
        agent.regroup((0, 1))
        agent.await_end((0, 1))
    assert attacked == {0, 1}
    check_run(run, (0, 1))
    warnings = [event for event in agent.events(0, "warning") if event["error"] == "ForeignConnection"]
    assert "between rank 0 on local and rank 1 on local" in warnings[0]["seen"]
