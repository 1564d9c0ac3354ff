"""The rows of the fault table that membership decides, in simulated seconds. A message takes one or two ticks of 50 ms,
a rank stops within 0.2 s, forming a group and copying a state take 0.2 s."""

from __future__ import annotations

import pytest

from shoal.control.membership.messages import Announce, Message
from shoal.control.membership.settings import MembershipSettings
from shoal.control.membership.types import NEVER, State
from tests.support.membership_sim import COPY_S, Cluster

PAUSE = MembershipSettings(on_silent_tie="pause")


def lan(size: int, rules: MembershipSettings | None = None, seed: int = 0) -> Cluster:
    return Cluster(size, rules, seed, delay_s=0.002)


def next_commit_s(cluster: Cluster, members: set[int], limit_s: float = 12.0) -> float:
    """Return the seconds until these members have committed a step in a new generation."""
    began, known = cluster.now, set(cluster.generations)
    while cluster.now - began < limit_s:
        cluster.run(0.05)
        if any(by not in known and member in members for _, by, _, member in cluster.commit_times):
            return cluster.now - began
    raise AssertionError(f"no commit within {limit_s} s\n{cluster.describe()}")


def generations_started(cluster: Cluster) -> int:
    return len(cluster.generations)


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_row_1_the_others_recover_from_a_killed_rank_within_a_second(victim: int) -> None:
    cluster = lan(3)
    cluster.kill_rank(victim)
    assert next_commit_s(cluster, {0, 1, 2} - {victim}) <= 1.0
    cluster.run(3)
    assert cluster.train_together()
    assert f"machine {victim} lost all of its ranks" in cluster.machines[(victim + 1) % 3].told[0]


def test_row_2_the_next_member_leads_when_the_first_is_killed() -> None:
    cluster = lan(3)
    cluster.kill(0)
    assert next_commit_s(cluster, {1, 2}) <= 1.5
    assert {peer.generation.members for peer in cluster.state_machines() if peer.generation} == {(1, 2)}


def test_row_3_the_others_recover_from_a_pulled_cable_within_four_seconds() -> None:
    cluster = lan(3)
    cluster.power_cut(2)
    assert next_commit_s(cluster, {0, 1}) <= 4.0
    assert "machine 2 is silent" in cluster.machines[0].told[0]


def test_row_4_the_last_of_three_continues_when_the_others_are_gone() -> None:
    cluster = lan(3)
    cluster.kill(0)
    cluster.kill(1)
    assert next_commit_s(cluster, {2}) <= 5.0
    [state_machine] = cluster.state_machines({2})
    assert state_machine.generation
    # No member resigned: it forks the lineage, in case the others still run.
    assert len(state_machine.generation.lineage.forks) == 1


def test_row_4_the_last_of_three_pauses_below_min_nodes() -> None:
    cluster = lan(3, MembershipSettings(min_nodes=2))
    cluster.kill(0)
    cluster.kill(1)
    cluster.run(5)
    before = cluster.committed()
    cluster.run(5)
    assert cluster.committed() == before
    assert "fewer than the 2 machines" in cluster.machines[2].paused[0]
    cluster.restart(0)
    cluster.run(4)
    assert cluster.committed() > before


def test_row_4_the_last_of_three_pauses_when_the_others_are_only_silent() -> None:
    cluster = lan(3)
    cluster.power_cut(0)
    cluster.power_cut(1)
    cluster.run(6)
    before = cluster.committed()
    cluster.run(5)
    assert cluster.committed() == before
    assert len(cluster.machines[2].paused) == 1
    for member in (0, 1):
        cluster.restart(member)
    cluster.run(5)
    assert cluster.train_together()
    assert cluster.committed() > before


def test_row_5_a_freeze_of_one_and_a_half_seconds_changes_nothing() -> None:
    for victim in range(3):
        cluster = lan(3, seed=victim)
        cluster.freeze(victim)
        cluster.run(1.5)
        cluster.thaw(victim)
        before = cluster.committed()
        cluster.run(5)
        assert generations_started(cluster) == 1
        assert cluster.committed() > before


@pytest.mark.parametrize("size", [2, 3])
def test_row_6_a_woken_machine_is_fenced_and_rejoins(size: int) -> None:
    cluster = lan(size)
    stale = cluster.machines[0].running
    assert stale
    cluster.freeze(0)
    assert next_commit_s(cluster, set(range(1, size))) <= 4.0
    cluster.run(26)
    cluster.thaw(0)
    woken_at = cluster.now
    while not cluster.train_together() and cluster.now - woken_at < 10:
        cluster.run(0.05)
    assert cluster.now - woken_at <= 2.0 + COPY_S
    late = [step for at, by, step, member in cluster.commit_times if at > woken_at and by == stale.id]
    assert late == []
    assert generations_started(cluster) == 3
    assert cluster.machines[0].abandons == []


def test_row_7_in_a_split_of_two_against_one_the_minority_pauses() -> None:
    cluster = lan(3)
    cluster.split({0}, {1, 2})
    assert next_commit_s(cluster, {1, 2}) <= 5.0
    paused_at = cluster.committed({0})
    cluster.run(10)
    assert cluster.committed({0}) == paused_at
    assert "cannot be reached and may go on without us" in cluster.machines[0].paused[0]
    cluster.heal()
    cluster.run(5)
    assert cluster.train_together()
    # A majority continued: the lineage is still the first one, and nothing was abandoned.
    assert {peer.generation.lineage.forks for peer in cluster.state_machines() if peer.generation} == {()}
    assert cluster.machines[0].abandons == []


def test_row_7_in_a_split_of_one_against_one_both_continue_and_one_yields() -> None:
    cluster = lan(2)
    cluster.split({0}, {1})
    cluster.run(4)
    assert (
        len(
            {
                state_machine.generation.lineage.name
                for state_machine in cluster.state_machines()
                if state_machine.generation
            }
        )
        == 2
    )
    cluster.freeze(1)
    cluster.run(3)
    cluster.thaw(1)
    cluster.run(3)
    ahead, behind = cluster.committed({0}), cluster.committed({1})
    assert ahead > behind
    cluster.heal()
    cluster.run(5)
    assert cluster.train_together()
    assert cluster.committed() > ahead
    [abandon] = cluster.machines[1].abandons
    assert abandon.shared_step < behind
    assert abandon.text.startswith(f"machine 1 has trained apart from machine 0 since step {abandon.shared_step}.")
    assert cluster.machines[0].abandons == []
    cluster.check_ledgers()


def test_row_7_in_a_split_of_one_against_one_both_pause_with_tie_pause() -> None:
    cluster = lan(2, PAUSE)
    cluster.split({0}, {1})
    cluster.run(4)
    before = cluster.committed()
    cluster.run(8)
    assert cluster.committed() == before
    cluster.heal()
    cluster.run(5)
    assert cluster.train_together()
    assert cluster.committed() > before
    assert {peer.generation.lineage.forks for peer in cluster.state_machines() if peer.generation} == {()}


def test_row_8_after_a_one_way_block_one_side_trains() -> None:
    cluster = lan(3)
    cluster.block(2, 0)
    assert next_commit_s(cluster, {0, 1}) <= 5.0
    generations = generations_started(cluster)
    cluster.run(10)
    # A member that some others cannot reach is not admitted, so it does not interrupt them repeatedly.
    assert generations_started(cluster) == generations
    cluster.heal()
    cluster.run(6)
    assert cluster.train_together()


def test_row_9_a_link_flap_of_half_a_second_changes_nothing() -> None:
    cluster = lan(3)
    cluster.split({0}, {1, 2})
    cluster.run(0.5)
    cluster.heal()
    cluster.run(5)
    assert generations_started(cluster) == 1


def test_row_9_a_link_flap_of_five_seconds_is_a_loss_and_a_rejoin() -> None:
    cluster = lan(3)
    cluster.split({2}, {0, 1})
    assert next_commit_s(cluster, {0, 1}) <= 4.0
    cluster.run(1.5)
    cluster.heal()
    cluster.run(4)
    assert cluster.train_together()
    assert generations_started(cluster) == 3


def test_row_12_a_new_machine_joins_between_two_steps() -> None:
    cluster = lan(2)
    cluster.join(7)
    cluster.run(3)
    assert cluster.train_together()
    assert generations_started(cluster) == 2
    gaps = [after - before for before, after in zip(commits(cluster), commits(cluster)[1:], strict=False)]
    # Agreement, forming the group and copying the state; no step is trained twice.
    assert max(gaps) <= 1.0
    assert "machine 7 joined" in cluster.machines[0].told[0]


def commits(cluster: Cluster) -> list[float]:
    """Return when each step was first committed."""
    first: dict[int, float] = {}
    for at, _, step, _ in cluster.commit_times:
        first.setdefault(step, at)
    return sorted(first.values())


class SilentAfterDecision(Cluster):
    """Kill member 0 when it has decided a successor, before it announces it."""

    has_decided = False

    def _send(self, source: int, target: int, message: Message) -> None:
        if source == 0 and isinstance(message, Announce) and message.generation.parent != NEVER:
            self.has_decided = True
        if not (self.has_decided and source == 0):
            super()._send(source, target, message)

    def _tick(self) -> None:
        super()._tick()
        if self.has_decided:
            self.kill(0)


@pytest.mark.parametrize("seed", range(3))
def test_a_decided_successor_stands_even_if_it_was_never_announced(seed: int) -> None:
    """Members 0 and 1 agreed without 2; then 0 dies, and 1 and 2 are a majority of the same generation. The simulated
    cluster fails the test when a second successor continues the lineage."""
    cluster = SilentAfterDecision(3, seed=seed, delay_s=0.002)
    cluster.split({0, 1}, {2})
    while not cluster.has_decided:
        cluster.run(0.05)
    [decided] = [generation for generation in cluster.generations.values() if generation.parent != NEVER]
    assert decided.members == (0, 1)
    cluster.heal()
    before = cluster.committed()
    cluster.run(8)
    assert cluster.train_together()
    assert cluster.committed() > before
    assert decided.id in {generation.parent for generation in cluster.generations.values()}


def test_the_second_rank_of_a_member_is_lost_and_readmitted() -> None:
    """One rank of a machine was killed: the others continue at once, and admit the restarted rank between two steps."""
    cluster = lan(2)
    machine = cluster.machines[1]
    assert machine.state_machine
    for ranks in ((0, 1), (0,), (0, 1)):
        machine.ranks = ranks
        if len(ranks) > 1:
            cluster.obey(machine, machine.state_machine.ready(ranks, cluster.now))
        else:
            assert machine.running
            cluster.obey(machine, machine.state_machine.failed(machine.running.id, cluster.now))
        cluster.run(1.5)
        assert cluster.train_together()
        assert machine.running
        assert (machine.running.ranks_of(1), machine.running.world_size) == (ranks, 1 + len(ranks))
    assert generations_started(cluster) == 4


def test_the_last_member_with_a_state_continues_when_its_successors_lost_theirs() -> None:
    """A laptop slept; the others continued with a new machine and were all killed. Only the laptop has a state."""
    cluster = lan(3, PAUSE)
    cluster.freeze(2)
    cluster.run(5)
    cluster.join(7)
    cluster.run(3)
    assert {
        state_machine.generation.members
        for state_machine in cluster.state_machines({0, 1, 7})
        if state_machine.generation
    } == {(0, 1, 7)}
    for member in (0, 1, 7):
        cluster.kill(member)
        cluster.restart(member)
    cluster.thaw(2)
    committed = cluster.committed({2})
    cluster.run(8)
    assert cluster.train_together()
    assert cluster.committed() > committed
    [lineage] = {peer.generation.lineage for peer in cluster.state_machines() if peer.generation}
    assert [fork.step for fork in lineage.forks] == [committed]
    cluster.check_ledgers()


def test_a_joining_member_never_trains_on_its_old_state() -> None:
    """It was admitted, and the other member dies before the copy: its old state must not be used."""
    cluster = lan(2)
    cluster.freeze(1)
    cluster.run(5)
    cluster.thaw(1)
    machine = cluster.machines[1]
    assert machine.state_machine
    while machine.state_machine.generation is None or len(machine.state_machine.generation.lineage.forks) == 0:
        cluster.run(0.05)
    assert machine.running
    cluster.kill(0)
    old = State(step=7, committed=6)
    cluster.obey(machine, machine.state_machine.failed(machine.running.id, cluster.now))
    cluster.obey(machine, machine.state_machine.stopped(machine.running.id, old, (0,), cluster.now))
    machine.running = machine.stop_at = None
    saved = list(machine.saved)
    cluster.run(4)
    # It has just woken, so the closed connection proves nothing: machine 0 may have the state.
    assert machine.running is None
    assert "machine 0 may have it" in machine.paused[-1]
    cluster.run(50)
    assert cluster.recoveries == 1
    assert machine.history is not None
    assert machine.history[: len(saved)] == saved
    assert "goes back to the newest checkpoint" in machine.told[-1]


def copying_from_the_last_holder() -> Cluster:
    """Stop where machines 1 and 2 lost their ranks, were readmitted, and have not copied machine 0's state yet."""
    cluster = lan(3)
    cluster.run(3)
    cluster.kill_rank(1)
    cluster.kill_rank(2)
    while not all((running := cluster.machines[member].running) and len(running.members) == 3 for member in (1, 2)):
        cluster.run(0.05)
    assert cluster.machines[1].history is None
    return cluster


def test_a_silent_machine_that_may_have_the_state_is_awaited() -> None:
    cluster = copying_from_the_last_holder()
    cluster.freeze(0)
    cluster.run(30)
    assert cluster.machines[1].running is None
    assert "machine 0 may have it and cannot be reached" in cluster.machines[1].paused[-1]
    before = cluster.machines[0].ledger
    cluster.thaw(0)
    cluster.run(10)
    assert cluster.recoveries == 0
    assert cluster.train_together()
    assert cluster.committed() > before
    cluster.check_ledgers()


def test_the_wait_for_a_silent_machine_with_the_state_has_a_timeout() -> None:
    cluster = copying_from_the_last_holder()
    cluster.power_cut(0)
    cluster.run(60)
    assert cluster.recoveries == 1
    assert cluster.machines[1].running
    assert cluster.machines[1].running.members == (1, 2)
    before = cluster.committed({1, 2})
    cluster.restart(0)
    cluster.run(10)
    assert cluster.train_together()
    assert cluster.committed() > before
    cluster.check_ledgers()


def test_steps_up_to_the_checkpoint_are_shared_with_a_lineage_that_went_back_to_it() -> None:
    """A machine that joins later gives up only its steps since then, and did not train apart."""
    cluster = Cluster(3)
    cluster.run(5)
    for member in range(3):
        cluster.kill_rank(member)
    cluster.machines[2].ready_at = cluster.now + 5
    committed = cluster.machines[2].ledger
    saved = max(len(machine.saved) for machine in cluster.machines.values())
    assert 0 < saved < committed
    cluster.run(15)
    assert cluster.recoveries == 1
    assert cluster.train_together()
    [abandon] = cluster.machines[2].abandons
    assert (abandon.shared_step, "trained apart" in abandon.text) == (saved, False)
    assert (
        f"went back to the checkpoint of step {saved}. machine 2 joins there: {committed - saved} steps" in abandon.text
    )
    cluster.check_ledgers()


def test_a_killed_machine_that_had_the_state_is_not_awaited() -> None:
    cluster = copying_from_the_last_holder()
    cluster.kill(0)
    cluster.run(6)
    assert cluster.recoveries == 1
    assert cluster.committed({1, 2}) > 0


@pytest.mark.parametrize("apart_s", [0.0, 0.3])
def test_when_all_ranks_are_killed_all_members_load_one_checkpoint(apart_s: float) -> None:
    cluster = lan(3)
    cluster.run(5)
    furthest = max(len(machine.saved) for machine in cluster.machines.values())
    assert furthest >= 10
    for member in range(3):
        cluster.kill_rank(member)
        cluster.run(apart_s)
    cluster.run(15)
    assert cluster.recoveries >= 1
    assert cluster.train_together()
    assert cluster.committed() > furthest
    cluster.check_ledgers()


def test_a_machine_lost_on_the_way_to_a_checkpoint_returns_also_with_min_nodes() -> None:
    """The other one has neither the state, which a returning machine could copy, nor may it go on alone."""
    cluster = lan(2, MembershipSettings(min_nodes=2))
    cluster.run(5)
    for member in range(2):
        cluster.kill_rank(member)
    while not all(peer.generation and peer.generation.recovers for peer in cluster.state_machines()):
        cluster.run(0.05)
    cluster.kill(1)
    cluster.run(5)
    cluster.restart(1)
    cluster.run(15)
    assert cluster.train_together(), cluster.describe()
    cluster.check_ledgers()


@pytest.mark.parametrize("rules", [MembershipSettings(max_nodes=2), MembershipSettings(max_ranks=2)])
def test_no_more_members_are_admitted_than_max_nodes_or_max_ranks(rules: MembershipSettings) -> None:
    cluster = lan(2, rules)
    cluster.join(7)
    cluster.run(3)
    assert generations_started(cluster) == 1
    cluster.kill(1)
    cluster.run(3)
    assert {peer.generation.members for peer in cluster.state_machines() if peer.generation} == {(0, 7)}


@pytest.mark.parametrize("rules", [MembershipSettings(max_nodes=2), MembershipSettings(max_ranks=2)])
def test_no_more_members_load_a_checkpoint_than_max_nodes_or_max_ranks(rules: MembershipSettings) -> None:
    """One machine waits for admission when all ranks of the members are killed."""
    cluster = lan(2, rules)
    cluster.join(7)
    cluster.run(3)
    for member in range(2):
        cluster.kill_rank(member)
    cluster.run(15)
    assert cluster.recoveries >= 1
    assert max(len(generation.members) for generation in cluster.generations.values()) == 2
    assert cluster.committed() > 10


def test_with_a_full_disk_no_generation_starts_under_an_unsaved_number() -> None:
    """A restarted agent would use the number, and with it the lineage's name, for another training."""
    cluster = lan(2)
    cluster.run(3)
    for machine in cluster.machines.values():
        machine.disk.full = True
    for member in range(2):
        cluster.kill_rank(member)
    cluster.run(15)
    assert cluster.recoveries == 0
    assert any("No space left on device" in text for text in cluster.machines[0].told)
    for machine in cluster.machines.values():
        machine.disk.full = False
    cluster.run(15)
    assert cluster.recoveries == 1
    assert cluster.train_together()


def test_a_machine_that_leaves_causes_no_fork() -> None:
    """It resigned its vote, so the remaining member continues the same lineage."""
    cluster = lan(2, PAUSE)
    leaver = cluster.machines[1]
    assert leaver.state_machine
    cluster.obey(leaver, leaver.state_machine.leave(cluster.now))
    assert next_commit_s(cluster, {0}) <= 1.0
    [state_machine] = cluster.state_machines({0})
    assert state_machine.generation
    assert state_machine.generation.members == (0,)
    assert state_machine.generation.lineage.forks == ()
    [note] = cluster.machines[0].told
    assert note.startswith("machine 1 left the run. machine 0 goes on, as generation 2, with step 9; that was agreed ")


def test_a_suspended_laptop_resigns_and_rejoins() -> None:
    cluster = lan(2, PAUSE)
    laptop = cluster.machines[1]
    assert laptop.state_machine
    cluster.obey(laptop, laptop.state_machine.resign("suspend", cluster.now))
    assert next_commit_s(cluster, {0}) <= 1.0
    cluster.freeze(1)
    cluster.run(20)
    cluster.thaw(1)
    cluster.run(4)
    assert cluster.train_together()


def test_a_slow_machine_stays_a_spare_until_another_is_lost() -> None:
    cluster = lan(4)
    cluster.stand_by(2)
    assert next_commit_s(cluster, {0}) <= 1.0
    assert "machine 2 is left out, because it is too slow, and stays a spare." in cluster.machines[0].told[0]
    cluster.run(20)
    # A second spare is no loss for the first one.
    cluster.stand_by(3)
    cluster.run(20)
    assert running(cluster) == {0: {0, 1}, 1: {0, 1}}
    assert cluster.train_together()
    cluster.kill(1)
    cluster.run(12)
    assert running(cluster) == {member: {0, 2, 3} for member in (0, 2, 3)}
    assert cluster.train_together()
    cluster.check_ledgers()


def test_a_spare_stays_when_a_killed_rank_is_restarted() -> None:
    cluster = lan(3)
    cluster.stand_by(2)
    cluster.run(5)
    cluster.kill_rank(1)
    cluster.run(10)
    assert running(cluster) == {0: {0, 1}, 1: {0, 1}}


def test_spares_return_when_fewer_than_min_nodes_would_train() -> None:
    cluster = lan(4, MembershipSettings(min_nodes=2))
    cluster.split({0}, {1}, {2, 3})
    for member in (0, 1, 3):
        cluster.stand_by(member)
    cluster.heal()
    cluster.run(10)
    assert cluster.train_together()


def test_a_spare_goes_back_to_a_checkpoint_when_all_others_are_gone() -> None:
    cluster = lan(2)
    cluster.stand_by(1)
    cluster.run(5)
    cluster.kill(0)
    cluster.run(10)
    assert running(cluster) == {1: {1}}


def test_the_last_machine_is_never_left_out() -> None:
    cluster = lan(1)
    cluster.stand_by(0)
    cluster.run(2)
    assert running(cluster) == {0: {0}}


def running(cluster: Cluster) -> dict[int, set[int]]:
    """Return the members of the generation in which each machine trains."""
    return {one.id: set(one.running.members) for one in cluster.machines.values() if one.running and one.alive}


def test_a_full_disk_prevents_a_vote_and_does_not_stop_the_training() -> None:
    cluster = lan(3)
    cluster.machines[1].disk.full = True
    before = cluster.committed()
    cluster.run(2)
    assert cluster.committed() > before
    cluster.kill(2)
    cluster.run(5)
    assert "cannot write its vote to disk (No space left on device)" in cluster.machines[1].told[0]
    cluster.machines[1].disk.full = False
    cluster.run(8)
    before = cluster.committed()
    cluster.run(2)
    assert cluster.committed() > before


def test_a_connection_that_is_reset_and_restored_causes_no_fork() -> None:
    """A router may drop a connection; two laptops must not fork for that."""
    cluster = lan(2)
    cluster.reset(0, 1)
    cluster.run(4)
    assert cluster.train_together()
    assert {peer.generation.lineage.forks for peer in cluster.state_machines() if peer.generation} == {()}


def test_finished_members_start_no_new_generation() -> None:
    cluster = lan(2)
    for state_machine in cluster.state_machines():
        state_machine.finish()
    cluster.kill(1)
    cluster.run(5)
    assert generations_started(cluster) == 1


def test_ids_of_joining_machines_stay_unique_over_a_restart_of_the_inviter() -> None:
    cluster = lan(2)
    [state_machine] = cluster.state_machines({1})
    ids = [state_machine.invite(2), state_machine.invite(2)]
    cluster.kill(1)
    cluster.restart(1)
    [state_machine] = cluster.state_machines({1})
    ids.append(state_machine.invite(2))
    assert len({0, 1, *ids}) == 5


def test_a_single_machine_with_a_full_disk_still_regroups_its_ranks() -> None:
    cluster = lan(1)
    machine = cluster.machines[0]
    machine.disk.full = True
    assert machine.state_machine
    assert machine.running
    cluster.obey(machine, machine.state_machine.failed(machine.running.id, cluster.now))
    assert next_commit_s(cluster, {0}) <= 1.0


@pytest.mark.parametrize("rules", [MembershipSettings(), PAUSE])
def test_of_two_only_the_side_that_receives_nothing_continues_in_a_one_way_block(rules: MembershipSettings) -> None:
    """The other side still receives its heartbeats and waits for it: no work is done twice."""
    cluster = lan(2, rules)
    cluster.block(0, 1)
    cluster.run(8)
    waited_at = cluster.committed({0})
    cluster.run(4)
    assert cluster.committed({0}) == waited_at
    assert (cluster.committed({1}) > waited_at + 20) == (rules.on_silent_tie == "continue")
    cluster.heal()
    cluster.run(5)
    assert cluster.train_together()
    assert cluster.machines[0].abandons == cluster.machines[1].abandons == []
