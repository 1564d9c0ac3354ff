"""Failures between machines, on the nodes of a lab: firewalls, names, interfaces, killed and frozen peers."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from shoal_lab.lab import Lab
from tests.support.failures.bench import (
    FIRST,
    SECOND,
    STORE_PORT,
    THIRD,
    Bench,
    meeting_at,
    place,
    wrong,
)
from tests.support.failures.registry import on_lab

C10D = ("--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=1")
GLOO = {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}


@on_lab("gloo.connect-timeout")
def firewall_on_the_lower_address(bench: Bench, lab: Lab) -> None:
    lab.node(FIRST).set_firewall(STORE_PORT)
    bench.ranks_on(lab, [FIRST, SECOND], "work_for_ever")
    bench.wait(40)


@on_lab("gloo.connect-timeout+second-is-master")
def firewall_on_the_lower_address_again(bench: Bench, lab: Lab) -> None:
    lab.node(FIRST).set_firewall(STORE_PORT)
    bench.ranks_on(lab, [SECOND, FIRST], "work_for_ever")
    bench.wait(40)


@on_lab("gloo.connect-timeout+of-three")
def firewall_in_the_middle(bench: Bench, lab: Lab) -> None:
    """The first rank has all its connections, starts, and times out before the others give up."""
    lab.node(SECOND).set_firewall(STORE_PORT)
    bench.ranks_on(lab, [FIRST, SECOND, THIRD], "work_for_ever")
    bench.wait(40)


@on_lab("gloo.connect-refused")
def stale_file_store(bench: Bench, lab: Lab) -> None:
    """The file of an earlier run leads to a port that is no longer open."""
    command = wrong("meet_in_a_file", str(bench.folder / "meeting"))
    for pause_s in (0, 6):
        for rank, node in ((1, SECOND), (0, FIRST)):
            bench.start(command, {**GLOO, **place(rank, 2)}, lab, node)
            time.sleep(pause_s)
        bench.wait(60)


@on_lab("gloo.loopback")
def loopback(bench: Bench, lab: Lab) -> None:
    """Use /etc/hosts as Debian writes it, without a setting that corrects gloo's choice."""
    for rank, node in enumerate((FIRST, SECOND)):
        names = bench.write(f"hosts-{node}", f"127.0.0.1 localhost\n127.0.1.1 {node}\n")
        start_unnamed(bench, lab, node, rank, names)
    bench.wait(40)


def loopback_of_older(bench: Bench, lab: Lab, torch: str) -> None:
    for rank, node in enumerate((FIRST, SECOND)):
        names = bench.write(f"hosts-{node}", f"127.0.0.1 localhost\n127.0.1.1 {node}\n")
        start_unnamed(bench, lab, node, rank, names, torch=torch)
    bench.wait(40)


on_lab("gloo.loopback+torch-2.0", torch="2.0")(partial(loopback_of_older, torch="2.0"))
on_lab("gloo.no-error", torch="2.5")(partial(loopback_of_older, torch="2.5"))


@on_lab("gloo.no-error+same-address", torch="2.5")
def decoy_of_older(bench: Bench, lab: Lab) -> None:
    with interface(lab, "docker0", ("172.17.0.1/16", "172.17.0.1/16")):
        for rank, node in enumerate((FIRST, SECOND)):
            places = {**meeting_at(lab, FIRST), **place(rank, 2), "GLOO_SOCKET_IFNAME": "docker0"}
            bench.start(wrong("work_for_ever", torch="2.5"), places, lab, node)
        bench.wait(40)


@on_lab("gloo.loopback+no-name")
def no_name(bench: Bench, lab: Lab) -> None:
    names = bench.write("hosts", "127.0.0.1 localhost\n")
    for rank, node in enumerate((FIRST, SECOND)):
        start_unnamed(bench, lab, node, rank, names)
    bench.wait(40)


@on_lab("gloo.loopback-fallback")
def no_name_on_one_machine(bench: Bench, lab: Lab) -> None:
    """Nothing fails: the other rank is on loopback too."""
    names = bench.write("hosts", "127.0.0.1 localhost\n::ffff:10.77.0.1 pc\n")
    for rank in (0, 1):
        start_unnamed(bench, lab, FIRST, rank, names, "healthy")
    bench.wait(40)


def start_unnamed(
    bench: Bench, lab: Lab, node: str, rank: int, names: Path, program: str = "work_for_ever", torch: str = ""
) -> None:
    mount = f'mount --bind {names} /etc/hosts; unset GLOO_SOCKET_IFNAME; exec "$@"'
    command = ["unshare", "--mount", "sh", "-ec", mount, "sh", *wrong(program, torch=torch)]
    bench.start(command, {**meeting_at(lab, FIRST), **place(rank, 2)}, lab, node)


@on_lab("gloo.same-address")
def decoy(bench: Bench, lab: Lab) -> None:
    with interface(lab, "docker0", ("172.17.0.1/16", "172.17.0.1/16")):
        bench.ranks_on(lab, [FIRST, SECOND], "work_for_ever", {"GLOO_SOCKET_IFNAME": "docker0"})
        bench.wait(40)


@on_lab("gloo.no-route")
def other_network(bench: Bench, lab: Lab) -> None:
    with interface(lab, "vpn0", ("100.64.0.1/24", "100.64.1.1/24")):
        bench.ranks_on(lab, [FIRST, SECOND], "work_for_ever", {"GLOO_SOCKET_IFNAME": "vpn0"})
        bench.wait(40)


@on_lab("gloo.rejected")
def firewall_that_answers(bench: Bench, lab: Lab) -> None:
    """Reject as firewalld does, on the machine that is connected to; a firewall that drops is another failure."""
    rules = f"""
        table inet rejecting {{ chain input {{
            type filter hook input priority 0;
            ct state new iifname eth0 tcp dport != {STORE_PORT} reject with icmpx type admin-prohibited;
        }}; }};"""
    subprocess.run(lab.command(FIRST, ["nft", rules]), check=True)
    try:
        bench.ranks_on(lab, [FIRST, SECOND], "work_for_ever")
        bench.wait(40)
    finally:
        subprocess.run(lab.command(FIRST, ["nft", "delete", "table", "inet", "rejecting"]), check=True)


@contextmanager
def interface(lab: Lab, name: str, addresses: Sequence[str]) -> Iterator[None]:
    nodes = (FIRST, SECOND)
    for node, address in zip(nodes, addresses, strict=True):
        commands = f"ip link add {name} type bridge; ip addr add {address} dev {name}; ip link set {name} up"
        subprocess.run(lab.command(node, ["sh", "-ec", commands]), check=True)
    try:
        yield
    finally:
        for node in nodes:
            subprocess.run(lab.command(node, ["ip", "link", "del", name]), check=True)


@on_lab("gloo.interface")
def unknown_interface(bench: Bench, lab: Lab) -> None:
    bench.ranks_on(lab, [FIRST, SECOND], "work_for_ever", {"GLOO_SOCKET_IFNAME": "eno1"})
    bench.wait(40)


@on_lab("gloo.interface+nccl")
def interface_as_for_nccl(bench: Bench, lab: Lab) -> None:
    bench.ranks_on(lab, [FIRST, SECOND], "work_for_ever", {"GLOO_SOCKET_IFNAME": "^docker0,lo"})
    bench.wait(40)


@on_lab("gloo.peer-reset")
def killed_peer(bench: Bench, lab: Lab) -> None:
    ranks = bench.ranks_on(lab, [FIRST, SECOND], "work_for_ever")
    bench.wait_for("is at work", 2)
    ranks[1].kill()
    bench.wait(20)


@on_lab("gloo.timeout")
def frozen_peer(bench: Bench, lab: Lab) -> None:
    bench.ranks_on(lab, [FIRST, SECOND], "work_for_ever")
    bench.wait_for("is at work", 2)
    lab.node(SECOND).freeze()
    time.sleep(6)
    lab.node(SECOND).thaw()
    bench.wait(20)


@on_lab("healthy+firewall")
def firewall_on_the_higher_address(bench: Bench, lab: Lab) -> None:
    """Only the lower address of a pair is connected to, so this firewall blocks no connection."""
    lab.node(SECOND).set_firewall()
    for rank, node in enumerate((FIRST, SECOND)):
        start_named(bench, lab, node, rank, "healthy")
    bench.wait(40)


def start_named(bench: Bench, lab: Lab, node: str, rank: int, program: str) -> None:
    """Start a rank with a name for every address in the form that torch looks up, so it prints no name warning."""
    names = bench.write("hosts", "".join(f"::ffff:10.77.0.{number} node{number}\n" for number in (1, 2, 3)))
    mount = f'mount --bind {names} /etc/hosts; exec "$@"'
    command = ["unshare", "--mount", "sh", "-ec", mount, "sh", *wrong(program)]
    bench.start(command, {**meeting_at(lab, FIRST), **place(rank, 2)}, lab, node)
