"""The membership state machine of one agent: inputs in, actions out; it has no clock, no socket and no thread.

Every input carries the time and returns the actions that the agent must perform. The agreement is single-decree Paxos
among the members of the last generation, except that members may give up their vote; `docs/faults.md` states the rules.
"""

from __future__ import annotations

from collections.abc import Mapping

from shoal.control.membership import sentences
from shoal.control.membership.messages import (
    Accept,
    Accepted,
    Alarm,
    Announce,
    Heartbeat,
    Message,
    Prepare,
    Promise,
    Refuse,
    Resign,
    Why,
)
from shoal.control.membership.paxos import Acceptor, Proposer
from shoal.control.membership.quorum import fit_members, mutually_reachable, recovery_generation
from shoal.control.membership.sentences import GenerationChange, Name
from shoal.control.membership.settings import MembershipSettings
from shoal.control.membership.state import (
    AbandonLineage,
    Action,
    GenerationProgress,
    MembershipState,
    Phase,
    Spare,
    StartGeneration,
)
from shoal.control.membership.types import (
    NEVER,
    Ballot,
    Generation,
    Ranks,
    State,
    has_restarted,
    next_member,
    shared_step,
)
from shoal.control.membership.vote_store import VoteStore


class MembershipMachine:
    def __init__(
        self, me: int, settings: MembershipSettings, votes: VoteStore, now: float, name: Name = "machine {}".format
    ) -> None:
        self._state = MembershipState(me, settings, votes, now, name)
        self._acceptor = Acceptor(self._state)
        self._proposer = Proposer(self._state, self._acceptor)
        self._entry = GenerationEntry(self._state, self._acceptor, self._proposer)
        self._lineage_choice = LineageChoice(self._state)
        self._recovery = CheckpointRecovery(self._state)
        self._is_finished = False
        # A restarted agent has lost its state, and with it the right to vote.
        if self.can_vote:
            self._state.voter.resign("restart")

    @property
    def generation(self) -> Generation | None:
        return self._state.generation

    @property
    def can_vote(self) -> bool:
        """Whether this agent votes on the successor of its generation."""
        return self._state.voter.may_vote()

    @property
    def has_or_loads_state(self) -> bool:
        """Whether this agent's ranks have a state to train on from, or are about to load it."""
        return self.can_vote and (self._state.ranks.has_state or self._state.ranks.phase is not Phase.STOPPED)

    @property
    def can_recover(self) -> bool:
        """Whether this agent, or members of later generations, go back to a checkpoint as soon as there are ranks."""
        current = self.generation
        return current is not None and not self.can_vote and self.joins is None and self._state.is_state_lost(current)

    @property
    def is_launching(self) -> bool:
        return is_launching(self._state)

    @property
    def joins(self) -> Ballot | None:
        """The lineage that this agent asks to join."""
        return self._state.joins

    @property
    def is_spare(self) -> bool:
        return self._state.spare is not None

    def may_commit(self, generation: Ballot) -> bool:
        """The fence: whether ranks may commit a step or replace a checkpoint in this generation.

        Only in the newest generation and before they have stopped; after a sleep not before every other member has
        confirmed that the generation is still the newest.
        """
        state = self._state
        has_stopped = state.ranks.phase is Phase.STOPPED
        return state.is_current(generation) and self.can_vote and not has_stopped and not state.progress.unconfirmed

    # Inputs from the clock and the connections.

    def tick(self, now: float) -> list[Action]:
        """Call at least every 0.1 s: a gap of more than `slept_after_s` means that this node slept."""
        self._state.set_time(now)
        return self._advance()

    def connected(self, member: int, now: float) -> list[Action]:
        self._state.set_time(now)
        self._state.peers.connected.add(member)
        self._state.peers.detector.record_message(member)
        self._state.introduce(member)
        self._proposer.resend(member)
        return self._advance()

    def closed(self, member: int, now: float) -> list[Action]:
        self._state.set_time(now)
        self._state.peers.detector.record_close(member)
        self._state.peers.connected.discard(member)
        return self._advance()

    def received(self, sender: int, message: Message, now: float) -> list[Action]:
        self._state.set_time(now)
        self._state.peers.detector.record_message(sender)
        self._on_message(sender, message)
        return self._advance()

    # Inputs from this agent's ranks and the user.

    def start_first_generation(self, generation: Generation, ranks: Ranks, now: float) -> list[Action]:
        """Enter the first generation of a launch, which all agents have in their orders, once they have met."""
        self._state.set_time(now)
        self._state.ranks.numbers, self._state.ranks.has_state = ranks, True
        self._entry.enter(generation)
        return self._advance()

    def ready(self, ranks: Ranks, now: float, committed: int = 0) -> list[Action]:
        """These ranks train or wait to join; `committed` is the last step of their own that new ones read from the
        ledger."""
        self._state.set_time(now)
        self._state.ranks.numbers = ranks
        self.committed(committed)
        return self._advance()

    def formed(
        self, generation: Ballot, left: Mapping[Ballot, int] | None = None, can_lose_parts: bool = False
    ) -> None:
        """This agent's ranks have formed the group of this generation and have its state.

        `left`: the earlier lineages that this state contains, and the step after which each was left.
        `can_lose_parts`: ranks have parts of the state that no other rank has.
        """
        if self._state.is_current(generation) and self._state.ranks.phase is not Phase.STOPPED:
            self._state.voter.set_shared_steps(left or {})
            self._state.ranks.has_state = self._state.progress.formed = True
            self._state.ranks.can_lose_parts = can_lose_parts
            self._state.peers.detector.set_starting(False)

    def committed(self, step: int) -> None:
        """Record the progress of this agent's ranks, for the next heartbeat."""
        self._state.ranks.committed = max(self._state.ranks.committed, step)

    def failed(self, generation: Ballot, now: float) -> list[Action]:
        """This agent's ranks cannot continue in this generation: an exchange failed, a rank died, no group formed."""
        self._state.set_time(now)
        self._state.progress.alarm |= self._state.is_current(generation)
        return self._advance()

    def stopped(self, generation: Ballot, replica: State | None, ranks: Ranks, now: float) -> list[Action]:
        """This agent's ranks have left the generation. `replica` None: the state they had to copy had not arrived."""
        self._state.set_time(now)
        own = self._state.ranks
        if self._state.is_current(generation):
            # A joining node may still have the state it came with, which does not belong to this generation.
            own.record_stopped(replica if own.has_state else None, ranks)
        return self._advance()

    def lost_ranks(self, now: float) -> list[Action]:
        """All ranks of this agent have ended; `ready` follows when new ones wait."""
        self._state.ranks.lose_all()
        return self.resign("ranks", now)

    def stand_by(self, generation: Ballot, now: float) -> list[Action]:
        """Leave the generation, because this machine is too slow; stay a spare until another member is lost."""
        state, current = self._state, self.generation
        if current is None or not state.is_current(generation) or not self.can_vote or len(current.members) < 2:
            return self.tick(now)
        state.spare = Spare(set(current.members) - {state.me})
        return self.resign("slow", now)

    def leave(self, now: float) -> list[Action]:
        self._state.is_leaving = True
        return self.resign("leave", now)

    def resign(self, why: Why, now: float) -> list[Action]:
        """Give up this agent's vote: what follows from a suspend of the machine, and from the inputs above."""
        self._state.set_time(now)
        state = self._state
        if state.generation is not None and self.can_vote:
            state.resign(state.generation, why)
        return self._advance()

    def begin_shutdown(self) -> None:
        """The run ends, here or elsewhere: without a vote this agent goes back to no checkpoint any more."""
        self._state.is_ending = True

    def finish(self) -> None:
        """This agent's ranks have passed the last barrier of the training: there is nothing left to agree on."""
        self._is_finished = True

    def invite(self, launch_size: int) -> int:
        """Return a new member's id that is used only once; the launch uses the ids below `launch_size`."""
        return next_member(launch_size, self._state.me, self._state.voter.count_invited())

    # Every input sets the time, changes the state, and then advances the protocol.

    def _advance(self) -> list[Action]:
        state = self._state
        self._advance_once()
        while state.inbox:
            self._on_message(state.me, state.inbox.pop(0))
            self._advance_once()
        state.send_heartbeat(at_once=False)
        actions, state.actions = state.actions, []
        return actions

    def _on_message(self, sender: int, message: Message) -> None:
        state = self._state
        match message:
            case Heartbeat():
                self._on_heartbeat(sender, message)
            case Announce():
                state.peers.generations[sender] = message.generation
                self._entry.on_generation(sender, message.generation)
            case Resign():
                state.voter.saw(message.promised.number)
                state.peers.resignations[sender, message.generation] = message
            case Alarm():
                state.progress.alarm |= state.is_current(message.generation)
            case Prepare():
                if self._acceptor.on_prepare(sender, message):
                    self._proposer.yield_to(sender)
            case Accept():
                self._acceptor.on_accept(sender, message)
            case Promise() | Accepted() | Refuse():
                self._proposer.on_answer(sender, message)

    def _on_heartbeat(self, sender: int, beat: Heartbeat) -> None:
        state = self._state
        state.peers.heartbeats[sender] = beat
        # Numbers rise at every agent that may ever belong to one generation, so no agent enters an old one again.
        state.voter.saw(beat.generation.number if beat.generation else 0)
        if not state.is_current(beat.generation):
            state.announce(sender)
        elif state.peers.detector.awake_s() >= 2 * state.settings.heartbeat_s:
            state.progress.unconfirmed.discard(sender)

    def _advance_once(self) -> None:
        """Do what follows from everything that is known by now."""
        if self._is_finished:
            return
        self._lineage_choice.advance()
        state, current = self._state, self.generation
        if current is None or not self.can_vote or state.joins is not None:
            self._proposer.step_down()
            if current is not None and not self.can_vote and state.joins is None:
                self._entry.announce(self._recovery.advance(current))
            return
        missing, pending = state.is_missing(current), self._acceptor.pending
        if missing or pending:
            after_step = not missing and pending is not None and pending.after_step
            state.actions += state.ranks.stop(current.id, after_step=after_step)
        self._acceptor.answer(current)
        self._entry.announce(self._proposer.advance(current, missing))


def is_launching(state: MembershipState) -> bool:
    """Whether the first group of this launch has not formed yet."""
    return state.generation is not None and state.generation.parent == NEVER and not state.progress.formed


class GenerationEntry:
    """How this agent follows decided generations: which ones it enters, and what it logs about them."""

    def __init__(self, state: MembershipState, acceptor: Acceptor, proposer: Proposer) -> None:
        self._state = state
        self._acceptor = acceptor
        self._proposer = proposer

    def announce(self, decided: Generation | None) -> None:
        """Announce a generation that this agent has decided, if it has, and follow it."""
        if decided is not None:
            self._state.broadcast(Announce(generation=decided))
            self.on_generation(self._state.me, decided)

    def on_generation(self, sender: int, generation: Generation) -> None:
        """Enter a decided generation; record that it excludes this agent; or resign from it, if it waits for a member
        that will never enter it."""
        state, current = self._state, self._state.generation
        state.voter.saw(generation.id.number)
        if state.me in generation.members:
            if state.voter.missed(generation):
                state.send(sender, Resign(generation=generation.id, why="elsewhere", promised=NEVER))
        elif current and generation.lineage.name == current.lineage.name and generation.id > current.id:
            state.progress.passed = generation
        if self._should_enter(generation):
            self.enter(generation)

    def _should_enter(self, generation: Generation) -> bool:
        """Whether it succeeds the current one or this agent asked to join it. Never one that it may have left."""
        state, current = self._state, self._state.generation
        if state.me not in generation.members or (current is not None and generation.id <= current.id):
            return False
        if state.joins == generation.lineage.name:
            return True
        if current is None or not state.voter.may_vote():
            # Without a state, a vote and a lineage to join, nothing is lost by going back with the others.
            return generation.recovers and state.joins is None and not (state.is_leaving or state.is_ending)
        return generation.lineage.name == current.lineage.name or generation.parent == current.id

    def enter(self, generation: Generation) -> None:
        state, ranks, before = self._state, self._state.ranks, self._state.generation
        # What an earlier launch of the run left on disk is not reported in the first generation of this one.
        if before is not None and generation.parent != NEVER:
            self._log_change(before, generation)
        state.voter.enter(generation)
        # Others shall copy a state from this agent's ranks that was lost since its promise.
        alarm = generation.source == state.me and not ranks.has_state and not generation.recovers
        # A joining node has no state before its copy has arrived.
        ranks.has_state &= state.joins is None and not generation.recovers
        ranks.phase, ranks.committed = Phase.TRAINING, generation.state.committed
        state.progress, state.joins, state.spare = GenerationProgress(state.now, alarm), None, None
        state.peers.detector.set_starting(generation.parent == NEVER)
        for member in generation.members:
            state.peers.detector.expect(member)
        state.peers.forget_before(generation.id)
        state.actions.append(StartGeneration(generation, ranks.has_state))
        state.send_heartbeat()
        self._proposer.reset()
        self._acceptor.pending = None

    def _log_change(self, before: Generation, after: Generation) -> None:
        """Log the change for the user; abandon this agent's commits where it changes lineages."""
        state = self._state
        begins = after.recovers and is_launching(state) and state.joins is None
        if after.recovers and not begins:
            state.log(sentences.recovering(after, state.me, state.name), after.id)
            return
        if state.joins is not None:
            shared, committed = shared_step(before.lineage, after.lineage), state.ranks.committed
            if before.lineage.name != after.lineage.name and committed > shared:
                has_lost_state = has_restarted(after.lineage, before.lineage.name)
                describe = sentences.redone if has_lost_state else sentences.abandoned
                text = describe(state.me, after, committed, shared, state.name)
                state.actions.append(AbandonLineage(before.lineage.name, after.lineage.name, shared, text))
            state.log(sentences.admitted(after, state.me, state.name), after.id)
            return
        missing = [member for member in before.members if member not in after.members]
        causes = {member: state.peers.cause(member, before) for member in missing}
        silent_s = [state.peers.detector.silent_s(member) for member, cause in causes.items() if cause == "silent"]
        since_s = max(self._proposer.needed_s, *silent_s, 0.0)
        change = GenerationChange(before, after, causes, since_s, state.ranks.can_lose_parts)
        state.log((sentences.begun_without if begins else sentences.regrouped)(change, state.name), after.id)


class CheckpointRecovery:
    """When this agent goes back to a checkpoint with others: once no member has the state any more."""

    def __init__(self, state: MembershipState) -> None:
        self._state = state
        # Which members were ready, and since when.
        self._ready: tuple[object, float] = (None, state.now)

    def advance(self, last: Generation) -> Generation | None:
        """Go back to a checkpoint, once all members of the newest generation have lost the state and their votes.

        The lowest member with ranks does so with the others that are ready, as a lineage of its own; the next one when
        the lowest has not for a while. A silent member may still have the state: then nothing happens here.
        """
        state, peers, settings = self._state, self._state.peers, self._state.settings
        ready = state.ready_to_recover(last)
        if state.me not in ready or state.is_leaving or state.is_ending or len(ready) < settings.min_nodes:
            self._ready = (None, state.now)
            return None
        if self._ready[0] != ready:
            self._ready = (ready, state.now)
        turn_s = settings.fork_after_s + sorted(ready).index(state.me) * settings.stop_timeout_s
        if state.now - self._ready[1] < turn_s:
            return None
        self._ready = (None, state.now)
        links = {member: peers.heartbeats[member].reachable for member in ready if member != state.me}
        group = mutually_reachable({**links, state.me: peers.reachable()})
        if state.me not in group:
            return None
        members = fit_members(state.me, {member: ready[member] for member in group}, settings)
        if len(members) < settings.min_nodes:
            return None
        try:
            ballot = Ballot(state.voter.use_next(), state.me)
        except OSError as error:
            state.log(sentences.cannot_recover(state.me, error.strerror or str(error), state.name))
            return None
        return recovery_generation(last, ballot, members)


class LineageChoice:
    """Which lineage this agent asks to join, or whether it stays a spare."""

    def __init__(self, state: MembershipState) -> None:
        self._state = state

    def _stands_by(self, lineage: Ballot | None) -> bool:
        """Whether this agent stays a spare: no member that trained has been missing for a while, and enough are left.

        A killed rank is restarted within moments. A member that became a spare itself is not missing.
        """
        state, spare = self._state, self._state.spare
        if spare is None:
            return False
        newest = state.peers.newest_generation(lineage)
        training = spare.members if newest is None else newest.members
        spare.members = spare.members.union(training) - state.peers.spares() - {state.me}
        if len(spare.members) < state.settings.min_nodes:
            state.spare = None
        elif spare.members.issubset(training):
            spare.missing_since = None
        elif spare.missing_since is None:
            spare.missing_since = state.now
        elif state.now - spare.missing_since > state.settings.stop_timeout_s:
            state.spare = None
        return state.spare is not None

    def advance(self) -> None:
        """Ask to join the lineage that should stay: always without a vote, and with one if it is another lineage."""
        state, current = self._state, self._state.generation
        own = current if state.voter.may_vote() else None
        best = state.peers.best_lineage(own if state.ranks.has_state else None, state.ranks.committed)
        is_overtaken = own is not None and state.peers.is_overtaken(own)
        is_staying = own is not None and not is_overtaken and best == own.lineage.name
        joins = None if is_staying or state.is_leaving or self._stands_by(best) else best
        if joins != state.joins:
            state.joins = joins
            state.send_heartbeat()
            if is_overtaken:
                state.log(sentences.fenced(state.me, state.ranks.committed, state.name))
        if joins is not None and current is not None:
            state.actions += state.ranks.stop(current.id, after_step=not is_overtaken)
