"""Who may greet when many knock, and what the journal says of it. The clock is in our hand."""

from __future__ import annotations

from shoal.control.connection_guard import ConnectionGuard, GuardLimits, PendingConnection

RULES = GuardLimits(max_pending=6, max_pending_per_address=3, failures=4, blocked_s=5.0, window_s=60.0, max_addresses=3)


class Scene:
    def __init__(self) -> None:
        self.now = 100.0
        self.notes: list[str] = []
        self.turned: list[str] = []
        self.guard = ConnectionGuard(self.notes.append, lambda: self.now, RULES)

    def knock(self, address: str, name: str = "") -> PendingConnection | None:
        return self.guard.knock(address, lambda: self.turned.append(name or address))

    def must_knock(self, address: str, name: str = "") -> PendingConnection:
        knock = self.knock(address, name)
        assert knock is not None
        return knock

    def fail(self, address: str, times: int = 1) -> None:
        for _ in range(times):
            self.guard.refuse(self.must_knock(address), "it does not know the token")


def test_an_address_is_spoken_of_once_and_counted_at_the_end_of_the_window() -> None:
    scene = Scene()
    scene.fail("a", 3)
    scene.fail("b")
    assert scene.notes == [f"refused a connection from {who}: it does not know the token" for who in "ab"]
    scene.now += 60
    scene.guard.look()
    assert scene.notes[2:] == ["refused 2 more connections from a in 60 s"]
    scene.fail("a")
    assert scene.notes[3:] == ["refused a connection from a: it does not know the token"]


def test_who_failed_often_is_not_heard_for_some_seconds_and_then_again() -> None:
    scene = Scene()
    scene.fail("a", 4)
    assert scene.knock("a") is None
    assert scene.knock("b") is not None
    scene.now += 4.9
    assert scene.knock("a") is None
    scene.now += 0.1
    assert scene.knock("a") is not None
    scene.guard.sum_up()
    assert scene.notes[-1] == "refused 5 more connections from a in 5 s"


def test_a_members_address_is_always_heard() -> None:
    scene = Scene()
    scene.fail("a", 4)
    scene.guard.expect(["a"])
    scene.fail("a", 20)
    assert scene.knock("a") is not None


def test_the_one_that_sits_longest_gives_way_and_first_one_of_the_same_address() -> None:
    scene = Scene()
    scene.must_knock("b", "b1")
    for name in ("a1", "a2", "a3", "a4"):
        scene.must_knock("a", name)
    assert scene.turned == ["a1"]
    for address in "cd":
        scene.must_knock(address)
    assert scene.turned == ["a1"]
    scene.must_knock("e")
    assert scene.turned == ["a1", "b1"]
    assert scene.guard.waiting == 6


def test_a_stranger_gives_way_to_a_member_before_another_member_does() -> None:
    scene = Scene()
    scene.guard.expect(["m", "n"])
    for address in "mabcde":
        scene.must_knock(address)
    scene.must_knock("n")
    assert scene.turned == ["a"]


def test_who_was_turned_away_is_counted_once_and_who_was_let_in_not_at_all() -> None:
    scene = Scene()
    first = scene.must_knock("a")
    for _ in range(3):
        scene.must_knock("a")
    scene.guard.refuse(first, "closed")
    scene.guard.sum_up()
    assert scene.notes == ["refused a connection from a: its handshake was slow, and others were waiting"]
    scene.guard.admit(second := scene.must_knock("b"))
    scene.guard.refuse(second, "too late to matter")
    assert len(scene.notes) == 1


def test_a_whole_network_fills_neither_the_journal_nor_the_memory() -> None:
    scene = Scene()
    for number in range(10_000):
        scene.fail(f"10.0.{number // 256}.{number % 256}")
    scene.guard.sum_up()
    assert scene.notes[3:] == ["refused 9997 connections from other addresses in 0 s"]
    assert len(scene.notes) == 4
    assert (
        len(scene.guard._failed) + len(scene.guard._unlogged) + len(scene.guard._blocked_until)
        <= 3 * RULES.max_addresses
    )
