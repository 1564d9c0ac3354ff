"""The launcher: starts an agent on every node, sends it the ranks to start, and follows its journal to the end.

Ctrl-C once asks every rank to finish its step and save; twice ends them at once. The agents themselves end or restart
the peers of a failing rank, so that it also happens after the launcher is gone.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shlex
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType

from shoal.agent.membership import highest_generation
from shoal.cluster.agent_link import AgentLink
from shoal.cluster.cluster import Cluster, without_nodes
from shoal.cluster.node import Node, Rendezvous
from shoal.cluster.slurm.spec import in_allocation
from shoal.config.defaults import GRACE_S
from shoal.config.load import load_config
from shoal.config.schema import MembersConfig, RunConfig
from shoal.control.agent_events import (
    AgentDone,
    AgentEvent,
    AgentNote,
    AgentReady,
    AgentRefused,
    GroupFailed,
    LineageAbandoned,
    MembershipAnnounced,
    NodeLost,
    PeerEnded,
    RankEnded,
    RankEvent,
    RankHung,
    RankRestarts,
    RanksJoined,
    RanksStarted,
    ScriptStoreKeys,
    ScriptStoreUsed,
    SessionBegan,
    StateLost,
    StopAsked,
    TrainingPaused,
    read_agent_event,
)
from shoal.control.channel import make_token
from shoal.control.orders import END, STOP, MeetOrder, MembershipOrder, RosterEntry, make_membership_order, to_line
from shoal.control.processes import AGENT, find_processes, is_running
from shoal.control.rank_env import RESUME, SETTINGS
from shoal.cost.batch_plan import world_batch
from shoal.cost.memory import out_of_memory_advice
from shoal.errors import ControlError, Interrupted, PeerLost, RunFailed, ShoalError, UsageError
from shoal.events import Event, EventLog, EventTail
from shoal.launch.failure import (
    LOG_TAIL,
    ProcessEnd,
    count_cut_off,
    diagnose,
    drop_survived,
    explain_early_exit,
    first_to_fail,
    has_own_fault,
    script_faults,
)
from shoal.launch.memory_check import check_memory
from shoal.launch.notes import LaunchNotes, no_rank_ever_joined, stop_note
from shoal.launch.plan import (
    Attempt,
    RankCommand,
    imports_shoal,
    make_go_order,
    plan_module,
    plan_ranks,
    plan_script,
    settings_notes,
)
from shoal.run_folder import RunFolder
from shoal.units import rank_list

POLL_S = 0.05
# Over SSH to a slow machine Python alone may take seconds to start.
READY_WITHIN_S = 45.0
# A journal's last line may be written a moment before or after the end of its agent is seen.
_JOURNAL_LAG_S = 1.0
# How long an agent may take to end once it was asked to end at once.
_END_WITHIN_S = 5.0
# The ranks of a session say themselves how many can share its batch.
_MAX_SCRIPT_RANKS = 1 << 16

Plan = Callable[[list[Node], Rendezvous], list[RankCommand]]
# Given the number of ranks and the highest generation so far, returns the rules by which members come and go.
MakeMembership = Callable[[int, int], MembershipOrder]


@dataclass
class AgentHandle:
    """The launcher's view of one node's agent, by its journal and its link."""

    node: Node
    link: AgentLink
    tail: EventTail
    ready: AgentReady | None = None
    started: bool = False
    done: bool = False
    ended_at: float | None = None  # when it was seen to have ended without a `done` event
    lost: str = ""  # how another agent lost it
    finished: bool = False  # another agent reported that all its ranks ended well
    abandoned: bool = False  # the launcher stopped waiting for it
    # The process of an agent that was started again and is not a child of the launcher; 0 when it cannot be seen from
    # here.
    restarted_pid: int | None = None

    def is_busy(self) -> bool:
        """Return whether it may still send something."""
        return not self.abandoned and self.how_gone() is None and (not self.done or self.link.is_reachable())

    def how_gone(self) -> str | None:
        """Return how it ended or was lost, None while it is there.

        Another agent's report counts only for a machine that the launcher cannot reach either.
        """
        if self.restarted_pid is not None:
            return None if is_running(self.restarted_pid) else "its agent, which had been started again, ended"
        how = self.link.ended()
        return self.lost if how is None and self.lost and not self.link.is_reachable() else how

    def become_ready(self, facts: AgentReady) -> None:
        """Take the facts of its machine, which the plan of its ranks depends on."""
        self.ready = facts
        self.node = replace(self.node, interface=facts.interface, cpu_only=facts.cpu_only)
        if self.node.cores is None:
            self.node = replace(self.node, cores=facts.cores, core_speeds=tuple(facts.core_speeds or ()))
        if self.node.free_memory_bytes is None:
            self.node = replace(self.node, free_memory_bytes=facts.free_memory_bytes)

    def follow_restarted(self, pid: int) -> None:
        """Follow an agent that another process started again: by a link that outlives the agent, or by its process; 0
        where that is on another machine."""
        self.restarted_pid = pid if self.link.ended() is not None else None
        self.done, self.ended_at, self.lost, self.finished = False, None, "", False

    def send(self, request: str) -> None:
        """Send STOP or END. A restarted agent gets signals instead: two at once mean END; see `Agent._on_interrupt`."""
        self.link.send(to_line(request))
        if self.restarted_pid is not None and is_running(self.restarted_pid):
            for signum in (signal.SIGINT, signal.SIGTERM)[: 2 if request == END else 1]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.restarted_pid, signum)

    def kill(self) -> None:
        if self.link.ended() is None:
            self.link.kill()
        self.link.close()
        if self.restarted_pid is not None and is_running(self.restarted_pid):
            os.kill(self.restarted_pid, signal.SIGKILL)


class LaunchedRanks:
    """The rank processes that the agents were ordered to start, and how each of them ended."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self.commands: list[RankCommand] = []
        self.ends: list[ProcessEnd] = []

    @property
    def count(self) -> int:
        return sum(len(command.ranks) for command in self.commands)

    def of_node(self, node: str) -> dict[str, RankCommand]:
        return {command.name: command for command in self.commands if command.node.name == node}

    def running(self) -> list[int]:
        ended = {end.name for end in self.ends}
        return [rank for command in self.commands if command.name not in ended for rank in command.ranks]

    def add_end(self, node: str, event: RankEnded, lost: str = "") -> None:
        ranks, log = self.of_node(node)[event.name].ranks, str(self._run.log(node, event.name))
        order = len(self.ends)
        self.ends.append(
            ProcessEnd(
                event.name,
                node,
                ranks,
                event.code,
                order,
                event.by_agent,
                log,
                event.out_of_memory,
                event.memory_limit_bytes,
                lost,
            )
        )

    def lose_node(self, node: str, how: str) -> None:
        """Count the running ranks of a node as killed."""
        ended = {end.name for end in self.ends}
        for name in [name for name in self.of_node(node) if name not in ended]:
            self.add_end(node, RankEnded(name, -int(signal.SIGKILL), by_agent=False, out_of_memory=False), lost=how)

    def forget_ends(self, name: str = "", node: str = "") -> None:
        """Forget how a rank that restarts has ended, or all ranks of a node whose agent was started again."""
        self.ends = [end for end in self.ends if end.name != name and end.node != node]


@dataclass
class LaunchReports:
    """What the agents reported of the run as a whole."""

    refused: ShoalError | None = None  # why an agent did not start, or ended
    ended_by: ShoalError | None = None  # a rank hangs, or the training's state is lost
    broken: str = ""  # the first rank that could not join the process group, and why
    stopped_by: str = ""  # the node that asked all others to stop, where it was not this launcher
    store_keys: int | None = None  # in the store of a script's ranks at its end; None while that is not known
    lost_by: dict[str, dict[str, str]] = field(default_factory=dict)  # by lost node: who lost it, and how


@dataclass(frozen=True)
class LaunchRequest:
    """What the agents of a launch are to run."""

    plan: Plan
    config: str  # a digest, in which all agents must agree, as in that of the data
    data: str = ""
    script_port: int | None = None  # where the first agent serves torch's own store for a script
    members: MakeMembership | None = None  # None: the loss of a node ends the run
    check: Callable[[list[Node]], str] = lambda nodes: ""  # raises where its ranks cannot run; returns a warning
    expect_ranks: bool = False  # the agents get their first rank as it is planned so far, and prepare for it


@dataclass
class Launch:
    """The agents of one launch. Leaving the `with` block ends all of them, and so all of their ranks."""

    run: RunFolder
    cluster: Cluster
    log: EventLog
    launch_id: str = field(default_factory=lambda: secrets.token_hex(8))
    # How long the ranks of a script may take to end once they are asked to stop; None for shoal's own ranks.
    grace_s: float | None = None
    interrupts: int = 0
    is_elastic: bool = False
    agents: list[AgentHandle] = field(default_factory=list)
    ranks: LaunchedRanks = field(init=False)
    notes: LaunchNotes = field(init=False)
    reports: LaunchReports = field(default_factory=LaunchReports)
    _interrupts_sent: int = 0
    _asked_to_end_at: float | None = None
    _is_split: bool = False  # every running agent was lost by another one, so the launcher ended them

    def __post_init__(self) -> None:
        self.ranks = LaunchedRanks(self.run)
        self.notes = LaunchNotes(self.run, self.log)

    def launch(self, request: LaunchRequest) -> None:
        """Start the agents, wait until all are ready, and send them the ranks."""
        common = MeetOrder(
            folder="",
            node="",
            member=0,
            address="",
            interface=None,
            token=make_token(self.run.token),
            launch=self.launch_id,
            launched_at=time.time(),
            config=request.config,
            data=request.data,
        )
        nodes = self.cluster.nodes
        expected = request.plan(nodes, Rendezvous(nodes[0].address, 0)) if request.expect_ranks else []
        for member, node in enumerate(nodes):
            tail = EventTail(self.run.journal(node.name))
            tail.skip_to_end()
            agent = AgentHandle(node, self.cluster.start_agent(node, self.run.path), tail)
            self.agents.append(agent)
            order = replace(
                common,
                folder=self.cluster.folder(node, self.run.path),
                node=node.name,
                member=member,
                address=node.address,
                interface=node.interface,
                script_port=request.script_port if member == 0 else None,
                expected=next(iter(make_go_order((), expected, node.name).starts), None),
            )
            agent.link.send(to_line(order))
        self._start_ranks(request, self._await_ready())

    def _await_ready(self) -> list[AgentReady]:
        deadline = time.monotonic() + READY_WITHIN_S
        while waiting := [agent for agent in self.agents if agent.ready is None]:
            self._poll()
            if self.interrupts:
                raise interrupted_early(self.run, is_script=self.grace_s is not None)
            if time.monotonic() > deadline:
                raise ControlError(
                    f"the agent on {waiting[0].node.name} did not answer within {READY_WITHIN_S:.0f} s",
                    why="the machine is very slow or very busy, or lost its connection",
                    fix=f"look at {self.run.path / 'agents'}, then try again",
                )
            time.sleep(POLL_S)
        return [agent.ready for agent in self.agents if agent.ready is not None]

    def _start_ranks(self, request: LaunchRequest, ready: list[AgentReady]) -> None:
        nodes = [agent.node for agent in self.agents]
        if warning := request.check(nodes):
            self.notes.write(warning)
        rendezvous = Rendezvous(nodes[0].address, ready[0].script_port or ready[0].port)
        self.notes.rendezvous = rendezvous
        commands = self.ranks.commands = request.plan(nodes, rendezvous)
        # A script's run becomes elastic when its ranks begin a session.
        self.is_elastic = request.members is not None and self.grace_s is None
        order = None
        if request.members is not None:
            # The highest of all earlier launches, as far as any node knows: no generation number is used twice.
            highest = max(highest_generation(self.run), *(facts.highest_generation for facts in ready))
            order = request.members(self.ranks.count, highest)
        roster = []
        for node, facts in zip(nodes, ready, strict=True):
            ranks = tuple(rank for command in self.ranks.of_node(node.name).values() for rank in command.ranks)
            roster.append(RosterEntry(node.name, node.address, facts.port, facts.agent_mark, ranks))
        for agent in self.agents:
            agent.link.send(to_line(make_go_order(roster, commands, agent.node.name, order, self.grace_s)))

    def __enter__(self) -> Launch:
        return self

    def __exit__(self, *_: object) -> None:
        """Ask the remaining agents to end, and kill those that do not.

        After a good end, wait for all files that are still being sent here: a checkpoint may be large and a link slow.
        Only another Ctrl-C cuts that short.
        """
        deadline, interrupts_before = time.monotonic() + _END_WITHIN_S, self.interrupts
        if is_unfinished := any(not agent.done for agent in self.agents):
            self._send(END)
        while busy := [agent for agent in self.agents if agent.is_busy()]:
            is_cut_short = is_unfinished or self.interrupts > interrupts_before
            if time.monotonic() > deadline and (is_cut_short or not any(agent.link.sends_files for agent in busy)):
                break
            time.sleep(POLL_S / 5)
        for agent in self.agents:
            agent.kill()

    def wait(self) -> None:
        """Wait until every agent is done, passing on interrupts; raise the error of an agent that refused to start."""
        while not all(agent.done for agent in self.agents):
            self._pass_on_interrupts()
            self._poll()
            if self.log.is_removed():
                # Deleted journals get no new lines: without this the launcher would wait forever.
                raise self.run.removed()
            self._abandon_stuck()
            if self.grace_s is not None and not self.is_elastic and not self.interrupts:
                # The ranks of a session have passed its last barrier when the first ends: none of them waits.
                self.notes.note_still_running(self.ranks.ends, self.ranks.running())
            time.sleep(POLL_S)
        if self._is_split and not self.interrupts:
            nodes = [agent.node.name for agent in self.agents]
            self.ranks.ends = count_cut_off(self.ranks.ends, self.reports.lost_by, nodes)
        if self.reports.refused and not self.interrupts:
            raise self.reports.refused

    def counted_ends(self) -> list[ProcessEnd]:
        """Return the ends that may make the run fail: not those that an elastic run survived."""
        return drop_survived(self.ranks.ends) if self.is_elastic else self.ranks.ends

    def interrupt(self, signum: int, frame: FrameType | None) -> None:
        # Slurm may send SIGTERM to every process of a job, and again at its time limit: that is no second Ctrl-C.
        is_of_job = signum == signal.SIGTERM and in_allocation()
        self.interrupts = max(self.interrupts, 1) if is_of_job else self.interrupts + 1

    def _pass_on_interrupts(self) -> None:
        while self._interrupts_sent < self.interrupts:
            self._interrupts_sent += 1
            if self._interrupts_sent == 1:
                self._send(STOP)
                self.notes.write(stop_note(self.grace_s))
            else:
                self._send(END)
                self._asked_to_end_at = self._asked_to_end_at or time.monotonic()

    def _abandon_stuck(self) -> None:
        """Stop waiting for agents that do not end: a frozen machine neither ends nor closes its connection."""
        stuck = [agent for agent in self.agents if not agent.done]
        if self._asked_to_end_at is None and stuck and all(agent.lost for agent in stuck):
            self._send(END)
            self._asked_to_end_at = time.monotonic()
            self._is_split = not self.is_elastic
        if self._asked_to_end_at is not None and time.monotonic() - self._asked_to_end_at > _END_WITHIN_S:
            for agent in stuck:
                agent.done = agent.abandoned = True
                self._lose_agent(agent, agent.lost or "it did not end when it was asked to")

    def _send(self, request: str) -> None:
        for agent in self.agents:
            agent.send(request)

    def _poll(self) -> None:
        for agent in self.agents:
            node = agent.node.name
            own = self.ranks.of_node(node)
            for record in agent.tail.poll():
                event = read_agent_event(record) if record.get("launch") == self.launch_id else None
                # The process that a journal names must be one that the node was ordered to start.
                if isinstance(event, RankEvent) and event.name not in own:
                    self.notes.note_bad_lines(node)
                elif event is not None:
                    self._handle(agent, event)
            if agent.tail.unreadable:
                self.notes.note_bad_lines(node)
        for agent in self.agents:
            self._check_alive(agent)

    def _handle(self, agent: AgentHandle, event: AgentEvent) -> None:
        node, reports, notes = agent.node.name, self.reports, self.notes
        match event:
            case AgentReady(incarnation=0):
                agent.become_ready(event)
            case AgentReady():
                self._follow_restarted(agent)
            case SessionBegan():
                self.is_elastic = True
            case RanksStarted():
                agent.started = True
                if all(other.started for other in self.agents):
                    self.log.write("running", nodes=[other.node.name for other in self.agents], ranks=self.ranks.count)
            case RankEnded():
                self.ranks.add_end(node, event)
            case RankRestarts():
                self.ranks.forget_ends(name=event.name)
            case AgentNote():
                notes.write(f"{node}: {self.run.name_in(event.text)}")
            case MembershipAnnounced():
                # All agents of a generation announce the same.
                notes.write_once(event.generation or event.text, event.text)
            case TrainingPaused() | LineageAbandoned():
                notes.write_once(event.text, event.text)
            case GroupFailed():
                reports.broken = reports.broken or f"{event.name}: {event.why}"
            case NodeLost():
                if not self.is_elastic:
                    notes.write(f"{node} lost {event.node}: {event.how}")
                reports.lost_by.setdefault(event.node, {})[node] = event.how
                self._mark_lost(event.node, event.how)
            case PeerEnded(failed=True):
                self._mark_lost(event.node, "its ranks failed, and their error did not reach the launcher")
            case PeerEnded():
                # Enough for an agent whose own journal does not arrive: its ranks ended, and it was not a failure.
                for other in self.agents:
                    other.finished |= other.node.name == event.node
            case StopAsked() if not self.interrupts:
                reports.stopped_by = reports.stopped_by or node
            case RanksJoined():
                notes.add_joined(node, event, len(self.agents))
            case ScriptStoreUsed():
                notes.note_open_store(len(self.agents))
            case ScriptStoreKeys():
                reports.store_keys = event.keys
                if event.keys:
                    notes.note_open_store(len(self.agents))
            case StateLost() | RankHung():
                event.error.fix = self.run.name_in(event.error.fix)
                reports.ended_by = reports.ended_by or event.error
            case AgentRefused():
                self._on_refused(agent, event.error)
            case AgentDone():
                agent.done = True

    def _follow_restarted(self, agent: AgentHandle) -> None:
        """Follow an agent that was started again. The ends of its former ranks no longer count."""
        # The process id in the event may be one inside an emulated node.
        own = (process for process in find_processes(self.run.path) if process.part == AGENT)
        agent.follow_restarted(next((process.pid for process in own if process.node == agent.node.name), 0))
        self.ranks.forget_ends(node=agent.node.name)

    def _on_refused(self, agent: AgentHandle, error: ShoalError) -> None:
        """Record that an agent refused to start, and end the others, which wait for it."""
        if agent.restarted_pid is not None:
            self.notes.write(f"{agent.node.name} could not take part again: {error.seen}")
            return
        reports = self.reports
        if reports.refused is None:
            self._send(END)
        if reports.refused is None or isinstance(reports.refused, PeerLost):
            reports.refused = error
        if not self.ranks.commands:
            raise reports.refused

    def _mark_lost(self, node: str, how: str) -> None:
        """Mark a node that another agent lost. A node that joined later is none of the launcher's agents."""
        for agent in self.agents:
            if agent.node.name == node:
                agent.lost = how

    def _check_alive(self, agent: AgentHandle) -> None:
        """Detect an agent that ended without a `done` event: it was killed, or its machine is gone."""
        if agent.finished and not agent.link.is_reachable():
            agent.done = True
        if agent.done or (how := agent.how_gone()) is None:
            return
        if agent.ended_at is None:
            agent.ended_at = time.monotonic()
        elif time.monotonic() - agent.ended_at > _JOURNAL_LAG_S:
            agent.done = True
            self._lose_agent(agent, how)

    def _lose_agent(self, agent: AgentHandle, how: str) -> None:
        """Count the agent's running ranks as killed; raise if they were never started."""
        if not self.ranks.commands:
            raise ControlError(
                f"{agent.node.name} did not start: {how}",
                why="the agent that starts its ranks ended before it could",
                fix=f"look at {self.run.path / 'agents'}",
            )
        self.ranks.lose_node(agent.node.name, how)


def _run_to_end(
    run: RunFolder, cluster: Cluster, log: EventLog, request: LaunchRequest, grace_s: float | None = None
) -> tuple[Launch, dict[int, Event]]:
    """Launch and wait; return the launch and the first fault that each rank wrote.

    Signals are only counted, because a handler may run in the middle of anything.
    """
    rank_events = _tail_ranks(run, cluster)
    launch = Launch(run, cluster, log, grace_s=grace_s)
    before = {signum: signal.signal(signum, launch.interrupt) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        with launch:
            launch.launch(request)
            launch.wait()
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
    return launch, _faults(rank_events)


def run_ranks(
    config: RunConfig,
    members: MembersConfig,
    run: RunFolder,
    cluster: Cluster,
    log: EventLog,
    data: str,
    resume: bool = False,
) -> int:
    """Run a training to its end and return the number of ranks. Raise what went wrong, or `Interrupted`.

    `log` receives the notes for the user.
    """

    def folder_of(node: Node) -> str:
        return cluster.folder(node, run.path)

    def rules(ranks: int, above: int) -> MembershipOrder:
        return make_membership_order(members, above, most_ranks=world_batch(load_config(run.config).train, ranks))

    request = LaunchRequest(
        lambda nodes, rendezvous: plan_ranks(config, folder_of, nodes, rendezvous, resume),
        config=hashlib.sha256(run.config.read_bytes()).hexdigest(),
        data=data,
        members=rules if config.launcher == "shoal" and members.on_loss == "go-on" else None,
        check=lambda nodes: check_memory(load_config(run.config), nodes),
        expect_ranks=True,
    )
    launch, faults = _run_to_end(run, cluster, log, request)
    ends = launch.counted_ends()
    advice = out_of_memory_advice(load_config(run.config), launch.ranks.count)
    error = diagnose(ends, faults, _log_tails(launch), advice) or _group_failure(launch)
    if launch.interrupts and not (launch.interrupts == 1 and has_own_fault(faults)):
        raise _interrupted(run, at_once=launch.interrupts > 1)
    if error:
        raise error
    if any(end.code == Interrupted.exit_code for end in ends):
        # A rank itself got a signal, and all ranks agreed to stop.
        raise _interrupted(run, at_once=False, why=asked_by(launch))
    _refuse_killed(ends)
    return sum(len(end.ranks) for end in ends)


def run_module(
    config: RunConfig, module: str, words: Sequence[str], run: RunFolder, cluster: Cluster, log: EventLog
) -> None:
    """Run one of shoal's own worker programs on every slot to its end. Its results are in the ranks' events."""

    def folder_of(node: Node) -> str:
        return cluster.folder(node, run.path)

    request = LaunchRequest(
        lambda nodes, rendezvous: plan_module(config, module, words, folder_of, nodes, rendezvous),
        config=hashlib.sha256("\0".join((module, *words)).encode()).hexdigest(),
    )
    launch, faults = _run_to_end(run, cluster, log, request)
    if launch.interrupts:
        raise Interrupted("interrupted")
    if error := diagnose(launch.ranks.ends, faults, _log_tails(launch)):
        raise error
    _refuse_killed(launch.ranks.ends)


@dataclass(frozen=True)
class SessionSettings:
    """The settings of the command line for the sessions of a script."""

    text: str = "{}"  # As JSON, section by section.
    resume: bool = False  # Continue from the newest checkpoint.

    @property
    def members(self) -> MembersConfig:
        return MembersConfig.model_validate(json.loads(self.text).get("members", {}))

    def variables(self) -> dict[str, str]:
        return {SETTINGS: self.text} | ({RESUME: "1"} if self.resume else {})


@dataclass(frozen=True)
class ScriptJob:
    """A user's script, and how it is run on every slot."""

    config: RunConfig
    argv: Sequence[str]  # Python's arguments
    # Recognises the messages of ranks that only lost a peer.
    is_consequence: Callable[[str], bool]
    port: int = 0
    grace_s: float = GRACE_S  # what the ranks have to end once they are asked to stop
    python: str = ""  # runs the script; empty: each machine's own
    user_env: Mapping[str, str] = field(default_factory=dict)  # the variables in it stay as the user set them
    session: SessionSettings = field(default_factory=SessionSettings)  # for the sessions of the script, if it has any
    measure: bool = False  # record the steps of a script that uses no session
    restarts: int = 0  # how often all ranks are started again after a failure


def run_script(job: ScriptJob, run: RunFolder, cluster: Cluster, log: EventLog) -> None:
    """Run a user's script on every slot. The raised error carries the exit code of the first rank to fail.

    After a failure all ranks are started again on the machines that are left, up to `job.restarts` times, as torchrun
    does. A script that uses a session recovers by itself and is not started again.
    """
    for number in range(job.restarts + 1):
        launch, error = _try_script(job, Attempt(number, job.restarts), run, cluster, log)
        if error is None:
            return
        lost = {end.node for end in launch.ranks.ends if end.lost}
        remaining = without_nodes(cluster, lost)
        if number == job.restarts or launch.is_elastic or not remaining.nodes:
            raise error
        cluster = remaining
        where = f", without {', '.join(sorted(lost))}" if lost else ""
        log.write(
            "note", text=f"{error.seen}: all ranks are started again, restart {number + 1} of {job.restarts}{where}"
        )


def _try_script(
    job: ScriptJob, attempt: Attempt, run: RunFolder, cluster: Cluster, log: EventLog
) -> tuple[Launch, ShoalError | None]:
    """Run the script once; return what made a rank fail. Raise `Interrupted` after Ctrl-C."""
    session = job.session

    def plan(nodes: list[Node], rendezvous: Rendezvous) -> list[RankCommand]:
        for text in settings_notes(job.config, nodes, job.user_env) if not attempt.number else ():
            log.write("note", text=text)
        return plan_script(
            job.config, job.argv, nodes, rendezvous, job.python, job.user_env, session.variables(), job.measure, attempt
        )

    def rules(ranks: int, above: int) -> MembershipOrder:
        return make_membership_order(session.members, above, _MAX_SCRIPT_RANKS, from_start=imports_shoal(job.argv))

    # Each attempt appends to the logs: an exception of an earlier one explains nothing now.
    sizes = {path: path.stat().st_size for path in (run.path / "logs").glob("*/*.log")}

    def read_end(path: Path, lines: int = 12, most_bytes: int = 8192) -> str:
        return read_log_tail(path, lines, most_bytes, after=sizes.get(path, 0))

    request = LaunchRequest(
        plan,
        config=hashlib.sha256("\0".join((*job.argv, session.text)).encode()).hexdigest(),
        script_port=job.port,
        members=rules if session.members.on_loss == "go-on" else None,
    )
    launch, rank_faults = _run_to_end(run, cluster, log, request, job.grace_s)
    ends = launch.counted_ends()
    if launch.interrupts:
        killed = [rank for end in launch.ranks.ends if end.by_agent for rank in end.ranks]
        late = f"{rank_list(killed)} had to be ended" if killed else ""
        raise Interrupted("interrupted", why=late, fix=resume_script_advice(run))
    faults = script_faults(ends, lambda end: read_end(Path(end.log), 1000, 1 << 16), job.is_consequence)
    # An error of a session has an exit code of its own; an exception of the script ends a rank with 1.
    own_codes = {rank for end in ends if end.code in (UsageError.exit_code, ShoalError.exit_code) for rank in end.ranks}
    faults |= {rank: fault for rank, fault in rank_faults.items() if rank in own_codes}
    tails = {command.name: read_end(run.log(command.node.name, command.name)) for command in launch.ranks.commands}
    error, first = diagnose(ends, faults, tails), first_to_fail(ends, faults)
    if error and first:
        joint = "\n" if error.why.startswith(LOG_TAIL) else "; "
        error.why = joint.join(filter(None, (explain_early_exit(ends, faults), error.why)))
        error.exit_code = first.code if first.code > 0 else 128 - first.code
        return launch, error
    if launch.is_elastic and (failure := _group_failure(launch)):
        return launch, failure
    if any(end.code == Interrupted.exit_code for end in ends):
        raise Interrupted("a rank reports that it was interrupted", why=asked_by(launch), fix=resume_script_advice(run))
    _refuse_killed(ends)
    is_unjoined = launch.reports.store_keys == 0 and not launch.notes.has_named_unjoined
    if is_unjoined and launch.ranks.count > 1 and not launch.is_elastic:
        launch.notes.write(no_rank_ever_joined(launch.ranks.count))
    return launch, None


def _group_failure(launch: Launch) -> ShoalError | None:
    """Return why agents ended their ranks: one hangs, none had the state any more, or the group could not form."""
    if any(end.code in (0, Interrupted.exit_code) for end in launch.ranks.ends):
        return None
    if launch.reports.ended_by or not launch.reports.broken:
        return launch.reports.ended_by
    return RunFailed(
        f"the ranks did not meet: {launch.reports.broken}",
        why="the machines reach each other, but not by the interface or the ports that the ranks use",
        fix="find out what is in the way: shoal doctor",
    )


def _refuse_killed(ends: Iterable[ProcessEnd]) -> None:
    """Raise where an agent killed its ranks without an order of the launcher: it was ended on its own machine."""
    if nodes := {end.node for end in ends if end.by_agent}:
        raise Interrupted(
            f"the ranks on {', '.join(sorted(nodes))} were ended from outside", why="an agent was asked to end at once"
        )


def interrupted_early(run: RunFolder, is_script: bool) -> Interrupted:
    folder = shlex.quote(str(run.path))
    fix = "start anew"
    if run.config.is_file() and (not is_script or run.has_checkpoint()):
        fix = f"start it again: shoal {'run' if is_script else 'train'} --resume {folder}"
    elif run.job.is_file():
        fix = f"the same command with another --out; or delete this folder first: shoal runs --delete {folder}"
    return Interrupted("interrupted before the ranks were started", fix=fix)


def resume_script_advice(run: RunFolder) -> str:
    """Name the command that continues a script whose session has saved a checkpoint."""
    if run.has_checkpoint():
        return f"go on from the last checkpoint: shoal run --resume {shlex.quote(str(run.path))}"
    return f"what the ranks printed is in {run.path / 'logs'}"


def asked_by(launch: Launch) -> str:
    stopped_by = launch.reports.stopped_by
    return f"{stopped_by} asked all machines to stop: Ctrl-C or a signal there" if stopped_by else ""


def _interrupted(run: RunFolder, at_once: bool, why: str = "") -> Interrupted:
    folder = shlex.quote(str(run.path))
    if not (step := run.newest_checkpoint()):
        again = "start anew with another --out" if run.has_begun() else f"start it again: shoal train --resume {folder}"
        return Interrupted("interrupted before the first checkpoint", why=why, fix=again)
    how = (
        f"ended at once; the last checkpoint has step {step}" if at_once else f"saved what was done, up to step {step}"
    )
    fix = f"go on from the last checkpoint: shoal train --resume {folder}"
    return Interrupted(f"interrupted: {how}", why=why, fix=fix)


def _tail_ranks(run: RunFolder, cluster: Cluster) -> list[EventTail]:
    """Follow the ranks' events from now on: a resumed run has older ones."""
    tails = [EventTail(run.events(rank)) for rank in range(sum(node.slots for node in cluster.nodes))]
    for tail in tails:
        tail.skip_to_end()
    return tails


def _faults(tails: list[EventTail]) -> dict[int, Event]:
    """Return the first fault that each rank wrote."""
    faults: dict[int, Event] = {}
    for rank, tail in enumerate(tails):
        for event in tail.poll():
            if event.get("event") == "fault":
                faults.setdefault(rank, event)
    return faults


def _log_tails(launch: Launch) -> dict[str, str]:
    return {
        command.name: read_log_tail(launch.run.log(command.node.name, command.name))
        for command in launch.ranks.commands
    }


def read_log_tail(log: Path, lines: int = 12, most_bytes: int = 8192, after: int = 0) -> str:
    """Return the last lines of a log, of the part behind its first `after` bytes."""
    try:
        with log.open("rb") as file:
            file.seek(max(after, log.stat().st_size - most_bytes))
            text = file.read().decode(errors="replace").replace("\r\n", "\n")
            # Of a progress bar only the state that was last on the screen.
            shown = (line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))
            return "\n".join("\n".join(shown).splitlines()[-lines:])
    except OSError:
        return ""
