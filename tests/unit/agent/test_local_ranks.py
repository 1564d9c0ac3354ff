"""How often an agent restarts a rank, and how long it waits for a rank to stop."""

from __future__ import annotations

from typing import cast

from shoal.agent.local_ranks import LocalRank, LocalRanks, RankConnection
from shoal.agent.membership import RankStop
from shoal.control.membership.settings import RESTART_BACKOFF_S, RESTART_FORGIVEN_S, STACKS_S, MembershipSettings
from shoal.control.membership.types import Ballot
from shoal.control.orders import StartProcess
from shoal.control.rank_messages import LeaveGeneration, ToRank


def local_ranks(restarts: int) -> tuple[LocalRanks, LocalRank]:
    rank = LocalRank(StartProcess("rank-0", (0,), ("true",), {}))
    return LocalRanks([rank], restarts), rank


def test_a_rank_is_restarted_three_times_with_growing_backoff() -> None:
    ranks, rank = local_ranks(restarts=3)
    assert tuple(ranks.schedule_restart(rank, 1000.0 + number) for number in range(3)) == RESTART_BACKOFF_S
    assert ranks.schedule_restart(rank, 1003.0) is None


def test_restarts_are_forgiven_after_a_long_run() -> None:
    """A training that lasts weeks may lose a rank every day."""
    ranks, rank = local_ranks(restarts=3)
    for day in range(10):
        assert ranks.schedule_restart(rank, 1000.0 + 86_400 * day) == RESTART_BACKOFF_S[0]
    for number in range(1, 3):
        assert ranks.schedule_restart(rank, 1000.0 + 86_400 * 9 + number) == RESTART_BACKOFF_S[number]
    last = 1000.0 + 86_400 * 9 + 2
    assert ranks.schedule_restart(rank, last + RESTART_FORGIVEN_S - 1) is None
    assert ranks.schedule_restart(rank, last + RESTART_FORGIVEN_S) == RESTART_BACKOFF_S[0]


class RecordingConnection:
    """Record the messages sent to a rank."""

    def __init__(self) -> None:
        self.sent: list[ToRank] = []

    def send(self, message: ToRank) -> None:
        self.sent.append(message)


def test_a_round_longer_than_the_timeout_is_interrupted_before_a_rank_is_killed() -> None:
    """Ranks finish a round of many steps before they stop at its edge. They get a request to stop at once before the
    agent takes them for hung."""
    ranks, rank = local_ranks(restarts=3)
    connection, settings = RecordingConnection(), MembershipSettings()
    rank.begin(cast(RankConnection, connection))
    rank.generation, rank.is_ready = Ballot(1, 0), True
    halt = RankStop(ranks, settings)
    halt.begin(Ballot(1, 0), after_step=True, now=0.0)
    assert halt.late(settings.step_end_timeout_s - 1) == []
    assert halt.late(settings.step_end_timeout_s) == []
    assert [message.after_step for message in connection.sent if isinstance(message, LeaveGeneration)] == [True, False]
    assert halt.late(settings.step_end_timeout_s + settings.stop_timeout_s - 0.1) == []
    assert halt.late(settings.step_end_timeout_s + settings.stop_timeout_s) == [rank]


def test_a_rank_that_still_starts_has_left_at_once() -> None:
    """It imports torch for longer than a hung rank gets. It reads its orders later, one after the other."""
    ranks, rank = local_ranks(restarts=3)
    connection = RecordingConnection()
    rank.begin(cast(RankConnection, connection))
    rank.generation = Ballot(1, 0)
    halt = RankStop(ranks, MembershipSettings())
    halt.begin(Ballot(1, 0), after_step=False, now=0.0)
    assert halt.take_done() == Ballot(1, 0)
    assert halt.late(100.0) == []
    assert (ranks.ready(), rank.has_state, len(connection.sent)) == ((0,), False, 1)


def test_a_rank_that_does_not_answer_is_asked_for_its_stacks_once_before_it_is_killed() -> None:
    ranks, rank = local_ranks(restarts=3)
    settings = MembershipSettings()
    rank.begin(cast(RankConnection, RecordingConnection()))
    rank.generation, rank.is_ready = Ballot(1, 0), True
    halt = RankStop(ranks, settings)
    halt.begin(Ballot(1, 0), after_step=False, now=0.0)
    asked_at = settings.stop_timeout_s - STACKS_S
    asked = [halt.about_to_be_late(now) for now in (0.0, asked_at - 0.1, asked_at, settings.stop_timeout_s)]
    assert asked == [[], [], [rank], []]
    assert halt.late(settings.stop_timeout_s) == [rank]


def test_zero_restarts_means_no_restart() -> None:
    ranks, rank = local_ranks(restarts=0)
    assert ranks.schedule_restart(rank, 1e6) is None
