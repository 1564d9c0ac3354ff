"""Membership of one agent in an elastic run: feeds the state machine and performs its actions.

The agent's own loop calls everything here, and nothing here blocks.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shoal.agent.hung_ranks import HungRanks
from shoal.agent.local_ranks import LocalRank, LocalRanks
from shoal.agent.mesh import Mesh
from shoal.agent.rank_processes import RankEnvironment, RankExit
from shoal.control import rank_messages
from shoal.control.agent_events import (
    AbandonRecorded,
    AgentFinished,
    AgentLeft,
    GenerationEntered,
    GroupFailed,
    LineageAbandoned,
    MembershipAnnounced,
    RankRestarts,
    StateLost,
    TrainingPaused,
)
from shoal.control.channel import Message as ChannelMessage
from shoal.control.membership.messages import Heartbeat, Message, decode, encode
from shoal.control.membership.settings import (
    LEASE_S,
    OUTLIVE_FINISHED_S,
    STACKS_S,
    STARTING_LIMIT_S,
    STATELESS_LIMIT_S,
    SUSPEND_LIMIT_S,
    MembershipSettings,
)
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
from shoal.control.membership.types import (
    MAX_RANKS_PER_MEMBER,
    NEVER,
    Ballot,
    Generation,
    MemberRanks,
    first_generation,
)
from shoal.control.membership.vote_store import VoteStore
from shoal.control.orders import GoOrder, MembershipOrder, RosterEntry
from shoal.control.rank_messages import EnterGeneration, generation_of
from shoal.errors import Interrupted, RunFailed, UsageError
from shoal.events import read_events
from shoal.host.facts import boot_clock
from shoal.run_folder import RunFolder


class AgentMembership:
    def __init__(
        self,
        me: int,
        go: GoOrder,
        members: MembershipOrder,
        votes: VoteStore,
        mesh: Mesh,
        environment: RankEnvironment,
        ranks: Sequence[LocalRank] | None = None,
    ) -> None:
        self._members = members
        self._mesh = mesh
        self._environment = environment
        self._numbering = RankNumbering(me, go.roster)
        # `ranks` are processes that were started before it was known that they take part.
        self.ranks = LocalRanks(list(ranks or map(LocalRank, go.starts)), members.restarts)
        self.shutdown = ShutdownTracker(me, len(go.roster), members.settings.silent_after_s)
        self._hung = HungRanks(self.ranks, environment, members.hung_tries, boot_clock())
        self._machine = MembershipMachine(me, members.settings, votes, boot_clock(), self.name)
        self._stopping = RankStop(self.ranks, members.settings)
        self._actions: deque[Action] = deque()
        # Messages of agents that began a moment before this one; None once it has begun.
        self._early_messages: list[tuple[int, ChannelMessage]] | None = []
        # Commits that the local ranks must still mark as abandoned.
        self._abandon: rank_messages.AbandonCommits | None = None
        self._sleep = SleepClock(members.settings.slept_after_s, boot_clock())
        self._lease_at = 0.0
        # All agents have met, or the others train already: from then on no loss of a rank or a node ends the run.
        self._has_begun = False

    # The beginning.

    def start_first_generation(self, go: GoOrder) -> None:
        """Begin training: all agents of the launch have met."""
        self._mesh.keep_connected(go.launch_places(), self.connected, self.shutdown.silent_after_s)
        self._has_begun = True
        for rank in self.ranks.ranks:
            rank.has_state = True
        generation = self._numbering.first_generation(self._members)
        ranks = generation.ranks_of(self._numbering.me)
        self._perform_all(self._machine.start_first_generation(generation, ranks, boot_clock()))
        self._deliver_early_messages()

    def join(self, go: GoOrder) -> None:
        """Ask to join a run that trains already: as a new node, or as a restarted one with only its votes."""
        self._mesh.keep_connected(go.places(), self.connected, self.shutdown.silent_after_s, dial_all=True)
        self._abandon = self._environment.pending_abandon()
        self._deliver_early_messages()

    def mark_begun(self) -> None:
        """Record that the others train already: a failure of this node before it joins does not end their run."""
        self._has_begun = True

    def start(self, ranks: Iterable[LocalRank]) -> None:
        for rank in ranks:
            self._environment.start_elastic(rank, self.on_rank_message)

    def _deliver_early_messages(self) -> None:
        early, self._early_messages = self._early_messages or (), None
        for member, message in early:
            self.received(member, message)

    # From the mesh.

    def connected(self, member: int) -> None:
        self.shutdown.connected.add(member)
        self._perform_all(self._machine.connected(member, boot_clock()))

    def closed(self, member: int) -> bool:
        """Return whether the run can continue: not before all agents have met once."""
        self.shutdown.connected.discard(member)
        self._perform_all(self._machine.closed(member, boot_clock()))
        return self._has_begun or self.shutdown.is_ending

    def received(self, member: int, document: ChannelMessage) -> None:
        if self._early_messages is not None:
            self._early_messages.append((member, document))
            return
        now, message = boot_clock(), decode(document)
        self.shutdown.record_message(member, message, now)
        self._perform_all(self._machine.received(member, message, now))

    # From the clock.

    def tick(self) -> None:
        now, machine = boot_clock(), self._machine
        if self._sleep.has_woken(now):
            self.wake()
        self._perform_all(machine.tick(now))
        self._renew_leases(now)
        for rank in self._stopping.about_to_be_late(now):
            self._environment.ask_for_stacks(rank.start.name)
        for rank in self._stopping.late(now):
            place = self._hung.describe_place(rank.start.name)
            self._environment.note(
                f"{rank.start.name} did not stop when it was told to, and was killed: it was at {place}"
            )
            self._environment.kill(rank.start.name)
        if self._hung.tick(now):
            self.shutdown.has_failed = True
        self.start(self.ranks.due_restarts(now))
        is_outside = not machine.can_vote or machine.joins is not None
        if not self.shutdown.is_ending and self.shutdown.is_late(is_outside, now):
            self._environment.note("the others have finished the training without this machine")
            self.begin_shutdown()
            self._environment.kill_all()
        is_starting = machine.can_recover and not self.ranks.have_ended()
        if not self.shutdown.is_ending and self.shutdown.is_stateless(
            machine.has_or_loads_state, machine.can_vote, now, is_starting
        ):
            self._environment.write(StateLost(_state_lost(self._environment.run_folder)))
            self.shutdown.has_failed = self.shutdown.may_return = True

    def _renew_leases(self, now: float) -> None:
        generation = self._machine.generation
        if generation and now >= self._lease_at and self._machine.may_commit(generation.id):
            self._lease_at = now + LEASE_S / 4
            for rank in self.ranks.still_in(generation.id):
                rank.send(rank_messages.LeaseRenewed(generation=generation.id, at_s=now))

    def suspend(self) -> None:
        """Resign: the machine is about to be suspended. The others continue; its ranks are offered again afterwards."""
        self._sleep.suspended_at = now = boot_clock()
        self._perform_all(self._machine.resign("suspend", now))

    def wake(self) -> None:
        """Reconnect: connections may be dead without having been closed."""
        self._sleep.suspended_at = None
        self._mesh.reconnect_all()
        self._stopping.restart(boot_clock())
        self._report_stopped()

    # The end.

    def leave(self) -> bool:
        """Leave the run because this machine is about to be switched off; it can return later.

        False where no other node would continue: the run has not begun, is ending, or is trained here alone.
        """
        if self.shutdown.has_left:
            # A shutdown signals every process of the machine, and some of them signal this agent again.
            return True
        generation = self._machine.generation
        is_alone = self._machine.can_vote and generation is not None and len(generation.members) < 2
        if self.shutdown.is_ending or not self._has_begun or is_alone:
            return False
        self.shutdown.may_return = True
        self._environment.note("this machine leaves: its agent was asked to end")
        self._environment.write(AgentLeft())
        self._perform_all(self._machine.leave(boot_clock()))
        self.shutdown.has_left = True
        self.begin_shutdown()
        self._environment.kill_all()
        return True

    def begin_shutdown(self, failed: bool = False) -> None:
        """End the run here: restart no rank, and after a failure agree on nothing more."""
        self.shutdown.is_ending = True
        self._machine.begin_shutdown()
        self.ranks.cancel_restarts()
        if failed:
            self._machine.finish()

    def is_over(self) -> bool:
        """Return whether all local ranks have ended and no member of their training needs this agent any more."""
        if not self.ranks.have_ended():
            return False
        if not self.shutdown.finished and not self.shutdown.has_left:
            self.shutdown.has_left = True
            self._perform_all(self._machine.leave(boot_clock()))
        return not self.shutdown.awaits(self._machine.generation, boot_clock())

    # For the invite server.

    def why_closed(self) -> str:
        """Return why no new node can join; empty when one can."""
        if self.shutdown.is_ending:
            return "it is about to end"
        return "it has not begun yet" if self._early_messages is not None else ""

    def is_full(self) -> bool:
        generation, settings = self._machine.generation, self._members.settings
        if generation is None:
            return False
        return len(generation.members) >= settings.max_nodes or generation.world_size >= settings.max_ranks

    def invite(self) -> int:
        """Return a new member's id. OSError when it cannot be written to disk."""
        member = self._machine.invite(len(self._numbering.roster))
        if self._numbering.number(member, MAX_RANKS_PER_MEMBER) >= rank_messages.MAX_RANK_NUMBERS:
            raise UsageError(
                "this machine can invite no other: the ranks of a new one would have no number",
                why="it was itself invited by one that was invited, and so on",
                fix="ask for the invitation on one of the first machines of the run: shoal host RUN, there",
            )
        return member

    # From this agent's ranks.

    def on_rank_message(self, rank: LocalRank, message: rank_messages.ToAgent) -> None:
        now = boot_clock()
        self._hung.record_message(rank, message, now)
        match message:
            case rank_messages.RankReady():
                rank.is_ready = True
                self.ranks.committed_at_start = max(self.ranks.committed_at_start, message.committed)
                if rank.generation is None and self.ranks.all_ready():
                    self._perform_all(self._machine.ready(self.ranks.ready(), now, self.ranks.committed_at_start))
            case rank_messages.GroupFormed() if rank.generation == message.generation:
                rank.has_formed = rank.has_state = True
                if self.ranks.all_formed(message.generation):
                    if self._abandon is not None:
                        # This agent's ranks have it in their ledger: it need not be sent again.
                        self._environment.write(AbandonRecorded(str(self._abandon.lineage)))
                        self._abandon = None
                    self._machine.formed(message.generation, dict(message.history), message.can_lose_parts)
            case rank_messages.LeftGeneration() if rank.generation == message.generation:
                rank.record_left(message.state)
                self._report_stopped()
            case rank_messages.GenerationBroken():
                generation = message.generation
                if message.timed_out:
                    self.record_timeout(generation)
                    for member in self.shutdown.connected:
                        self._mesh.post(member, {"type": "timed-out", "generation": str(generation)})
                self._environment.write(GroupFailed(rank.start.name, str(generation), message.why))
                if not self._machine.is_launching:
                    # The ranks of a launch end with their own error, unless a lost rank or node was its reason.
                    self._perform_all(self._machine.failed(generation, now))
            case rank_messages.MachineTooSlow():
                self._perform_all(self._machine.stand_by(message.generation, now))
            case rank_messages.StepCommitted():
                self._machine.committed(message.step)
            case rank_messages.TrainingFinished():
                rank.has_finished = True
                self._finish()
            case _:
                pass  # about a generation that it has left

    def record_timeout(self, generation: Ballot) -> None:
        """Record that a rank, here or elsewhere, waited for another one of this generation until its timeout."""
        self._hung.record_timeout(generation, self._machine.is_launching, boot_clock())

    def on_rank_exit(self, ended: RankExit) -> bool:
        """Return whether the run can continue although this rank has ended."""
        rank = self.ranks.named(ended.start.name)
        generation = rank.generation
        rank.end()
        if ended.code in (0, Interrupted.exit_code):
            rank.has_finished = True
            self._finish()
            return True
        if ended.by_agent:
            return True
        was_killed = self._environment.ran_out_of_memory(ended) or ended.code < 0
        # A rank that fails before it has trained with others is a problem of its own node and does not end the run.
        if not (self._has_begun and (was_killed or generation is None)) or self._was_last(generation):
            return False
        self._continue_without(generation)
        if was_killed and not self.shutdown.is_ending:
            schedule_restart(rank, self.ranks, self._environment)
        return True

    def _was_last(self, generation: Ballot | None) -> bool:
        """Whether no other rank has the state, and no other agent is connected to go back to a checkpoint with."""
        if self.shutdown.connected:
            return False
        current = self._machine.generation
        is_alone = current is not None and current.id == generation and current.members == (self._numbering.me,)
        return is_alone and generation is not None and not self.ranks.members_of(generation)

    def _continue_without(self, generation: Ballot | None) -> None:
        """Continue after the death of a local rank, in this generation or while it waited for one."""
        now = boot_clock()
        if generation is None:
            self._perform_all(self._machine.ready(self.ranks.ready(), now))
        elif self.ranks.members_of(generation):
            self._perform_all(self._machine.failed(generation, now))
            self._report_stopped()
        else:
            self._stopping.cancel()
            self._perform_all(self._machine.lost_ranks(now))
            if waiting := self.ranks.ready():
                self._perform_all(self._machine.ready(waiting, now))

    def _finish(self) -> None:
        if not self.shutdown.finished and self.ranks.all_finished():
            self.shutdown.finished = True
            self.begin_shutdown()
            self._machine.finish()
            self._environment.write(AgentFinished())
            for rank in self.ranks.waiting():
                self._environment.kill(rank.start.name)

    def _report_stopped(self) -> None:
        if self._sleep.suspended_at is None and (generation := self._stopping.take_done()):
            state, ranks = self.ranks.furthest_state(generation), self.ranks.ready()
            self._perform_all(self._machine.stopped(generation, state, ranks, boot_clock()))

    # Actions of the state machine.

    def _perform_all(self, actions: Iterable[Action]) -> None:
        """Perform the actions in order; those that follow from one of them come after all earlier ones."""
        is_idle = not self._actions
        self._actions.extend(actions)
        while is_idle and self._actions:
            try:
                self._perform(self._actions[0])
            except BaseException:
                # Otherwise later calls would never perform anything again.
                self._actions.clear()
                raise
            self._actions.popleft()

    def _perform(self, action: Action) -> None:
        write = self._environment.write
        match action:
            case SendMessage():
                self._mesh.post(action.to, encode(action.message))
            case StopGeneration():
                self._stopping.begin(action.generation, action.after_step, boot_clock())
                self._report_stopped()
            case StartGeneration():
                self._enter(action)
            case PauseTraining():
                write(TrainingPaused(action.text))
            case LogSentence():
                write(MembershipAnnounced(action.generation and str(action.generation), action.text))
            case AbandonLineage():
                lineage, surviving, shared = action.lineage, action.surviving, action.shared_step
                self._abandon = rank_messages.AbandonCommits(lineage=lineage, surviving=surviving, shared_step=shared)
                write(LineageAbandoned(str(lineage), str(surviving), shared, action.text))

    def _enter(self, action: StartGeneration) -> None:
        generation, me = action.generation, self._numbering.me
        self._stopping.cancel()
        self._lease_at = 0.0
        self._environment.enter(generation)
        self._environment.write(
            GenerationEntered(
                id=str(generation.id),
                lineage=str(generation.lineage.name),
                members=[self.name(member) for member in generation.members],
                ranks=generation.world_size,
                step=generation.state.step,
            )
        )
        lower_members = [member for member in generation.members if member < me]
        keeps_files = not any(map(self._environment.shares_folder_with, lower_members))
        orders = self._numbering.orders(generation, self.name, keeps_files)
        for local, order in orders.items():
            rank = self.ranks.ranks[local]
            if rank.is_alive:
                if self._abandon is not None:
                    rank.send(self._abandon)
                rank.enter(order.model_copy(update={"has_state": action.has_state and rank.has_state}))
        if len(self.ranks.members_of(generation.id)) < len(orders):
            # A rank died between this agent's promise and the decision.
            self._continue_without(generation.id)

    def name(self, member: int) -> str:
        return self._mesh.places.name(member)


def schedule_restart(rank: LocalRank, ranks: LocalRanks, environment: RankEnvironment) -> bool:
    """Have a killed rank started again soon, and record it; return False after too many attempts in short order."""
    after_s = ranks.schedule_restart(rank, boot_clock())
    if after_s is not None:
        environment.write(RankRestarts(rank.start.name, rank.attempts, after_s))
    return after_s is not None


@dataclass
class SleepClock:
    """Notices that this machine has slept: from a gap between ticks, or from a suspend that was announced. Pure."""

    slept_after_s: float  # a longer gap between two ticks means that the machine slept
    ticked_at: float
    suspended_at: float | None = None

    def has_woken(self, now: float) -> bool:
        """Call at every tick. Return also true where an announced suspend does not come."""
        has_slept, self.ticked_at = now - self.ticked_at > self.slept_after_s, now
        return has_slept or (self.suspended_at is not None and now - self.suspended_at > SUSPEND_LIMIT_S)


class RankStop:
    """Local ranks that leave a generation: which have answered, and which take too long."""

    def __init__(self, ranks: LocalRanks, settings: MembershipSettings) -> None:
        self._ranks = ranks
        self._settings = settings
        self._generation: Ballot | None = None
        self._after_step = False
        self._deadline = 0.0
        self._stacks_at = 0.0  # when late ranks are asked for their stacks

    def begin(self, generation: Ballot, after_step: bool, now: float) -> None:
        self._generation, self._after_step = generation, after_step
        self._deadline = now + (self._settings.step_end_timeout_s if after_step else self._settings.stop_timeout_s)
        self._stacks_at = self._deadline - STACKS_S
        self._ranks.stop(generation, after_step)

    def restart(self, now: float) -> None:
        """Restart the timeout after a sleep: this agent's ranks slept too."""
        if self._generation is not None:
            self.begin(self._generation, self._after_step, now)

    def cancel(self) -> None:
        self._generation = None

    def take_done(self) -> Ballot | None:
        """Return, once, the generation that all live ranks have left."""
        generation = self._generation
        if generation is None or self._ranks.still_in(generation):
            return None
        self._generation = None
        return generation if self._ranks.members_of(generation) else None

    def about_to_be_late(self, now: float) -> list[LocalRank]:
        """Return, once, the ranks that will be killed soon: one that holds the interpreter's lock answers nothing."""
        if self._generation is None or self._after_step or now < self._stacks_at:
            return []
        self._stacks_at = math.inf
        return self._ranks.still_in(self._generation)

    def late(self, now: float) -> list[LocalRank]:
        """Return the ranks to kill; again after every timeout until they have ended."""
        if self._generation is None or now < self._deadline:
            return []
        if self._after_step:
            # A step, or a round of steps, takes longer than the timeout: the ranks shall stop where they are.
            self.begin(self._generation, after_step=False, now=now)
            return []
        self._deadline = now + self._settings.stop_timeout_s
        return self._ranks.still_in(self._generation)


@dataclass
class ShutdownTracker:
    """How an elastic run ends for one agent: which members have finished and which are still awaited. Pure."""

    me: int
    launch_size: int  # nodes of the launch
    silent_after_s: float  # a member that sent nothing for this long is not awaited
    finished: bool = False  # the local ranks have passed the last barrier, or were asked to stop and did
    is_ending: bool = False  # no rank is restarted any more
    has_left: bool = False  # this agent has resigned for good
    has_failed: bool = False  # the group of the launch did not form, or its state is lost
    may_return: bool = False  # the agent keeps its orders, so that this node can be started again later
    connected: set[int] = field(default_factory=set)
    received_at: dict[int, float] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    holders: set[int] = field(default_factory=set)  # members that reported a state to train on from
    voters: set[int] = field(default_factory=set)  # members with a vote, which may also be loading a state
    others_finished_at: float | None = None
    stateless_since: float | None = None

    def record_message(self, member: int, message: Message, now: float) -> None:
        self.received_at[member] = now
        if isinstance(message, Heartbeat):
            (self.holders.add if message.can_vote and message.has_state else self.holders.discard)(member)
            (self.voters.add if message.can_vote else self.voters.discard)(member)

    def is_stateless(self, has_state: bool, has_vote: bool, now: float, is_starting: bool = False) -> bool:
        """Return whether neither this agent nor a connected one has had the state for too long.

        Without a vote the agent waits for members that have one: they may be loading a checkpoint. `is_starting`: its
        own ranks are starting and then load one.
        """
        if has_state or (self.holders if has_vote else self.voters) & self.connected:
            self.stateless_since = None
        elif self.stateless_since is None:
            self.stateless_since = now
        limit_s = STARTING_LIMIT_S if is_starting else STATELESS_LIMIT_S
        return self.stateless_since is not None and now - self.stateless_since > limit_s

    def record_done(self, member: int, finished: bool, now: float) -> None:
        """Record that a member's ranks have ended, after the last step of the training or before."""
        self.done.add(member)
        if finished and self.others_finished_at is None:
            self.others_finished_at = now

    def awaits(self, generation: Generation | None, now: float) -> bool:
        """Return whether another member of the training still works: it may be saving, or need this agent's keys."""
        if not self.finished or generation is None:
            return False
        others = self.connected.intersection(generation.members) - self.done
        return any(now - self.received_at.get(member, now) <= self.silent_after_s for member in others)

    def is_late(self, is_outside: bool, now: float) -> bool:
        """Return whether the training ended elsewhere, and this agent was outside or could not follow to its end."""
        if self.finished or self.others_finished_at is None:
            return False
        return is_outside or now - self.others_finished_at > OUTLIVE_FINISHED_S

    def absent(self) -> list[int]:
        """Return the nodes of the launch that have not reported their end, once the training is over."""
        members = range(self.launch_size) if self.finished else ()
        return [member for member in members if member not in {*self.done, self.me}]


def _state_lost(run: str) -> RunFailed:
    resume = RunFolder(Path(run)).rejoin_advice() or f"go on from the last checkpoint: shoal train --resume {run}"
    return RunFailed(
        "no machine that can be reached has the training's state any more",
        why="the others are out of reach from here, their ranks were killed, or the run has ended meanwhile",
        fix=f"if they still train, come back when they can be reached: shoal join {run}; if none does, {resume}",
    )


@dataclass(frozen=True)
class RankNumbering:
    """The numbers of ranks and their files: nodes of the launch keep those of the launch, and every later member has a
    range of its own behind them. Pure."""

    me: int
    roster: Sequence[RosterEntry]

    def first_generation(self, members: MembershipOrder) -> Generation:
        member_ranks = tuple(
            MemberRanks(member=member, ranks=tuple(range(len(place.ranks)))) for member, place in enumerate(self.roster)
        )
        return first_generation(member_ranks, above=members.above)

    @property
    def launched(self) -> int:
        """The number of ranks of the launch."""
        return sum(len(place.ranks) for place in self.roster)

    def number(self, member: int, local: int) -> int:
        if member < len(self.roster):
            return self.roster[member].ranks[local]
        return self.launched + (member - len(self.roster)) * MAX_RANKS_PER_MEMBER + local

    def orders(
        self, generation: Generation, name: Callable[[int], str], keeps_files: bool
    ) -> dict[int, EnterGeneration]:
        """Return the order for each rank of this agent, by local number. The caller sets whether each has a state."""
        own = generation.ranks_of(self.me)
        places = [(entry.member, local) for entry in generation.member_ranks for local in entry.ranks]
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
                has_state=True,
                keeps_files=keeps_files and index == 0,
                recovers=generation.recovers,
                launched=self.launched,
            )
            for index, local in enumerate(own)
        }


def highest_generation(run: RunFolder) -> int:
    """Return the highest number of a generation in the ledger of earlier launches; 0 without one."""
    if not run.commits.exists():
        return 0
    ballots = (generation_of(f"gen-{record.get('generation')}/") for record in read_events(run.commits))
    return max((ballot.number for ballot in ballots if ballot is not None), default=0)
