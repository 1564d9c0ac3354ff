"""Which generation an agent is in: how it learns of others, enters the next one, and gives up its place."""

from __future__ import annotations

from shoal.control.membership import lineages, sentences
from shoal.control.membership.actions import Abandon, Start
from shoal.control.membership.desk import Desk
from shoal.control.membership.generation import NEVER, Generation
from shoal.control.membership.messages import Resign, Why
from shoal.control.membership.ownranks import Phase
from shoal.control.membership.sentences import Change


class Tenure:
    def __init__(self, desk: Desk) -> None:
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
        desk.actions.append(Start(generation, ranks.holds))
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
        change = Change(before, after, causes, max(sought_s, *silent_s, 0.0))
        desk.say(sentences.regrouped(change, desk.name), after.id)

    def _give_up(self, before: Generation, after: Generation) -> None:
        desk, old, new = self._desk, before.lineage, after.lineage
        shared, committed = lineages.shared_step(old, new), desk.ranks.committed
        if old.name != new.name and committed > shared:
            text = sentences.abandoned(desk.me, after, committed, shared, desk.name)
            desk.actions.append(Abandon(old.name, new.name, shared, text))
