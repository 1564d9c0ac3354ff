"""How often an agent starts a rank again, and how long it waits for one that is to stop."""

from __future__ import annotations

from typing import cast

from shoal.agent.local_ranks import LocalRank, LocalRanks, RankConnection
from shoal.agent.membership import RankStop
from shoal.control.membership.settings import RESTART_BACKOFF_S, RESTART_FORGIVEN_S, MembershipSettings
from shoal.control.membership.types import Ballot
from shoal.control.orders import StartProcess
from shoal.control.rank_messages import LeaveGeneration, ToRank


def local_ranks(restarts: int) -> tuple[LocalRanks, LocalRank]:
    rank = LocalRank(StartProcess("rank-0", (0,), ("true",), {}))
    return LocalRanks([rank], restarts), rank


def test_three_times_and_each_time_later() -> None:
    ranks, rank = local_ranks(restarts=3)
    assert tuple(ranks.schedule_restart(rank, 1000.0 + number) for number in range(3)) == RESTART_BACKOFF_S
    assert ranks.schedule_restart(rank, 1003.0) is None


def test_whoever_lived_long_since_then_is_forgiven() -> None:
    """A training of weeks may lose a rank every day."""
    ranks, rank = local_ranks(restarts=3)
    for day in range(10):
        assert ranks.schedule_restart(rank, 1000.0 + 86_400 * day) == RESTART_BACKOFF_S[0]
    for number in range(1, 3):
        assert ranks.schedule_restart(rank, 1000.0 + 86_400 * 9 + number) == RESTART_BACKOFF_S[number]
    last = 1000.0 + 86_400 * 9 + 2
    assert ranks.schedule_restart(rank, last + RESTART_FORGIVEN_S - 1) is None
    assert ranks.schedule_restart(rank, last + RESTART_FORGIVEN_S) == RESTART_BACKOFF_S[0]


class Line:
    """Keeps what a rank was sent."""

    def __init__(self) -> None:
        self.sent: list[ToRank] = []

    def send(self, message: ToRank) -> None:
        self.sent.append(message)


def test_a_round_that_is_longer_than_anybody_waits_is_broken_off_and_nobody_killed() -> None:
    """Ranks end a round of many steps before they stop at its edge: they are asked to stop at once before they are
    taken for hung."""
    ranks, rank = local_ranks(restarts=3)
    line, settings = Line(), MembershipSettings()
    rank.begin(cast(RankConnection, line))
    rank.generation = Ballot(1, 0)
    stopping = RankStop(ranks, settings)
    stopping.begin(Ballot(1, 0), after_step=True, now=0.0)
    assert stopping.late(settings.step_end_timeout_s - 1) == []
    assert stopping.late(settings.step_end_timeout_s) == []
    assert [message.after_step for message in line.sent if isinstance(message, LeaveGeneration)] == [True, False]
    assert stopping.late(settings.step_end_timeout_s + settings.stop_timeout_s - 0.1) == []
    assert stopping.late(settings.step_end_timeout_s + settings.stop_timeout_s) == [rank]


def test_no_restarts_are_none() -> None:
    ranks, rank = local_ranks(restarts=0)
    assert ranks.schedule_restart(rank, 1e6) is None
