"""How often an agent starts a rank again."""

from __future__ import annotations

from shoal.launch.crew import BACK_OFF_S, FORGIVEN_S, Crew, Hand
from shoal.launch.orders import Start


def crew(restarts: int) -> tuple[Crew, Hand]:
    hand = Hand(Start("rank-0", (0,), ("true",), {}))
    return Crew([hand], restarts), hand


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


def test_no_restarts_are_none() -> None:
    ours, hand = crew(restarts=0)
    assert ours.try_again(hand, 1e6) is None
