"""Detection of stragglers and slow links from given step figures and from the kernel's connection counters.

Exercises engine.stragglers.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import socket
import time
from collections.abc import Sequence

import pytest

from shoal.engine.stragglers import SlowRank, Stragglers
from shoal.host.node_stats import NodeStats
from shoal.sync.step_stats import NO_TIMES, HostStats, KernelCounters, OwnTimes, RankStats

NAMES = ("rank 0 on attic", "rank 1 on cellar", "rank 2 on den")
# The ring of an all-reduce: every rank sends to the next.
RING = ((1, 2), (2, 3), (3, 1))
PIECE = b"x" * 20_000


def make_stats(own_ms: Sequence[float], starved: Sequence[float] = (), mbps: Sequence[float] = ()) -> list[RankStats]:
    starved, mbps = starved or [0.0] * len(own_ms), mbps or [900.0] * len(own_ms)
    return [
        RankStats(ms / 1e3, HostStats(lack, source, 1e6 * rate, target, 1e6 * rate))
        for ms, lack, rate, (source, target) in zip(own_ms, starved, mbps, RING, strict=False)
    ]


EVEN = make_stats([10, 11, 10])


def watch(
    *phases: tuple[list[RankStats], int], exposed: Sequence[float] = (), work: Sequence[int] = ()
) -> list[tuple[int, str]]:
    """Observe every phase for its number of steps; return the warnings with their step within the phase."""
    stragglers = Stragglers(evidence_s=0)
    stragglers.reset(NAMES[: len(phases[0][0])])
    warnings: list[tuple[int, str]] = []
    for number, (figures, steps) in enumerate(phases):
        for step in range(1, steps + 1):
            exposed_s = exposed[number] / 1e3 if exposed else 0.001
            step_s = max(stats.ready_s for stats in figures) + exposed_s + 0.001
            warnings += [
                (step, slow.seen) for slow in stragglers.observe(figures, work or [1] * len(figures), step_s, exposed_s)
            ]
    return warnings


def test_equal_ranks_give_no_warning() -> None:
    assert watch((EVEN, 200)) == []


def test_a_starved_rank_is_named_within_twenty_steps() -> None:
    [(steps, text)] = watch((EVEN, 60), (make_stats([10, 30, 10], starved=[0.1, 0.8, 0.1]), 60))
    assert steps <= 20
    assert text == (
        "all ranks wait for rank 1 on cellar since step 61: it takes 3.0 times as long as the others for its part of a "
        "step (30 ms, and not 10), which costs 62% of the time; likely cause: it waits for a processor 80% of the time"
    )


def test_a_slow_rank_with_enough_processor_time_has_a_slower_processor() -> None:
    [(_, text)] = watch((make_stats([10, 10, 20], starved=[0.3, 0.3, 0.35]), 60))
    assert "rank 2 on den" in text
    assert "its processor is slower" in text


def test_single_long_steps_give_no_warning() -> None:
    pause = make_stats([10, 2000, 10])
    assert watch((EVEN, 40), (pause, 1), (EVEN, 40), (pause, 1), (EVEN, 40)) == []


def test_warm_up_steps_give_no_warning() -> None:
    assert watch((make_stats([10, 500, 10]), 16), (EVEN, 60)) == []


def test_waiting_that_costs_no_time_gives_no_warning() -> None:
    assert watch((make_stats([1.0, 1.8, 1.0]), 60), exposed=[50]) == []


def test_a_slow_network_is_named_by_the_node_its_slow_links_share() -> None:
    slow = make_stats([10, 10, 10], mbps=[9.5, 9.4, 800])
    [(steps, text)] = watch((EVEN, 60), (slow, 60), exposed=[1, 40])
    assert steps <= 20
    assert text == (
        "all ranks wait for the network of cellar: it carries 9.4 Mbit/s, and the best link here 900; exchanging "
        "takes 78% of a step"
    )


def test_with_two_nodes_the_link_between_them_is_named() -> None:
    after = [RankStats(0.01, HostStats(0, source, 9e6, target, 9e6)) for source, target in ((1, 2), (2, 1))]
    before = make_stats([10, 10])
    [(_, text)] = watch((before, 60), (after, 60), exposed=[1, 40])
    assert "the link between attic and cellar" in text


def test_a_network_that_is_equally_slow_for_all_gives_no_warning() -> None:
    assert watch((make_stats([10, 10, 10], mbps=[90, 91, 92]), 60), exposed=[40]) == []


@pytest.mark.parametrize(("starved", "mbps", "is_named"), [(0.0, 150, True), (0.3, 70, False), (0.3, 9, True)])
def test_with_starved_ranks_a_link_must_be_far_slower(starved: float, mbps: float, is_named: bool) -> None:
    slow = make_stats([10, 10, 10], starved=[starved] * 3, mbps=[mbps, mbps, 800])
    assert bool(watch((EVEN, 60), (slow, 60), exposed=[1, 40])) == is_named


def test_a_slow_link_hidden_by_computation_gives_no_warning() -> None:
    assert watch((EVEN, 60), (make_stats([10, 10, 10], mbps=[9, 9, 900]), 60), exposed=[1, 1]) == []


def test_lost_packets_are_reported() -> None:
    lossy = [
        RankStats(0.01, HostStats(address=source, lossy_peer=target, resent=share))
        for (source, target), share in zip(RING, (0.011, 0.009, 0.0), strict=True)
    ]
    [(_, text)] = watch((EVEN, 60), (lossy, 60))
    assert text == "packets are lost by the network of cellar: 1.1% of what is sent is sent again"


@pytest.mark.parametrize(("queued_s", "is_named"), [(0.05, False), (0.001, True)])
def test_packets_that_a_slow_links_full_queue_drops_are_no_second_verdict(queued_s: float, is_named: bool) -> None:
    lossy = [
        RankStats(0.01, HostStats(0, source, 9e6, target, 9e6, target, resent=0.04, queued_s=queued_s))
        for source, target in RING
    ]
    # Losses are counted over many steps: when the link is fast again, they are still known.
    healed = [
        RankStats(0.01, HostStats(0, source, 900e6, target, 800e6, target, resent=0.04, queued_s=queued_s))
        for source, target in RING
    ]
    texts = [text for _, text in watch((EVEN, 60), (lossy, 60), (healed, 40), exposed=[1, 40, 1])]
    assert [text.partition(":")[0] for text in texts if "wait" in text] == ["all ranks wait for the whole network"]
    assert any("packets are lost" in text for text in texts) == is_named


def test_a_warning_is_repeated_only_after_a_recovery() -> None:
    slow = make_stats([10, 30, 10])
    assert len(watch((slow, 400))) == 1
    assert len(watch((slow, 60), (EVEN, 60), (slow, 60))) == 1
    assert len(watch((slow, 60), (EVEN, 160), (slow, 60))) == 2


def test_an_intermittently_slow_rank_is_reported_once() -> None:
    draw = random.Random(1)
    phases = [(make_stats([10, 15 * draw.uniform(0.9, 1.1), 10]), 4) for _ in range(600)]
    assert len(watch(*phases)) == 1


def test_a_rank_with_more_micro_batches_has_no_slow_processor() -> None:
    [(_, text)] = watch((make_stats([20, 10]), 60), work=[2, 1])
    assert text.endswith("; it has 2 of 3 samples")
    [(_, text)] = watch((make_stats([20, 10]), 60), work=[1, 1])
    assert "its processor is slower" in text


def advice(work: Sequence[int], follows_speed: bool, least: int = 1) -> SlowRank:
    stragglers = Stragglers(evidence_s=0)
    stragglers.reset(NAMES, follows_speed)
    stats = make_stats([10, 10, 30])
    [slow] = [slow for _ in range(60) for slow in stragglers.observe(stats, work, 0.03, 0.0, least=least)]
    return slow


def test_the_advice_for_a_slower_processor_agrees_with_what_shares_do() -> None:
    fixed = advice([1, 1, 1], follows_speed=False)
    assert "shares" not in fixed.seen
    assert "--balance live" in fixed.fix
    least = advice([4, 4, 1], follows_speed=True)
    assert least.seen.endswith("; shares follow speed, and are 4:4:1 now")
    assert "use a larger --global-batch" in least.fix
    assert "use a smaller --micro-batch or a larger" in advice([32, 32, 8], follows_speed=True, least=8).fix
    assert advice([4, 4, 2], follows_speed=True).fix.startswith("nothing to do")


def watch_shares(throttled: float, work: Sequence[int]) -> list[SlowRank]:
    """Return the verdicts on a rank of a third of the speed, from step 101 on; its share follows at step 110."""
    stragglers = Stragglers()
    stragglers.reset(NAMES[:2], follows_speed=True)
    slow_node = NodeStats(throttled=throttled)
    verdicts: list[SlowRank] = []
    for step in range(1, 301):
        shares = [4, 4] if step <= 110 else work
        micro_batch_s = (0.05, 0.05 if step <= 100 else 0.15)
        seconds = [count * each for count, each in zip(shares, micro_batch_s, strict=True)]
        node = slow_node if step > 100 else NodeStats()
        ranks = [
            RankStats(seconds[0] + 0.01, HostStats(), work_s=seconds[0]),
            RankStats(seconds[1] + 0.01, HostStats(), node=node, work_s=seconds[1]),
        ]
        verdicts += stragglers.observe(ranks, shares, max(seconds) + 0.02, 0.001, step)
        if step == 110:
            stragglers.change_shares()
    return verdicts


def test_a_rank_that_something_slows_down_is_named_although_its_share_has_followed() -> None:
    [slow] = watch_shares(throttled=0.65, work=[6, 2])
    assert (slow.rank, slow.fields["cause"], slow.fields["since"]) == (1, "CPU quota", 101)
    assert slow.fields["cost"] == pytest.approx(1 / 3, abs=0.01)
    assert slow.seen == (
        "rank 1 on cellar computes at 0.33 of the speed of the others since step 101, which costs 33% of the time, "
        "although its share is smaller (shares now 6:2); likely cause: a CPU limit stops its control group for 65% of "
        "the time"
    )
    # Nothing can be done about a slower processor, and the change of shares has named it.
    assert watch_shares(throttled=0.0, work=[6, 2]) == []


@pytest.mark.parametrize(("gc_s", "is_named"), [(0.04, True), (0.005, False)])
def test_a_rank_that_collects_garbage_is_named_although_its_share_makes_up_for_it(gc_s: float, is_named: bool) -> None:
    stragglers = Stragglers(evidence_s=0)
    stragglers.reset(NAMES[:2], follows_speed=True)
    ranks = [
        RankStats(0.036, HostStats(), work_s=0.033),
        RankStats(0.050, HostStats(), OwnTimes(gc_s=gc_s), work_s=0.010),
    ]
    verdicts = [slow for step in range(1, 100) for slow in stragglers.observe(ranks, [3, 1], 0.095, 0.001, step)]
    assert [(slow.rank, slow.fields["cause"]) for slow in verdicts] == ([(1, "garbage collection")] if is_named else [])
    if is_named:
        assert verdicts[0].seen.startswith("rank 1 on cellar does less than it could since step 17, which costs 22% of")


@pytest.mark.parametrize("onset", range(0, 40, 3))
def test_the_reported_cause_is_right_for_any_onset(onset: int) -> None:
    """The kernel's counters are read every five steps: their values may be older than the slowdown."""
    stragglers = Stragglers(evidence_s=0)
    stragglers.reset(NAMES)
    starved, reported_at = 0.0, None
    for step in range(200):
        is_slow = step >= 60 + onset
        if step % 5 == 0:
            starved = 0.7 if step >= 65 + onset else 0.7 * max(0, step - 60 - onset) / 5
        figures = make_stats([10, 30 if is_slow else 10, 10], starved=[0.05, starved, 0.05])
        for slow in stragglers.observe(figures, [1, 1, 1], 0.03, 0.001):
            assert "waits for a processor" in slow.seen
            reported_at = step - 60 - onset
    assert reported_at is not None
    assert reported_at <= 20


def test_a_new_world_does_not_repeat_the_warning() -> None:
    stragglers, slow = Stragglers(evidence_s=0), make_stats([10, 30, 10])
    for expected in (1, 0):
        stragglers.reset(NAMES)
        assert sum(len(stragglers.observe(slow, [1, 1, 1], 0.03, 0.0)) for _ in range(60)) == expected


def test_ranks_without_nodes_are_named_by_rank() -> None:
    stragglers = Stragglers(evidence_s=0)
    stragglers.reset(("rank 0", "rank 1"))
    [slow] = [slow for _ in range(60) for slow in stragglers.observe(make_stats([10, 30]), [1, 1], 0.03, 0.0)]
    assert slow.seen.startswith("all ranks wait for rank 1 since step 17: it takes")


def make_late(late_ms: float, own: OwnTimes = NO_TIMES, **node: float) -> list[RankStats]:
    """Return the figures of two ranks, of which the second is late."""
    on_time = RankStats(0.1, HostStats(starved=0.05))
    return [on_time, RankStats(0.1 + late_ms / 1e3, HostStats(starved=0.05), own, NodeStats(**node))]


def judge(phases: Sequence[tuple[list[RankStats], int]], step_s: float | None = None) -> list[tuple[int, SlowRank]]:
    """Observe the phases in turn as a run does; return the verdicts with their steps."""
    stragglers = Stragglers()
    stragglers.reset(NAMES[:2])
    verdicts: list[tuple[int, SlowRank]] = []
    number = 0
    for figures, steps in phases:
        for _ in range(steps):
            number += 1
            took_s = step_s or max(stats.ready_s for stats in figures) + 0.01
            found = stragglers.observe(figures, [1, 1], took_s, 0.001, number, "yes (process 7)")
            verdicts += [(number, slow) for slow in found]
    return verdicts


@pytest.mark.parametrize(
    ("late", "kind"),
    [
        (make_late(200, OwnTimes(data_s=0.19)), "data"),
        (make_late(200, OwnTimes(gc_s=0.15)), "garbage collection"),
        (make_late(200, throttled=0.6), "CPU quota"),
        (make_late(200, frozen=0.5), "freezes"),
        (make_late(200, major_faults=900.0), "memory"),
        (make_late(200), "unknown"),
    ],
)
def test_a_rank_that_is_late_is_named_with_its_cause_within_a_minute(late: list[RankStats], kind: str) -> None:
    [(step, slow)] = judge([(make_late(0), 100), (late, 200)])
    assert (slow.rank, slow.fields["cause"], slow.fields["since"]) == (1, kind, 101)
    assert slow.fields["cost"] == pytest.approx(0.2 / 0.31, abs=0.01)
    # Not before the samples show the change, and not later than a minute.
    assert 10 <= (step - 100) * 0.31 <= 60


@pytest.mark.parametrize("step_s", [0.3, 3.0, 14.0])
def test_long_steps_are_judged_within_a_minute_too(step_s: float) -> None:
    on_time = [RankStats(step_s / 3, HostStats())] * 2
    late = [on_time[0], RankStats(0.9 * step_s, HostStats(), node=NodeStats(throttled=0.6))]
    [(step, slow)] = judge([(on_time, 40), (late, 100)], step_s)
    assert slow.fields["cause"] == "CPU quota"
    assert (step - 40) * step_s <= 75


def test_short_freezes_are_found_although_most_steps_are_as_fast_as_ever() -> None:
    frozen = make_late(600, frozen=0.25)
    usual = make_late(0, frozen=0.25)
    phases = [(make_late(0), 100)] + [(usual, 9), (frozen, 1)] * 40
    [(step, slow)] = judge(phases)
    assert (slow.rank, slow.fields["cause"]) == (1, "freezes")
    assert "late in" in slow.seen
    assert (step - 100) * 0.17 <= 60


def test_slow_writes_of_checkpoints_are_found() -> None:
    writing = [make_late(0)[0], RankStats(0.1, HostStats(), OwnTimes(disk_s=3.0))]
    [(_, slow)] = judge([(make_late(0), 60)] + [(writing, 1), (make_late(0), 49)] * 4)
    assert (slow.rank, slow.fields["cause"]) == (1, "disk")
    assert "checkpoints took up to 3" in slow.seen


def test_noise_on_both_ranks_gives_no_verdict() -> None:
    draw = random.Random(3)

    def noisy() -> list[RankStats]:
        return [RankStats(0.1 * draw.lognormvariate(0, 0.25), HostStats(starved=draw.random())) for _ in range(2)]

    assert judge([(noisy(), 1) for _ in range(3000)]) == []


def test_the_kernel_counters_give_the_rate_of_a_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        kernel = KernelCounters()
        with socket.create_connection(server.getsockname(), source_address=("127.0.0.2", 0)) as client:
            accepted, _ = server.accept()
            with accepted:
                # In pieces that fit the receive buffer: waiting for the reader is not the link's fault.
                for _ in range(100):
                    client.sendall(PIECE)
                    accepted.recv(len(PIECE), socket.MSG_WAITALL)
                vitals = kernel.look()
    assert vitals.address in [int.from_bytes(socket.inet_aton(f"127.0.0.{end}")) for end in (1, 2)]
    assert vitals.best_bps > 10e6
    assert (vitals.slow_bps, vitals.resent) == (0.0, 0.0)


def spin(core: int, seconds: float, answer: multiprocessing.Queue[float] | None) -> None:
    os.sched_setaffinity(0, {core})
    kernel, until = KernelCounters(), time.monotonic() + seconds
    while time.monotonic() < until:
        pass
    if answer is not None:
        answer.put(kernel.look().starved)


@pytest.mark.parametrize(("rivals", "least"), [(1, 0.3), (3, 0.6)])
def test_a_shared_processor_is_detected(rivals: int, least: float) -> None:
    core = min(os.sched_getaffinity(0))
    context = multiprocessing.get_context("fork")
    answer: multiprocessing.Queue[float] = context.Queue()
    others = [context.Process(target=spin, args=(core, 1.5, None)) for _ in range(rivals)]
    measured = context.Process(target=spin, args=(core, 1.0, answer))
    for process in (*others, measured):
        process.start()
    starved = answer.get(timeout=30)
    for process in (*others, measured):
        process.join()
    assert least < starved <= 1.0


# Oversubscription. Values as two ranks with four threads each have on two cores.
CROWDED = NodeStats(wanted=3.9, waited=2.9, cpus=2, run_cpus=2, threads=4, machine=7)


def crowded_ranks(node: NodeStats, count: int = 2, starved: float = 0.7) -> list[RankStats]:
    return [RankStats(0.01, HostStats(starved), node=node) for _ in range(count)]


@pytest.mark.parametrize("count", [1, 2])
def test_a_machine_whose_ranks_have_too_many_threads_is_named_once(count: int) -> None:
    [(_, text)] = watch((crowded_ranks(CROWDED, count), 300))
    number, threads = ("one rank", "3.9") if count == 1 else ("two ranks", "7.8")
    assert f"the threads of {number} on attic want {threads} processors and may use 2" in text
    assert "they wait for one 74% of the time (since step 17)" in text


@pytest.mark.parametrize(
    "ranks",
    [
        # One thread a rank: ordinary, beside other programs, and more ranks than cores.
        crowded_ranks(NodeStats(wanted=1.1, waited=0.1, cpus=1, run_cpus=2, threads=1, machine=7)),
        crowded_ranks(NodeStats(wanted=1.1, waited=0.6, cpus=1, run_cpus=2, threads=1, machine=7, other_cores=1.0)),
        crowded_ranks(NodeStats(wanted=1.0, waited=0.4, cpus=2, run_cpus=2, threads=1, machine=7), 3, starved=0.35),
        # Threads that wait, but hold up no training thread.
        crowded_ranks(CROWDED, starved=0.02),
        # Other programs use the processors.
        crowded_ranks(NodeStats(**{**vars(CROWDED), "wanted": 2.6, "other_cores": 1.5}), 1),
        # No kernel that counts.
        crowded_ranks(NodeStats()),
    ],
)
def test_ranks_that_do_not_slow_themselves_down_give_no_verdict(ranks: list[RankStats]) -> None:
    assert watch((ranks, 200)) == []


def test_a_late_rank_is_named_for_its_own_threads_and_its_machine_is_not_named_again() -> None:
    alone = NodeStats(wanted=1.0, waited=0.0, cpus=2, run_cpus=2, threads=2, machine=8)
    ranks = [
        RankStats(0.01, HostStats(0.0), node=alone),
        RankStats(0.05, HostStats(0.7), node=CROWDED),
    ]
    texts = [text for _, text in watch((ranks, 300))]
    assert any("all ranks wait for rank 1 on cellar" in text and "want 3.9 processors" in text for text in texts)
    assert len(texts) == 1
