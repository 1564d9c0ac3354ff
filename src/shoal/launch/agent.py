"""The agent: one a node. `python -P -m shoal.launch.agent`, with its orders on standard input.

It meets the other agents, starts this node's ranks, keeps their logs and their keys, and writes into its journal what
becomes of them. It needs nobody's terminal: the launcher may go, and the run goes on. Its ranks die with it.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shlex
import signal
import socket
import sys
import traceback
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path

from shoal.cluster.node import reserve_port
from shoal.control.channel import Message
from shoal.control.devices import this_machine_is_cpu_only
from shoal.control.hello import introduce
from shoal.control.machine import boot_clock, physical_cores
from shoal.control.placement import AGENT_FD, KEEPS_FILES
from shoal.control.process import marks, unmark
from shoal.control.route import interface_for
from shoal.errors import Interrupted, RunFailed, ShoalError
from shoal.events import EventLog
from shoal.launch.awake import awake
from shoal.launch.found import KEEPER, MESSENGER, find
from shoal.launch.joined import LonelyScripts
from shoal.launch.keystore import KeyStore, Reply, Request, read_request, to_frame
from shoal.launch.mesh import Mesh
from shoal.launch.orders import END, STOP, Go, Meet, Member, Start, read_go, read_meet, read_wish
from shoal.launch.ranks import Ended, Ranks
from shoal.runfolder import RunFolder

POLL_S = 0.05
# A rank that lost its peer gets this long to say so in its log before it is ended.
GRACE_AFTER_FAILURE_S = 3.0


class Agent:
    def __init__(self, meet: Meet) -> None:
        self._orders = meet
        self._run = RunFolder(Path(meet.folder))
        self._journal = EventLog(self._run.journal(meet.node), meet.member)
        self._mesh = Mesh(self._on_message, self._on_lost, self._note)
        self._keys = KeyStore()
        self._ranks = Ranks(self._run, meet.node, self._now)
        self._roster: tuple[Member, ...] = ()
        self._met_at = boot_clock()
        self._failed_at: float | None = None
        self._signals = 0
        self._asked_to_stop = False
        self._over: set[int] = set()
        self._questions: dict[int, asyncio.Future[Reply]] = {}
        self._serving: set[asyncio.Task[None]] = set()

    async def work(self, lines: asyncio.StreamReader) -> int:
        try:
            self._listen_for_signals()
            go = await self._get_ready(lines)
            self._roster = go.roster
            self._keep(self._obey(lines))
            await self._mesh.meet(go.roster)
            if self._asked_to_stop:
                raise _asked_too_early()
            self._met_at = boot_clock()
            with awake(f"training {self._run.path.name}"):
                self._start_all(go)
                await self._see_through()
        except ShoalError as error:
            self._write("refused", **error.as_dict())
            return error.exit_code
        except Abandoned:
            self._write("note", text="the launcher left before the run began")
            return Interrupted.exit_code
        except Exception as error:
            traceback.print_exc()
            self._write("refused", **_as_bug(error, self._orders.node).as_dict())
            return RunFailed.exit_code
        finally:
            self._ranks.kill()
            for ended in self._ranks.reap():
                self._report(ended)
            await self._mesh.close()
            self._write("done")
        return 0

    async def _get_ready(self, lines: asyncio.StreamReader) -> Go:
        orders = self._orders
        _refuse_leftovers(self._run.path, orders.node)
        interface = interface_for(orders.address, orders.interface, orders.node)
        mark = secrets.token_hex(16)
        me = introduce(orders.member, orders.node, mark, orders.config, orders.data)
        port = await self._mesh.listen(orders.address, me, orders.token)
        self._script_port = None if orders.script_port is None else reserve_port(orders.address, orders.script_port)
        self._write(
            "ready",
            node=orders.node,
            mark=mark,
            pid=os.getpid(),
            port=port,
            script_port=self._script_port and self._script_port.getsockname()[1],
            interface=interface,
            cores=physical_cores(),
            cpu_only=this_machine_is_cpu_only(),
        )
        line = await lines.readline()
        if not line or read_wish(line):
            raise Abandoned
        return read_go(line)

    def _start_all(self, go: Go) -> None:
        alone_with_folder = not any(self._shares_folder_with(member) for member in go.roster[: self._orders.member])
        try:
            for start in go.starts:
                self._start(start, alone_with_folder)
        except OSError as error:
            raise RunFailed(
                f"cannot start {start.name} on {self._orders.node}: {error.strerror}",
                why="the machine is out of processes or memory, or the run folder is not writable",
                fix="check there: ulimit -u; df -h",
            ) from error
        self._roll = LonelyScripts(go.starts, self._note)
        self._write("started", processes=self._ranks.alive())

    def _start(self, start: Start, alone_with_folder: bool) -> None:
        env = marks(self._run.path, start.name)
        if not alone_with_folder:
            env[KEEPS_FILES] = "0"
        if not start.store:
            self._ranks.start(start, env)
            return
        ours, theirs = socket.socketpair()
        with theirs:
            self._ranks.start(start, {**env, AGENT_FD: str(theirs.fileno())}, (theirs.fileno(),))
        self._keep(self._serve(ours))

    def _shares_folder_with(self, member: Member) -> bool:
        with suppress(OSError):
            return member.mark in self._run.journal(member.node).read_text(encoding="utf-8")
        return False

    async def _see_through(self) -> None:
        """Until every member's ranks have ended: a rank elsewhere may still need our keys."""
        told = False
        while len(self._over) < len(self._roster):
            for ended in self._ranks.reap():
                await self._on_ended(ended)
            if self._failed_at is not None and boot_clock() - self._failed_at > GRACE_AFTER_FAILURE_S:
                self._ranks.kill()
            self._roll.look(self._ranks.alive(), boot_clock() - self._met_at)
            if not told and not self._ranks.alive():
                told = True
                self._over.add(self._orders.member)
                await self._mesh.tell_all({"type": "done"})
            await asyncio.sleep(POLL_S)

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
        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signum, self._on_signal)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def _on_signal(self) -> None:
        """The second one ends everything; what peers were told before the first does not count."""
        self._signals += 1
        self._keep(self._wish(at_once=self._signals > 1))

    async def _wish(self, at_once: bool) -> None:
        """We have been asked to stop; the others hear of it, and ask their own ranks."""
        await self._stop(at_once)
        await self._mesh.tell_all({"type": "stopping", "at_once": at_once})

    async def _stop(self, at_once: bool) -> None:
        if at_once:
            self._ranks.kill()
        elif not self._asked_to_stop:
            self._ranks.ask_to_stop()
        self._asked_to_stop = True
        await self._mesh.give_up(_asked_too_early())

    async def _on_ended(self, ended: Ended) -> None:
        self._report(ended)
        if ended.code not in (0, Interrupted.exit_code):
            self._fail()
            await self._mesh.tell_all({"type": "failed"})

    def _report(self, ended: Ended) -> None:
        self._write("ended", name=ended.start.name, code=ended.code, by_us=ended.by_us, starved=ended.starved)

    async def _on_message(self, member: int, message: Message) -> None:
        match message:
            case {"type": "failed"}:
                self._fail()
            case {"type": "stopping", "at_once": at_once}:
                await self._stop(bool(at_once))
            case {"type": "done"}:
                self._over.add(member)
                self._write("peer", node=self._roster[member].node, failed=self._failed_at is not None)
            case {"type": "ask", "id": number, "request": request}:
                # Not awaited here: a question may wait for a key that this very peer brings next.
                self._keep(self._answer(member, number, request))
            case {"type": "answer", "id": number, "reply": reply}:
                if (question := self._questions.pop(number, None)) and not question.done():
                    question.set_result(reply)

    def _on_lost(self, member: int, how: str) -> None:
        for question in self._questions.values():
            if member == 0 and not question.done():
                question.set_result({"error": f"the agent that keeps the keys is gone: {how}"})
        if member in self._over:
            return
        self._over.add(member)
        self._write("lost", member=member, node=self._roster[member].node, how=how)
        self._fail()

    def _fail(self) -> None:
        if self._failed_at is None:
            self._failed_at = boot_clock()

    async def _serve(self, ours: socket.socket) -> None:
        """One rank's questions, until it closes its end."""
        reader, writer = await asyncio.open_connection(sock=ours)
        with suppress(EOFError, OSError):
            while True:
                writer.write(to_frame(await self._ask(await read_request(reader))))
                await writer.drain()
        writer.close()

    async def _ask(self, request: Request) -> Reply:
        """The first member keeps the keys."""
        if self._orders.member == 0:
            return await self._keys.answer(request)
        number = max(self._questions, default=0) + 1
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._questions[number] = answer
        # It serves until everybody's ranks have ended, also when its own have.
        if not await self._mesh.tell(0, {"type": "ask", "id": number, "request": request}):
            return {"error": "the agent that keeps the keys is gone"}
        return await answer

    async def _answer(self, member: int, number: int, request: Request) -> None:
        await self._mesh.tell(member, {"type": "answer", "id": number, "reply": await self._keys.answer(request)})

    def _keep(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(work)
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    def _note(self, text: str) -> None:
        self._write("note", text=text)

    def _write(self, event: str, **fields: object) -> None:
        self._journal.write(event, launch=self._orders.launch, **fields)

    def _now(self) -> float:
        """The launcher's clock when it launched, and our own seconds since: comparable between machines."""
        return self._orders.launched_at + boot_clock() - self._met_at


def _refuse_leftovers(run: Path, node: str) -> None:
    """Ranks of an earlier launch whose keeper was killed still write into this very folder."""
    left = [found for found in find(run) if found.part not in (KEEPER, MESSENGER)]
    if left:
        raise RunFailed(
            f"an earlier launch of {run} still works on {node}: process {', '.join(str(found.pid) for found in left)}",
            why="whoever kept it was killed, and its agent goes on",
            fix=f"end it first: shoal stop {shlex.quote(str(run))}",
        )


def _asked_too_early() -> Interrupted:
    return Interrupted("asked to stop before the ranks were started")


def _as_bug(error: Exception, node: str) -> RunFailed:
    return RunFailed(
        f"the agent on {node} failed: {type(error).__name__}: {error}",
        why="that is a bug in shoal, or the machine is in trouble",
        fix=f"its log has the traceback: agents/{node}.log in the run folder",
    )


class Abandoned(Exception):
    """The launcher was gone before it had said what to start."""


async def _read_stdin() -> asyncio.StreamReader:
    # A plan for many ranks is one line; the default limit of 64 kB would cut it.
    reader = asyncio.StreamReader(limit=16 << 20)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


async def _main() -> int:
    unmark()
    lines = await _read_stdin()
    first = await lines.readline()
    if not first:
        return Interrupted.exit_code
    return await Agent(read_meet(first)).work(lines)


if __name__ == "__main__":
    sys.exit(asyncio.run(_main()))
