"""Who may greet when many knock, and what the journal says of it. The clock is in our hand."""

from __future__ import annotations

from shoal.control.connection_guard import ConnectionGuard, GuardLimits, PendingConnection

RULES = GuardLimits(places=6, places_per_address=3, failures=4, shut_s=5.0, window_s=60.0, named=3)


class Door:
    def __init__(self) -> None:
        self.now = 100.0
        self.notes: list[str] = []
        self.turned: list[str] = []
        self.supervisor = ConnectionGuard(self.notes.append, lambda: self.now, RULES)

    def knock(self, address: str, name: str = "") -> PendingConnection | None:
        return self.supervisor.knock(address, lambda: self.turned.append(name or address))

    def must_knock(self, address: str, name: str = "") -> PendingConnection:
        knock = self.knock(address, name)
        assert knock is not None
        return knock

    def fail(self, address: str, times: int = 1) -> None:
        for _ in range(times):
            self.supervisor.refuse(self.must_knock(address), "it does not know the token")


def test_an_address_is_spoken_of_once_and_counted_at_the_end_of_the_window() -> None:
    door = Door()
    door.fail("a", 3)
    door.fail("b")
    assert door.notes == [f"refused a connection from {who}: it does not know the token" for who in "ab"]
    door.now += 60
    door.supervisor.look()
    assert door.notes[2:] == ["refused 2 more connections from a in 60 s"]
    door.fail("a")
    assert door.notes[3:] == ["refused a connection from a: it does not know the token"]


def test_who_failed_often_is_not_heard_for_some_seconds_and_then_again() -> None:
    door = Door()
    door.fail("a", 4)
    assert door.knock("a") is None
    assert door.knock("b") is not None
    door.now += 4.9
    assert door.knock("a") is None
    door.now += 0.1
    assert door.knock("a") is not None
    door.supervisor.sum_up()
    assert door.notes[-1] == "refused 5 more connections from a in 5 s"


def test_a_members_address_is_always_heard() -> None:
    door = Door()
    door.fail("a", 4)
    door.supervisor.expect(["a"])
    door.fail("a", 20)
    assert door.knock("a") is not None


def test_the_one_that_sits_longest_gives_way_and_first_one_of_the_same_address() -> None:
    door = Door()
    door.must_knock("b", "b1")
    for name in ("a1", "a2", "a3", "a4"):
        door.must_knock("a", name)
    assert door.turned == ["a1"]
    for address in "cd":
        door.must_knock(address)
    assert door.turned == ["a1"]
    door.must_knock("e")
    assert door.turned == ["a1", "b1"]
    assert door.supervisor.waiting == 6


def test_a_stranger_gives_way_to_a_member_before_another_member_does() -> None:
    door = Door()
    door.supervisor.expect(["m", "n"])
    for address in "mabcde":
        door.must_knock(address)
    door.must_knock("n")
    assert door.turned == ["a"]


def test_who_was_turned_away_is_counted_once_and_who_was_let_in_not_at_all() -> None:
    door = Door()
    first = door.must_knock("a")
    for _ in range(3):
        door.must_knock("a")
    door.supervisor.refuse(first, "closed")
    door.supervisor.sum_up()
    assert door.notes == ["refused a connection from a: it was slow to greet, and others were waiting"]
    door.supervisor.admit(second := door.must_knock("b"))
    door.supervisor.refuse(second, "too late to matter")
    assert len(door.notes) == 1


def test_a_whole_network_fills_neither_the_journal_nor_the_memory() -> None:
    door = Door()
    for number in range(10_000):
        door.fail(f"10.0.{number // 256}.{number % 256}")
    door.supervisor.sum_up()
    assert door.notes[3:] == ["refused 9997 connections from other addresses in 0 s"]
    assert len(door.notes) == 4
    assert (
        len(door.supervisor._failed) + len(door.supervisor._unsaid) + len(door.supervisor._shut_until)
        <= 3 * RULES.named
    )
