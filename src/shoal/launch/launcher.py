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
from shoal.agent.unjoined_ranks import no_rank_ever_joined, no_rank_joined, ranks_still_running, ranks_wait_for_others
from shoal.cluster.agent_link import AgentLink
from shoal.cluster.cluster import Cluster, without_nodes
from shoal.cluster.node import Node, Rendezvous
from shoal.config.defaults import GRACE_S
from shoal.config.load import load_config
from shoal.config.schema import MembersConfig, RunConfig
from shoal.control.channel import make_token
from shoal.control.orders import END, STOP, MeetOrder, MembershipOrder, RosterEntry, make_membership_order, to_line
from shoal.control.processes import AGENT, find_processes, is_running
from shoal.control.rank_env import RESUME, SETTINGS
from shoal.cost.batch_plan import world_batch
from shoal.cost.memory import out_of_memory_advice
from shoal.errors import ControlError, Interrupted, PeerLost, RunFailed, ShoalError, UsageError, from_dict
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
from shoal.units import format_duration, rank_list

POLL_S = 0.05
# Over SSH to a slow machine Python alone may take seconds to start.
READY_WITHIN_S = 45.0
# A journal's last line may be written a moment before or after the end of its agent is seen.
_JOURNAL_LAG_S = 1.0
# How long an agent may take to end once it was asked to end at once.
_END_WITHIN_S = 5.0
# The ranks of a session say themselves how many can share its batch.
_MAX_SCRIPT_RANKS = 1 << 16
# Ranks of a script that run this much longer than the first that ended are mentioned.
NOTE_RUNNING_AFTER_S = 60.0

Plan = Callable[[list[Node], Rendezvous], list[RankCommand]]
# Given the number of ranks and the highest generation so far, returns the rules by which members come and go.
MakeMembership = Callable[[int, int], MembershipOrder]


@dataclass
class AgentHandle:
    """The launcher's view of one node's agent, by its journal and its link."""

    node: Node
    link: AgentLink
    tail: EventTail
    ready: Event | None = None
    started: bool = False
    done: bool = False
    ended_at: float | None = None  # when it was seen to have ended without a `done` event
    lost: str = ""  # how another agent lost it
    finished: bool = False  # another agent reported that all its ranks ended well
    abandoned: bool = False  # the launcher stopped waiting for it
    # The process of an agent that was started again and is no child of the launcher; 0 when it cannot be seen from
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

    def send(self, request: str) -> None:
        """Send STOP or END. A restarted agent gets signals instead: two at once mean END; see `Agent._on_signal`."""
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


@dataclass
class Launch:
    """The agents of one launch. Leaving the `with` block ends all of them, and so all of their ranks."""

    run: RunFolder
    cluster: Cluster
    log: EventLog
    launch_id: str = field(default_factory=lambda: secrets.token_hex(8))
    agents: list[AgentHandle] = field(default_factory=list)
    commands: list[RankCommand] = field(default_factory=list)
    ends: list[ProcessEnd] = field(default_factory=list)
    refused: ShoalError | None = None
    interrupts: int = 0
    stopped_by: str = ""  # the node that asked all others to stop, where it was not this launcher
    is_elastic: bool = False
    broken: str = ""  # the first rank that could not join the process group, and why
    state_lost: ShoalError | None = None
    # How long the ranks of a script may take to end once they are asked to stop; None for shoal's own ranks.
    grace_s: float | None = None
    # Keys in the store of a script's ranks at its end; None while that is not known.
    store_keys: int | None = None
    noted_unjoined: bool = False
    _joined: dict[str, Event] = field(default_factory=dict)  # each node's report of which ranks joined
    _rendezvous: Rendezvous | None = None
    _first_end_at: float | None = None
    _noted_running: bool = False
    _noted_open_store: bool = False
    _announced: set[str] = field(default_factory=set)
    # Nodes whose journals have lines that cannot be used.
    _noted_journals: set[str] = field(default_factory=set)
    _interrupts_sent: int = 0
    _asked_to_end_at: float | None = None
    _lost_by: dict[str, dict[str, str]] = field(default_factory=dict)  # by lost node: who lost it, and how
    _is_split: bool = False  # every running agent was lost by another one, so the launcher ended them

    def launch(
        self,
        plan: Plan,
        config: str,
        data: str,
        script_port: int | None = None,
        members: MakeMembership | None = None,
        expect_ranks: bool = False,
    ) -> None:
        """Start the agents, wait until all are ready, and send them the ranks. With `members` the run is elastic.

        With `expect_ranks` the agents get their first rank as it is planned so far, and prepare for it.
        """
        common = MeetOrder(
            folder="",
            node="",
            member=0,
            address="",
            interface=None,
            token=make_token(self.run.token),
            launch=self.launch_id,
            launched_at=time.time(),
            config=config,
            data=data,
        )
        nodes = self.cluster.nodes
        expected = plan(nodes, Rendezvous(nodes[0].address, 0)) if expect_ranks else []
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
                script_port=script_port if member == 0 else None,
                expected=next(iter(make_go_order((), expected, node.name).starts), None),
            )
            agent.link.send(to_line(order))
        self._await_ready()
        self._start_ranks(plan, members)

    def _await_ready(self) -> None:
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

    def _start_ranks(self, plan: Plan, members: MakeMembership | None) -> None:
        ready = [agent.ready or {} for agent in self.agents]
        for agent, facts in zip(self.agents, ready, strict=True):
            agent.node = replace(agent.node, interface=facts["interface"], cpu_only=facts["cpu_only"])
            if agent.node.cores is None:
                speeds = tuple(facts.get("core_speeds") or ())
                agent.node = replace(agent.node, cores=facts["cores"], core_speeds=speeds)
        nodes = [agent.node for agent in self.agents]
        rendezvous = Rendezvous(nodes[0].address, ready[0]["script_port"] or ready[0]["port"])
        self._rendezvous = rendezvous
        self.commands = plan(nodes, rendezvous)
        # A script's run becomes elastic when its ranks begin a session.
        self.is_elastic = members is not None and self.grace_s is None
        order = None
        if members is not None:
            # The highest of all earlier launches, as far as any node knows: no generation number is used twice.
            highest = max(highest_generation(self.run), *(int(facts["highest_generation"]) for facts in ready))
            order = members(self.ranks, highest)
        roster = []
        for node, facts in zip(nodes, ready, strict=True):
            ranks = [rank for command in self.commands if command.node.name == node.name for rank in command.ranks]
            roster.append(RosterEntry(node.name, node.address, facts["port"], facts["agent_mark"], tuple(ranks)))
        for agent in self.agents:
            agent.link.send(to_line(make_go_order(roster, self.commands, agent.node.name, order, self.grace_s)))

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
        while any(agent.is_busy() for agent in self.agents):
            if time.monotonic() > deadline and (is_unfinished or self.interrupts > interrupts_before):
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
            self._note_still_running()
            time.sleep(POLL_S)
        if self._is_split and not self.interrupts:
            self.ends = count_cut_off(self.ends, self._lost_by, [agent.node.name for agent in self.agents])
        if self.refused and not self.interrupts:
            raise self.refused

    def interrupt(self, signum: int, frame: FrameType | None) -> None:
        self.interrupts += 1

    def _pass_on_interrupts(self) -> None:
        while self._interrupts_sent < self.interrupts:
            self._interrupts_sent += 1
            if self._interrupts_sent == 1:
                self._send(STOP)
                self._note(stop_note(self.grace_s))
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
            own = {command.name for command in self.commands if command.node.name == agent.node.name}
            for event in agent.tail.poll():
                if event.get("launch") != self.launch_id:
                    continue
                # The process that a journal names must be one that the node was ordered to start.
                if event["event"] not in ("ended", "restart", "group-failed") or event["name"] in own:
                    self._handle(agent, event)
                else:
                    self._note_bad_lines(agent)
            if agent.tail.unreadable:
                self._note_bad_lines(agent)
        for agent in self.agents:
            self._check_alive(agent)

    def _note_bad_lines(self, agent: AgentHandle) -> None:
        """Note unusable lines once for each node: a journal with many of them must not fill the user's screen."""
        if agent.node.name not in self._noted_journals:
            self._noted_journals.add(agent.node.name)
            self._note(
                f"the journal of {agent.node.name} has lines that cannot be used and are ignored: its shoal is another "
                f"version, or the file was damaged ({self.run.journal(agent.node.name)})"
            )

    def _handle(self, agent: AgentHandle, event: Event) -> None:
        node = agent.node.name
        match event["event"]:
            case "ready" if event["incarnation"]:
                self._take_restarted(agent)
            case "ready":
                agent.ready = event
            case "session":
                self.is_elastic = True
            case "started":
                agent.started = True
                if all(other.started for other in self.agents):
                    self.log.write("running", nodes=[other.node.name for other in self.agents], ranks=self.ranks)
            case "ended":
                self._add_end(
                    agent, event["name"], event["code"], event["by_agent"], out_of_memory=event["out_of_memory"]
                )
            case "note":
                self._note(f"{node}: {event['text']}")
            case "restart":
                self.ends = [end for end in self.ends if end.name != event["name"]]
            case "announce" | "pause" | "abandon":
                # All agents of a generation announce the same: note it once.
                key = event.get("generation") or event["text"]
                if key not in self._announced:
                    self._announced.add(key)
                    self._note(event["text"])
            case "group-failed":
                self.broken = self.broken or f"{event['name']}: {event['why']}"
            case "lost":
                if not self.is_elastic:
                    self._note(f"{node} lost {event['node']}: {event['how']}")
                self._lost_by.setdefault(event["node"], {})[node] = event["how"]
                self._mark_lost(event["node"], event["how"])
            case "peer-ended" if event["failed"]:
                self._mark_lost(event["node"], "its ranks failed, and their error did not reach the launcher")
            case "peer-ended":
                # Enough for an agent whose own journal does not arrive: its ranks ended, and it was no failure.
                for other in self.agents:
                    other.finished |= other.node.name == event["node"]
            case "stop-asked" if not self.interrupts:
                self.stopped_by = self.stopped_by or node
            case "joined-group":
                self._joined[node] = event
                self._note_unjoined()
            case "script-store-used":
                self._note_open_store()
            case "script-store-keys":
                self.store_keys = event["keys"]
                if self.store_keys:
                    self._note_open_store()
            case "state-lost":
                self.state_lost = from_dict(event)
            case "refused" if agent.restarted_pid is not None:
                self._note(f"{node} could not take part again: {event['seen']}")
            case "refused":
                self._refuse(from_dict(event))
            case "done":
                agent.done = True

    def _note_unjoined(self) -> None:
        """Name the ranks that have not joined the process group, once the agents of all nodes have reported.

        A rank may wait for one of another node, so a single report shows too little.
        """
        if self._rendezvous is None or len(self._joined) < len(self.agents):
            return
        joined, missing = (
            sorted(rank for event in self._joined.values() for rank in event[key]) for key in ("met", "missing")
        )
        if missing and not self.noted_unjoined:
            place = self._rendezvous.address, self._rendezvous.port
            after_s = max(float(event["after_s"]) for event in self._joined.values())
            run = shlex.quote(str(self.run.path))
            warning = (
                ranks_wait_for_others(joined, missing, *place, after_s, run)
                if joined
                else no_rank_joined(missing, *place, after_s)
            )
            self.noted_unjoined = True
            self._note(f"{warning.seen}: {warning.why} ({warning.fix})")

    def _note_open_store(self) -> None:
        """Note, once, that the ranks of a script meet in a store without a token. Those of a session do not."""
        if self._rendezvous is None or len(self.agents) == 1 or self._noted_open_store:
            return
        self._noted_open_store = True
        self._note(
            f"the script's store is torch's own and asks for no token: any program that reaches "
            f"{self._rendezvous.address} port {self._rendezvous.port} can write into it. Use a network you trust."
        )

    def _note_still_running(self) -> None:
        """Name the ranks of a script that still run long after others have ended well.

        The ranks of a session have passed its last barrier by then: none of them waits.
        """
        if self.grace_s is None or self.is_elastic or self.interrupts or self._noted_running or not self.ends:
            return
        ended = [rank for end in self.ends for rank in end.ranks]
        running = [rank for command in self.commands for rank in command.ranks if rank not in ended]
        if any(end.code for end in self.ends) or not running:
            return
        now = time.monotonic()
        self._first_end_at = now if self._first_end_at is None else self._first_end_at
        if now - self._first_end_at > NOTE_RUNNING_AFTER_S:
            self._noted_running = True
            self._note(ranks_still_running(ended, running, now - self._first_end_at, shlex.quote(str(self.run.path))))

    @property
    def ranks(self) -> int:
        return sum(len(command.ranks) for command in self.commands)

    def _take_restarted(self, agent: AgentHandle) -> None:
        """Follow an agent that another process started again. The ends of its former ranks no longer count."""
        # The process id in the event may be one inside an emulated node.
        own = (
            process
            for process in find_processes(self.run.path)
            if (process.part, process.node) == (AGENT, agent.node.name)
        )
        agent.restarted_pid = next((process.pid for process in own), 0)
        agent.done, agent.ended_at, agent.lost, agent.finished = False, None, "", False
        self.ends = [end for end in self.ends if end.node != agent.node.name]

    def _note(self, text: str) -> None:
        self.log.write("note", text=text)

    def _refuse(self, error: ShoalError) -> None:
        """Record that an agent refused to start, and end the others, which wait for it."""
        if self.refused is None:
            self._send(END)
        if self.refused is None or isinstance(self.refused, PeerLost):
            self.refused = error
        if not self.commands:
            raise self.refused

    def _add_end(
        self, agent: AgentHandle, name: str, code: int, by_agent: bool, out_of_memory: bool = False, lost: str = ""
    ) -> None:
        node = agent.node.name
        command = next(command for command in self.commands if command.name == name)
        log = str(self.run.log(node, name))
        self.ends.append(
            ProcessEnd(name, node, command.ranks, code, len(self.ends), by_agent, log, out_of_memory, lost)
        )

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
        if not self.commands:
            raise ControlError(
                f"{agent.node.name} did not start: {how}",
                why="the agent that starts its ranks ended before it could",
                fix=f"look at {self.run.path / 'agents'}",
            )
        ended = {end.name for end in self.ends}
        for command in self.commands:
            if command.node.name == agent.node.name and command.name not in ended:
                self._add_end(agent, command.name, -int(signal.SIGKILL), by_agent=False, lost=how)


def stop_note(grace_s: float | None) -> str:
    """Return the note after the first Ctrl-C: what happens now, and how to end it sooner."""
    now = "shoal stop --now ends them at once"
    if grace_s is None:
        return f"the ranks finish their step and save; {now}"
    if not grace_s:
        return "the ranks are ended at once (--grace 0)"
    return (
        f"the ranks were asked to stop; those that still run in {format_duration(grace_s)} are ended (--grace); {now}"
    )


def _run_to_end(
    launch: Launch,
    plan: Plan,
    config: str,
    data: str = "",
    script_port: int | None = None,
    members: MakeMembership | None = None,
    expect_ranks: bool = False,
) -> None:
    """Launch and wait. Signals are only counted, because a handler may run in the middle of anything."""
    before = {signum: signal.signal(signum, launch.interrupt) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        with launch:
            launch.launch(plan, config, data, script_port, members, expect_ranks)
            launch.wait()
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


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

    rank_events = _tail_ranks(run, cluster)
    launch = Launch(run, cluster, log)
    _run_to_end(
        launch,
        lambda nodes, rendezvous: plan_ranks(config, folder_of, nodes, rendezvous, resume),
        config=hashlib.sha256(run.config.read_bytes()).hexdigest(),
        data=data,
        members=rules if config.launcher == "shoal" and members.on_loss == "go-on" else None,
        expect_ranks=True,
    )
    faults = _faults(rank_events)
    ends = drop_survived(launch.ends) if launch.is_elastic else launch.ends
    advice = out_of_memory_advice(load_config(run.config), launch.ranks)
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

    rank_events = _tail_ranks(run, cluster)
    launch = Launch(run, cluster, log)
    _run_to_end(
        launch,
        lambda nodes, rendezvous: plan_module(config, module, words, folder_of, nodes, rendezvous),
        config=hashlib.sha256("\0".join((module, *words)).encode()).hexdigest(),
    )
    if launch.interrupts:
        raise Interrupted("interrupted")
    if error := diagnose(launch.ends, _faults(rank_events), _log_tails(launch)):
        raise error
    _refuse_killed(launch.ends)


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
        lost = {end.node for end in launch.ends if end.lost}
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

    rank_events = _tail_ranks(run, cluster)
    launch = Launch(run, cluster, log, grace_s=job.grace_s)
    _run_to_end(
        launch,
        plan,
        config=hashlib.sha256("\0".join((*job.argv, session.text)).encode()).hexdigest(),
        script_port=job.port,
        members=rules if session.members.on_loss == "go-on" else None,
    )
    ends = drop_survived(launch.ends) if launch.is_elastic else launch.ends
    if launch.interrupts:
        killed = [rank for end in launch.ends if end.by_agent for rank in end.ranks]
        late = f"{rank_list(killed)} had to be ended" if killed else ""
        raise Interrupted("interrupted", why=late, fix=resume_script_advice(run))
    faults = script_faults(ends, lambda end: read_end(Path(end.log), 1000, 1 << 16), job.is_consequence)
    # An error of a session has an exit code of its own; an exception of the script ends a rank with 1.
    own_codes = {rank for end in ends if end.code in (UsageError.exit_code, ShoalError.exit_code) for rank in end.ranks}
    faults |= {rank: fault for rank, fault in _faults(rank_events).items() if rank in own_codes}
    tails = {command.name: read_end(run.log(command.node.name, command.name)) for command in launch.commands}
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
    if launch.ranks > 1 and launch.store_keys == 0 and not launch.noted_unjoined and not launch.is_elastic:
        log.write("note", text=no_rank_ever_joined(launch.ranks))
    return launch, None


def _group_failure(launch: Launch) -> ShoalError | None:
    """Return why agents ended their ranks: no rank had the state any more, or the process group could not form."""
    if any(end.code in (0, Interrupted.exit_code) for end in launch.ends):
        return None
    if launch.state_lost or not launch.broken:
        return launch.state_lost
    return RunFailed(
        f"the ranks did not meet: {launch.broken}",
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
    return f"{launch.stopped_by} asked all machines to stop: Ctrl-C or a signal there" if launch.stopped_by else ""


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
    return {command.name: read_log_tail(launch.run.log(command.node.name, command.name)) for command in launch.commands}


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
