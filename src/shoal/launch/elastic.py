"""An agent in a run whose machines come and go: it asks its council, and does what that decides.

Everything here is called from the agent's own loop and waits for nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from shoal.control.channel import Message
from shoal.control.machine import boot_clock
from shoal.control.membership.actions import Abandon, Action, Pause, Send, Start, Stop, Tell
from shoal.control.membership.council import Council
from shoal.control.membership.generation import Ballot
from shoal.control.membership.messages import decode, encode
from shoal.control.membership.rules import Rules
from shoal.control.rankline import (
    LEASE_S,
    Broken,
    Committed,
    Finished,
    Formed,
    GiveUp,
    Halted,
    Here,
    Leased,
    ToAgent,
)
from shoal.errors import Interrupted
from shoal.launch.crew import Crew, Hand
from shoal.launch.keyring import Keyring
from shoal.launch.mesh import Mesh
from shoal.launch.orders import Membership
from shoal.launch.ranks import Ended
from shoal.launch.seating import Seating

# Whoever could not pass the last barrier although others did may end by itself, as a lineage of its own.
_OUTLIVE_S = 15.0


class Machine(Protocol):
    """What the agent can do here."""

    def launch(self, hand: Hand) -> None: ...
    def kill(self, name: str) -> None: ...
    def kill_all(self) -> None: ...
    def fail(self) -> None: ...
    def shares_folder_with(self, member: int) -> bool: ...
    def write(self, event: str, **fields: Any) -> None: ...


@dataclass(frozen=True)
class _Halting:
    generation: Ballot
    at_edge: bool
    until: float


class Elastic:
    def __init__(
        self, council: Council, rules: Rules, seating: Seating, crew: Crew, mesh: Mesh, keys: Keyring, machine: Machine
    ) -> None:
        self._council = council
        self._rules = rules
        self._seating = seating
        self._crew = crew
        self._mesh = mesh
        self._keys = keys
        self._machine = machine
        self._todo: deque[Action] = deque()
        self._early: list[tuple[int, Message]] | None = []
        self._halting: _Halting | None = None
        self._give_up: GiveUp | None = None
        self._ticked_at = boot_clock()
        self._lease_at = 0.0
        self._founded = False
        self._finished = False
        self._winding_up = False
        self._linked: set[int] = set()
        self._heard_at: dict[int, float] = {}
        self._done: set[int] = set()
        self._others_finished_at: float | None = None
        self._ended_at: float | None = None

    # How it begins.

    def found(self, members: Membership) -> None:
        """All agents of the launch have met."""
        for hand in self._crew.hands:
            hand.holds = True
        generation = self._seating.founding(members)
        self._do(self._council.found(generation, generation.ranks_of(self._seating.me), boot_clock()))
        self._hear_the_early()

    def come_back(self) -> None:
        """Started again, with nothing but what was promised: the council asks to be let in."""
        self._founded = True
        self._hear_the_early()

    def _hear_the_early(self) -> None:
        early, self._early = self._early or [], None
        for member, message in early:
            self.received(member, message)

    # From the mesh.

    def connected(self, member: int) -> None:
        self._linked.add(member)
        self._do(self._council.connected(member, boot_clock()))

    def closed(self, member: int) -> bool:
        """Whether the run can go on: not before everybody has met once."""
        self._linked.discard(member)
        self._do(self._council.closed(member, boot_clock()))
        return self._founded or self._winding_up

    def received(self, member: int, message: Message) -> None:
        if self._early is not None:
            # From somebody who began a moment before us.
            self._early.append((member, message))
            return
        now = self._heard_at[member] = boot_clock()
        self._do(self._council.received(member, decode(message), now))

    def is_done(self, member: int, finished: bool) -> None:
        """Its ranks have ended, after the last step of the training or before."""
        self._done.add(member)
        if finished and self._others_finished_at is None:
            self._others_finished_at = boot_clock()

    # From the clock.

    def tick(self) -> None:
        now = boot_clock()
        slept = now - self._ticked_at > self._rules.away_after_s
        self._ticked_at = now
        if slept:
            self._mesh.dial_anew()
            if self._halting:
                self._halt(self._halting.generation, self._halting.at_edge)
        self._do(self._council.tick(now))
        self._lease(now)
        self._end_the_late(now)
        self._start_again(now)
        self._give_in(now)

    def is_over(self) -> bool:
        """Our ranks have ended, and nobody who trained with us needs our keys or our word any more."""
        if not self._crew.is_gone():
            return False
        now = boot_clock()
        if self._ended_at is None:
            self._ended_at = now
            if not self._finished:
                self._do(self._council.leave(now))
        return not (self._finished and any(self._is_awaited(member, now) for member in self._linked))

    def _is_awaited(self, member: int, now: float) -> bool:
        """It trained with us and still works: it may be writing its last checkpoint."""
        generation, heard_at = self._council.generation, self._heard_at.get(member, self._ended_at or now)
        trains = generation is not None and member in generation.members
        return trains and member not in self._done and now - heard_at <= self._rules.silent_after_s

    def absent(self) -> list[int]:
        """Those of the launch that have not said how they ended, now that the training is over."""
        founders = range(len(self._seating.roster)) if self._finished else ()
        return [member for member in founders if member not in {*self._done, self._seating.me}]

    @property
    def finished(self) -> bool:
        return self._finished

    def wind_up(self) -> None:
        """The run ends: nobody is started again."""
        self._winding_up = True
        for hand in self._crew.hands:
            hand.again_at = None

    def _lease(self, now: float) -> None:
        generation = self._council.generation
        if generation and now >= self._lease_at and self._council.may_commit(generation.id):
            self._lease_at = now + LEASE_S / 4
            for hand in self._crew.still_in(generation.id):
                hand.say(Leased(generation=generation.id, at_s=now))

    def _end_the_late(self, now: float) -> None:
        halting = self._halting
        if halting is None or now < halting.until:
            return
        for hand in self._crew.still_in(halting.generation):
            self._machine.write("note", text=f"{hand.start.name} did not stop when it was told to, and was killed")
            self._machine.kill(hand.start.name)
        self._halting = _Halting(halting.generation, halting.at_edge, now + self._rules.answer_s)

    def _start_again(self, now: float) -> None:
        for hand in self._crew.due(now):
            hand.again_at = None
            self._machine.launch(hand)

    def _give_in(self, now: float) -> None:
        """The training has ended elsewhere, and we were not part of it or could not follow to its end."""
        if self._others_finished_at is None or self._finished or self._winding_up:
            return
        outside = not self._council.votes or self._council.asks is not None
        if outside or now - self._others_finished_at > _OUTLIVE_S:
            self._machine.write("note", text="the others have finished the training without this machine")
            self.wind_up()
            self._machine.kill_all()

    # From our ranks.

    def heard(self, hand: Hand, message: ToAgent) -> None:
        now = boot_clock()
        match message:
            case Here():
                hand.here = True
                if hand.inside is None and self._crew.all_here():
                    self._do(self._council.ready(self._crew.ready(), now, message.committed))
            case Formed() if hand.inside == message.generation:
                hand.formed = hand.holds = True
                if self._crew.all_formed(message.generation):
                    self._founded = True
                    self._council.formed(message.generation)
            case Halted() if hand.inside == message.generation:
                hand.halted(message.state)
                self._collect()
            case Broken():
                self._on_broken(hand, message)
            case Committed():
                self._council.committed(message.step)
            case Finished():
                hand.finished = True
                self._finish()
            case _:
                pass  # of a generation that it has left

    def _on_broken(self, hand: Hand, message: Broken) -> None:
        name, generation = hand.start.name, message.generation
        self._machine.write("broken", name=name, generation=str(generation), why=message.why)
        if self._founded:
            self._do(self._council.failed(generation, boot_clock()))
        else:
            # A world that was asked for and does not form is an error.
            self._machine.fail()

    def ended(self, ended: Ended) -> bool:
        """Whether the run can go on although this rank has ended."""
        hand = self._crew.named(ended.start.name)
        was_inside, finished = hand.inside, ended.code in (0, Interrupted.exit_code)
        hand.end()
        if finished:
            hand.finished = True
            self._finish()
            return True
        if self._winding_up:
            return ended.by_us
        if ended.code > 0 or not self._founded:
            return False
        self._do_without(was_inside)
        if (after_s := self._crew.try_again(hand, boot_clock())) is not None:
            self._machine.write("restart", name=ended.start.name, attempt=hand.attempts, after_s=after_s)
        return True

    def _do_without(self, generation: Ballot | None) -> None:
        """One of ours has died, in this generation or while it waited for one."""
        now = boot_clock()
        if generation is None:
            self._do(self._council.ready(self._crew.ready(), now))
        elif self._crew.inside(generation):
            self._do(self._council.failed(generation, now))
            self._collect()
        else:
            self._halting = None
            self._do(self._council.lost_ranks(now))
            if waiting := self._crew.ready():
                self._do(self._council.ready(waiting, now))

    def _finish(self) -> None:
        if not self._finished and self._crew.all_finished():
            self._finished = True
            self.wind_up()
            self._council.finish()
            self._machine.write("finished")

    def _collect(self) -> None:
        halting = self._halting
        if halting is None or self._crew.still_in(halting.generation):
            return
        self._halting = None
        if self._crew.inside(halting.generation):
            state, ranks = self._crew.furthest(halting.generation), self._crew.ready()
            self._do(self._council.stopped(halting.generation, state, ranks, boot_clock()))

    # What the council wants done.

    def _do(self, actions: Iterable[Action]) -> None:
        """In order; what follows from an action comes after those that were asked for before it."""
        idle = not self._todo
        self._todo.extend(actions)
        while idle and self._todo:
            try:
                self._perform(self._todo[0])
            finally:
                self._todo.popleft()

    def _perform(self, action: Action) -> None:
        write: Callable[..., None] = self._machine.write
        match action:
            case Send():
                self._mesh.post(action.to, encode(action.message))
            case Stop():
                self._halt(action.generation, action.at_edge)
            case Start():
                self._enter(action)
            case Pause():
                write("pause", text=action.text)
            case Tell():
                write("tell", generation=action.generation and str(action.generation), text=action.text)
            case Abandon():
                lineage, standing, shared = action.lineage, action.standing, action.shared_step
                self._give_up = GiveUp(lineage=lineage, standing=standing, shared_step=shared)
                write("abandon", lineage=str(lineage), standing=str(standing), shared_step=shared, text=action.text)

    def _halt(self, generation: Ballot, at_edge: bool) -> None:
        patience_s = self._rules.edge_s if at_edge else self._rules.answer_s
        self._halting = _Halting(generation, at_edge, boot_clock() + patience_s)
        self._crew.halt(generation, at_edge)
        self._collect()

    def _enter(self, action: Start) -> None:
        generation = action.generation
        me, names = self._seating.me, [self.name(member) for member in generation.members]
        self._halting, self._lease_at = None, 0.0
        self._keys.enter(generation)
        self._machine.write(
            "generation",
            id=str(generation.id),
            lineage=str(generation.lineage.name),
            members=names,
            ranks=generation.world_size,
            step=generation.state.step,
        )
        keeps_files = not any(self._machine.shares_folder_with(member) for member in generation.members if member < me)
        orders = self._seating.orders(generation, self.name, keeps_files)
        for local, order in orders.items():
            hand = self._crew.hands[local]
            if hand.alive:
                hand.enter(order.model_copy(update={"holds": action.holds and hand.holds}))
                if self._give_up is not None:
                    hand.say(self._give_up)
        self._give_up = None
        if len(self._crew.inside(generation.id)) < len(orders):
            # Somebody died between our promise and its being taken up.
            self._do_without(generation.id)

    def name(self, member: int) -> str:
        return self._mesh.places[member].node if member in self._mesh.places else f"machine {member}"
