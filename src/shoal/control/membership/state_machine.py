"""One agent's part in deciding who trains. Inputs in, actions out; no clock, no socket, no thread of its own.

Every input carries the time and returns what is to be done. Any member may propose a successor; the lowest that is
there does, and the next one when it doesn't. The agreement itself is single-decree Paxos among the members of the last
generation, with the twist that members may give up their vote; `docs/faults.md` states it whole.
"""

from __future__ import annotations

from collections.abc import Callable

from shoal.control.membership import sentences, types
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
from shoal.control.membership.quorum import fitting_seats, mutual, recover
from shoal.control.membership.sentences import GenerationChange, Name
from shoal.control.membership.settings import MembershipSettings
from shoal.control.membership.state import AbandonLineage, Action, MembershipState, Phase, StartGeneration
from shoal.control.membership.types import NEVER, Ballot, Generation, Ranks, State, next_member
from shoal.control.membership.vote_store import VoteStore

# SECTION control/membership/tenure
# Which generation an agent is in: how it learns of others, enters the next one, and gives up its place.


class CurrentGeneration:
    def __init__(self, desk: MembershipState) -> None:
        self._desk = desk

    def is_for_us(self, generation: Generation) -> bool:
        """Whether to enter it: it grew out of ours, or we asked for it. Never one that we may have left before."""
        desk, current = self._desk, self._desk.generation
        if desk.me not in generation.members or (current is not None and generation.id <= current.id):
            return False
        if desk.asks == generation.lineage.name:
            return True
        if current is None or not desk.voter.may_vote():
            # Without a state, a vote and a lineage to ask for there is nothing to lose by going back with the others.
            return generation.recovers and desk.asks is None and not (desk.is_leaving or desk.is_ending)
        return generation.lineage.name == current.lineage.name or generation.parent == current.id

    def look_at(self, sender: int, generation: Generation) -> None:
        """One that we don't enter may still have left us behind, or wait for us in vain."""
        desk, current = self._desk, self._desk.generation
        desk.voter.saw(generation.id.number)
        if desk.me in generation.members:
            if desk.voter.missed(generation):
                desk.post(sender, Resign(generation=generation.id, why="elsewhere", promised=NEVER))
        elif current and generation.lineage.name == current.lineage.name and generation.id > current.id:
            desk.passed = generation

    def enter(self, generation: Generation, sought_s: float) -> None:
        desk, ranks, before = self._desk, self._desk.ranks, self._desk.generation
        # What an earlier launch of the run left on disk is no news in the first generation of this one.
        if before is not None and generation.parent != NEVER:
            self._account(before, generation, sought_s)
        desk.voter.enter(generation)
        # Others are to copy from us what we have lost since we promised it.
        desk.alarm = generation.source == desk.me and not ranks.holds and not generation.recovers
        # Whoever was let in has nothing to train on from before its copy has arrived; unless it missed nothing.
        ranks.holds &= (desk.asks is None or ranks.has(generation.state)) and not generation.recovers
        ranks.phase, ranks.committed = Phase.TRAINING, generation.state.committed
        desk.unsure, desk.asks, desk.passed = set(), None, None
        desk.formed, desk.began_at = False, desk.now
        for member in generation.members:
            desk.view.watch.expect(member)
        desk.view.forget_before(generation.id)
        desk.actions.append(StartGeneration(generation, ranks.holds))
        desk.beat()

    def resign(self, why: Why) -> None:
        desk = self._desk
        if desk.generation is None or not desk.voter.may_vote():
            return
        desk.voter.resign(why)
        desk.actions += desk.ranks.halt(desk.generation.id, at_edge=False)
        if word := desk.voter.resignation():
            desk.tell_all(word)

    def _account(self, before: Generation, after: Generation, sought_s: float) -> None:
        """What the user is told; and what our ledger gives up, where we change sides."""
        desk = self._desk
        if after.recovers:
            desk.say(sentences.recovering(after, desk.me, desk.name), after.id)
            return
        if desk.asks is not None:
            self._give_up(before, after)
            desk.say(sentences.admitted(after, desk.me, desk.name), after.id)
            return
        left = [member for member in before.members if member not in after.members]
        causes = {member: desk.view.cause(member, before) for member in left}
        silent_s = [desk.view.watch.silent_s(member) for member, cause in causes.items() if cause == "silent"]
        change = GenerationChange(before, after, causes, max(sought_s, *silent_s, 0.0))
        desk.say(sentences.regrouped(change, desk.name), after.id)

    def _give_up(self, before: Generation, after: Generation) -> None:
        desk, old, new = self._desk, before.lineage, after.lineage
        shared, committed = types.shared_step(old, new), desk.ranks.committed
        if old.name != new.name and committed > shared:
            text = sentences.abandoned(desk.me, after, committed, shared, desk.name)
            desk.actions.append(AbandonLineage(old.name, new.name, shared, text))


class MembershipMachine:
    def __init__(
        self, me: int, rules: MembershipSettings, promises: VoteStore, now: float, name: Name = "machine {}".format
    ) -> None:
        self._desk = MembershipState(me, rules, promises, now, name)
        self._elector = Acceptor(self._desk)
        self._chair = Proposer(self._desk, self._elector)
        self._tenure = CurrentGeneration(self._desk)
        self._over = False
        # What a member without a vote saw of the others when it last looked for a state, and since when.
        self._loss: tuple[object, float] = (None, now)
        # Whoever comes back has lost its state, and with it the right to say what follows.
        if self.votes:
            self._desk.voter.resign("restart")

    @property
    def generation(self) -> Generation | None:
        return self._desk.generation

    @property
    def votes(self) -> bool:
        """Whether we have a say in what follows our generation."""
        return self._desk.voter.may_vote()

    @property
    def has_state(self) -> bool:
        """Whether our ranks have something to train on from, or are about to load it."""
        return self.votes and (self._desk.ranks.holds or self._desk.ranks.phase is not Phase.STOPPED)

    @property
    def can_recover(self) -> bool:
        """Whether we, or members that were with the others for longer, go back to a checkpoint as soon as there are
        ranks."""
        current = self.generation
        return current is not None and not self.votes and self.asks is None and self._desk.is_state_lost(current)

    @property
    def asks(self) -> Ballot | None:
        """The lineage that we want to be let into."""
        return self._desk.asks

    def may_commit(self, generation: Ballot) -> bool:
        """The fence: only ranks of the newest generation that have not stopped may commit or put a checkpoint in
        its place; and whoever slept not before it has heard from all others that the generation still is the newest."""
        desk = self._desk
        stopped = desk.ranks.phase is Phase.STOPPED
        return desk.is_current(generation) and self.votes and not stopped and not desk.unsure

    # From the clock and the connections.

    def tick(self, now: float) -> list[Action]:
        """At least every 0.1 s: a longer gap than `away_after_s` means that we slept."""
        return self._take(now, lambda: None)

    def connected(self, member: int, now: float) -> list[Action]:
        def greet() -> None:
            self._desk.view.linked.add(member)
            self._desk.view.watch.heard(member)
            self._desk.introduce(member)
            self._chair.remind(member)

        return self._take(now, greet)

    def closed(self, member: int, now: float) -> list[Action]:
        def part() -> None:
            self._desk.view.watch.closed(member)
            self._desk.view.linked.discard(member)

        return self._take(now, part)

    def received(self, sender: int, message: Message, now: float) -> list[Action]:
        def hear() -> None:
            self._desk.view.watch.heard(sender)
            self._handle(sender, message)

        return self._take(now, hear)

    # From our own ranks, and the person at this machine.

    def found(self, generation: Generation, ranks: Ranks, now: float) -> list[Action]:
        """The first generation of a launch, of which all agents were told the same, once they have met."""

        def begin() -> None:
            self._desk.ranks.numbers, self._desk.ranks.holds = ranks, True
            self._enter(generation)

        return self._take(now, begin)

    def ready(self, ranks: Ranks, now: float, committed: int = 0) -> list[Action]:
        """These ranks of ours train or wait to be let in; `committed` is the last step that new ones
        found in the ledger as their own."""

        def offer() -> None:
            self._desk.ranks.numbers = ranks
            self.committed(committed)

        return self._take(now, offer)

    def formed(self, generation: Ballot) -> None:
        """Our ranks have met the others in this generation and hold its state, copied where theirs differed."""
        if self._desk.is_current(generation) and self._desk.ranks.phase is not Phase.STOPPED:
            self._desk.ranks.holds = self._desk.formed = True

    def committed(self, step: int) -> None:
        """Our ranks' progress; nothing follows from it but what the next heartbeat says."""
        self._desk.ranks.committed = max(self._desk.ranks.committed, step)

    def failed(self, generation: Ballot, now: float) -> list[Action]:
        """Our ranks cannot go on in this generation: an exchange failed, a rank died, the group did not form."""

        def raise_alarm() -> None:
            self._desk.alarm |= self._desk.is_current(generation)

        return self._take(now, raise_alarm)

    def stopped(self, generation: Ballot, state: State | None, ranks: Ranks, now: float) -> list[Action]:
        """Our ranks are out of the generation. No state: what they had to copy had not arrived."""

        def halt() -> None:
            own = self._desk.ranks
            if self._desk.is_current(generation):
                # A guest may still have the state it came with; that is none of this generation's.
                own.halted(state if own.holds else None, ranks)

        return self._take(now, halt)

    def lost_ranks(self, now: float) -> list[Action]:
        """All of them were reaped; `ready` follows when new ones wait."""
        self._desk.ranks.lose_all()
        return self._resign("ranks", now)

    def suspend(self, now: float) -> list[Action]:
        return self._resign("suspend", now)

    def leave(self, now: float) -> list[Action]:
        self._desk.is_leaving = True
        return self._resign("leave", now)

    def wind_up(self) -> None:
        """The run ends, here or elsewhere: without a vote we go back to no checkpoint any more."""
        self._desk.is_ending = True

    def finish(self) -> None:
        """Our ranks have passed the last barrier of the training: there is nothing left to agree on."""
        self._over = True

    def invite(self, founders: int) -> int:
        """An id for a new machine, that nobody has had or will have; `founders` began the run as 0, 1, 2 …"""
        return next_member(founders, self._desk.me, self._desk.voter.count_guest())

    def _resign(self, why: Why, now: float) -> list[Action]:
        return self._take(now, lambda: self._tenure.resign(why))

    # One input at a time.

    def _take(self, now: float, change: Callable[[], None]) -> list[Action]:
        desk = self._desk
        desk.now = now
        if desk.view.watch.note(now) and desk.generation:
            desk.unsure = set(desk.generation.members) - {desk.me}
        change()
        self._consider()
        while desk.inbox:
            self._handle(desk.me, desk.inbox.pop(0))
            self._consider()
        desk.beat(at_once=False)
        actions, desk.actions = desk.actions, []
        return actions

    def _handle(self, sender: int, message: Message) -> None:
        desk = self._desk
        match message:
            case Heartbeat():
                self._on_beat(sender, message)
            case Announce():
                desk.view.generations[sender] = message.generation
                self._learn(sender, message.generation)
            case Resign():
                desk.voter.saw(message.promised.number)
                desk.view.resignations[sender, message.generation] = message
            case Alarm():
                desk.alarm |= desk.is_current(message.generation)
            case Prepare():
                if self._elector.on_prepare(sender, message):
                    self._chair.yield_to(sender)
            case Accept():
                self._elector.on_accept(sender, message)
            case Promise() | Accepted() | Refuse():
                self._chair.on_answer(sender, message)

    def _on_beat(self, sender: int, beat: Heartbeat) -> None:
        desk = self._desk
        desk.view.beats[sender] = beat
        # Numbers rise for everybody who may ever belong to one generation, so nobody enters an old one again.
        desk.voter.saw(beat.generation.number if beat.generation else 0)
        if not desk.is_current(beat.generation):
            desk.announce(sender)
        elif desk.view.watch.awake_s() >= 2 * desk.rules.beat_s:
            desk.unsure.discard(sender)

    def _learn(self, sender: int, generation: Generation) -> None:
        self._tenure.look_at(sender, generation)
        if self._tenure.is_for_us(generation):
            self._enter(generation)

    def _enter(self, generation: Generation) -> None:
        self._tenure.enter(generation, self._chair.needed_s)
        self._chair.reset()
        self._elector.due = None

    def _consider(self) -> None:
        """What follows from all that we know by now."""
        if self._over:
            return
        self._choose_lineage()
        desk, current = self._desk, self.generation
        if current is None or not self.votes or desk.asks is not None:
            self._chair.step_down()
            if current is not None and not self.votes and desk.asks is None:
                self._recover(current)
            return
        missing, due = desk.is_missing(current), self._elector.due
        if missing or due:
            desk.actions += desk.ranks.halt(current.id, at_edge=not missing and due is not None and due.at_edge)
        self._elector.answer(current)
        if decided := self._chair.preside(current, missing):
            desk.tell_all(Announce(generation=decided))
            self._learn(desk.me, decided)

    def _recover(self, last: Generation) -> None:
        """All members of the newest generation have lost the state and their votes with it: the lowest that has ranks
        goes back to a checkpoint with the others that are ready, as a lineage of its own. The next one does so when the
        lowest has not for a while. A silent member may still have the state: then nothing happens here."""
        desk, view = self._desk, self._desk.view
        ready = desk.ready_to_recover(last)
        if desk.me not in ready or desk.is_leaving or desk.is_ending or len(ready) < desk.rules.min_nodes:
            self._loss = (None, desk.now)
            return
        if self._loss[0] != ready:
            self._loss = (ready, desk.now)
        turn_s = desk.rules.fork_after_s + sorted(ready).index(desk.me) * desk.rules.answer_s
        if desk.now - self._loss[1] < turn_s:
            return
        self._loss = (None, desk.now)
        inside = mutual({member: view.hears() if member == desk.me else view.beats[member].hears for member in ready})
        if desk.me not in inside:
            return
        seats = fitting_seats(desk.me, {member: ready[member] for member in inside}, desk.rules)
        if len(seats) < desk.rules.min_nodes:
            return
        try:
            ballot = Ballot(desk.voter.use_next(), desk.me)
        except OSError as error:
            desk.say(sentences.cannot_recover(desk.me, error.strerror or str(error), desk.name))
            return
        decided = recover(last, ballot, seats)
        desk.tell_all(Announce(generation=decided))
        self._learn(desk.me, decided)

    def _choose_lineage(self) -> None:
        """Whether to ask somebody to let us in: always without a vote, and with one if others should stand."""
        desk, current = self._desk, self.generation
        mine = current if self.votes else None
        best = desk.view.best_lineage(mine if desk.ranks.holds else None, desk.ranks.committed)
        overtaken = mine is not None and desk.view.is_overtaken(mine)
        stays = mine is not None and not overtaken and best == mine.lineage.name
        asks = None if stays or desk.is_leaving else best
        if asks != desk.asks:
            desk.asks = asks
            desk.beat()
            if overtaken:
                desk.say(sentences.fenced(desk.me, desk.ranks.committed, desk.name))
        if asks is not None and current is not None:
            desk.actions += desk.ranks.halt(current.id, at_edge=not overtaken)
