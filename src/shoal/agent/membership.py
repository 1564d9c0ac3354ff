"""An agent in a run whose machines come and go: it asks its council, and does what that decides.

Everything here is called from the agent's own loop and waits for nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from shoal.agent.kv_store import KvStoreClient
from shoal.agent.local_ranks import LocalRank, LocalRanks
from shoal.agent.mesh import Mesh
from shoal.agent.rank_processes import RankEnvironment, RankExit
from shoal.control import rank_messages
from shoal.control.channel import Message as ChannelMessage
from shoal.control.membership.messages import Heartbeat, Message, decode, encode
from shoal.control.membership.settings import MembershipSettings
from shoal.control.membership.state import (
    AbandonLineage,
    Action,
    LogSentence,
    PauseTraining,
    SendMessage,
    StartGeneration,
    StopGeneration,
)
from shoal.control.membership.state_machine import MembershipMachine
from shoal.control.membership.types import MOST_RANKS, NEVER, Ballot, Generation, MemberRanks, founding
from shoal.control.membership.vote_store import VoteStore
from shoal.control.orders import GoOrder, MembershipOrder, RosterEntry
from shoal.control.rank_messages import EnterGeneration, generation_of
from shoal.errors import Interrupted, RunFailed, UsageError
from shoal.events import read_events
from shoal.host.facts import boot_clock
from shoal.run_folder import RunFolder

# SECTION launch/halting
# Ranks on their way out of a generation: who has answered, and who takes too long.


class RankHalt:
    def __init__(self, crew: LocalRanks, rules: MembershipSettings) -> None:
        self._crew = crew
        self._rules = rules
        self._generation: Ballot | None = None
        self._at_edge = False
        self._until = 0.0

    def begin(self, generation: Ballot, at_edge: bool, now: float) -> None:
        self._generation, self._at_edge = generation, at_edge
        self._until = now + (self._rules.edge_s if at_edge else self._rules.answer_s)
        self._crew.halt(generation, at_edge)

    def begin_anew(self, now: float) -> None:
        """After a sleep: our ranks slept too, and have not had their time."""
        if self._generation is not None:
            self.begin(self._generation, self._at_edge, now)

    def forget(self) -> None:
        self._generation = None

    def done(self) -> Ballot | None:
        """The generation that everybody who is left has come out of, once."""
        generation = self._generation
        if generation is None or self._crew.still_in(generation):
            return None
        self._generation = None
        return generation if self._crew.inside(generation) else None

    def late(self, now: float) -> list[LocalRank]:
        """Those to be ended, once in a while until they are gone."""
        if self._generation is None or now < self._until:
            return []
        if self._at_edge:
            # A step, or a round of them, may take longer than anybody waits: then they stop where they are.
            self.begin(self._generation, at_edge=False, now=now)
            return []
        self._until = now + self._rules.answer_s
        return self._crew.still_in(self._generation)


# SECTION launch/farewell
# How a run whose machines come and go ends for one agent: who has finished, who is still awaited. Pure.


# Whoever could not pass the last barrier although others did may end by itself, as a lineage of its own.
_OUTLIVE_S = 15.0
# How long a machine without the training's state waits for anybody who has it.
_HOPELESS_AFTER_S = 60.0
# How long its ranks may take to start, where all that is missing to go back to a checkpoint are ranks.
_STARTED_WITHIN_S = 600.0


@dataclass
class ShutdownTracker:
    """`silent_after_s`: a member that has not been heard of for so long is not awaited. `finished`: our ranks have
    passed the last barrier of the training, or were asked to stop and did."""

    me: int
    founders: int
    silent_after_s: float
    finished: bool = False
    linked: set[int] = field(default_factory=set)
    heard_at: dict[int, float] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    holders: set[int] = field(default_factory=set)
    voters: set[int] = field(default_factory=set)
    others_finished_at: float | None = None
    hopeless_since: float | None = None

    def heard(self, member: int, message: Message, now: float) -> None:
        """`holders`: who has a state to train on from, by its own last word; `voters` may also be loading one."""
        self.heard_at[member] = now
        if isinstance(message, Heartbeat):
            (self.holders.add if message.votes and message.holds else self.holders.discard)(member)
            (self.voters.add if message.votes else self.voters.discard)(member)

    def is_hopeless(self, has_state: bool, has_vote: bool, now: float, is_starting: bool = False) -> bool:
        """Neither this agent nor one that it reaches has what was trained, and that for a while. Without a vote it
        waits for those that have one: they may be loading a checkpoint. `is_starting`: its own ranks are starting, and
        then go back to one."""
        if has_state or (self.holders if has_vote else self.voters) & self.linked:
            self.hopeless_since = None
        elif self.hopeless_since is None:
            self.hopeless_since = now
        limit_s = _STARTED_WITHIN_S if is_starting else _HOPELESS_AFTER_S
        return self.hopeless_since is not None and now - self.hopeless_since > limit_s

    def is_done(self, member: int, finished: bool, now: float) -> None:
        """Its ranks have ended, after the last step of the training or before."""
        self.done.add(member)
        if finished and self.others_finished_at is None:
            self.others_finished_at = now

    def awaits(self, generation: Generation | None, now: float) -> bool:
        """Whether somebody trained with us and still works: it may be writing its last checkpoint, or need our keys."""
        if not self.finished or generation is None:
            return False
        others = self.linked.intersection(generation.members) - self.done
        return any(now - self.heard_at.get(member, now) <= self.silent_after_s for member in others)

    def is_late(self, outside: bool, now: float) -> bool:
        """The training has ended elsewhere, and we were not part of it or could not follow to its end."""
        if self.finished or self.others_finished_at is None:
            return False
        return outside or now - self.others_finished_at > _OUTLIVE_S

    def absent(self) -> list[int]:
        """Those of the launch that have not said how they ended, now that the training is over."""
        founders = range(self.founders) if self.finished else ()
        return [member for member in founders if member not in {*self.done, self.me}]


def nobody_has_the_state(run: str) -> RunFailed:
    return RunFailed(
        "nobody who can be reached has the training's state any more",
        why="the others are out of reach from here, their ranks were killed, or the run has ended meanwhile",
        fix=f"if they still train, come back when they can be reached: shoal join {run}; if nobody does, go on from "
        f"the last checkpoint: shoal train --resume {run}",
    )


# SECTION launch/seating
# From a generation to what each rank of a node is told: its place, and the numbers of everybody. Pure.


@dataclass(frozen=True)
class RankNumbering:
    """The numbers by which ranks and their files are known: a founder's ranks keep those of the launch, and each later
    member has a range of its own behind them."""

    me: int
    roster: Sequence[RosterEntry]

    def founding(self, members: MembershipOrder) -> Generation:
        seats = [
            MemberRanks(member=member, ranks=tuple(range(len(place.ranks)))) for member, place in enumerate(self.roster)
        ]
        return founding(tuple(seats), above=members.above)

    @property
    def launched(self) -> int:
        """How many ranks the launch had."""
        return sum(len(place.ranks) for place in self.roster)

    def number(self, member: int, local: int) -> int:
        if member < len(self.roster):
            return self.roster[member].ranks[local]
        return self.launched + (member - len(self.roster)) * MOST_RANKS + local

    def orders(
        self, generation: Generation, name: Callable[[int], str], keeps_files: bool
    ) -> dict[int, EnterGeneration]:
        """For each of our ranks in it, by local number. Whether one holds a state is for the caller to say."""
        own = generation.ranks_of(self.me)
        places = [(seat.member, local) for seat in generation.seats for local in seat.ranks]
        return {
            local: EnterGeneration(
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


# A machine that said so is suspended within seconds; where it never was, somebody changed their mind.
_ASLEEP_WITHIN_S = 30.0


class AgentMembership:
    def __init__(
        self,
        me: int,
        go: GoOrder,
        members: MembershipOrder,
        promises: VoteStore,
        mesh: Mesh,
        keys: KvStoreClient,
        workplace: RankEnvironment,
    ) -> None:
        self._rules = members.rules
        self._members = members
        self._mesh = mesh
        self._keys = keys
        self._workplace = workplace
        self._seating = RankNumbering(me, go.roster)
        self.crew = LocalRanks([LocalRank(start) for start in go.starts], members.restarts)
        self.farewell = ShutdownTracker(me, len(go.roster), members.rules.silent_after_s)
        self._council = MembershipMachine(me, members.rules, promises, boot_clock(), self.name)
        # The world that was asked for did not form, or nothing is left of it.
        self.failed = False
        self.may_return = False
        self._todo: deque[Action] = deque()
        self._early: list[tuple[int, ChannelMessage]] | None = []
        self._halting = RankHalt(self.crew, members.rules)
        self._give_up: rank_messages.AbandonCommits | None = None
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

    def start(self, hands: Iterable[LocalRank]) -> None:
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

    def received(self, member: int, message: ChannelMessage) -> None:
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
        if self._seating.number(member, MOST_RANKS) >= rank_messages.MOST_NUMBERS:
            raise UsageError(
                "this machine can invite nobody: the ranks of a new one would have no number",
                why="it was itself invited by one that was invited, and so on",
                fix="ask for the invitation on one of the first machines of the run: shoal host RUN, there",
            )
        return member

    def _lease(self, now: float) -> None:
        generation = self._council.generation
        if generation and now >= self._lease_at and self._council.may_commit(generation.id):
            self._lease_at = now + rank_messages.LEASE_S / 4
            for hand in self.crew.still_in(generation.id):
                hand.say(rank_messages.LeaseRenewed(generation=generation.id, at_s=now))

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

    def heard(self, hand: LocalRank, message: rank_messages.ToAgent) -> None:
        now = boot_clock()
        match message:
            case rank_messages.RankReady():
                hand.here = True
                self._found = max(self._found, message.committed)
                if hand.inside is None and self.crew.all_here():
                    self._do(self._council.ready(self.crew.ready(), now, self._found))
            case rank_messages.GroupFormed() if hand.inside == message.generation:
                hand.formed = hand.holds = True
                if self.crew.all_formed(message.generation):
                    self._founded = True
                    self._note_given_up()
                    self._council.formed(message.generation)
            case rank_messages.LeftGeneration() if hand.inside == message.generation:
                hand.halted(message.state)
                self._collect()
            case rank_messages.GenerationBroken():
                self._on_broken(hand, message)
            case rank_messages.StepCommitted():
                self._council.committed(message.step)
            case rank_messages.TrainingFinished():
                hand.finished = True
                self._finish()
            case _:
                pass  # of a generation that it has left

    def _on_broken(self, hand: LocalRank, message: rank_messages.GenerationBroken) -> None:
        name, generation = hand.start.name, message.generation
        self._workplace.write("broken", name=name, generation=str(generation), why=message.why)
        if self._founded:
            self._do(self._council.failed(generation, boot_clock()))
        else:
            self.failed = True

    def ended(self, ended: RankExit) -> bool:
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
            case SendMessage():
                self._mesh.post(action.to, encode(action.message))
            case StopGeneration():
                self._halting.begin(action.generation, action.at_edge, boot_clock())
                self._collect()
            case StartGeneration():
                self._enter(action)
            case PauseTraining():
                write("pause", text=action.text)
            case LogSentence():
                write("tell", generation=action.generation and str(action.generation), text=action.text)
            case AbandonLineage():
                lineage, standing, shared = action.lineage, action.standing, action.shared_step
                self._give_up = rank_messages.AbandonCommits(lineage=lineage, standing=standing, shared_step=shared)
                write("abandon", lineage=str(lineage), standing=str(standing), shared_step=shared, text=action.text)

    def _enter(self, action: StartGeneration) -> None:
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


# SECTION launch/earlier
# What earlier launches of a run have left behind, as far as a new one must know it.


def highest_generation(run: RunFolder) -> int:
    """The highest number of a generation in the ledger."""
    if not run.commits.exists():
        return 0
    named = (generation_of(f"gen-{record.get('generation')}/") for record in read_events(run.commits))
    return max((ballot.number for ballot in named if ballot is not None), default=0)
