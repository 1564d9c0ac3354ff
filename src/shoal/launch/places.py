"""Where the members' agents listen, as far as one of them knows. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict

from shoal.control.channel import Message
from shoal.control.hello import Hello
from shoal.control.route import dial_order
from shoal.errors import ControlError
from shoal.launch.orders import MOST_PLACES, Member, read_places


def to_dial(me: int, addresses: Mapping[int, str]) -> list[int]:
    """Those below us, by address and then by number. Gloo's ranks dial in the same direction, so a firewall that lets
    a training pass lets its agents pass too."""
    order = {member: (dial_order(address), member) for member, address in addresses.items()}
    return [member for member, place in order.items() if place < order[me]]


class Places:
    """`version` grows with every change."""

    def __init__(self) -> None:
        self._known: dict[int, Member] = {}
        self.version = 0

    def __getitem__(self, member: int) -> Member:
        return self._known[member]

    def __contains__(self, member: int) -> bool:
        return member in self._known

    def __iter__(self) -> Iterator[int]:
        return iter(list(self._known))

    def name(self, member: int) -> str:
        return self._known[member].node if member in self._known else f"machine {member}"

    def update(self, roster: Mapping[int, Member]) -> None:
        self._known.update(roster)
        self.version += 1

    def of_others(self, me: int) -> dict[int, Member]:
        return {member: place for member, place in self._known.items() if member != me}

    def addresses(self) -> list[str]:
        return [place.address for place in self._known.values()]

    def ours_to_dial(self, me: Hello) -> list[int]:
        addresses = {member: place.address for member, place in self._known.items()}
        return to_dial(me.member, {**addresses, me.member: me.address})

    def is_reborn(self, theirs: Hello) -> bool:
        """Whether it was started again since we heard of it."""
        known = self._known.get(theirs.member)
        return known is not None and theirs.life > known.life

    def believe(self, theirs: Hello) -> None:
        """What a member says of itself is the newest there is."""
        known = self._known.get(theirs.member)
        ranks = known.ranks if known else ()
        place = Member(theirs.node, theirs.address, theirs.port, theirs.mark, ranks, theirs.life)
        self.version += place != known
        self._known[theirs.member] = place

    def as_message(self) -> Message:
        return {"type": "places", "places": {str(member): asdict(place) for member, place in self._known.items()}}

    def learn(self, message: Message) -> list[int]:
        """What somebody else knows of newcomers, and of those that came back: whom we had not known so."""
        try:
            told = read_places(message["places"])
        except (KeyError, TypeError, ValueError, AttributeError):
            raise ControlError("a list of members that cannot be read", why="the other side is not shoal") from None
        news = {
            member: place
            for member, place in told.items()
            if member not in self._known or place.life > self._known[member].life
        }
        if len(self._known.keys() | news.keys()) > MOST_PLACES:
            raise ControlError(f"a list with more than {MOST_PLACES} members", why="the other side is not shoal")
        self._known.update(news)
        self.version += bool(news)
        return list(news)

    def missing(self, me: Hello, here: Iterable[int], within_s: float) -> ControlError:
        there = {me.member, *here}
        absent = [place for member, place in self._known.items() if member not in there]
        names = ", ".join(f"{place.node} ({place.address}:{place.port})" for place in absent)
        return ControlError(
            f"{me.node} could not meet {names} within {within_s:.0f} s",
            why="a firewall drops connections between the machines, or they reach each other by other addresses",
            fix=f"try on {me.node}: ping {absent[0].address}; then open the firewall, or name the right address",
        )
