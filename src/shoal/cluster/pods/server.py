"""What a pod does for the other pods of its job: it tells its state, starts its agent, and runs checks.

All know the job's code, which is on the volume that they share. A program that is started is a module of shoal.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from asyncio.subprocess import PIPE
from pathlib import Path

from shoal.cluster.agent_link import PipeLink, agent_command
from shoal.cluster.node_program import module_command
from shoal.cluster.pods.spec import PORT, PodJob, node_name
from shoal.cluster.shared_folder import resolve
from shoal.control.channel import Channel, Message, dial
from shoal.control.connection_guard import accept_connection, make_connection_guard
from shoal.control.orders import END, STOP, move_orders, read_request_line, unseal_token
from shoal.errors import ControlError, ShoalError, UsageError
from shoal.events import EventTail
from shoal.host.facts import source_address
from shoal.run_folder import RunFolder

_POLL_S = 0.1
_ANSWER_WITHIN_S = 5.0
# How long a killed agent counts as one that is about to be started again.
_RESTART_WITHIN_S = 20.0
_PIECE_BYTES = 1 << 16


async def ask(host: str, code: str, **request: object) -> Message:
    """Return the answer of a pod to one request. OSError or EOFError where it does not answer."""
    async with asyncio.timeout(_ANSWER_WITHIN_S):
        channel = await dial(host, PORT, code)
        try:
            await channel.send(request)
            return await channel.receive()
        finally:
            channel.close()


class PodAgent:
    """The agent of this pod in one run."""

    def __init__(self, run: RunFolder, node: str, again: bool) -> None:
        self._journal = EventTail(run.journal(node))
        self._journal.skip_to_end()
        self._again = again
        words = ("--again", str(run.path), node) if again else ()
        self.run = run
        self._link = PipeLink((*agent_command(run.path, node), *words), run.path, node)
        self._seen: set[str] = set()
        self._members: list[str] = []
        self._has_finished = False

    def _read_journal(self) -> None:
        for event in self._journal.poll():
            self._seen.add(event["event"])
            if event["event"] == "generation":
                self._members = event["members"]
            if event["event"] == "done":
                self._has_finished = event.get("finished") is True

    @property
    def has_finished(self) -> bool:
        """Whether its ranks have ended as they should."""
        self._read_journal()
        return self._has_finished

    @property
    def members(self) -> list[str]:
        """The nodes that train together, as far as it has seen."""
        self._read_journal()
        return self._members

    @property
    def trains(self) -> bool:
        """Whether its ranks take part in the training; those of an agent that came back do once it has rejoined."""
        self._read_journal()
        return self.ended() is None and ("generation" in self._seen or (not self._again and "started" in self._seen))

    @property
    def was_killed(self) -> bool:
        self._read_journal()
        return self.ended() is not None and "done" not in self._seen

    def ended(self) -> str | None:
        return self._link.ended()

    def send(self, line: bytes) -> None:
        """Pass an order on. An agent that was started again obeys signals."""
        if not self._again:
            self._link.send(line)
        elif (request := read_request_line(line)) in (STOP, END):
            self.stop(at_once=request == END)

    def stop(self, at_once: bool = False) -> None:
        for signum in (signal.SIGINT, signal.SIGTERM)[: 2 if at_once else 1]:
            self._link.send_signal(signum)

    def leave(self) -> None:
        self._link.ask_to_leave()

    async def wait(self, within_s: float) -> bool:
        until = asyncio.get_running_loop().time() + within_s
        while self.ended() is None and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(_POLL_S)
        return self.ended() is not None

    def kill(self) -> None:
        """End it without a word to the others, which continue: a request to end would end the whole run."""
        if self.ended() is None:
            self._link.kill()
        self._link.close()

    def close_orders(self) -> None:
        """Let it end if it has not begun: its launcher is gone."""
        if not self._again:
            self._link.close_orders()


class PodServer:
    def __init__(self, job: PodJob, run: RunFolder, code: str) -> None:
        self._job = job
        self._run = run
        self._code = code
        self._guard = make_connection_guard(lambda text: None)
        self._server: asyncio.Server | None = None
        self._handlers: set[asyncio.Task[None]] = set()
        self._agents: dict[Path, PodAgent] = {}  # of the job's run, and of a check that is run beside it
        self.is_leaving = False

    @property
    def agent(self) -> PodAgent | None:
        """The agent of this pod in the job's run."""
        return self._agents.get(self._run.path)

    async def open(self) -> None:
        try:
            self._server = await asyncio.start_server(self._serve, None, PORT)
        except OSError as error:
            raise UsageError(
                f"cannot listen at port {PORT}: {error.strerror}", fix="end what listens there, or use another pod"
            ) from None

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for handler in self._handlers:
            handler.cancel()
        await asyncio.gather(*self._handlers, return_exceptions=True)
        for agent in self._agents.values():
            agent.kill()

    async def start_again(self, peer: str) -> None:
        """Start the agent again from its orders: the others train, and it asks to rejoin. `peer` is one of them."""
        if self.agent is not None:
            self.agent.kill()
        # A pod that comes back has another address, and meanwhile the others may have come back too.
        hosts = [peer, *self._job.hosts]
        there, *addresses = await asyncio.gather(*(asyncio.to_thread(resolve, host) for host in hosts))
        places = {node_name(index): address for index, address in enumerate(addresses) if address}
        if there is not None:
            places[self._job.node] = source_address(there)
        move_orders(self._run, self._job.node, places)
        self._agents[self._run.path] = PodAgent(self._run, self._job.node, again=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - a callback of a server runs in a task
        self._handlers.add(task)
        task.add_done_callback(self._handlers.discard)
        channel = await accept_connection(reader, writer, self._code, self._guard)
        if channel is None:
            return
        try:
            await self._answer(channel, await channel.receive())
        except ShoalError as error:
            with contextlib.suppress(OSError):
                await channel.send({"type": "refused", **error.as_dict()})
        except (OSError, EOFError, asyncio.CancelledError):
            # Cancelled by `close` only; asyncio would report it as an error of its own callback.
            pass
        finally:
            channel.close()

    async def _answer(self, channel: Channel, request: Message) -> None:
        match request:
            case {"do": "state"}:
                trains = self.agent is not None and self.agent.trains
                await channel.send({"trains": trains, "leaves": self.is_leaving})
            case {"do": "agent", "run": str(path), "attach": bool(attach)}:
                if not attach:
                    self._start(RunFolder(Path(path)))
                await self._follow_agent(Path(path), channel)
            case {"do": "run", "module": str(module), "words": [*words]} if module.startswith("shoal."):
                await self._run_program([*module_command(module), *map(str, words)], channel)
            case _:
                raise ControlError("a pod got a request that it does not know", why="the pods have different versions")

    def _start(self, run: RunFolder) -> None:
        node = self._job.node
        if not run.path.is_dir():
            raise UsageError(
                f"{run.path} is not in {node}",
                why="the pods do not share a volume",
                fix="claim one that is ReadWriteMany",
            )
        if (agent := self._agents.get(run.path)) is not None:
            if agent.trains:
                raise ControlError(f"{node} trains already", why="the other pods continued without the first one")
            agent.kill()
        if run.path == self._run.path:
            self._job.agent_mark(self._job.index).touch()
        self._agents[run.path] = PodAgent(run, node, again=False)

    async def _follow_agent(self, run: Path, channel: Channel) -> None:
        """Pass orders on to the agent of a run until it has ended for good."""
        if run not in self._agents:
            raise ControlError(f"{self._job.node} has no agent", why="the pod is new, and has not rejoined yet")
        receiving = asyncio.create_task(self._pass_orders(run, channel))
        clock, killed_at = asyncio.get_running_loop().time, None
        try:
            while not channel.is_closed():
                agent = self._agents[run]
                how = agent.ended()
                killed_at = (killed_at or clock()) if how is not None and agent.was_killed else None
                if how is not None and (killed_at is None or clock() - killed_at > _RESTART_WITHIN_S):
                    await channel.send({"type": "ended", "how": how})
                    return
                await asyncio.sleep(_POLL_S)
        finally:
            receiving.cancel()
            if run != self._run.path:
                # A check ends with the command that has started it.
                self._agents.pop(run).kill()
            elif self.agent is not None and not self.agent.trains:
                self.agent.close_orders()

    async def _pass_orders(self, run: Path, channel: Channel) -> None:
        with contextlib.suppress(OSError, EOFError, ControlError):
            while True:
                line = (await channel.receive()).get("line")
                if isinstance(line, str):
                    self._agents[run].send(unseal_token(line.encode(), self._code))

    async def _run_program(self, argv: list[str], channel: Channel) -> None:
        """Run a program whose lines go to and from the other pod; it ends with the connection."""
        process = await asyncio.create_subprocess_exec(
            *argv, stdin=PIPE, stdout=PIPE, stderr=PIPE, start_new_session=True
        )
        assert process.stdin is not None  # noqa: S101 - all three were asked for
        assert process.stdout is not None  # noqa: S101
        assert process.stderr is not None  # noqa: S101

        async def forward(stream: asyncio.StreamReader, kind: str) -> None:
            while piece := await stream.read(_PIECE_BYTES):
                await channel.send({"type": kind, "text": piece.decode("latin-1")})

        async def feed(stdin: asyncio.StreamWriter) -> None:
            try:
                while (line := (await channel.receive()).get("line")) is not None:
                    stdin.write(str(line).encode())
            except (OSError, EOFError, ControlError):
                pass
            finally:
                stdin.close()

        feeding = asyncio.create_task(feed(process.stdin))
        try:
            await asyncio.gather(forward(process.stdout, "out"), forward(process.stderr, "err"))
            await channel.send({"type": "exit", "code": await process.wait()})
        finally:
            feeding.cancel()
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
