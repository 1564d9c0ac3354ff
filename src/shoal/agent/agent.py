"""The agent: one a node. `python -P -m shoal.agent.agent`, with its orders on standard input.

It meets the other agents, starts this node's ranks, keeps their logs and their keys, and writes into its journal what
becomes of them. It needs nobody's terminal: the launcher may go, and the run goes on. Its ranks die with it. In a run
whose machines come and go it also has a council (`launch.elastic`), and can be started again (`launch.again`).
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
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.agent.invite import InviteServer
from shoal.agent.kv_store import KvStoreClient
from shoal.agent.membership import AgentMembership
from shoal.agent.mesh import Mesh
from shoal.agent.rank_processes import RankEnvironment, RankExit, RankProcesses
from shoal.agent.sleep import awake, watch_for_sleep
from shoal.agent.unjoined_ranks import UnjoinedRanks
from shoal.cluster.node import listen_at
from shoal.control.channel import Message
from shoal.control.handshake import introduce
from shoal.control.membership.vote_store import VoteFile
from shoal.control.orders import (
    END,
    STOP,
    GoOrder,
    MeetOrder,
    MembershipOrder,
    read_go,
    read_meet,
    read_stdin,
    read_wish,
    to_line,
)
from shoal.control.processes import MESSENGER, SUPERVISOR, find, restore_signals, unmark
from shoal.control.rank_env import torch_caches
from shoal.errors import Interrupted, RunFailed, ShoalError
from shoal.events import EventLog
from shoal.host.facts import boot_clock, interface_for, physical_cores, this_machine_is_cpu_only
from shoal.run_folder import RunFolder, write_durably
from shoal.units import format_duration

# SECTION launch/ready
# An agent before it has met anybody: it looks at its machine, begins to listen, and says what others must know.


async def get_ready(orders: MeetOrder, run: RunFolder, mesh: Mesh) -> tuple[dict[str, Any], socket.socket | None]:
    """What the launcher is told, and the socket at which the store of a user's script will be served."""
    refuse_leftovers(run.path, orders.node, is_new=orders.life == 0)
    # Refused here, before any rank is started.
    torch_caches()
    interface = interface_for(orders.address, orders.interface, orders.node)
    mark = secrets.token_hex(16)
    me = introduce(orders.member, orders.node, mark, orders.config, orders.data, orders.life)
    port = await mesh.listen(orders.address, me, orders.token, orders.port)
    held = None if orders.script_port is None else listen_at(orders.address, orders.script_port)
    said = {
        "node": orders.node,
        "mark": mark,
        "pid": os.getpid(),
        "port": port,
        "script_port": held and held.getsockname()[1],
        "interface": interface,
        "cores": physical_cores(),
        "cpu_only": this_machine_is_cpu_only(),
        "life": orders.life,
        "highest": VoteFile(run.votes(orders.node)).load().highest,
    }
    return said, held


def refuse_leftovers(run: Path, node: str, is_new: bool) -> None:
    """Ranks of an earlier launch whose supervisor was killed still write into this very folder. Whoever comes back
    finds
    those of other emulated nodes there, as it should."""
    others = [found for found in find(run) if found.part not in (SUPERVISOR, MESSENGER)]
    left = [found for found in others if is_new or found.node == node]
    if left:
        raise RunFailed(
            f"an earlier launch of {run} still works on {node}: process {', '.join(str(found.pid) for found in left)}",
            why="whoever kept it was killed, and its agent goes on",
            fix=f"end it first: shoal stop {shlex.quote(str(run))}",
        )


def as_bug(error: Exception, node: str) -> RunFailed:
    return RunFailed(
        f"the agent on {node} failed: {type(error).__name__}: {error}",
        why="that is a bug in shoal, or the machine is in trouble",
        fix=f"its log has the traceback: agents/{node}.log in the run folder",
    )


# SECTION launch/again
# An agent's orders on disk, while it works: what it takes to start it again on its machine after its end.


def keep_orders(run: RunFolder, meet: MeetOrder, go: GoOrder) -> None:
    """Readable by its owner alone: it has the run's token. Whole or not at all, and on disk before it is relied on."""
    path = run.orders(meet.node)
    write_durably(path, to_line(meet) + to_line(go), path.with_name(f".{path.name}.new"), 0o600)


def read_orders(run: RunFolder, node: str) -> tuple[MeetOrder, GoOrder]:
    """For the agent's next life."""
    try:
        first, second = run.orders(node).read_bytes().splitlines()
        meet, go = read_meet(first), read_go(second)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunFailed(
            f"{node} cannot take part in {run.path} again: {run.orders(node)} cannot be read",
            why=getattr(error, "strerror", None) or "its agent has ended as it should, or the file is damaged",
            fix="if the run goes on elsewhere, let this machine in as a new one: shoal host RUN, there",
        ) from None
    return replace(meet, life=meet.life + 1), go


def forget_orders(run: RunFolder, node: str) -> None:
    """An agent that ends by itself has nothing to come back to."""
    run.orders(node).unlink(missing_ok=True)


POLL_S = 0.05
# A rank that lost its peer gets this long to say so in its log before it is ended.
GRACE_AFTER_FAILURE_S = 3.0
# How often the agent checks that its run folder still exists.
FOLDER_CHECK_S = 1.0


class Agent:
    def __init__(self, meet: MeetOrder) -> None:
        self._orders = meet
        self._run = RunFolder(Path(meet.folder))
        self._journal = EventLog(self._run.journal(meet.node), meet.member)
        self._mesh = Mesh(self._on_message, self._on_lost, self._note)
        self._keys = KvStoreClient(meet.member, self._mesh.tell, meet.token)
        self._ranks = RankProcesses(self._run, meet.node, self._now)
        self._workplace = RankEnvironment(self._run, meet.node, self._ranks, self._keys, self._mesh.places, self._write)
        self._elastic: AgentMembership | None = None
        self._sponsor: InviteServer | None = None
        self._met_at = boot_clock()
        self._failed_at: float | None = None
        self._go: GoOrder | None = None
        self._kept = 0
        self._signals = 0
        self._asked_at: float | None = None
        self._grace_s: float | None = None
        self._told = False
        self._over: set[int] = set()
        self._serving: set[asyncio.Task[None]] = set()

    async def work(self, lines: asyncio.StreamReader) -> int:
        async def begin() -> None:
            line = await lines.readline()
            if not line or read_wish(line):
                raise LauncherGone
            self._keep(self._obey(lines))
            await self._begin(read_go(line))

        return await self._live(begin())

    async def work_again(self, go: GoOrder) -> int:
        """After our own end: the others went on, and let us in once we have met."""
        return await self._live(self._begin_as_guest(go))

    async def _live(self, begin: Coroutine[None, None, None]) -> int:
        try:
            self._listen_for_signals()
            await self._get_ready()
            await begin
            with awake(f"training {self._run.path.name}"):
                await self._see_through()
            self._name_the_absent()
        except ShoalError as error:
            self._write("refused", **error.as_dict())
            return error.exit_code
        except LauncherGone:
            self._write("note", text="the launcher left before the run began")
            return Interrupted.exit_code
        except Exception as error:
            traceback.print_exc()
            self._write("refused", **as_bug(error, self._orders.node).as_dict())
            return RunFailed.exit_code
        finally:
            begin.close()
            self._ranks.kill()
            for ended in self._ranks.reap():
                self._report(ended)
            self._workplace.close()
            await self._mesh.close()
            if self._sponsor is not None:
                self._sponsor.close()
            # A laptop that woke where nobody of the run is may be taken home yet; what is switched off, switched on.
            if self._elastic is not None and not self._elastic.may_return:
                forget_orders(self._run, self._orders.node)
            self._write("done", finished=self._has_finished())
        return 0

    def _keep_orders(self, go: GoOrder) -> None:
        """What it takes to start us again."""
        self._go, self._kept = go, self._mesh.places.version
        keep_orders(self._run, self._orders, go)

    def _keep_places(self) -> None:
        """Machines come back elsewhere, and the last that goes away must find one of them."""
        if self._go is not None and self._kept != self._mesh.places.version:
            with contextlib.suppress(OSError):
                self._keep_orders(self._go.at(self._mesh.places.of_others(self._orders.member)))

    async def _get_ready(self) -> None:
        said, listener = await get_ready(self._orders, self._run, self._mesh)
        if listener is not None:
            # At once: importing torch takes it seconds, and meanwhile the agents meet.
            self._workplace.serve_script_store(listener)
        self._orders = replace(self._orders, port=said["port"])
        self._write("ready", **said)
        if note := torch_caches().note:
            self._note(note)

    async def _begin(self, go: GoOrder) -> None:
        if self._orders.member >= len(go.roster):
            await self._begin_as_guest(go)
            return
        self._roster = dict(enumerate(go.roster))
        self._grace_s = go.grace_s
        if go.members is not None:
            self._keep_orders(go)
            self._elastic = self._make_elastic(go, go.members)
        await self._mesh.meet(self._roster)
        if self._asked_at is not None:
            raise _asked_too_early()
        self._met_at = boot_clock()
        self._start_all(go)
        if self._elastic is None or go.members is None:
            self._mesh.watch()
        else:
            self._mesh.keep_up(self._roster, self._elastic.connected)
            self._elastic.found()
            await self._listen_around(self._elastic)

    async def _begin_as_guest(self, go: GoOrder) -> None:
        if go.members is None:
            raise RunFailed("this run ends when a machine is lost", why="members.on_loss is `end`")
        self._roster = dict(enumerate(go.roster))
        self._keep_orders(go)
        self._elastic = self._make_elastic(go, go.members)
        self._elastic.is_on_its_way()
        self._start_all(go)
        self._mesh.keep_up(go.places(), self._elastic.connected, dial_all=True)
        self._elastic.come()
        await self._listen_around(self._elastic)

    async def _listen_around(self, elastic: AgentMembership) -> None:
        """For new machines that are invited here, and for word that this one is suspended. A disk that has no sockets
        keeps nobody from training."""
        self._keep(watch_for_sleep(elastic.fall_asleep, elastic.wake))
        self._sponsor = InviteServer(self._run.door(self._orders.node), elastic, self._mesh.places)
        try:
            await self._sponsor.open()
        except OSError as error:
            self._note(f"no new machine can be invited on {self._orders.node}: {error.strerror}")

    def _make_elastic(self, go: GoOrder, members: MembershipOrder) -> AgentMembership:
        promises = VoteFile(self._run.votes(self._orders.node))
        return AgentMembership(self._orders.member, go, members, promises, self._mesh, self._keys, self._workplace)

    def _start_all(self, go: GoOrder) -> None:
        if self._elastic is not None:
            self._elastic.start(self._elastic.crew.hands)
        else:
            alone = not any(map(self._workplace.shares_folder_with, range(self._orders.member)))
            for start in go.starts:
                self._workplace.start(start, alone)
        self._roll = UnjoinedRanks(
            go.starts, lambda met, missing, after_s: self._write("met", met=met, missing=missing, after_s=after_s)
        )
        self._write("started", processes=self._ranks.alive())

    async def _see_through(self) -> None:
        """Until every member's ranks have ended: a rank elsewhere may still need our keys."""
        looked_at = boot_clock()
        while not self._is_over():
            if boot_clock() - looked_at > FOLDER_CHECK_S:
                looked_at = boot_clock()
                if self._journal.is_removed():
                    raise self._run.removed()
            for ended in self._ranks.reap():
                await self._on_ended(ended)
            if self._failed_at is not None and boot_clock() - self._failed_at > GRACE_AFTER_FAILURE_S:
                self._ranks.kill()
            self._end_the_late()
            self._roll.look(self._ranks.alive(), boot_clock() - self._met_at)
            self._workplace.look_at_store()
            self._keep_places()
            if self._elastic is not None:
                self._elastic.tick()
                if self._elastic.failed and self._failed_at is None:
                    # Who gives up because it reaches nobody has nothing to say to those it may yet reach.
                    await (self._end_alone() if self._elastic.may_return else self._fail())
            await self._say_when_done()
            self._journal.retry()
            await asyncio.sleep(POLL_S)

    def _end_the_late(self) -> None:
        """Ranks of a script may ignore the signal, or hang while they handle it."""
        if self._asked_at is None or self._grace_s is None or boot_clock() - self._asked_at <= self._grace_s:
            return
        if late := self._ranks.alive():
            names = ", ".join(sorted(name.replace("-", " ") for name in late))
            self._note(f"{names} did not stop within {format_duration(self._grace_s)}: ended now")
            self._ranks.kill()
        self._grace_s = None

    def _is_over(self) -> bool:
        return len(self._over) == len(self._roster) if self._elastic is None else self._elastic.is_over()

    async def _say_when_done(self) -> None:
        gone = not self._ranks.alive() if self._elastic is None else self._elastic.crew.is_gone()
        if gone and not self._told:
            self._told = True
            self._over.add(self._orders.member)
            await self._mesh.tell_all({"type": "done", "finished": self._has_finished()})

    def _has_finished(self) -> bool:
        return self._elastic is not None and self._elastic.farewell.finished

    async def _obey(self, lines: asyncio.StreamReader) -> None:
        """The end of the lines is the end of the launcher or of its connection, never of the run."""
        while line := await lines.readline():
            wish = read_wish(line)
            if wish == STOP:
                await self._wish(at_once=False)
            elif wish == END:
                await self._wish(at_once=True)

    def _listen_for_signals(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._on_signal)
        loop.add_signal_handler(signal.SIGTERM, self._on_term)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def _on_signal(self) -> None:
        """The second one ends everything; what peers were told before the first does not count."""
        self._signals += 1
        self._keep(self._wish(at_once=self._signals > 1))

    def _on_term(self) -> None:
        """What a machine says to all its processes before it is switched off: the others train on."""
        if self._elastic is None or self._signals or not self._elastic.depart():
            self._on_signal()

    async def _wish(self, at_once: bool) -> None:
        """We have been asked to stop; the others hear of it, and ask their own ranks."""
        await self._stop(at_once)
        await self._mesh.tell_all({"type": "stopping", "at_once": at_once})

    async def _stop(self, at_once: bool) -> None:
        if self._elastic is not None:
            self._elastic.wind_up()
        if at_once:
            self._ranks.kill()
        elif self._asked_at is None:
            self._ranks.ask_to_stop()
        self._asked_at = boot_clock() if self._asked_at is None else self._asked_at
        await self._mesh.give_up(_asked_too_early())

    async def _on_ended(self, ended: RankExit) -> None:
        self._report(ended)
        if self._elastic is not None and self._elastic.ended(ended):
            return
        # Of a script that is asked to stop, one rank ends by the signal while another still saves.
        is_obeying = self._asked_at is not None and not ended.start.store
        if ended.code not in (0, Interrupted.exit_code) and not is_obeying:
            await self._fail()

    def _report(self, ended: RankExit) -> None:
        self._write("ended", name=ended.start.name, code=ended.code, by_us=ended.by_us, starved=ended.starved)

    async def _on_message(self, member: int, message: Message) -> None:
        match message:
            case {"type": str(kind)} if kind.startswith("member-") and self._elastic is not None:
                self._elastic.received(member, message)
            case {"type": "failed"}:
                self._note_failure()
            case {"type": "stopping", "at_once": at_once}:
                await self._stop(bool(at_once))
            case {"type": "done"}:
                self._over.add(member)
                if self._elastic is not None:
                    self._elastic.farewell.is_done(member, bool(message.get("finished")), boot_clock())
                self._write("peer", node=self._mesh.places.name(member), failed=self._failed_at is not None)
            case {"type": "ask" | "answer"}:
                self._keys.hear(member, message)

    def _on_lost(self, member: int, how: str) -> None:
        self._keys.lose(member, how)
        if self._elastic is not None and self._elastic.closed(member):
            self._write("closed", node=self._mesh.places.name(member), how=how)
            return
        if member in self._over:
            return
        self._over.add(member)
        self._write("lost", member=member, node=self._mesh.places.name(member), how=how)
        self._note_failure()

    def _name_the_absent(self) -> None:
        """The launcher need not wait for whom nobody hears, if it cannot see it either."""
        for member in self._elastic.farewell.absent() if self._elastic is not None else ():
            self._write(
                "lost", member=member, node=self._mesh.places.name(member), how="it is gone, or has fallen silent"
            )

    def _note_failure(self) -> None:
        if self._elastic is not None:
            self._elastic.wind_up(failed=True)
        if self._failed_at is None:
            self._failed_at = boot_clock()

    async def _end_alone(self) -> None:
        self._note_failure()

    async def _fail(self) -> None:
        self._note_failure()
        await self._mesh.tell_all({"type": "failed"})

    def _keep(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(work)
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    def _write(self, event: str, **fields: Any) -> None:
        self._journal.write(event, launch=self._orders.launch, **fields)

    def _note(self, text: str) -> None:
        self._write("note", text=text)

    def _now(self) -> float:
        """The launcher's clock when it launched, and our own seconds since: comparable between machines."""
        return self._orders.launched_at + boot_clock() - self._met_at


def _asked_too_early() -> Interrupted:
    return Interrupted("asked to stop before the ranks were started")


class LauncherGone(Exception):
    """The launcher was gone before it had said what to start."""


async def _main(words: list[str]) -> int:
    unmark()
    if words[:1] == ["--again"]:
        meet, go = read_orders(RunFolder(Path(words[1])), words[2])
        return await Agent(meet).work_again(go)
    lines = await read_stdin()
    first = await lines.readline()
    if not first:
        return Interrupted.exit_code
    return await Agent(read_meet(first)).work(lines)


if __name__ == "__main__":
    restore_signals()
    sys.exit(asyncio.run(_main(sys.argv[1:])))
