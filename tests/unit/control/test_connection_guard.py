"""Which connections may handshake under load, and what is logged about the others. The clock is simulated."""

from __future__ import annotations

from shoal.control.connection_guard import ConnectionGuard, GuardLimits, PendingConnection

RULES = GuardLimits(max_pending=6, max_pending_per_address=3, failures=4, blocked_s=5.0, window_s=60.0, max_addresses=3)


class GuardScenario:
    def __init__(self) -> None:
        self.now = 100.0
        self.notes: list[str] = []
        self.closed: list[str] = []
        self.guard = ConnectionGuard(self.notes.append, lambda: self.now, RULES)

    def knock(self, address: str, name: str = "") -> PendingConnection | None:
        return self.guard.knock(address, lambda: self.closed.append(name or address))

    def must_knock(self, address: str, name: str = "") -> PendingConnection:
        knock = self.knock(address, name)
        assert knock is not None
        return knock

    def fail(self, address: str, times: int = 1) -> None:
        for _ in range(times):
            self.guard.refuse(self.must_knock(address), "it does not know the token")


def test_an_address_is_logged_once_and_counted_at_the_end_of_the_window() -> None:
    scenario = GuardScenario()
    scenario.fail("a", 3)
    scenario.fail("b")
    assert scenario.notes == [f"refused a connection from {address}: it does not know the token" for address in "ab"]
    scenario.now += 60
    scenario.guard.look()
    assert scenario.notes[2:] == ["refused 2 more connections from a in 60 s"]
    scenario.fail("a")
    assert scenario.notes[3:] == ["refused a connection from a: it does not know the token"]


def test_an_address_that_failed_often_is_blocked_for_some_seconds() -> None:
    scenario = GuardScenario()
    scenario.fail("a", 4)
    assert scenario.knock("a") is None
    assert scenario.knock("b") is not None
    scenario.now += 4.9
    assert scenario.knock("a") is None
    scenario.now += 0.1
    assert scenario.knock("a") is not None
    scenario.guard.sum_up()
    assert scenario.notes[-1] == "refused 5 more connections from a in 5 s"


def test_the_address_of_a_member_is_never_blocked() -> None:
    scenario = GuardScenario()
    scenario.fail("a", 4)
    scenario.guard.expect(["a"])
    scenario.fail("a", 20)
    assert scenario.knock("a") is not None


def test_the_oldest_pending_connection_is_closed_first_within_the_same_address() -> None:
    scenario = GuardScenario()
    scenario.must_knock("b", "b1")
    for name in ("a1", "a2", "a3", "a4"):
        scenario.must_knock("a", name)
    assert scenario.closed == ["a1"]
    for address in "cd":
        scenario.must_knock(address)
    assert scenario.closed == ["a1"]
    scenario.must_knock("e")
    assert scenario.closed == ["a1", "b1"]
    assert scenario.guard.waiting == 6


def test_unknown_connections_are_closed_before_those_of_members() -> None:
    scenario = GuardScenario()
    scenario.guard.expect(["m", "n"])
    for address in "mabcde":
        scenario.must_knock(address)
    scenario.must_knock("n")
    assert scenario.closed == ["a"]


def test_a_closed_connection_is_counted_once_and_an_admitted_one_never() -> None:
    scenario = GuardScenario()
    first = scenario.must_knock("a")
    for _ in range(3):
        scenario.must_knock("a")
    scenario.guard.refuse(first, "closed")
    scenario.guard.sum_up()
    assert scenario.notes == ["refused a connection from a: its handshake was slow, and others were waiting"]
    scenario.guard.admit(second := scenario.must_knock("b"))
    scenario.guard.refuse(second, "too late to matter")
    assert len(scenario.notes) == 1


def test_failures_from_many_addresses_use_bounded_log_and_memory() -> None:
    scenario = GuardScenario()
    for number in range(10_000):
        scenario.fail(f"10.0.{number // 256}.{number % 256}")
    scenario.guard.sum_up()
    assert scenario.notes[3:] == ["refused 9997 connections from other addresses in 0 s"]
    assert len(scenario.notes) == 4
    assert (
        len(scenario.guard._failed) + len(scenario.guard._unlogged) + len(scenario.guard._blocked_until)
        <= 3 * RULES.max_addresses
    )
