"""A simulated cluster for the membership state machines: agents, ranks, links that delay, hold, reorder and break.

What gloo and the worker do is modelled as far as membership depends on it: an exchange needs the contribution of every
rank of a generation, every rank learns its outcome separately, and a step is committed when the next exchange has
succeeded. Every commit and every generation is checked against the guarantees of docs/faults.md as it happens.
"""

from __future__ import annotations

import hashlib
import random
from collections import deque
from dataclasses import dataclass, field

from shoal.control.membership.messages import Message, decode, encode
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
from shoal.control.membership.types import Ballot, Generation, MemberRanks, State, first_generation
from shoal.control.membership.vote_store import VoteRecord

TICK_S = 0.05
STEP_S = 0.1
COPY_S = 0.2
FORM_WITHIN_S = 2.0
KEEPALIVE_S = 20.0
RESTART_S = 0.5
CHECKPOINT_EVERY = 10

Entry = tuple[int, Ballot]
CLOSED = "closed"


class Disk:
    """The vote records that survive an agent."""

    def __init__(self) -> None:
        self._text = VoteRecord().model_dump_json()
        self.full = False

    def load(self) -> VoteRecord:
        return VoteRecord.model_validate_json(self._text)

    def save(self, record: VoteRecord) -> None:
        if self.full:
            raise OSError(28, "No space left on device")
        self._text = record.model_dump_json()


@dataclass
class Wire:
    """One direction of a connection: the messages in flight, in order."""

    items: deque[tuple[float, Message | str]] = field(default_factory=deque)
    open: bool = True
    blocked_since: float | None = None


@dataclass
class Machine:
    """An agent with one rank. `history` lists the steps in its weights; `ledger` counts those known to be committed;
    `saved` is its newest checkpoint."""

    id: int
    disk: Disk = field(default_factory=Disk)
    ranks: tuple[int, ...] = (0,)
    state_machine: MembershipMachine | None = None
    frozen: bool = False
    running: Generation | None = None
    started_at: float = 0.0
    arrived: bool = False
    stop_at: float | None = None
    ready_at: float | None = None
    history: list[Entry] | None = None
    ledger: int = 0
    saved: list[Entry] = field(default_factory=list)
    result_due: bool = False
    told: list[str] = field(default_factory=list)
    paused: list[str] = field(default_factory=list)
    abandons: list[AbandonLineage] = field(default_factory=list)

    @property
    def alive(self) -> bool:
        return self.state_machine is not None

    @property
    def awake(self) -> bool:
        return self.alive and not self.frozen

    def state(self) -> State | None:
        if self.history is None:
            return None
        return State(step=len(self.history), committed=self.ledger)


def digest(history: list[Entry]) -> str:
    return hashlib.sha256(repr(history).encode()).hexdigest()[:16]


class Cluster:
    def __init__(
        self, size: int, rules: MembershipSettings | None = None, seed: int = 0, delay_s: float = 0.01
    ) -> None:
        self.rules = rules or MembershipSettings()
        self.random = random.Random(seed)
        self.delay_s = delay_s
        self.now = 100.0
        self.machines: dict[int, Machine] = {}
        self.wires: dict[tuple[int, int], Wire] = {}
        self.cut: set[tuple[int, int]] = set()
        self.commits: dict[tuple[Ballot, int], Entry] = {}
        self.commit_times: list[tuple[float, Ballot, int, int]] = []
        self.generations: dict[Ballot, Generation] = {}
        self.recoveries = 0
        first = first_generation(tuple(MemberRanks(member=member, ranks=(0,)) for member in range(size)))
        for member in range(size):
            self._boot(Machine(member)).history = []
        self._connect()
        for machine in self.machines.values():
            assert machine.state_machine
            self.obey(machine, machine.state_machine.start_first_generation(first, (0,), self.now))
        self.run(1.0)

    # Faults and changes made by a test.

    def run(self, seconds: float) -> None:
        until = self.now + seconds - TICK_S / 2
        while self.now < until:
            self._tick()

    def kill(self, member: int) -> None:
        """Kill agent and ranks: the kernel closes their connections and may drop unsent messages."""
        machine = self.machines[member]
        if not machine.alive:
            return
        machine.state_machine, machine.frozen = None, False
        machine.running = machine.history = machine.stop_at = machine.ready_at = None
        machine.result_due = False
        for (source, target), wire in self.wires.items():
            if source == member and wire.open:
                for _ in range(self.random.choice((0, 0, 1, 2, 8))):
                    if wire.items and self.random.random() < 0.5:
                        wire.items.pop()
                wire.items.append((self.now, CLOSED))
                wire.open = False
                self.wires[target, source].open = False
                self.wires[target, source].items.clear()

    def power_cut(self, member: int) -> None:
        """Kill a machine without a message to its peers."""
        self.kill(member)
        for (source, _), wire in self.wires.items():
            if source == member:
                wire.items.clear()

    def restart(self, member: int) -> None:
        machine = self.machines[member]
        if not machine.alive:
            self._boot(machine)
            machine.ready_at = self.now + RESTART_S

    def join(self, member: int) -> None:
        self._boot(Machine(member)).ready_at = self.now + RESTART_S

    def kill_rank(self, member: int) -> None:
        machine = self.machines[member]
        if machine.awake:
            assert machine.state_machine
            machine.running = machine.history = machine.stop_at = None
            machine.result_due = False
            self.obey(machine, machine.state_machine.lost_ranks(self.now))
            machine.ready_at = self.now + RESTART_S

    def freeze(self, member: int) -> None:
        self.machines[member].frozen = self.machines[member].alive

    def thaw(self, member: int) -> None:
        self.machines[member].frozen = False

    def reset(self, one: int, other: int) -> None:
        """Close the connection of two machines from outside, as a router may do."""
        if one != other and self.wires[one, other].open:
            self._hang_up(one, other)

    def suspend(self, member: int) -> None:
        """Suspend a machine after a notification from logind, as a closed lid does."""
        machine = self.machines[member]
        if machine.awake:
            assert machine.state_machine
            self.obey(machine, machine.state_machine.resign("suspend", self.now))
            self.run(2 * TICK_S)
            self.freeze(member)

    def stand_by(self, member: int) -> None:
        """Leave a machine out, as its ranks do that are too slow."""
        machine = self.machines[member]
        if machine.awake and machine.running:
            assert machine.state_machine
            self.obey(machine, machine.state_machine.stand_by(machine.running.id, self.now))

    def block(self, source: int, target: int) -> None:
        self.cut.add((source, target))

    def split(self, *sides: set[int]) -> None:
        self.cut = {
            (one, other) for left in sides for right in sides if left is not right for one in left for other in right
        }

    def heal(self) -> None:
        self.cut.clear()

    # Queries of a test.

    def state_machines(self, members: set[int] | None = None) -> list[MembershipMachine]:
        chosen = self.machines.values() if members is None else [self.machines[member] for member in members]
        return [machine.state_machine for machine in chosen if machine.state_machine]

    def committed(self, members: set[int] | None = None) -> int:
        chosen = self.machines if members is None else members
        return max((self.machines[member].ledger for member in chosen), default=0)

    def train_together(self) -> bool:
        """Return whether all living machines but spares train in one generation, with equal bits up to the step in
        progress."""
        alive = [one for one in self.machines.values() if one.state_machine and not one.state_machine.is_spare]
        running = {machine.running.id if machine.running and machine.arrived else None for machine in alive}
        shortest = min((len(machine.history or ()) for machine in alive), default=0)
        histories = {digest((machine.history or [])[:shortest]) for machine in alive}
        return len(running) == 1 and None not in running and len(histories) == 1

    def are_healthy(self) -> bool:
        alive = {one.id for one in self.machines.values() if one.state_machine and not one.state_machine.is_spare}
        hindered = any(machine.frozen or machine.disk.full for machine in self.machines.values())
        members = {
            member
            for state_machine in self.state_machines()
            if state_machine.generation
            for member in state_machine.generation.members
        }
        return not self.cut and not hindered and self.train_together() and members == alive

    def lineages(self, members: set[int]) -> set[Ballot]:
        return {
            state_machine.generation.lineage.name
            for state_machine in self.state_machines(members)
            if state_machine.generation
        }

    def check_ledgers(self) -> None:
        """Check that the current history has every committed step of its lineage, and of its parent lineages every step
        before the fork: none lost, none twice."""
        machine = next(one for one in self.machines.values() if one.running)
        assert machine.running
        assert machine.history is not None
        assert [step for step, _ in machine.history] == list(range(1, len(machine.history) + 1))
        lineage = machine.running.lineage
        until = {lineage.name: machine.ledger} | {fork.lineage: fork.step for fork in lineage.forks}
        for (name, step), entry in self.commits.items():
            assert step > until.get(name, 0) or machine.history[step - 1] == entry, f"step {step} of {name} is lost"

    def describe(self) -> str:
        return "\n".join(
            f"{machine.id}: in {peer.generation and str(peer.generation.id)} of "
            f"{peer.generation and str(peer.generation.lineage.name)}, can vote {peer.can_vote}, "
            f"joins {peer.joins and str(peer.joins)}, runs {machine.running and str(machine.running.id)}, "
            f"arrived {machine.arrived}, at {machine.history and len(machine.history)}, committed {machine.ledger}"
            for machine in self.machines.values()
            if (peer := machine.state_machine)
        )

    # The simulation.

    def _boot(self, machine: Machine) -> Machine:
        machine.state_machine = MembershipMachine(machine.id, self.rules, machine.disk, self.now)
        machine.history = None
        machine.arrived = False
        machine.ledger = 0
        self.machines[machine.id] = machine
        for other in self.machines:
            for pair in ((machine.id, other), (other, machine.id)):
                if other != machine.id and pair not in self.wires:
                    self.wires[pair] = Wire(open=False)
        return machine

    def _tick(self) -> None:
        self.now = round(self.now + TICK_S, 6)
        self._connect()
        order = sorted(self.machines)
        self.random.shuffle(order)
        for member in order:
            if self.machines[member].awake:
                self._deliver(self.machines[member])
        for member in order:
            if self.machines[member].awake:
                self._work(self.machines[member])
        for generation in {m.running.id: m.running for m in self.machines.values() if m.running}.values():
            self._exchange(generation)

    def _connect(self) -> None:
        for (source, target), wire in self.wires.items():
            blocked = (source, target) in self.cut
            wire.blocked_since = None if not blocked else wire.blocked_since or self.now
            if wire.open and wire.blocked_since and self.now - wire.blocked_since > KEEPALIVE_S:
                self._hang_up(source, target)
        for one, other in [pair for pair in self.wires if pair[0] < pair[1]]:
            if self._can_connect(one, other):
                self._open(one, other)

    def _hang_up(self, one: int, other: int) -> None:
        """Close the connection on both sides."""
        for pair in ((one, other), (other, one)):
            wire = self.wires[pair]
            wire.open = False
            wire.items.clear()
            wire.items.append((self.now, CLOSED))

    def _can_connect(self, one: int, other: int) -> bool:
        wires = self.wires[one, other], self.wires[other, one]
        free = (one, other) not in self.cut and (other, one) not in self.cut
        idle = not any(wire.open or wire.items for wire in wires)
        return free and idle and self.machines[one].awake and self.machines[other].awake

    def _open(self, one: int, other: int) -> None:
        for pair in ((one, other), (other, one)):
            self.wires[pair] = Wire()
        for source, target in ((one, other), (other, one)):
            machine = self.machines[source]
            assert machine.state_machine
            self.obey(machine, machine.state_machine.connected(target, self.now))

    def _deliver(self, machine: Machine) -> None:
        sources = [source for source, target in self.wires if target == machine.id]
        self.random.shuffle(sources)
        for source in sources:
            wire = self.wires[source, machine.id]
            while wire.items and wire.items[0][0] <= self.now and machine.state_machine:
                is_close = wire.items[0][1] == CLOSED and not wire.open and len(wire.items) == 1
                if (source, machine.id) in self.cut and not (is_close and self._kernel_gave_up(source, machine.id)):
                    break
                self._hand_over(machine, source, wire.items.popleft()[1])

    def _kernel_gave_up(self, source: int, target: int) -> bool:
        return self.wires[source, target].blocked_since is not None and self.machines[source].alive

    def _hand_over(self, machine: Machine, source: int, item: Message | str) -> None:
        assert machine.state_machine
        if isinstance(item, str):
            self.obey(machine, machine.state_machine.closed(source, self.now))
        else:
            self.obey(machine, machine.state_machine.received(source, decode(encode(item)), self.now))

    def _work(self, machine: Machine) -> None:
        state_machine = machine.state_machine
        assert state_machine
        if machine.result_due and machine.running:
            self._apply(machine)
        if machine.stop_at is not None and self.now >= machine.stop_at:
            generation, machine.stop_at, machine.running = machine.running, None, None
            machine.result_due = False
            assert generation
            self.obey(machine, state_machine.stopped(generation.id, machine.state(), machine.ranks, self.now))
        if machine.ready_at is not None and self.now >= machine.ready_at:
            machine.ready_at = None
            self.obey(machine, state_machine.ready(machine.ranks, self.now))
        self.obey(machine, state_machine.tick(self.now))

    def obey(self, machine: Machine, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case SendMessage(to, message):
                    self._send(machine.id, to, message)
                case StartGeneration(generation, has_state):
                    self._start(machine, generation, has_state)
                case StopGeneration(_, after_step):
                    wait_s = STEP_S if after_step else self.random.choice((0.0, TICK_S, 4 * TICK_S))
                    machine.stop_at = self.now + wait_s
                case LogSentence(_, text):
                    machine.told.append(text)
                case PauseTraining(text):
                    machine.paused.append(text)
                case AbandonLineage():
                    machine.abandons.append(action)

    def _send(self, source: int, target: int, message: Message) -> None:
        wire = self.wires[source, target]
        if wire.open:
            delay_s = self.random.choice((1, 1, 1, 5, 20)) * self.delay_s
            latest = max(wire.items[-1][0], self.now) if wire.items else self.now
            wire.items.append((max(latest, self.now + delay_s), message))

    def _start(self, machine: Machine, generation: Generation, has_state: bool) -> None:
        self._check_generation(generation)
        assert machine.running is None, f"{machine.id} gets a start order before it has stopped"
        machine.history = machine.history if has_state else None
        machine.running, machine.started_at, machine.arrived = generation, self.now, False
        machine.stop_at = None
        machine.result_due = False

    def _exchange(self, generation: Generation) -> None:
        members = [self.machines[member] for member in generation.members]
        inside = [machine for machine in members if machine.running and machine.running.id == generation.id]
        if len(inside) < len(members) or not all(machine.awake for machine in members):
            self._fail_those_who_notice(generation, members, inside)
            return
        if not self._mesh_is_whole(generation):
            self._time_out(generation, inside)
        elif not all(machine.arrived for machine in inside):
            self._copy(generation, inside)
        elif not any(machine.result_due or machine.stop_at for machine in inside) and self._step_is_over(generation):
            for machine in inside:
                machine.result_due = True

    def _step_is_over(self, generation: Generation) -> bool:
        return round(self.now / TICK_S) % round(STEP_S / TICK_S) == 0

    def _mesh_is_whole(self, generation: Generation) -> bool:
        return not any((one, other) in self.cut for one in generation.members for other in generation.members)

    def _fail_those_who_notice(self, generation: Generation, members: list[Machine], inside: list[Machine]) -> None:
        """Fail ranks whose peer left and closed its sockets; a frozen peer or a cut link closes nothing."""
        left = [machine for machine in members if machine not in inside and self._has_left(machine, generation)]
        for machine in inside:
            sees = [one for one in left if (one.id, machine.id) not in self.cut]
            if sees and machine.awake and machine.state_machine and self.random.random() < 0.7:
                self.obey(machine, machine.state_machine.failed(generation.id, self.now))
        self._time_out(generation, inside)

    def _has_left(self, machine: Machine, generation: Generation) -> bool:
        current = machine.state_machine.generation if machine.state_machine else None
        is_late = machine.alive and (current is None or current.id < generation.id) and machine.running is None
        return machine.running is None and not is_late

    def _time_out(self, generation: Generation, inside: list[Machine]) -> None:
        """Give up a group that does not form; a formed group waits much longer for a silent peer."""
        for machine in inside:
            late = self.now - machine.started_at > FORM_WITHIN_S
            if not machine.arrived and late and machine.awake and machine.state_machine:
                self.obey(machine, machine.state_machine.failed(generation.id, self.now))

    def _copy(self, generation: Generation, inside: list[Machine]) -> None:
        if self.now - max(machine.started_at for machine in inside) < COPY_S:
            return
        if generation.recovers:
            self._recover(inside)
        source = self.machines[generation.source]
        state = source.state()
        if state is None or source.history is None:
            self._time_out(generation, inside)
            return
        if not generation.recovers:
            assert state.step == generation.state.step
        for machine in inside:
            machine.arrived = True
            if machine.state_machine:
                machine.state_machine.formed(generation.id, self._left_lineages(generation, source.history))
            if machine.history != source.history:
                machine.history = list(source.history)
            machine.ledger = max(machine.ledger, source.ledger) if machine.history else source.ledger
            machine.ledger = min(machine.ledger, len(machine.history or ()))

    def _left_lineages(self, generation: Generation, history: list[Entry]) -> dict[Ballot, int]:
        """Return the earlier lineages in a history, and the last step of each, as ranks read them from a checkpoint."""
        lineages = {self.generations[by].lineage.name: step for step, by in history}
        return {name: step for name, step in lineages.items() if name != generation.lineage.name}

    def _recover(self, inside: list[Machine]) -> None:
        """Return to the newest checkpoint on any disk, or to the first step without one."""
        assert all(machine.history is None for machine in inside), "a recovery although a rank has a state"
        saved = max((machine.saved for machine in inside), key=len)
        self.recoveries += 1
        for machine in inside:
            machine.history, machine.ledger = list(saved), len(saved)

    def _apply(self, machine: Machine) -> None:
        """Apply a step whose exchange has succeeded here: every rank has the previous one."""
        generation, state_machine = machine.running, machine.state_machine
        assert generation
        assert state_machine
        assert machine.history is not None
        machine.result_due = False
        if machine.history:
            self._commit(machine, generation, state_machine)
        machine.history.append((len(machine.history) + 1, generation.id))

    def _commit(self, machine: Machine, generation: Generation, state_machine: MembershipMachine) -> None:
        assert machine.history is not None
        if not state_machine.may_commit(generation.id):
            return
        step = len(machine.history)
        entry = machine.history[step - 1]
        seen = self.commits.setdefault((generation.lineage.name, step), entry)
        assert seen == entry, f"step {step} of lineage {generation.lineage.name} was committed as {seen} and as {entry}"
        for other in self.generations.values():
            follows = other.parent == generation.id and other.lineage.name == generation.lineage.name
            assert not follows or step <= other.state.step, f"stale {generation.id} committed {step} after {other.id}"
        machine.ledger = step
        if step % CHECKPOINT_EVERY == 0:
            machine.saved = machine.history[:step]
        self.commit_times.append((self.now, generation.id, step, machine.id))
        state_machine.committed(step)

    def _check_generation(self, generation: Generation) -> None:
        known = self.generations.setdefault(generation.id, generation)
        assert known == generation, f"two generations have the id {generation.id}"
        for other in self.generations.values():
            same = other.parent == generation.parent and other.lineage.name == generation.lineage.name
            assert other.id == generation.id or not same, f"{generation.parent} has two successors in one lineage"
        if known is generation and generation.parent in self.generations:
            self._check_nothing_lost(generation)

    def _check_nothing_lost(self, generation: Generation) -> None:
        parent = self.generations[generation.parent]
        steps = [step for _, by, step, _ in self.commit_times if by == parent.id]
        if generation.lineage.name == parent.lineage.name:
            assert max(steps, default=0) <= generation.state.step, f"{generation.id} lacks committed steps"
