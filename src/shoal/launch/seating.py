"""From a generation to what each rank of a node is told: its place, and the numbers of everybody. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shoal.control.membership.generation import MOST_RANKS, NEVER, Generation, Seat, founding
from shoal.control.rankline import Enter
from shoal.launch.orders import Member, Membership


@dataclass(frozen=True)
class Seating:
    """The numbers by which ranks and their files are known: a founder's ranks keep those of the launch, and each later
    member has a range of its own behind them."""

    me: int
    roster: Sequence[Member]

    def founding(self, members: Membership) -> Generation:
        seats = [Seat(member=member, ranks=tuple(range(len(place.ranks)))) for member, place in enumerate(self.roster)]
        return founding(tuple(seats), above=members.above)

    @property
    def launched(self) -> int:
        """How many ranks the launch had."""
        return sum(len(place.ranks) for place in self.roster)

    def number(self, member: int, local: int) -> int:
        if member < len(self.roster):
            return self.roster[member].ranks[local]
        return self.launched + (member - len(self.roster)) * MOST_RANKS + local

    def orders(self, generation: Generation, name: Callable[[int], str], keeps_files: bool) -> dict[int, Enter]:
        """For each of our ranks in it, by local number. Whether one holds a state is for the caller to say."""
        own = generation.ranks_of(self.me)
        places = [(seat.member, local) for seat in generation.seats for local in seat.ranks]
        return {
            local: Enter(
                generation=generation.id,
                lineage=generation.lineage,
                rank=generation.first_rank(self.me) + index,
                local_rank=index,
                local_size=len(own),
                ids=tuple(self.number(*place) for place in places),
                nodes=tuple(name(member) for member, _ in places),
                state=generation.state,
                source=generation.first_rank(generation.source),
                first=generation.parent == NEVER,
                holds=True,
                keeps_files=keeps_files and index == 0,
                recovers=generation.recovers,
                launched=self.launched,
            )
            for index, local in enumerate(own)
        }
