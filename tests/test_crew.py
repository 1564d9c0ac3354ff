"""How often an agent starts a rank again, and how long it waits for one that is to stop."""

from __future__ import annotations

from typing import cast

from shoal.agent.local_ranks import BACK_OFF_S, FORGIVEN_S, LocalRank, LocalRanks, RankConnection
from shoal.agent.membership import RankHalt
from shoal.control.membership.settings import MembershipSettings
from shoal.control.membership.types import Ballot
from shoal.control.orders import StartProcess
from shoal.control.rank_messages import LeaveGeneration, ToRank


def crew(restarts: int) -> tuple[LocalRanks, LocalRank]:
    hand = LocalRank(StartProcess("rank-0", (0,), ("true",), {}))
    return LocalRanks([hand], restarts), hand


def test_three_times_and_each_time_later() -> None:
    ours, hand = crew(restarts=3)
    assert tuple(ours.try_again(hand, 1000.0 + number) for number in range(3)) == BACK_OFF_S
    assert ours.try_again(hand, 1003.0) is None


def test_whoever_lived_long_since_then_is_forgiven() -> None:
    """A training of weeks may lose a rank every day."""
    ours, hand = crew(restarts=3)
    for day in range(10):
        assert ours.try_again(hand, 1000.0 + 86_400 * day) == BACK_OFF_S[0]
    for number in range(1, 3):
        assert ours.try_again(hand, 1000.0 + 86_400 * 9 + number) == BACK_OFF_S[number]
    last = 1000.0 + 86_400 * 9 + 2
    assert ours.try_again(hand, last + FORGIVEN_S - 1) is None
    assert ours.try_again(hand, last + FORGIVEN_S) == BACK_OFF_S[0]


class Line:
    """Keeps what a rank was told."""

    def __init__(self) -> None:
        self.told: list[ToRank] = []

    def say(self, message: ToRank) -> None:
        self.told.append(message)


def test_a_round_that_is_longer_than_anybody_waits_is_broken_off_and_nobody_killed() -> None:
    """Ranks end a round of many steps before they stop at its edge: they are asked to stop at once before they are
    taken for hung."""
    ours, hand = crew(restarts=3)
    line, rules = Line(), MembershipSettings()
    hand.begin(cast(RankConnection, line))
    hand.inside = Ballot(1, 0)
    halting = RankHalt(ours, rules)
    halting.begin(Ballot(1, 0), at_edge=True, now=0.0)
    assert halting.late(rules.edge_s - 1) == []
    assert halting.late(rules.edge_s) == []
    assert [message.at_edge for message in line.told if isinstance(message, LeaveGeneration)] == [True, False]
    assert halting.late(rules.edge_s + rules.answer_s - 0.1) == []
    assert halting.late(rules.edge_s + rules.answer_s) == [hand]


def test_no_restarts_are_none() -> None:
    ours, hand = crew(restarts=0)
    assert ours.try_again(hand, 1e6) is None
