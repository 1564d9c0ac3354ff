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
from shoal.agent.mesh import BackgroundTasks, Mesh
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
from shoal.control.membership.vote_store import VoteFile
from shoal.control.orders import (
    END,
    STOP,
    GoOrder,
    MeetOrder,
    MembershipOrder,
    read_go,
    read_meet,
    read_request_line,
    read_stdin,
    to_line,
)
from shoal.control.processes import MESSENGER, SUPERVISOR, TEMPLATE, find_processes, remove_own_marks, restore_signals
from shoal.control.rank_env import MEASURE, torch_caches
from shoal.control.rank_messages import RankReady, ToAgent
from shoal.errors import Interrupted, RunFailed, ShoalError
from shoal.events import EventLog
from shoal.host.facts import boot_clock, interface_for, this_machine_is_cpu_only
from shoal.host.topology import this_topology
from shoal.run_folder import RunFolder, write_durably
from shoal.units import format_duration


class LauncherGone(Exception):
    """The launcher ended before it had sent what to start."""


class Agent:
    def __init__(self, meet: MeetOrder) -> None:
        self._orders = meet
        self._run = RunFolder(Path(meet.folder))
        self._journal = EventLog(self._run.journal(meet.node), meet.member)
        self._mesh = Mesh(self._on_message, self._on_lost, self._note)
        self._keys = KvStoreClient(meet.member, self._mesh.send, meet.token)
        self._ranks = RankProcesses(self._run, meet.node, self._now, self._note)
        self._environment = RankEnvironment(
            self._run, meet.node, self._ranks, self._keys, self._mesh.places, self._write
        )
        self._membership: AgentMembership | None = None  # None: the run is not elastic
        # The ranks of a script, which may begin a session: the run is elastic from then on.
        self._script_ranks = LocalRanks((), 0)
        self._early_messages: list[tuple[int, Message]] = []  # about membership, of agents that began a moment before
        self._invites: InviteServer | None = None
        self._met_at = boot_clock()
        self._failed_at: float | None = None
        self._go: GoOrder | None = None
        self._saved_version = 0  # of the addresses in the saved orders
        self._signals = 0
        self._stop_asked_at: float | None = None
        self._grace_s: float | None = None
        self._has_reported_started = self._has_reported_done = False
        self._done: set[int] = set()  # members whose ranks have ended
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
            with awake(f"training {self._run.path.name}"):
                await self._wait_for_end()
            # So that the launcher does not wait for a node that neither it nor this agent can see.
            for member in self._membership.shutdown.absent() if self._membership is not None else ():
                how = "it is gone, or has fallen silent"
                self._write(NodeLost(member, self._mesh.places.name(member), how))
        except ShoalError as error:
            self._write(AgentRefused(error))
            return error.exit_code
        except LauncherGone:
            self._note("the launcher left before the run began")
            return Interrupted.exit_code
        except Exception as error:
            traceback.print_exc()
            bug = RunFailed(
                f"the agent on {self._orders.node} failed: {type(error).__name__}: {error}",
                why="that is a bug in shoal, or the machine is in trouble",
                fix=f"its log has the traceback: agents/{self._orders.node}.log in the run folder",
            )
            self._write(AgentRefused(bug))
            return RunFailed.exit_code
        finally:
            begin.close()
            self._ranks.kill()
            for ended in self._ranks.reap():
                self._report_exit(ended)
            self._ranks.close()
            self._environment.close()
            await self._mesh.close()
            if self._invites is not None:
                self._invites.close()
            # A node that was switched off or reaches no other node may rejoin later: it keeps its orders.
            if self._membership is not None and not self._membership.shutdown.may_return:
                self._run.orders(self._orders.node).unlink(missing_ok=True)
            self._write(AgentDone(self._has_finished()))
        return 0

    # The beginning.

    async def _get_ready(self) -> None:
        facts, listener = await get_ready(self._orders, self._run, self._mesh)
        if listener is not None:
            # At once: importing torch takes it seconds, and meanwhile the agents meet.
            self._environment.serve_script_store(listener)
        if self._orders.expected is not None:
            # For the same reason.
            self._ranks.prepare(self._orders.expected)
        self._orders = replace(self._orders, port=facts.port)
        self._write(facts)
        if note := torch_caches().note:
            self._note(note)

    async def _begin(self, go: GoOrder) -> None:
        if self._orders.member >= len(go.roster):
            await self._begin_joining(go)
            return
        self._roster = dict(enumerate(go.roster))
        self._grace_s = go.grace_s
        self._go = go
        if go.members is not None and not go.is_script:
            self._save_orders(go)
            self._membership = self._make_membership(go, go.members)
        await self._mesh.meet(self._roster)
        if self._stop_asked_at is not None:
            raise _asked_too_early()
        self._met_at = boot_clock()
        self._start_ranks(go)
        if self._membership is None:
            self._mesh.watch()
        else:
            self._mesh.keep_connected(
                self._roster, self._membership.connected, self._membership.shutdown.silent_after_s
            )
            self._membership.start_first_generation()
            await self._open_elastic(self._membership)

    async def _begin_joining(self, go: GoOrder) -> None:
        if go.members is None:
            raise RunFailed("this run ends when a machine is lost", why="members.on_loss is `end`")
        self._roster = dict(enumerate(go.roster))
        self._save_orders(go)
        self._membership = self._make_membership(go, go.members)
        self._membership.mark_begun()
        self._start_ranks(go)
        self._mesh.keep_connected(
            go.places(), self._membership.connected, self._membership.shutdown.silent_after_s, dial_all=True
        )
        self._membership.join()
        await self._open_elastic(self._membership)

    async def _begin_session(self, max_ranks: int | None) -> None:
        """Make the run of a script elastic: a rank of it, here or elsewhere, begins a session.

        All agents begin at the same time, as in a training of shoal's own: an agent that waited until its own ranks
        have imported torch would count as silent.
        """
        go = self._go
        if self._membership is not None or go is None or go.members is None or self._failed_at is not None:
            return
        members = go.members
        if max_ranks is not None:
            settings = replace(members.settings, max_ranks=min(max_ranks, members.settings.max_ranks))
            members = replace(members, settings=settings)
        membership = self._membership = self._make_membership(go, members, self._script_ranks.ranks)
        self._save_orders(replace(go, members=members))
        self._write(SessionBegan())
        await self._mesh.broadcast({"type": "session", "max_ranks": max_ranks})
        self._mesh.keep_connected(self._roster, membership.connected, membership.shutdown.silent_after_s)
        membership.start_first_generation()
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
        members = self._go.members if self._go else None
        is_ending = self._failed_at is not None or self._stop_asked_at is not None
        return members is not None and members.from_start and self._membership is None and not is_ending

    async def _open_elastic(self, membership: AgentMembership) -> None:
        """Watch for a suspend of this machine, and accept requests to invite nodes, where the disk has sockets."""
        self._tasks.spawn(watch_for_sleep(membership.suspend, membership.wake))
        self._invites = InviteServer(self._run.invite_socket(self._orders.node), membership, self._mesh.places)
        try:
            await self._invites.open()
        except OSError as error:
            self._note(f"no new machine can be invited on {self._orders.node}: {error.strerror}")

    def _make_membership(
        self, go: GoOrder, members: MembershipOrder, ranks: Sequence[LocalRank] | None = None
    ) -> AgentMembership:
        votes = VoteFile(self._run.votes(self._orders.node))
        me = self._orders.member
        return AgentMembership(me, go, members, votes, self._mesh, self._keys, self._environment, ranks)

    def _save_orders(self, go: GoOrder) -> None:
        self._go, self._saved_version = go, self._mesh.places.version
        save_orders(self._run, self._orders, go)

    def _start_ranks(self, go: GoOrder) -> None:
        if self._membership is not None:
            self._membership.start(self._membership.ranks.ranks)
        elif go.members is not None:
            self._script_ranks = LocalRanks([LocalRank(start) for start in go.starts], go.members.restarts)
            for rank in self._script_ranks.ranks:
                self._environment.start_elastic(rank, self._on_script_rank)
        else:
            has_own_folder = not any(map(self._environment.shares_folder_with, range(self._orders.member)))
            for start in go.starts:
                self._environment.start(start, has_own_folder)
        self._unjoined = UnjoinedRanks(
            go.starts,
            self._report_joined,
            lambda: self._write(ScriptStoreUsed()),
        )
        self._report_started()

    def _report_started(self) -> None:
        """Record the ranks' processes, once all of them exist."""
        processes = self._ranks.alive()
        if not self._has_reported_started and all(processes.values()):
            self._has_reported_started = True
            self._write(RanksStarted(processes))

    def _report_joined(self, met: list[int], missing: list[int], after_s: float) -> None:
        # A session writes its configuration when it is made; its ranks meet when the loop begins, through the agents.
        is_measured = any(MEASURE in start.argv for start in (self._go.starts if self._go else ()))
        if met or is_measured or not self._run.config.is_file():
            self._write(RanksJoined(met, missing, after_s))

    # The main loop.

    async def _wait_for_end(self) -> None:
        """Wait until every member's ranks have ended: a rank elsewhere may still need this agent's keys."""
        checked_at = boot_clock()
        while not self._is_over():
            if boot_clock() - checked_at > FOLDER_CHECK_S:
                checked_at = boot_clock()
                if self._journal.is_removed():
                    raise self._run.removed()
            for ended in self._ranks.reap():
                await self._on_exit(ended)
            if self._failed_at is not None and boot_clock() - self._failed_at > FAILURE_GRACE_S:
                self._ranks.kill()
            self._kill_late_ranks()
            if self._membership is None:
                self._unjoined.look(self._ranks.alive(), boot_clock() - self._met_at)
                for rank in self._script_ranks.due_restarts(boot_clock()):
                    self._environment.start_elastic(rank, self._on_script_rank)
            self._environment.check_script_store()
            self._report_started()
            if self._membership is not None and self._go and self._saved_version != self._mesh.places.version:
                # Nodes return at other addresses, and the last one to leave must find one of them again.
                with contextlib.suppress(OSError):
                    self._save_orders(self._go.at(self._mesh.places.of_others(self._orders.member)))
            if self._membership is not None:
                self._membership.tick()
                if self._membership.shutdown.has_failed and self._failed_at is None:
                    # An agent that gives up because it reaches no other must not end the run of those it may yet reach.
                    await self._fail(report=not self._membership.shutdown.may_return)
            await self._report_when_done()
            self._journal.retry()
            await asyncio.sleep(AGENT_POLL_S)

    def _kill_late_ranks(self) -> None:
        """Kill ranks of a script that ignore the signal or hang while they handle it."""
        if self._stop_asked_at is None or self._grace_s is None or boot_clock() - self._stop_asked_at <= self._grace_s:
            return
        if late := self._ranks.alive():
            names = ", ".join(sorted(name.replace("-", " ") for name in late))
            self._note(f"{names} did not stop within {format_duration(self._grace_s)}: ended now")
            self._ranks.kill()
        self._grace_s = None

    def _is_over(self) -> bool:
        return len(self._done) == len(self._roster) if self._membership is None else self._membership.is_over()

    async def _report_when_done(self) -> None:
        ranks = self._script_ranks if self._membership is None else self._membership.ranks
        if not self._ranks.alive() and ranks.have_ended() and not self._has_reported_done:
            self._has_reported_done = True
            self._ranks.close()
            self._done.add(self._orders.member)
            await self._mesh.broadcast({"type": "done", "finished": self._has_finished()})

    def _has_finished(self) -> bool:
        return self._membership is not None and self._membership.shutdown.finished

    async def _on_exit(self, ended: RankExit) -> None:
        self._report_exit(ended)
        if self._membership is not None and self._membership.on_rank_exit(ended):
            return
        if self._script_ranks.ranks:
            rank = self._script_ranks.named(ended.start.name)
            rank.end()
            may_restart = ended.code < 0 and not ended.by_agent and self._awaits_session()
            if may_restart and schedule_restart(rank, self._script_ranks, self._environment):
                return
        # When a script is asked to stop, one rank ends by the signal while another still saves.
        is_stopping = self._stop_asked_at is not None and not ended.start.store
        if ended.code not in (0, Interrupted.exit_code) and not is_stopping:
            await self._fail()

    def _report_exit(self, ended: RankExit) -> None:
        self._write(RankEnded(ended.start.name, ended.code, ended.by_agent, ended.out_of_memory))

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
        self._signals += 1
        self._tasks.spawn(self._stop_everywhere(at_once=self._signals > 1))

    def _on_terminate(self) -> None:
        """Leave the run: a machine that is switched off sends SIGTERM to all its processes, and the others train on."""
        if self._membership is None or self._signals or not self._membership.leave():
            self._on_interrupt()

    async def _stop_everywhere(self, at_once: bool) -> None:
        self._write(StopAsked(at_once))
        await self._stop(at_once)
        await self._mesh.broadcast({"type": "stopping", "at_once": at_once})

    async def _stop(self, at_once: bool) -> None:
        if self._membership is not None:
            self._membership.begin_shutdown()
        if at_once:
            self._ranks.kill()
        elif self._stop_asked_at is None:
            self._ranks.ask_to_stop()
        self._stop_asked_at = boot_clock() if self._stop_asked_at is None else self._stop_asked_at
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
            case {"type": "failed"}:
                self._record_failure()
            case {"type": "stopping", "at_once": at_once}:
                await self._stop(bool(at_once))
            case {"type": "done"}:
                self._done.add(member)
                if self._membership is not None:
                    self._membership.shutdown.record_done(member, bool(message.get("finished")), boot_clock())
                self._write(PeerEnded(self._mesh.places.name(member), failed=self._failed_at is not None))
            case {"type": "ask" | "answer"}:
                self._keys.on_message(member, message)

    def _on_lost(self, member: int, how: str) -> None:
        self._keys.lose(member, how)
        if self._membership is not None and self._membership.closed(member):
            self._write(PeerClosed(self._mesh.places.name(member), how))
            return
        if member in self._done:
            return
        self._done.add(member)
        if self._awaits_session():
            self._write(PeerClosed(self._mesh.places.name(member), how))
            return
        self._write(NodeLost(member, self._mesh.places.name(member), how))
        self._record_failure()

    def _record_failure(self) -> None:
        if self._membership is not None:
            self._membership.begin_shutdown(failed=True)
        if self._failed_at is None:
            self._failed_at = boot_clock()

    async def _fail(self, report: bool = True) -> None:
        self._record_failure()
        if report:
            await self._mesh.broadcast({"type": "failed"})

    def _write(self, event: AgentEvent) -> None:
        self._journal.write(event.kind, launch=self._orders.launch, **event.to_fields())

    def _note(self, text: str) -> None:
        self._write(AgentNote(text))

    def _now(self) -> float:
        """Return the launcher's clock at the launch plus this machine's seconds since: comparable between machines."""
        return self._orders.launched_at + boot_clock() - self._met_at


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


def save_orders(run: RunFolder, meet: MeetOrder, go: GoOrder) -> None:
    """Write the orders with which this agent can be restarted: atomically, and readable only by their owner, because
    they contain the run's token."""
    path = run.orders(meet.node)
    write_durably(path, to_line(meet) + to_line(go), path.with_name(f".{path.name}.new"), 0o600)


def read_orders(run: RunFolder, node: str) -> tuple[MeetOrder, GoOrder]:
    """Read the saved orders for the agent's next life."""
    try:
        first, second = run.orders(node).read_bytes().splitlines()
        meet, go = read_meet(first), read_go(second)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunFailed(
            f"{node} cannot take part in {run.path} again: {run.orders(node)} cannot be read",
            why=getattr(error, "strerror", None) or "its agent has ended as it should, or the file is damaged",
            fix="if the run goes on elsewhere, let this machine join as a new one: shoal host RUN, there",
        ) from None
    return replace(meet, life=meet.life + 1), go


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
