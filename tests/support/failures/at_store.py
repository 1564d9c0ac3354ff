"""Failures of the rendezvous: torch's store and torchrun's rendezvous, on the nodes of a lab."""

from __future__ import annotations

import subprocess
import time

from shoal_lab.lab import Lab
from tests.support.failures.bench import (
    FIRST,
    NOTHING,
    SECOND,
    THIRD,
    TORCHRUN,
    WRONG,
    Bench,
    Env,
    meeting_at,
    place,
    wrong,
)
from tests.support.failures.on_lab import start_named
from tests.support.failures.registry import on_lab

C10D = ("--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=1")
GLOO = {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}


@on_lab("store.refused")
def store_not_started(bench: Bench, lab: Lab) -> None:
    rank_one_alone(bench, lab, meeting_at(lab, FIRST)["MASTER_ADDR"])


@on_lab("store.dropped")
def store_behind_firewall(bench: Bench, lab: Lab) -> None:
    lab.node(FIRST).set_firewall("22")
    rank_one_alone(bench, lab, meeting_at(lab, FIRST)["MASTER_ADDR"])


@on_lab("store.no-answer")
def store_behind_firewall_in_few_words(bench: Bench, lab: Lab) -> None:
    """With a high log level only the traceback is printed, which does not show which of the two causes it was."""
    lab.node(FIRST).set_firewall("22")
    rank_one_alone(bench, lab, meeting_at(lab, FIRST)["MASTER_ADDR"], env={"TORCH_CPP_LOG_LEVEL": "FATAL"})


@on_lab("store.unreachable")
def store_on_another_network(bench: Bench, lab: Lab) -> None:
    rank_one_alone(bench, lab, "192.168.99.1")


@on_lab("store.unreachable+nobody-there")
def store_at_an_unused_address(bench: Bench, lab: Lab) -> None:
    rank_one_alone(bench, lab, "10.77.0.99", "meet_with_patience")


@on_lab("store.name")
def unknown_name(bench: Bench, lab: Lab) -> None:
    rank_one_alone(bench, lab, "desk.local")


def rank_one_alone(bench: Bench, lab: Lab, address: str, program: str = "healthy", env: Env = NOTHING) -> None:
    place_of_one = {**meeting_at(lab, FIRST), **place(1, 2), "MASTER_ADDR": address, **env}
    bench.start(wrong(program), place_of_one, lab, SECOND)
    bench.wait(60)


@on_lab("store.missing-clients")
def rank_zero_alone(bench: Bench, lab: Lab) -> None:
    bench.start(wrong("healthy"), {**meeting_at(lab, FIRST), **place(0, 2)}, lab, FIRST)
    bench.wait(40)


@on_lab("store.rank-missing")
def rank_given_twice(bench: Bench, lab: Lab) -> None:
    for rank, node in zip((0, 1, 1), (FIRST, SECOND, THIRD), strict=True):
        bench.start(wrong("healthy"), {**meeting_at(lab, FIRST), **place(rank, 3)}, lab, node)
    bench.wait(40)


@on_lab("store.rank-missing+world-size")
def world_sizes_differ(bench: Bench, lab: Lab) -> None:
    for rank, node in enumerate((FIRST, SECOND)):
        bench.start(wrong("healthy"), {**meeting_at(lab, FIRST), **place(rank, 2 + rank)}, lab, node)
    bench.wait(40)


@on_lab("store.gone")
def store_host_dies(bench: Bench, lab: Lab) -> None:
    ranks = bench.ranks_on(lab, [FIRST, SECOND], "use_the_store")
    bench.wait_for("is at work", 2)
    ranks[0].kill()
    bench.wait(20)


@on_lab("store.gone+torchrun")
def rendezvous_host_dies(bench: Bench, lab: Lab) -> None:
    settings = ((FIRST, "is_host=true"), (SECOND, "is_host=false,read_timeout=4"))
    started = [start_c10d(bench, lab, node, 2, "10.77.0.1", conf, "work_for_ever") for node, conf in settings]
    bench.wait_for("is at work", 2)
    started[0].kill()
    bench.wait(40)


@on_lab("store.retrying")
def late_rank_zero(bench: Bench, lab: Lab) -> None:
    """The other rank is refused for a while, logs it, and retries."""
    for rank, node in ((1, SECOND), (0, FIRST)):
        start_named(bench, lab, node, rank, "healthy_with_patience")
        time.sleep(10)
    bench.wait(60)


@on_lab("store.reverse-dns")
def no_reverse_names(bench: Bench, lab: Lab) -> None:
    """Nothing fails: this is the output of a healthy run whose addresses have no names."""
    bench.ranks_on(lab, [FIRST, SECOND], "healthy")
    bench.wait(40)


@on_lab("torchrun.no-host")
def rendezvous_host_missing(bench: Bench, lab: Lab) -> None:
    for node in (FIRST, SECOND):
        start_c10d(bench, lab, node, 2, "10.77.0.3", "read_timeout=4")
    bench.wait(60)


@on_lab("torchrun.join-timeout")
def node_missing(bench: Bench, lab: Lab) -> None:
    start_c10d(bench, lab, FIRST, 2, "10.77.0.1", "join_timeout=6")
    bench.wait(60)


def start_c10d(
    bench: Bench, lab: Lab, node: str, nodes: int, endpoint: str, conf: str, program: str = "healthy"
) -> subprocess.Popen[bytes]:
    options = (f"--nnodes={nodes}", *C10D, f"--rdzv-endpoint={endpoint}:29400", f"--rdzv-conf={conf}")
    return bench.start([*TORCHRUN, *options, str(WRONG), program], GLOO, lab, node)


@on_lab("torchrun.node-rank")
def node_rank_given_twice(bench: Bench, lab: Lab) -> None:
    for node in (FIRST, SECOND):
        options = ("--nnodes=2", "--node-rank=0", "--nproc-per-node=1", "--master-addr=10.77.0.1")
        bench.start([*TORCHRUN, *options, "--rdzv-conf=timeout=6", str(WRONG), "healthy"], GLOO, lab, node)
    bench.wait(60)
