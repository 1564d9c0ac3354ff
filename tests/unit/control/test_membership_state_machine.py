"""Membership under random kills, freezes, partitions, joins and heals, in any order.

The simulated cluster checks every commit and every generation against docs/faults.md as it happens; the rules below
add what must be true once everything is healed.
"""

from __future__ import annotations

import random
from typing import Literal

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from shoal.control.membership.settings import MembershipSettings
from shoal.control.membership.types import next_member
from tests.support.membership_sim import Cluster

# After the heal: wake up, be detected, yield, be admitted, and retry a group that did not form at first.
TOGETHER_WITHIN_S = 25.0
# Silence, one proposer that is missing, and slow messages.
MAJORITY_WITHIN_S = 12.0


class Membership(RuleBasedStateMachine):
    cluster: Cluster

    @initialize(
        size=st.integers(1, 5),
        min_nodes=st.sampled_from([1, 1, 2]),
        tie=st.sampled_from(["continue", "pause"]),
        seed=st.integers(0, 2**16),
        delay_s=st.sampled_from([0.005, 0.02, 0.05]),
    )
    def begin(self, size: int, min_nodes: int, tie: Literal["continue", "pause"], seed: int, delay_s: float) -> None:
        rules = MembershipSettings(on_silent_tie=tie, min_nodes=min(size, min_nodes))
        self.cluster = Cluster(size, rules, seed, delay_s)
        self.launch_size = size
        self.joined = 0

    def member(self, pick: int) -> int:
        members = sorted(self.cluster.machines)
        return members[pick % len(members)]

    @rule(seconds=st.sampled_from([0.05, 0.1, 0.3, 1.0, 3.0, 7.0]))
    def wait(self, seconds: float) -> None:
        self.cluster.run(seconds)

    @rule(pick=st.integers(0, 5))
    def kill(self, pick: int) -> None:
        self.cluster.kill(self.member(pick))

    @rule(pick=st.integers(0, 5))
    def power_cut(self, pick: int) -> None:
        self.cluster.power_cut(self.member(pick))

    @rule(pick=st.integers(0, 5))
    def kill_rank(self, pick: int) -> None:
        self.cluster.kill_rank(self.member(pick))

    @rule(pick=st.integers(0, 5))
    def restart(self, pick: int) -> None:
        self.cluster.restart(self.member(pick))

    @rule(pick=st.integers(0, 5))
    def freeze(self, pick: int) -> None:
        self.cluster.freeze(self.member(pick))

    @rule(pick=st.integers(0, 5))
    def thaw(self, pick: int) -> None:
        self.cluster.thaw(self.member(pick))

    @rule(pick=st.integers(0, 5))
    def suspend(self, pick: int) -> None:
        self.cluster.suspend(self.member(pick))

    @rule(pick=st.integers(0, 5))
    def stand_by(self, pick: int) -> None:
        self.cluster.stand_by(self.member(pick))

    @rule(pick=st.integers(0, 5), full=st.booleans())
    def fill_disk(self, pick: int, full: bool) -> None:
        self.cluster.machines[self.member(pick)].disk.full = full

    @rule(one=st.integers(0, 5), other=st.integers(0, 5))
    def reset(self, one: int, other: int) -> None:
        self.cluster.reset(self.member(one), self.member(other))

    @rule(sides=st.lists(st.integers(0, 2), min_size=6, max_size=6))
    def split(self, sides: list[int]) -> None:
        members = sorted(self.cluster.machines)
        groups = [{member for place, member in enumerate(members) if sides[place % 6] == side} for side in range(3)]
        self.cluster.split(*groups)

    @rule(one=st.integers(0, 5), other=st.integers(0, 5))
    def block_one_way(self, one: int, other: int) -> None:
        self.cluster.block(self.member(one), self.member(other))

    @rule()
    def heal(self) -> None:
        self.cluster.heal()

    @precondition(lambda self: len(self.cluster.machines) < 6)
    @rule()
    def join(self) -> None:
        self.cluster.join(next_member(self.launch_size, 0, self.joined))
        self.joined += 1

    @rule(seed=st.integers(0, 2**16), faults=st.integers(2, 8))
    def storm(self, seed: int, faults: int) -> None:
        """Inject several faults within moments: combinations break what one fault alone does not."""
        chance = random.Random(seed)
        for _ in range(faults):
            fault = chance.choice((self.kill, self.kill_rank, self.power_cut, self.restart, self.freeze, self.thaw))
            fault(chance.randrange(6))
            if chance.random() < 0.4:
                self.split([chance.randrange(2) for _ in range(6)])
            elif chance.random() < 0.5:
                self.cluster.heal()
            self.cluster.run(chance.choice((0.05, 0.1, 0.3, 0.3, 1.0, 3.0)))

    @precondition(lambda self: self.cluster.are_healthy() and len(self.cluster.machines) > 2)
    @rule(pick=st.integers(0, 5), silently=st.booleans())
    def a_majority_continues(self, pick: int, silently: bool) -> None:
        """Cut off or kill fewer than half: only the others continue the lineage, within seconds."""
        cluster = self.cluster
        members = sorted(member for member, machine in cluster.machines.items() if machine.alive)
        few = {members[(pick + place) % len(members)] for place in range((len(members) - 1) // 2)}
        many = set(members) - few
        if silently:
            cluster.split(few, many)
        else:
            for member in few:
                cluster.kill(member)
        lineages, before = cluster.lineages(many), cluster.committed(many)
        # Silent members are awaited for longer until the first group has formed.
        cluster.run(MAJORITY_WITHIN_S + (0.0 if before else MembershipSettings().starting_silent_after_s))
        assert cluster.committed(many) > before, cluster.describe()
        assert cluster.lineages(many) == lineages
        paused_at = cluster.committed(few)
        cluster.run(1.0)
        assert cluster.committed(few) == paused_at

    @rule()
    def everything_heals(self) -> None:
        """Heal everything: exactly one lineage stands, every member is in it, and it has every step committed in it.
        That holds also when every member had lost the state and all went back to a checkpoint."""
        cluster = self.cluster
        cluster.heal()
        for member, machine in cluster.machines.items():
            machine.disk.full = False
            cluster.thaw(member)
            cluster.restart(member)
        cluster.run(TOGETHER_WITHIN_S)
        before = cluster.committed()
        cluster.run(1.0)
        assert cluster.train_together(), cluster.describe()
        assert cluster.committed() > before, cluster.describe()
        cluster.check_ledgers()

    def teardown(self) -> None:
        if hasattr(self, "cluster"):
            self.everything_heals()


QUICK = settings(max_examples=8, stateful_step_count=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def test_membership_invariants_hold() -> None:
    run_state_machine_as_test(Membership, settings=QUICK)


@pytest.mark.parametrize(
    "histories", [pytest.param(8, marks=pytest.mark.long), pytest.param(300, marks=pytest.mark.exhaustive)]
)
@pytest.mark.timeout(3600)
def test_membership_invariants_hold_over_long_histories(histories: int) -> None:
    run_state_machine_as_test(Membership, settings=settings(QUICK, max_examples=histories, stateful_step_count=30))
