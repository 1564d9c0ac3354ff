"""An agent in a run whose machines come and go: it asks its council, and does what that decides.

Everything here is called from the agent's own loop and waits for nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from shoal.control import rankline
from shoal.control.channel import Message
from shoal.control.machine import boot_clock
from shoal.control.membership.actions import Abandon, Action, Pause, Send, Start, Stop, Tell
from shoal.control.membership.council import Council
from shoal.control.membership.generation import MOST_RANKS, Ballot
from shoal.control.membership.messages import decode, encode
from shoal.control.membership.promises import Promises
from shoal.errors import Interrupted, UsageError
from shoal.launch.crew import Crew, Hand
from shoal.launch.farewell import Farewell, nobody_has_the_state
from shoal.launch.halting import Halting
from shoal.launch.keyring import Keyring
from shoal.launch.mesh import Mesh
from shoal.launch.orders import Go, Membership
from shoal.launch.ranks import Ended
from shoal.launch.seating import Seating
from shoal.launch.workplace import Workplace

# A machine that said so is suspended within seconds; where it never was, somebody changed their mind.
_ASLEEP_WITHIN_S = 30.0


class Elastic:
    def __init__(
        self, me: int, go: Go, members: Membership, promises: Promises, mesh: Mesh, keys: Keyring, workplace: Workplace
    ) -> None:
        self._rules = members.rules
        self._members = members
        self._mesh = mesh
        self._keys = keys
        self._workplace = workplace
        self._seating = Seating(me, go.roster)
        self.crew = Crew([Hand(start) for start in go.starts], members.restarts)
        self.farewell = Farewell(me, len(go.roster), members.rules.silent_after_s)
        self._council = Council(me, members.rules, promises, boot_clock(), self.name)
        # The world that was asked for did not form, or nothing is left of it.
        self.failed = False
        self.may_return = False
        self._todo: deque[Action] = deque()
        self._early: list[tuple[int, Message]] | None = []
        self._halting = Halting(self.crew, members.rules)
        self._give_up: rankline.GiveUp | None = None
        # The last step that a rank of this node has in the ledger, as its ranks read it when they started.
        self._found = 0
        self._ticked_at = boot_clock()
        self._asleep_at: float | None = None
        self._lease_at = 0.0
        self._founded = False
        self._winding_up = False
        self._left = False

    # How it begins.

    def found(self) -> None:
        """All agents of the launch have met."""
        for hand in self.crew.hands:
            hand.holds = True
        generation = self._seating.founding(self._members)
        self._do(self._council.found(generation, generation.ranks_of(self._seating.me), boot_clock()))
        self._hear_the_early()

    def come(self) -> None:
        """To a run that trains already: new, or started again with nothing but what was promised. The council asks to
        be let in."""
        self._give_up = self._workplace.unsaid_give_up()
        self._hear_the_early()

    def is_on_its_way(self) -> None:
        """It has still to meet anybody, and the others train: whatever becomes of it is no trouble of theirs."""
        self._founded = True

    def start(self, hands: Iterable[Hand]) -> None:
        for hand in hands:
            self._workplace.start_with_line(hand, self.heard)

    def _hear_the_early(self) -> None:
        early, self._early = self._early or (), None
        for member, message in early:
            self.received(member, message)

    # From the mesh.

    def connected(self, member: int) -> None:
        self.farewell.linked.add(member)
        self._do(self._council.connected(member, boot_clock()))

    def closed(self, member: int) -> bool:
        """Whether the run can go on: not before everybody has met once."""
        self.farewell.linked.discard(member)
        self._do(self._council.closed(member, boot_clock()))
        return self._founded or self._winding_up

    def received(self, member: int, message: Message) -> None:
        if self._early is not None:
            # From somebody who began a moment before us.
            self._early.append((member, message))
            return
        now, heard = boot_clock(), decode(message)
        self.farewell.heard(member, heard, now)
        self._do(self._council.received(member, heard, now))

    # From the clock.

    def tick(self) -> None:
        now = boot_clock()
        slept = now - self._ticked_at > self._rules.away_after_s
        self._ticked_at = now
        if slept or (self._asleep_at is not None and now - self._asleep_at > _ASLEEP_WITHIN_S):
            self.wake()
        self._do(self._council.tick(now))
        self._lease(now)
        self._end_the_late(now)
        self.start(self.crew.due(now))
        self._give_in(now)
        council = self._council
        is_starting = council.can_recover and not self.crew.is_gone()
        if not self._winding_up and self.farewell.is_hopeless(council.has_state, council.votes, now, is_starting):
            self._workplace.write("gave-up", **nobody_has_the_state(self._workplace.run_folder).as_dict())
            self.failed = self.may_return = True

    def fall_asleep(self) -> None:
        """The machine is about to be suspended. The others go on without us, and let us in when we have woken: not
        before, so they hear of our ranks only then."""
        self._asleep_at = boot_clock()
        self._do(self._council.suspend(self._asleep_at))

    def depart(self) -> bool:
        """This machine is about to be switched off; it can come back later. False where nobody would go on: the run has
        not begun, is ending, or is trained here alone."""
        if self._left:
            # Whoever switches a machine off tells every process of it, and some of them tell us again.
            return True
        generation = self._council.generation
        alone = self._council.votes and generation is not None and len(generation.members) < 2
        if self._winding_up or not self._founded or alone:
            return False
        self.may_return = True
        self._workplace.write("note", text="this machine leaves: its agent was asked to end")
        self._workplace.write("left")
        self._do(self._council.leave(boot_clock()))
        self._left = True
        self.wind_up()
        self._workplace.kill_all()
        return True

    def wake(self) -> None:
        """Our connections may be dead without having been closed."""
        self._asleep_at = None
        self._mesh.dial_anew()
        self._halting.begin_anew(boot_clock())
        self._collect()

    def is_over(self) -> bool:
        """Our ranks have ended, and nobody who trained with us needs our keys or our word any more."""
        if not self.crew.is_gone():
            return False
        if not self.farewell.finished and not self._left:
            self._left = True
            self._do(self._council.leave(boot_clock()))
        return not self.farewell.awaits(self._council.generation, boot_clock())

    def wind_up(self, failed: bool = False) -> None:
        """The run ends: nobody is started again, and after a failure nobody goes on either."""
        self._winding_up = True
        self._council.wind_up()
        self.crew.rest()
        if failed:
            self._council.finish()

    # From whoever invites a new machine.

    def takes_nobody(self) -> str:
        """Why no new machine can come; nothing when one can."""
        return "it is about to end" if self._winding_up else "it has not begun yet" if self._early is not None else ""

    def is_full(self) -> bool:
        generation = self._council.generation
        if generation is None:
            return False
        return len(generation.members) >= self._rules.max_nodes or generation.world_size >= self._rules.most_ranks

    def invite(self) -> int:
        """Raises OSError when it cannot be written down."""
        member = self._council.invite(len(self._seating.roster))
        if self._seating.number(member, MOST_RANKS) >= rankline.MOST_NUMBERS:
            raise UsageError(
                "this machine can invite nobody: the ranks of a new one would have no number",
                why="it was itself invited by one that was invited, and so on",
                fix="ask for the invitation on one of the first machines of the run: shoal host RUN, there",
            )
        return member

    def _lease(self, now: float) -> None:
        generation = self._council.generation
        if generation and now >= self._lease_at and self._council.may_commit(generation.id):
            self._lease_at = now + rankline.LEASE_S / 4
            for hand in self.crew.still_in(generation.id):
                hand.say(rankline.Leased(generation=generation.id, at_s=now))

    def _end_the_late(self, now: float) -> None:
        for hand in self._halting.late(now):
            self._workplace.write("note", text=f"{hand.start.name} did not stop when it was told to, and was killed")
            self._workplace.kill(hand.start.name)

    def _give_in(self, now: float) -> None:
        outside = not self._council.votes or self._council.asks is not None
        if not self._winding_up and self.farewell.is_late(outside, now):
            self._workplace.write("note", text="the others have finished the training without this machine")
            self.wind_up()
            self._workplace.kill_all()

    # From our ranks.

    def heard(self, hand: Hand, message: rankline.ToAgent) -> None:
        now = boot_clock()
        match message:
            case rankline.Here():
                hand.here = True
                self._found = max(self._found, message.committed)
                if hand.inside is None and self.crew.all_here():
                    self._do(self._council.ready(self.crew.ready(), now, self._found))
            case rankline.Formed() if hand.inside == message.generation:
                hand.formed = hand.holds = True
                if self.crew.all_formed(message.generation):
                    self._founded = True
                    self._note_given_up()
                    self._council.formed(message.generation)
            case rankline.Halted() if hand.inside == message.generation:
                hand.halted(message.state)
                self._collect()
            case rankline.Broken():
                self._on_broken(hand, message)
            case rankline.Committed():
                self._council.committed(message.step)
            case rankline.Finished():
                hand.finished = True
                self._finish()
            case _:
                pass  # of a generation that it has left

    def _on_broken(self, hand: Hand, message: rankline.Broken) -> None:
        name, generation = hand.start.name, message.generation
        self._workplace.write("broken", name=name, generation=str(generation), why=message.why)
        if self._founded:
            self._do(self._council.failed(generation, boot_clock()))
        else:
            self.failed = True

    def ended(self, ended: Ended) -> bool:
        """Whether the run can go on although this rank has ended."""
        hand = self.crew.named(ended.start.name)
        was_inside, finished = hand.inside, ended.code in (0, Interrupted.exit_code)
        hand.end()
        if finished:
            hand.finished = True
            self._finish()
            return True
        if ended.by_us:
            return True
        killed = self._workplace.ran_out_of_memory(ended) or ended.code < 0
        # What fails before it has trained with anybody is its own machine's trouble, and ends nobody else's training.
        alone = was_inside is None
        if not (self._founded and (killed or alone)) or self._was_the_last(was_inside):
            return False
        self._do_without(was_inside)
        if killed and not self._winding_up and (after_s := self.crew.try_again(hand, boot_clock())) is not None:
            self._workplace.write("restart", name=ended.start.name, attempt=hand.attempts, after_s=after_s)
        return True

    def _note_given_up(self) -> None:
        """Our ranks have it in their ledger: nobody need be told again."""
        if self._give_up is not None:
            self._workplace.write("given-up", lineage=str(self._give_up.lineage))
            self._give_up = None

    def _was_the_last(self, generation: Ballot | None) -> bool:
        """No other rank has what was trained, and no other agent is there to go back to a checkpoint with."""
        if self.farewell.linked:
            return False
        current = self._council.generation
        alone = current is not None and current.id == generation and current.members == (self._seating.me,)
        return alone and generation is not None and not self.crew.inside(generation)

    def _do_without(self, generation: Ballot | None) -> None:
        """One of ours has died, in this generation or while it waited for one."""
        now = boot_clock()
        if generation is None:
            self._do(self._council.ready(self.crew.ready(), now))
        elif self.crew.inside(generation):
            self._do(self._council.failed(generation, now))
            self._collect()
        else:
            self._halting.forget()
            self._do(self._council.lost_ranks(now))
            if waiting := self.crew.ready():
                self._do(self._council.ready(waiting, now))

    def _finish(self) -> None:
        if not self.farewell.finished and self.crew.all_finished():
            self.farewell.finished = True
            self.wind_up()
            self._council.finish()
            self._workplace.write("finished")
            for hand in self.crew.waiting():
                self._workplace.kill(hand.start.name)

    def _collect(self) -> None:
        if self._asleep_at is None and (generation := self._halting.done()):
            state, ranks = self.crew.furthest(generation), self.crew.ready()
            self._do(self._council.stopped(generation, state, ranks, boot_clock()))

    # What the council wants done.

    def _do(self, actions: Iterable[Action]) -> None:
        """In order; what follows from an action comes after those that were asked for before it."""
        idle = not self._todo
        self._todo.extend(actions)
        while idle and self._todo:
            try:
                self._perform(self._todo[0])
            except BaseException:
                # Or nothing would ever be done again.
                self._todo.clear()
                raise
            self._todo.popleft()

    def _perform(self, action: Action) -> None:
        write: Callable[..., None] = self._workplace.write
        match action:
            case Send():
                self._mesh.post(action.to, encode(action.message))
            case Stop():
                self._halting.begin(action.generation, action.at_edge, boot_clock())
                self._collect()
            case Start():
                self._enter(action)
            case Pause():
                write("pause", text=action.text)
            case Tell():
                write("tell", generation=action.generation and str(action.generation), text=action.text)
            case Abandon():
                lineage, standing, shared = action.lineage, action.standing, action.shared_step
                self._give_up = rankline.GiveUp(lineage=lineage, standing=standing, shared_step=shared)
                write("abandon", lineage=str(lineage), standing=str(standing), shared_step=shared, text=action.text)

    def _enter(self, action: Start) -> None:
        generation = action.generation
        me, names = self._seating.me, [self.name(member) for member in generation.members]
        self._halting.forget()
        self._lease_at = 0.0
        self._keys.enter(generation)
        self._workplace.write(
            "generation",
            id=str(generation.id),
            lineage=str(generation.lineage.name),
            members=names,
            ranks=generation.world_size,
            step=generation.state.step,
        )
        keeps_files = not any(
            self._workplace.shares_folder_with(member) for member in generation.members if member < me
        )
        orders = self._seating.orders(generation, self.name, keeps_files)
        for local, order in orders.items():
            hand = self.crew.hands[local]
            if hand.alive:
                if self._give_up is not None:
                    hand.say(self._give_up)
                hand.enter(order.model_copy(update={"holds": action.holds and hand.holds}))
        if len(self.crew.inside(generation.id)) < len(orders):
            # Somebody died between our promise and its being taken up.
            self._do_without(generation.id)

    def name(self, member: int) -> str:
        return self._mesh.places.name(member)
