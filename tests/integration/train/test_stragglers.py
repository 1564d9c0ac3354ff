"""Who is waited for, and why: figures of made-up steps, and the kernel's own of real connections."""

from __future__ import annotations

import multiprocessing
import os
import random
import socket
import time
from collections.abc import Sequence

import pytest

from shoal.config.schema import RunConfig
from shoal.cost.batch_plan import rank_weights
from shoal.sync.step_stats import HostStats, KernelCounters, RankStats
from shoal.train.stragglers import Stragglers

NAMES = ("rank 0 on attic", "rank 1 on cellar", "rank 2 on den")
# The ring of an all-reduce: each sends to the next.
RING = ((1, 2), (2, 3), (3, 1))
PIECE = b"x" * 20_000


def told(own_ms: Sequence[float], starved: Sequence[float] = (), mbps: Sequence[float] = ()) -> list[RankStats]:
    starved, mbps = starved or [0.0] * len(own_ms), mbps or [900.0] * len(own_ms)
    return [
        RankStats(ms / 1e3, HostStats(lack, source, 1e6 * rate, target, 1e6 * rate))
        for ms, lack, rate, (source, target) in zip(own_ms, starved, mbps, RING, strict=False)
    ]


EVEN = told([10, 11, 10])


def watch(
    *phases: tuple[list[RankStats], int], exposed: Sequence[float] = (), work: Sequence[int] = ()
) -> list[tuple[int, str]]:
    """Each phase for so many steps; what was said, and how many steps after the last phase began."""
    stragglers = Stragglers()
    stragglers.reset(NAMES[: len(phases[0][0])])
    said: list[tuple[int, str]] = []
    for number, (figures, steps) in enumerate(phases):
        for step in range(1, steps + 1):
            exposed_s = exposed[number] / 1e3 if exposed else 0.001
            step_s = max(each.ready_s for each in figures) + exposed_s + 0.001
            said += [
                (step, slow.seen) for slow in stragglers.observe(figures, work or [1] * len(figures), step_s, exposed_s)
            ]
    return said


def test_nobody_is_named_where_all_are_alike() -> None:
    assert watch((EVEN, 200)) == []


def test_a_starved_rank_is_named_within_twenty_steps() -> None:
    [(steps, text)] = watch((EVEN, 60), (told([10, 30, 10], starved=[0.1, 0.8, 0.1]), 60))
    assert steps <= 20
    assert text == (
        "all ranks wait for rank 1 on cellar: it takes 3.0 times as long as the others for its part of a step "
        "(30 ms, and not 10); for 80% of the time it waits for a processor, because of other programs or a limit"
    )


def test_a_rank_that_has_its_processor_is_slower_by_itself() -> None:
    [(_, text)] = watch((told([10, 10, 20], starved=[0.3, 0.3, 0.35]), 60))
    assert "rank 2 on den" in text
    assert "its processor is slower" in text


def test_one_long_step_is_nobodys_character() -> None:
    pause = told([10, 2000, 10])
    assert watch((EVEN, 40), (pause, 1), (EVEN, 40), (pause, 1), (EVEN, 40)) == []


def test_warming_up_is_not_judged() -> None:
    assert watch((told([10, 500, 10]), 16), (EVEN, 60)) == []


def test_waiting_that_costs_nothing_is_not_worth_a_word() -> None:
    assert watch((told([1.0, 1.8, 1.0]), 60), exposed=[50]) == []


def test_a_slow_link_is_named_by_what_the_slow_edges_share() -> None:
    slow = told([10, 10, 10], mbps=[9.5, 9.4, 800])
    [(steps, text)] = watch((EVEN, 60), (slow, 60), exposed=[1, 40])
    assert steps <= 20
    assert text == (
        "all ranks wait for the network of cellar: it carries 9.4 Mbit/s, and the best link here 900; exchanging "
        "takes 78% of a step"
    )


def test_between_two_nobody_can_say_whose_end_it_is() -> None:
    after = [RankStats(0.01, HostStats(0, source, 9e6, target, 9e6)) for source, target in ((1, 2), (2, 1))]
    before = told([10, 10])
    [(_, text)] = watch((before, 60), (after, 60), exposed=[1, 40])
    assert "the link between attic and cellar" in text


def test_a_network_that_is_slow_for_all_alike_is_nobodys() -> None:
    assert watch((told([10, 10, 10], mbps=[90, 91, 92]), 60), exposed=[40]) == []


@pytest.mark.parametrize(("starved", "mbps", "is_named"), [(0.0, 150, True), (0.3, 70, False), (0.3, 9, True)])
def test_where_ranks_lack_processors_a_link_must_be_far_slower(starved: float, mbps: float, is_named: bool) -> None:
    slow = told([10, 10, 10], starved=[starved] * 3, mbps=[mbps, mbps, 800])
    assert bool(watch((EVEN, 60), (slow, 60), exposed=[1, 40])) == is_named


def test_a_slow_link_that_is_hidden_is_no_trouble() -> None:
    assert watch((EVEN, 60), (told([10, 10, 10], mbps=[9, 9, 900]), 60), exposed=[1, 1]) == []


def test_lost_packets_are_told_of() -> None:
    lossy = [
        RankStats(0.01, HostStats(address=source, lossy_peer=target, resent=share))
        for (source, target), share in zip(RING, (0.011, 0.009, 0.0), strict=True)
    ]
    [(_, text)] = watch((EVEN, 60), (lossy, 60))
    assert text == "packets are lost by the network of cellar: 1.1% of what is sent is sent again"


def test_the_same_is_told_once_and_again_after_it_was_over() -> None:
    slow = told([10, 30, 10])
    assert len(watch((slow, 400))) == 1
    assert len(watch((slow, 60), (EVEN, 60), (slow, 60))) == 1
    assert len(watch((slow, 60), (EVEN, 160), (slow, 60))) == 2


def test_one_that_is_slow_now_and_then_is_told_of_once() -> None:
    draw = random.Random(1)
    phases = [(told([10, 15 * draw.uniform(0.9, 1.1), 10]), 4) for _ in range(600)]
    assert len(watch(*phases)) == 1


def test_a_batch_that_does_not_come_out_even_is_no_slow_processor() -> None:
    [(_, text)] = watch((told([20, 10]), 60), work=[2, 1])
    assert text.endswith("; it has 2 of 3 micro-batches")
    [(_, text)] = watch((told([20, 10]), 60), work=[1, 1])
    assert "its processor is slower" in text


def advice(own_ms: Sequence[float], work: Sequence[int], ids: Sequence[int] = (), weights: Sequence[float] = ()) -> str:
    stragglers = Stragglers()
    stragglers.reset([f"rank {number}" for number in ids or range(len(own_ms))], ids, weights)
    [slow] = [slow for _ in range(60) for slow in stragglers.observe(told(own_ms), work, 0.03, 0.0)]
    return slow.fix


def test_a_slow_rank_is_advised_less_work_than_it_has() -> None:
    assert advice([10, 10, 15], [1, 1, 1]).endswith(" --set run.weights=1/1/0.67")
    assert advice([10, 10, 15], [2, 2, 1], weights=[1, 1, 0.5]).endswith(" --set run.weights=1/1/0.33")
    # In the unit of the weights that the others keep.
    assert advice([10, 10, 15], [2, 2, 1], weights=[20, 20, 10]).endswith(" --set run.weights=20/20/6.7")
    assert advice([10, 10, 40], [4, 2, 2], weights=[2, 1, 1]).endswith(" --set run.weights=2/1/0.25")


def test_the_advised_weights_are_those_of_all_ranks_of_the_launch() -> None:
    """Rank 1 has left: the ranks that are there have other places than numbers."""
    fix = advice([10, 10, 30], [2, 1, 1], ids=[0, 2, 3], weights=[2, 3, 1, 1])
    assert fix.endswith(" --set run.weights=2/3/1/0.33")
    config = RunConfig(weights=fix.rpartition("=")[2])
    assert rank_weights(config, 4) == (2, 3, 1, 0.33)


def test_a_rank_that_joined_later_is_given_no_weight() -> None:
    fix = advice([10, 30], [1, 1], ids=[0, 64], weights=[1, 1])
    assert "run.weights=" not in fix
    assert "joined after the start" in fix


def test_a_weight_below_one_micro_batch_is_not_raised() -> None:
    fix = advice([10, 10, 15], [2, 2, 1], weights=[1, 1, 0.1])
    assert "run.weights" not in fix
    assert "1 of 5 micro-batches" in fix


@pytest.mark.parametrize("onset", range(0, 40, 3))
def test_the_cause_is_that_of_the_trouble_whenever_it_began(onset: int) -> None:
    """The kernel's counters are looked at every five steps: what they say may be older than the trouble."""
    stragglers = Stragglers()
    stragglers.reset(NAMES)
    starved, told_at = 0.0, None
    for step in range(200):
        is_slow = step >= 60 + onset
        if step % 5 == 0:
            starved = 0.7 if step >= 65 + onset else 0.7 * max(0, step - 60 - onset) / 5
        figures = told([10, 30 if is_slow else 10, 10], starved=[0.05, starved, 0.05])
        for slow in stragglers.observe(figures, [1, 1, 1], 0.03, 0.001):
            assert "waits for a processor" in slow.seen
            told_at = step - 60 - onset
    assert told_at is not None
    assert told_at <= 20


def test_another_world_does_not_hear_it_again() -> None:
    stragglers, slow = Stragglers(), told([10, 30, 10])
    for expected in (1, 0):
        stragglers.reset(NAMES)
        assert sum(len(stragglers.observe(slow, [1, 1, 1], 0.03, 0.0)) for _ in range(60)) == expected


def test_ranks_without_nodes_have_a_name_too() -> None:
    stragglers = Stragglers()
    stragglers.reset(("rank 0", "rank 1"))
    [slow] = [slow for _ in range(60) for slow in stragglers.observe(told([10, 30]), [1, 1], 0.03, 0.0)]
    assert slow.seen.startswith("all ranks wait for rank 1: it takes")


def test_the_kernel_counts_what_a_connection_carried() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        kernel = KernelCounters()
        with socket.create_connection(server.getsockname(), source_address=("127.0.0.2", 0)) as ours:
            theirs, _ = server.accept()
            with theirs:
                # In pieces that the other side has room for: waiting for its reader is not the link's.
                for _ in range(100):
                    ours.sendall(PIECE)
                    theirs.recv(len(PIECE), socket.MSG_WAITALL)
                stats = kernel.look()
    assert stats.address in [int.from_bytes(socket.inet_aton(f"127.0.0.{end}")) for end in (1, 2)]
    assert stats.best_bps > 10e6
    assert (stats.slow_bps, stats.resent) == (0.0, 0.0)


def spin(core: int, seconds: float, answer: multiprocessing.Queue[float] | None) -> None:
    os.sched_setaffinity(0, {core})
    kernel, until = KernelCounters(), time.monotonic() + seconds
    while time.monotonic() < until:
        pass
    if answer is not None:
        answer.put(kernel.look().starved)


@pytest.mark.parametrize(("rivals", "least"), [(1, 0.3), (3, 0.6)])
def test_a_shared_processor_is_seen(rivals: int, least: float) -> None:
    core = min(os.sched_getaffinity(0))
    context = multiprocessing.get_context("fork")
    answer: multiprocessing.Queue[float] = context.Queue()
    others = [context.Process(target=spin, args=(core, 1.5, None)) for _ in range(rivals)]
    ours = context.Process(target=spin, args=(core, 1.0, answer))
    for process in (*others, ours):
        process.start()
    starved = answer.get(timeout=30)
    for process in (*others, ours):
        process.join()
    assert least < starved <= 1.0
