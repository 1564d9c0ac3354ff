"""The agent of one node: `python -P -m shoal.agent.agent`, with its orders on standard input.

It meets the other agents, starts this node's ranks, serves their logs and keys, and records in its journal how they
end. It needs no terminal: when the launcher ends, the run continues. Its ranks die with it. In an elastic run it also
takes part in membership (`agent.membership`), and can be restarted on its machine from the orders it saved (`--again`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shlex
import signal
import socket
import sys
import traceback
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from pathlib import Path

from shoal.agent.invite_server import InviteServer
from shoal.agent.kv_store import KvStoreClient
from shoal.agent.local_ranks import LocalRank, LocalRanks
from shoal.agent.membership import AgentMembership, schedule_restart
from shoal.agent.mesh import AgentAddresses, BackgroundTasks, Mesh
from shoal.agent.rank_processes import RankEnvironment, RankExit, RankProcesses
from shoal.agent.sleep import awake, watch_for_sleep
from shoal.agent.unjoined_ranks import UnjoinedRanks
from shoal.cluster.node import listen_at
from shoal.control.agent_events import (
    AgentDone,
    AgentEvent,
    AgentNote,
    AgentReady,
    AgentRefused,
    NodeLost,
    PeerClosed,
    PeerEnded,
    RankEnded,
    RanksJoined,
    RanksStarted,
    ScriptStoreUsed,
    SessionBegan,
    StopAsked,
)
from shoal.control.channel import Message
from shoal.control.handshake import make_hello
from shoal.control.membership.settings import AGENT_POLL_S, FAILURE_GRACE_S, FOLDER_CHECK_S
from shoal.control.membership.types import read_ballot
from shoal.control.membership.vote_store import VoteFile
from shoal.control.orders import (
    END,
    STOP,
    GoOrder,
    MeetOrder,
    MembershipOrder,
    read_go,
    read_meet,
    read_orders,
    read_request_line,
    read_stdin,
    save_orders,
)
from shoal.control.processes import MESSENGER, SUPERVISOR, TEMPLATE, find_processes, remove_own_marks, restore_signals
from shoal.control.rank_env import MEASURE, TERM_IS_FOR_ALL, torch_caches
from shoal.control.rank_messages import RankReady, ToAgent
from shoal.errors import Interrupted, RunFailed, ShoalError
from shoal.events import EventLog
from shoal.host.facts import boot_clock, interface_for, this_machine_is_cpu_only
from shoal.host.memory import available_bytes
from shoal.host.topology import this_topology
from shoal.run_folder import RunFolder
from shoal.units import format_duration


class LauncherGone(Exception):
    """The launcher ended before it had sent what to start."""


class AgentJournal:
    """The journal of one agent: what it reports to the launcher, in the launcher's time."""

    def __init__(self, run: RunFolder, meet: MeetOrder) -> None:
        self._log = EventLog(run.journal(meet.node), meet.member)
        self._launch, self._launched_at = meet.launch, meet.launched_at
        self._met_at = boot_clock()

    def write(self, event: AgentEvent) -> None:
        self._log.write(event.kind, launch=self._launch, **event.to_fields())

    def note(self, text: str) -> None:
        self.write(AgentNote(text))

    def write_exit(self, ended: RankExit) -> None:
        limit_bytes = ended.memory_limit_bytes
        self.write(RankEnded(ended.start.name, ended.code, ended.by_agent, ended.out_of_memory, limit_bytes))

    def retry(self) -> None:
        """Write what could not be written before."""
        self._log.retry()

    def check(self, run: RunFolder) -> None:
        if self._log.is_removed():
            raise run.removed()

    def restart_clock(self) -> None:
        self._met_at = boot_clock()

    def since_met(self) -> float:
        return boot_clock() - self._met_at

    def now(self) -> float:
        """Return the launcher's clock at the launch plus this machine's seconds since: comparable between machines."""
        return self._launched_at + self.since_met()


class SavedOrders:
    """The orders of this agent, and their copy in the run folder with which it can be restarted."""

    def __init__(self, meet: MeetOrder) -> None:
        self.run = RunFolder(Path(meet.folder))
        self.meet = meet
        self.go: GoOrder | None = None
        self._version = 0  # of the addresses in the copy

    def save(self, go: GoOrder, version: int) -> None:
        self.go, self._version = go, version
        save_orders(self.run, self.meet, go)

    def follow(self, places: AgentAddresses) -> None:
        """Save the other agents' new addresses."""
        if self.go is not None and self._version != places.version:
            self.save(self.go.at(places.of_others(self.meet.member)), places.version)

    def remove(self) -> None:
        self.run.orders(self.meet.node).unlink(missing_ok=True)


class RunEnd:
    """Why and how far this run is ending: a failure, a request to stop, and the members whose ranks have ended."""

    def __init__(self) -> None:
        self.done: set[int] = set()
        self.signals = 0
        self.has_killed = False  # the ranks that did not stop in time
        self._failed_at: float | None = None
        self._stop_asked_at: float | None = None

    @property
    def has_failed(self) -> bool:
        return self._failed_at is not None

    @property
    def is_asked(self) -> bool:
        return self._stop_asked_at is not None

    def fail(self) -> None:
        self._failed_at = boot_clock() if self._failed_at is None else self._failed_at

    def ask(self) -> None:
        self._stop_asked_at = boot_clock() if self._stop_asked_at is None else self._stop_asked_at

    def has_failed_for(self, seconds: float) -> bool:
        return self._failed_at is not None and boot_clock() - self._failed_at > seconds

    def is_asked_for(self, seconds: float) -> bool:
        return self._stop_asked_at is not None and boot_clock() - self._stop_asked_at > seconds


class Agent:
    def __init__(self, meet: MeetOrder) -> None:
        self._orders = SavedOrders(meet)
        run = self._orders.run
        self._journal = AgentJournal(run, meet)
        self._mesh = Mesh(self._on_message, self._on_lost, self._journal.note)
        self._keys = KvStoreClient(meet.member, self._mesh.send, meet.token)
        self._ranks = RankProcesses(run, meet.node, self._journal.now, self._journal.note)
        self._environment = RankEnvironment(
            run, meet.node, self._ranks, self._keys, self._mesh.places, self._journal.write
        )
        self._membership: AgentMembership | None = None  # None: the run is not elastic
        # The ranks of a script, which may begin a session: the run is elastic from then on.
        self._script_ranks = LocalRanks((), 0)
        self._early_messages: list[tuple[int, Message]] = []  # about membership, of agents that began a moment before
        self._invites: InviteServer | None = None
        self._end = RunEnd()
        self._has_reported_started = False
        self._tasks = BackgroundTasks()

    async def work(self, lines: asyncio.StreamReader) -> int:
        async def begin() -> None:
            line = await lines.readline()
            if not line or read_request_line(line):
                raise LauncherGone
            self._tasks.spawn(self._read_requests(lines))
            await self._begin(read_go(line))

        return await self._work(begin())

    async def work_again(self, go: GoOrder) -> int:
        """Work after a restart of this agent: the others continued, and it asks to join them."""
        return await self._work(self._begin_joining(go))

    async def _work(self, begin: Coroutine[None, None, None]) -> int:
        try:
            self._handle_signals()
            await self._get_ready()
            await begin
            with awake(f"training {self._orders.run.path.name}"):
                await self._wait_for_end()
            # So that the launcher does not wait for a node that neither it nor this agent can see.
            for member in self._membership.shutdown.absent() if self._membership is not None else ():
                how = "it is gone, or has fallen silent"
                self._journal.write(NodeLost(member, self._mesh.places.name(member), how))
        except ShoalError as error:
            self._journal.write(AgentRefused(error))
            return error.exit_code
        except LauncherGone:
            self._journal.note("the launcher left before the run began")
            return Interrupted.exit_code
        except Exception as error:
            traceback.print_exc()
            bug = RunFailed(
                f"the agent on {self._orders.meet.node} failed: {type(error).__name__}: {error}",
                why="that is a bug in shoal, or the machine is in trouble",
                fix=f"its log has the traceback: agents/{self._orders.meet.node}.log in the run folder",
            )
            self._journal.write(AgentRefused(bug))
            return RunFailed.exit_code
        finally:
            begin.close()
            self._ranks.kill()
            for ended in self._ranks.reap():
                self._journal.write_exit(ended)
            self._ranks.close()
            self._environment.close()
            await self._mesh.close()
            if self._invites is not None:
                self._invites.close()
            # A node that was switched off or reaches no other node may rejoin later: it keeps its orders.
            if self._membership is not None and not self._membership.shutdown.may_return:
                self._orders.remove()
            self._journal.write(AgentDone(self._membership is not None and self._membership.shutdown.finished))
        return 0

    # The beginning.

    async def _get_ready(self) -> None:
        facts, listener = await get_ready(self._orders.meet, self._orders.run, self._mesh)
        if listener is not None:
            # At once: importing torch takes it seconds, and meanwhile the agents meet.
            self._environment.serve_script_store(listener)
        if self._orders.meet.expected is not None:
            # For the same reason.
            self._ranks.prepare(self._orders.meet.expected)
        self._orders.meet = replace(self._orders.meet, port=facts.port)
        self._journal.write(facts)
        if note := torch_caches().note:
            self._journal.note(note)

    async def _begin(self, go: GoOrder) -> None:
        if self._orders.meet.member >= len(go.roster):
            await self._begin_joining(go)
            return
        self._orders.go = go
        if go.members is not None and not go.is_script:
            self._orders.save(go, self._mesh.places.version)
            self._membership = self._make_membership(go, go.members)
        await self._mesh.meet(go.launch_places())
        if self._end.is_asked:
            raise _asked_too_early()
        self._journal.restart_clock()
        self._start_ranks(go)
        if self._membership is None:
            self._mesh.watch()
        else:
            self._membership.start_first_generation(go)
            await self._open_elastic(self._membership)

    async def _begin_joining(self, go: GoOrder) -> None:
        if go.members is None:
            raise RunFailed("this run ends when a machine is lost", why="members.on_loss is `end`")
        self._orders.save(go, self._mesh.places.version)
        self._membership = self._make_membership(go, go.members)
        self._membership.mark_begun()
        self._start_ranks(go)
        self._membership.join(go)
        await self._open_elastic(self._membership)

    async def _begin_session(self, max_ranks: int | None) -> None:
        """Make the run of a script elastic: a rank of it, here or elsewhere, begins a session.

        All agents begin at the same time, as in a training of shoal's own: an agent that waited until its own ranks
        have imported torch would count as silent.
        """
        go = self._orders.go
        if self._membership is not None or go is None or go.members is None or self._end.has_failed:
            return
        members = go.members
        if max_ranks is not None:
            settings = replace(members.settings, max_ranks=min(max_ranks, members.settings.max_ranks))
            members = replace(members, settings=settings)
        membership = self._membership = self._make_membership(go, members, self._script_ranks.ranks)
        self._orders.save(replace(go, members=members), self._mesh.places.version)
        self._journal.write(SessionBegan())
        await self._mesh.broadcast({"type": "session", "max_ranks": max_ranks})
        membership.start_first_generation(go)
        for member, message in self._early_messages:
            membership.received(member, message)
        self._early_messages.clear()
        await self._open_elastic(membership)

    def _on_script_rank(self, rank: LocalRank, message: ToAgent) -> None:
        """Handle a message of a script's rank: only a session sends any."""

        async def handle() -> None:
            if isinstance(message, RankReady):
                await self._begin_session(message.max_ranks)
            if self._membership is not None:
                self._membership.on_rank_message(rank, message)

        self._tasks.spawn(handle())

    def _awaits_session(self) -> bool:
        """Whether the ranks of a script start and are about to begin a session: a loss does not end the run."""
        members = self._orders.go.members if self._orders.go else None
        is_ending = self._end.has_failed or self._end.is_asked
        return members is not None and members.from_start and self._membership is None and not is_ending

    async def _open_elastic(self, membership: AgentMembership) -> None:
        """Watch for a suspend of this machine, and accept requests to invite nodes, where the disk has sockets."""
        self._tasks.spawn(watch_for_sleep(membership.suspend, membership.wake))
        node = self._orders.meet.node
        self._invites = InviteServer(self._orders.run.invite_socket(node), membership, self._mesh.places)
        try:
            await self._invites.open()
        except OSError as error:
            self._journal.note(f"no new machine can be invited on {node}: {error.strerror}")

    def _make_membership(
        self, go: GoOrder, members: MembershipOrder, ranks: Sequence[LocalRank] | None = None
    ) -> AgentMembership:
        meet = self._orders.meet
        votes = VoteFile(self._orders.run.votes(meet.node))
        return AgentMembership(meet.member, go, members, votes, self._mesh, self._environment, ranks)

    def _start_ranks(self, go: GoOrder) -> None:
        if self._membership is not None:
            self._membership.start(self._membership.ranks.ranks)
        elif go.members is not None:
            self._script_ranks = LocalRanks([LocalRank(start) for start in go.starts], go.members.restarts)
            for rank in self._script_ranks.ranks:
                self._environment.start_elastic(rank, self._on_script_rank)
        else:
            has_own_folder = not any(map(self._environment.shares_folder_with, range(self._orders.meet.member)))
            for start in go.starts:
                self._environment.start(start, has_own_folder)
        self._unjoined = UnjoinedRanks(
            go.starts,
            self._report_joined,
            lambda: self._journal.write(ScriptStoreUsed()),
        )
        self._report_started()

    def _report_started(self) -> None:
        """Record the ranks' processes, once all of them exist."""
        processes = self._ranks.alive()
        if not self._has_reported_started and all(processes.values()):
            self._has_reported_started = True
            self._journal.write(RanksStarted(processes))

    def _report_joined(self, met: list[int], missing: list[int], after_s: float) -> None:
        # A session writes its configuration when it is made; its ranks meet when the loop begins, through the agents.
        go = self._orders.go
        is_measured = any(MEASURE in start.argv for start in (go.starts if go else ()))
        if met or is_measured or not self._orders.run.config.is_file():
            self._journal.write(RanksJoined(met, missing, after_s))

    # The main loop.

    async def _wait_for_end(self) -> None:
        """Wait until every member's ranks have ended: a rank elsewhere may still need this agent's keys."""
        checked_at = boot_clock()
        while not self._is_over():
            if boot_clock() - checked_at > FOLDER_CHECK_S:
                checked_at = boot_clock()
                self._journal.check(self._orders.run)
            for ended in self._ranks.reap():
                await self._on_exit(ended)
            if self._end.has_failed_for(FAILURE_GRACE_S):
                self._ranks.kill()
            self._kill_late_ranks()
            if self._membership is None:
                self._unjoined.look(self._ranks.alive(), self._journal.since_met())
                for rank in self._script_ranks.due_restarts(boot_clock()):
                    self._environment.start_elastic(rank, self._on_script_rank)
            self._environment.check_script_store()
            self._report_started()
            if self._membership is not None:
                # Nodes return at other addresses, and the last one to leave must find one of them again.
                with contextlib.suppress(OSError):
                    self._orders.follow(self._mesh.places)
                self._membership.tick()
                if self._membership.shutdown.has_failed and not self._end.has_failed:
                    # An agent that gives up because it reaches no other must not end the run of those it may yet reach.
                    await self._fail(report=not self._membership.shutdown.may_return)
            await self._report_when_done()
            self._journal.retry()
            await asyncio.sleep(AGENT_POLL_S)

    def _kill_late_ranks(self) -> None:
        """Kill ranks of a script that ignore the signal or hang while they handle it."""
        grace_s = self._orders.go.grace_s if self._orders.go else None
        if grace_s is None or self._end.has_killed or not self._end.is_asked_for(grace_s):
            return
        if late := self._ranks.alive():
            names = ", ".join(sorted(name.replace("-", " ") for name in late))
            self._journal.note(f"{names} did not stop within {format_duration(grace_s)}: ended now")
            self._ranks.kill()
        self._end.has_killed = True

    def _is_over(self) -> bool:
        if self._membership is not None:
            return self._membership.is_over()
        return self._orders.go is not None and len(self._end.done) == len(self._orders.go.roster)

    async def _report_when_done(self) -> None:
        ranks = self._script_ranks if self._membership is None else self._membership.ranks
        me = self._orders.meet.member
        if not self._ranks.alive() and ranks.have_ended() and me not in self._end.done:
            self._ranks.close()
            self._end.done.add(me)
            finished = self._membership is not None and self._membership.shutdown.finished
            await self._mesh.broadcast({"type": "done", "finished": finished})

    async def _on_exit(self, ended: RankExit) -> None:
        self._journal.write_exit(ended)
        if self._membership is not None and self._membership.on_rank_exit(ended):
            return
        if self._script_ranks.ranks:
            rank = self._script_ranks.named(ended.start.name)
            rank.end()
            may_restart = ended.code < 0 and not ended.by_agent and self._awaits_session()
            if may_restart and schedule_restart(rank, self._script_ranks, self._environment):
                return
        # When a script is asked to stop, one rank ends by the signal while another still saves.
        is_stopping = self._end.is_asked and not ended.start.store
        if ended.code not in (0, Interrupted.exit_code) and not is_stopping:
            await self._fail()

    # Requests to stop.

    async def _read_requests(self, lines: asyncio.StreamReader) -> None:
        """Obey the launcher. The end of the lines is the end of its connection, never of the run."""
        while line := await lines.readline():
            request = read_request_line(line)
            if request in (STOP, END):
                await self._stop_everywhere(at_once=request == END)

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._on_interrupt)
        loop.add_signal_handler(signal.SIGTERM, self._on_terminate)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def _on_interrupt(self) -> None:
        """Stop; the second signal ends everything at once, whatever peers requested before the first."""
        self._end.signals += 1
        self._tasks.spawn(self._stop_everywhere(at_once=self._end.signals > 1))

    def _on_terminate(self) -> None:
        """Leave the run: a machine that is switched off sends SIGTERM to all its processes, and the others train on.

        A scheduler sends it to all nodes of a job at once, which then save together.
        """
        is_for_all = TERM_IS_FOR_ALL in os.environ
        if is_for_all or self._membership is None or self._end.signals or not self._membership.leave():
            self._on_interrupt()

    async def _stop_everywhere(self, at_once: bool) -> None:
        self._journal.write(StopAsked(at_once))
        await self._stop(at_once)
        await self._mesh.broadcast({"type": "stopping", "at_once": at_once})

    async def _stop(self, at_once: bool) -> None:
        if self._membership is not None:
            self._membership.begin_shutdown()
        if at_once:
            self._ranks.kill()
        elif not self._end.is_asked:
            self._ranks.ask_to_stop()
        self._end.ask()
        await self._mesh.give_up(_asked_too_early())

    # From the other agents.

    async def _on_message(self, member: int, message: Message) -> None:
        match message:
            case {"type": str(kind)} if kind.startswith("member-"):
                if self._membership is not None:
                    self._membership.received(member, message)
                else:
                    self._early_messages.append((member, message))
            case {"type": "session"}:
                max_ranks = message.get("max_ranks")
                await self._begin_session(max_ranks if isinstance(max_ranks, int) else None)
            case {"type": "timed-out", "generation": str(generation)}:
                # As all that comes from another machine, it may be anything.
                with contextlib.suppress(ValueError):
                    if self._membership is not None:
                        self._membership.record_timeout(read_ballot(generation))
            case {"type": "failed"}:
                self._record_failure()
            case {"type": "stopping", "at_once": at_once}:
                await self._stop(bool(at_once))
            case {"type": "done"}:
                self._end.done.add(member)
                if self._membership is not None:
                    self._membership.shutdown.record_done(member, bool(message.get("finished")), boot_clock())
                self._journal.write(PeerEnded(self._mesh.places.name(member), failed=self._end.has_failed))
            case {"type": "ask" | "answer"}:
                self._keys.on_message(member, message)

    def _on_lost(self, member: int, how: str) -> None:
        self._keys.lose(member, how)
        if self._membership is not None and self._membership.closed(member):
            self._journal.write(PeerClosed(self._mesh.places.name(member), how))
            return
        if member in self._end.done:
            return
        self._end.done.add(member)
        if self._awaits_session():
            self._journal.write(PeerClosed(self._mesh.places.name(member), how))
            return
        self._journal.write(NodeLost(member, self._mesh.places.name(member), how))
        self._record_failure()

    def _record_failure(self) -> None:
        if self._membership is not None:
            self._membership.begin_shutdown(failed=True)
        self._end.fail()

    async def _fail(self, report: bool = True) -> None:
        self._record_failure()
        if report:
            await self._mesh.broadcast({"type": "failed"})


def _asked_too_early() -> Interrupted:
    return Interrupted("asked to stop before the ranks were started")


async def get_ready(orders: MeetOrder, run: RunFolder, mesh: Mesh) -> tuple[AgentReady, socket.socket | None]:
    """Check this machine and begin to listen.

    Return the facts that the launcher needs, and the socket at which the store of a user's script will be served.
    """
    refuse_leftovers(run.path, orders.node, is_new=orders.life == 0)
    # Unsafe cache folders are refused here, before any rank is started.
    torch_caches()
    interface = interface_for(orders.address, orders.interface, orders.node)
    mark = secrets.token_hex(16)
    me = make_hello(orders.member, orders.node, mark, orders.config, orders.data, orders.life)
    port = await mesh.listen(orders.address, me, orders.token, orders.port)
    listener = None if orders.script_port is None else listen_at(orders.address, orders.script_port)
    facts = AgentReady(
        node=orders.node,
        address=orders.address,
        agent_mark=mark,
        pid=os.getpid(),
        port=port,
        script_port=None if listener is None else listener.getsockname()[1],
        interface=interface,
        cores=this_topology().usable,
        core_speeds=this_topology().core_speeds,
        cpu_only=this_machine_is_cpu_only(),
        free_memory_bytes=available_bytes(with_swap=True),
        incarnation=orders.life,
        highest_generation=VoteFile(run.votes(orders.node)).load().highest,
    )
    return facts, listener


def refuse_leftovers(run: Path, node: str, is_new: bool) -> None:
    """Refuse to start beside ranks of an earlier launch, which still write into this folder.

    A restarted agent (`is_new` false) ignores those of other emulated nodes, which belong to the same run. The template
    of an emulated node may be there before its agent.
    """
    others = [process for process in find_processes(run) if process.part not in (SUPERVISOR, MESSENGER, TEMPLATE)]
    left = [process for process in others if is_new or process.node == node]
    if left:
        pids = ", ".join(str(process.pid) for process in left)
        raise RunFailed(
            f"an earlier launch of {run} still works on {node}: process {pids}",
            why="its supervisor was killed, and its agent goes on",
            fix=f"end it first: shoal stop {shlex.quote(str(run))}",
        )


async def _main(argv: list[str]) -> int:
    remove_own_marks()
    if argv[:1] == ["--again"]:
        meet, go = read_orders(RunFolder(Path(argv[1])), argv[2])
        return await Agent(meet).work_again(go)
    lines = await read_stdin()
    first = await lines.readline()
    if not first:
        return Interrupted.exit_code
    return await Agent(read_meet(first)).work(lines)


if __name__ == "__main__":
    restore_signals()
    sys.exit(asyncio.run(_main(sys.argv[1:])))
