"""One agent's part in deciding who trains. Inputs in, actions out; no clock, no socket, no thread of its own.

Every input carries the time and returns what is to be done. Any member may propose a successor; the lowest that is
there does, and the next one when it doesn't. The agreement itself is single-decree Paxos among the members of the last
generation, with the twist that members may give up their vote; `docs/faults.md` states it whole.
"""

from __future__ import annotations

from collections.abc import Callable

from shoal.control.membership import lineages, sentences
from shoal.control.membership.actions import Abandon, Action, Pause, Send, Start, Tell
from shoal.control.membership.generation import NEVER, Ballot, Generation, Ranks, State
from shoal.control.membership.messages import (
    Accept,
    Accepted,
    Alarm,
    Announce,
    Beat,
    Message,
    Prepare,
    Promise,
    Refuse,
    Resign,
    Vote,
    Why,
)
from shoal.control.membership.ownranks import OwnRanks, Phase
from shoal.control.membership.promises import Promises, Voter
from shoal.control.membership.round import Round
from shoal.control.membership.rules import Rules
from shoal.control.membership.sentences import Change, Name
from shoal.control.membership.succession import succeed
from shoal.control.membership.view import View

# A pause is looked at again this often, even when nothing seems to have changed.
_AGAIN_S = 1.0


class Council:
    def __init__(self, me: int, rules: Rules, promises: Promises, now: float, name: Name = "machine {}".format) -> None:
        self._me = me
        self._rules = rules
        self._name = name
        self._voter = Voter(promises)
        self._view = View(me, rules, now)
        self._ranks = OwnRanks()
        self._now = now
        self._round: Round | None = None
        self._due: Prepare | None = None
        self._asks: Ballot | None = None
        self._passed: Generation | None = None
        self._alarm = self._paused = self._formed = self._leaving = self._complained = False
        self._began_at = self._beat_at = self._next_try = self._promised_at = now
        self._need_since: float | None = None
        self._scene: object = None
        self._announced_at: dict[int, float] = {}
        self._unsure: set[int] = set()
        self._inbox: list[Message] = []
        self._out: list[Action] = []
        # Whoever comes back has lost its state, and with it the right to say what follows.
        if self._voter.may_vote():
            self._voter.resign("restart")

    # What others read.

    @property
    def generation(self) -> Generation | None:
        return self._voter.record.generation

    @property
    def votes(self) -> bool:
        """Whether we have a say in what follows our generation."""
        return self._voter.may_vote()

    @property
    def asks(self) -> Ballot | None:
        """The lineage that we want to be let into."""
        return self._asks

    def may_commit(self, generation: Ballot) -> bool:
        """The fence: only ranks of the newest generation that have not stopped may commit, write a checkpoint or move
        `latest`; and whoever slept not before it has heard from all others that the generation still is the newest."""
        stopped = self._ranks.phase is Phase.STOPPED
        return self._is_current(generation) and self._voter.may_vote() and not stopped and not self._unsure

    # Inputs from the clock and the connections.

    def tick(self, now: float) -> list[Action]:
        return self._take(now, lambda: None)

    def connected(self, member: int, now: float) -> list[Action]:
        def greet() -> None:
            self._view.linked.add(member)
            self._announced_at.pop(member, None)
            self._view.watch.heard(member)
            self._introduce(member)

        return self._take(now, greet)

    def closed(self, member: int, now: float) -> list[Action]:
        def part() -> None:
            self._view.watch.closed(member)
            self._view.linked.discard(member)

        return self._take(now, part)

    def received(self, sender: int, message: Message, now: float) -> list[Action]:
        def hear() -> None:
            self._view.watch.heard(sender)
            self._handle(sender, message)

        return self._take(now, hear)

    # Inputs from our own ranks and the person at this machine.

    def found(self, generation: Generation, ranks: Ranks, now: float) -> list[Action]:
        """The first generation of a launch, of which all agents were told the same."""
        self._ranks.numbers, self._ranks.holds = ranks, True
        return self._take(now, lambda: self._enter(generation))

    def ready(self, ranks: Ranks, now: float, committed: int = 0) -> list[Action]:
        """New ranks wait to be let in; `committed` is the last step of the ledger they found."""

        def offer() -> None:
            self._ranks.numbers = ranks
            self._ranks.committed = max(self._ranks.committed, committed)

        return self._take(now, offer)

    def formed(self, generation: Ballot) -> None:
        """Our ranks have met the others in this generation and hold its state, copied where theirs differed."""
        if self._is_current(generation) and self._ranks.phase is not Phase.STOPPED:
            self._ranks.holds = self._formed = True

    def committed(self, step: int) -> None:
        """Our ranks' progress; nothing follows from it but what the next heartbeat says."""
        self._ranks.committed = max(self._ranks.committed, step)

    def failed(self, generation: Ballot, now: float) -> list[Action]:
        """Our ranks cannot go on in this generation: an exchange failed, a rank died, the group did not form."""

        def stop() -> None:
            if self._is_current(generation):
                self._alarm = True

        return self._take(now, stop)

    def stopped(self, generation: Ballot, state: State | None, ranks: Ranks, now: float) -> list[Action]:
        """Our ranks are out of the generation. No state: what they had to copy had not arrived."""

        def halt() -> None:
            if self._is_current(generation):
                self._ranks.halted(state, ranks)

        return self._take(now, halt)

    def lost_ranks(self, now: float) -> list[Action]:
        """All of them were reaped; `ready` follows when new ones wait."""

        def resign() -> None:
            self._ranks.lose_all()
            self._resign("ranks")

        return self._take(now, resign)

    def suspend(self, now: float) -> list[Action]:
        return self._take(now, lambda: self._resign("suspend"))

    def leave(self, now: float) -> list[Action]:
        def go() -> None:
            self._leaving = True
            self._resign("leave")

        return self._take(now, go)

    # One input at a time.

    def _take(self, now: float, change: Callable[[], None]) -> list[Action]:
        self._now = now
        if self._view.watch.note(now) and self.generation:
            self._unsure = set(self.generation.members) - {self._me}
        change()
        self._consider()
        while self._inbox:
            self._handle(self._me, self._inbox.pop(0))
            self._consider()
        if now - self._beat_at >= self._rules.beat_s:
            self._beat()
        actions, self._out = self._out, []
        return actions

    def _post(self, to: int, message: Message) -> None:
        if to == self._me:
            self._inbox.append(message)
        elif to in self._view.linked:
            self._out.append(Send(to, message))

    def _tell_all(self, message: Message) -> None:
        for member in sorted(self._view.linked):
            self._post(member, message)

    def _beat(self) -> None:
        self._beat_at = self._now
        current = self.generation
        beat = Beat(
            generation=current.id if current else None,
            lineage=current.lineage.name if current else None,
            committed=self._ranks.committed,
            hears=self._view.hears(),
            votes=self._voter.may_vote(),
            holds=self._ranks.holds,
            asks=self._asks,
            ranks=self._ranks.numbers,
        )
        self._tell_all(beat)

    def _introduce(self, member: int) -> None:
        """Connections break and are made again: what was said over an old one may not have arrived."""
        if word := self._voter.resignation():
            self._post(member, word)
        elif current := self.generation:
            self._post(member, Announce(generation=current))

    # Messages.

    def _handle(self, sender: int, message: Message) -> None:
        match message:
            case Beat():
                self._on_beat(sender, message)
            case Announce():
                self._view.generations[sender] = message.generation
                self._learn(message.generation)
                self._decline(sender, message.generation)
            case Resign():
                self._voter.saw(message.promised.number)
                self._view.resignations[sender, message.generation] = message
            case Alarm() if self._is_current(message.generation):
                self._alarm = True
            case Prepare():
                self._on_prepare(sender, message)
            case Accept():
                self._on_accept(sender, message)
            case Promise() | Accepted() | Refuse() if self._round and self._round.base.id == message.generation:
                self._on_answer(self._round, sender, message)

    def _on_beat(self, sender: int, beat: Beat) -> None:
        self._view.beats[sender] = beat
        if self._is_current(beat.generation or NEVER) and self._view.watch.awake_s() >= 2 * self._rules.beat_s:
            self._unsure.discard(sender)
        # Numbers rise for everybody who may ever belong to one generation, so nobody enters an old one again.
        self._voter.saw(beat.generation.number if beat.generation else 0)
        current = self.generation
        if current and self._voter.may_vote() and beat.generation != current.id:
            self._announce(sender, current)

    def _announce(self, to: int, current: Generation) -> None:
        """Not to every one of the heartbeats that piled up while one of us slept."""
        if self._now - self._announced_at.get(to, float("-inf")) >= self._rules.beat_s:
            self._announced_at[to] = self._now
            self._post(to, Announce(generation=current))

    def _on_prepare(self, proposer: int, prepare: Prepare) -> None:
        self._voter.saw(prepare.ballot.number)
        if not self._may_answer(proposer, prepare.generation):
            return
        if not self._vote(lambda: self._voter.promise(prepare.ballot)):
            self._post(proposer, Refuse(generation=prepare.generation, ballot=self._voter.record.promised))
            return
        self._due = prepare
        self._promised_at = self._now
        if proposer != self._me:
            self._round = None

    def _on_accept(self, proposer: int, accept: Accept) -> None:
        if not self._may_answer(proposer, accept.generation):
            return
        vote = Vote(ballot=accept.ballot, successor=accept.successor)
        answer = Accepted if self._vote(lambda: self._voter.accept(vote)) else Refuse
        ballot = accept.ballot if answer is Accepted else self._voter.record.promised
        self._post(proposer, answer(generation=accept.generation, ballot=ballot))

    def _may_answer(self, proposer: int, generation: Ballot) -> bool:
        """Who wants to leave a lineage does not say how it goes on; who is ahead tells who is behind."""
        current = self.generation
        if current and self._voter.may_vote() and current.id != generation:
            self._announce(proposer, current)
        return self._is_current(generation) and self._voter.may_vote() and self._asks is None

    def _vote(self, cast: Callable[[], bool]) -> bool:
        """A vote that cannot be written down is not given."""
        try:
            return cast()
        except OSError as error:
            if not self._complained:
                self._complained = True
                self._say(sentences.cannot_promise(self._me, error, self._name))
            return False

    def _on_answer(self, round: Round, sender: int, answer: Promise | Accepted | Refuse) -> None:
        if isinstance(answer, Refuse):
            self._voter.saw(answer.ballot.number)
            if answer.ballot > round.ballot:
                self._drop_round()
        elif answer.ballot != round.ballot:
            return
        elif isinstance(answer, Promise):
            round.promises[sender] = answer
        else:
            round.accepts.add(sender)

    # What follows from what we know.

    def _consider(self) -> None:
        self._choose_lineage()
        current = self.generation
        if current is None or not self._voter.may_vote() or self._asks is not None:
            self._round = self._need_since = None
            return
        missing = self._missing(current)
        if missing or self._due:
            at_edge = not missing and self._due is not None and self._due.at_edge
            self._out += self._ranks.halt(current.id, at_edge)
        self._answer(current)
        if self._round is not None:
            self._conclude(self._round, missing)
        elif missing or self._ranks.phase is not Phase.TRAINING or self._is_welcome(current):
            self._seek_successor(current, missing)
        else:
            self._need_since = None

    def _choose_lineage(self) -> None:
        current, votes = self.generation, self._voter.may_vote()
        mine = current if votes else None
        held = mine if self._ranks.holds else None
        best = None if self._leaving else self._view.best_lineage(held, self._ranks.committed)
        overtaken = mine is not None and self._view.is_overtaken(mine)
        asks = best if mine is None or overtaken or best != mine.lineage.name else None
        if asks != self._asks:
            self._asks = asks
            self._beat()
            if overtaken:
                self._say(sentences.fenced(mine, self._me, self._name))
        if asks is not None and current is not None:
            self._out += self._ranks.halt(current.id, at_edge=not overtaken)

    def _answer(self, current: Generation) -> None:
        """The promise goes out when our ranks are out."""
        due = self._due
        if due is None or self._ranks.phase is not Phase.STOPPED:
            return
        self._due = None
        promise = Promise(
            generation=current.id,
            ballot=due.ballot,
            state=self._ranks.state,
            ranks=self._ranks.numbers,
            hears=self._view.hears(),
            accepted=self._voter.record.accepted,
        )
        self._post(due.ballot.proposer, promise)

    def _seek_successor(self, current: Generation, missing: bool) -> None:
        if self._need_since is None:
            self._need_since = self._next_try = self._now
            if missing:
                self._tell_all(Alarm(generation=current.id))
        if self._scene_changed():
            self._next_try = min(self._next_try, self._now)
        if self._now >= max(self._next_try, self._my_turn(current, missing)):
            self._propose(current, at_edge=not missing and self._ranks.phase is Phase.TRAINING)

    def _my_turn(self, current: Generation, missing: bool) -> float:
        """When it falls to us: after those before us, and after whoever we made a promise to, if it is there."""
        present = self._present(current)
        turn = present.index(self._me) * self._rules.turn_s
        leader = self._voter.record.promised.proposer
        if self._voter.record.promised.number and leader != self._me and leader in present:
            patience = self._rules.answer_s if missing or not self._ranks.at_edge else self._rules.edge_s
            return self._promised_at + patience + turn
        return (self._need_since or self._now) + turn

    def _propose(self, current: Generation, at_edge: bool) -> None:
        ballot = Ballot(self._voter.record.highest + 1, self._me)
        self._round = Round(current, ballot, at_edge, self._now)
        for member in current.members:
            self._post(member, Prepare(generation=current.id, ballot=ballot, at_edge=at_edge))

    def _conclude(self, round: Round, missing: bool) -> None:
        if missing:
            round.hurry(self._now)
        late = self._now - round.began_at > (self._rules.edge_s if round.at_edge else self._rules.answer_s)
        if round.outcome is None and self._me in round.promises:
            if late or not round.waits_for(self._present(round.base)):
                self._choose_successor(round)
        elif round.outcome and round.outcome.successor and round.is_decided():
            self._drop_round()
            self._tell_all(Announce(generation=round.outcome.successor))
            self._learn(round.outcome.successor)
        elif late:
            self._drop_round()

    def _choose_successor(self, round: Round) -> None:
        view, base = self._view, round.base
        electorate = view.electorate(base)
        words = {member: view.resignations[member, base.id] for member in electorate.resigned}
        if round.outbid_by(words.values()):
            self._drop_round()
            return
        bound = None if self._passed else round.bound_to(electorate, words)
        if self._passed:
            electorate = electorate.passed_by(self._passed)
        outcome = bound or succeed(base, round.ballot, electorate, round.promises, view.guests(base), self._rules)
        if outcome.successor is None:
            self._pause(round, outcome.why)
            return
        round.outcome, round.began_at = outcome, self._now
        accept = Accept(generation=base.id, ballot=round.ballot, successor=outcome.successor)
        for member in round.promises:
            self._post(member, accept)

    def _pause(self, round: Round, why: str) -> None:
        self._round = None
        self._next_try = self._now + _AGAIN_S
        if not self._paused:
            self._paused = True
            text = sentences.paused(why, sorted(round.promises), round.base, self._name, self._rules.min_nodes)
            self._out.append(Pause(text))

    def _drop_round(self) -> None:
        self._round = None
        self._next_try = self._now + self._rules.turn_s

    # Generations come and go.

    def _learn(self, generation: Generation) -> None:
        self._voter.saw(generation.id.number)
        current = self.generation
        if current is not None and generation.id == current.id:
            return
        if self._me in generation.members:
            if self._follows(generation):
                self._enter(generation)
        elif current and generation.lineage.name == current.lineage.name and generation.id > current.id:
            self._passed = generation

    def _follows(self, generation: Generation) -> bool:
        """Whether it is for us: it grew out of ours, or we asked for it. Never one that we may have left before."""
        current = self.generation
        if current is not None and generation.id <= current.id:
            return False
        if self._asks == generation.lineage.name:
            return True
        if current is None or not self._voter.may_vote():
            return False
        return generation.lineage.name == current.lineage.name or generation.parent == current.id

    def _decline(self, sender: int, generation: Generation) -> None:
        """We asked once and went another way before they let us in: they need not wait for our vote."""
        if self._me in generation.members and self._voter.missed(generation):
            self._post(sender, Resign(generation=generation.id, why="elsewhere", promised=NEVER))

    def _enter(self, generation: Generation) -> None:
        before = self.generation
        if before is not None:
            self._account(before, generation)
        self._voter.enter(generation)
        # Others are to copy from us what we have lost since we promised it.
        self._alarm = generation.source == self._me and not self._ranks.holds
        # Whoever was let in has nothing to train on from before its copy has arrived.
        self._ranks.holds &= self._asks is None
        self._unsure = set()
        self._round = self._due = self._asks = self._need_since = self._passed = None
        self._paused = self._formed = False
        self._began_at = self._now
        for member in generation.members:
            self._view.watch.expect(member)
        self._view.forget_before(generation.id)
        self._ranks.phase = Phase.TRAINING
        self._ranks.committed = generation.state.committed
        self._out.append(Start(generation))
        self._beat()

    def _account(self, before: Generation, after: Generation) -> None:
        """What the user is told; and what our ledger gives up, where we change sides."""
        old, new = before.lineage, after.lineage
        if self._asks is not None:
            shared = lineages.shared_step(old, new)
            if old.name != new.name and self._ranks.committed > shared:
                text = sentences.abandoned(before, after, self._ranks.committed, shared, self._name)
                self._out.append(Abandon(old.name, new.name, shared, text))
            self._say(sentences.admitted(after, self._me, self._name), after.id)
            return
        left = [member for member in before.members if member not in after.members]
        causes = {member: self._view.cause(member, before) for member in left}
        silent_s = [self._view.watch.silent_s(member) for member, cause in causes.items() if cause == "silent"]
        since_s = self._now - (self._now if self._need_since is None else self._need_since)
        change = Change(before, after, causes, max(since_s, *silent_s, 0.0))
        self._say(sentences.regrouped(change, self._name), after.id)

    def _resign(self, why: Why) -> None:
        current = self.generation
        if current is None or not self._voter.may_vote():
            return
        self._voter.resign(why)
        self._out += self._ranks.halt(current.id, at_edge=False)
        if word := self._voter.resignation():
            self._tell_all(word)

    # Small questions.

    def _is_current(self, generation: Ballot) -> bool:
        return self.generation is not None and self.generation.id == generation

    def _is_settled(self) -> bool:
        return self._now - self._began_at > self._rules.answer_s

    def _present(self, current: Generation) -> list[int]:
        """Members of our generation that will answer, ourselves included, lowest first."""
        return [member for member in sorted(current.members) if member == self._me or not self._is_out(member, current)]

    def _is_out(self, member: int, current: Generation) -> bool:
        beat = self._view.beats.get(member)
        asks_elsewhere = beat is not None and beat.generation == current.id and beat.asks is not None
        elsewhere = self._is_settled() and self._view.is_elsewhere(member, current)
        resigned = self._view.has_resigned(member, current)
        return asks_elsewhere or elsewhere or resigned or not self._view.usable(member)

    def _missing(self, current: Generation) -> bool:
        return self._alarm or len(self._present(current)) < len(current.members)

    def _is_welcome(self, current: Generation) -> bool:
        """Not before the last change has paid: guests that come and go must not keep the others from training."""
        room = len(current.members) < self._rules.max_nodes
        paid = self._formed and (self._ranks.committed > current.state.committed or self._is_settled())
        return room and paid and self._view.welcome(current, self._present(current))

    def _scene_changed(self) -> bool:
        beats = {member: (beat.hears, beat.asks) for member, beat in self._view.beats.items()}
        scene = (self._view.hears(), beats, dict(self._view.resignations))
        changed, self._scene = scene != self._scene, scene
        return changed

    def _say(self, text: str, generation: Ballot | None = None) -> None:
        self._out.append(Tell(generation, text))
