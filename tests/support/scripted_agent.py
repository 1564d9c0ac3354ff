"""An agent whose membership decisions are made by the test: real ranks, real gloo, a real key-value store.

with ScriptedAgent(run, 3) as agent:
    agent.start(0, 1, 2)
    agent.form((0, 1, 2))
    agent.await_step(1, 10)
    agent.kill(2)
    agent.regroup((0, 1))
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from shoal.agent.kv_store import KvStore, derive_key, read_request
from shoal.agent.kv_store import to_frame as key_frame
from shoal.control.channel import LENGTH
from shoal.control.membership.types import Ballot, Lineage, State
from shoal.control.processes import RUN_MARK
from shoal.control.rank_env import AGENT_FD, KEEPS_FILES, Placement
from shoal.control.rank_messages import (
    MEMBERSHIP_FD,
    EnterGeneration,
    GroupFormed,
    LeaseRenewed,
    LeaveGeneration,
    LeftGeneration,
    RankReady,
    ToAgent,
    ToRank,
    read_to_agent,
    to_frame,
)
from shoal.events import read_events
from shoal.host.facts import boot_clock
from shoal.run_folder import RunFolder
from tests.support.ranks import WorkerProcess
from tests.support.waiting import wait_until

M = TypeVar("M")


class Rank:
    def __init__(self, process: WorkerProcess, line: socket.socket) -> None:
        self.process = process
        self.line = line
        self.received: list[ToAgent] = []
        self.has_left = False
        self.changed = threading.Condition()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        with suppress(OSError, ValueError), self.line.makefile("rb") as stream:
            while head := stream.read(LENGTH):
                message = read_to_agent(stream.read(int.from_bytes(head, "big")))
                with self.changed:
                    self.received.append(message)
                    self.changed.notify_all()
        with self.changed:
            self.has_left = True
            self.changed.notify_all()

    def send(self, message: ToRank) -> None:
        with suppress(OSError):
            self.line.sendall(to_frame(message))

    def receive(self, kind: type[M], where: Callable[[M], bool] = lambda message: True, within_s: float = 60.0) -> M:
        def match() -> M | None:
            return next((item for item in self.received if isinstance(item, kind) and where(item)), None)

        with self.changed:
            # A rank that has closed its connection sends no more messages.
            self.changed.wait_for(lambda: match() is not None or self.has_left, within_s)
            message = match()
        assert message is not None, f"no {kind.__name__}: {self.received[-5:]}"
        return message


class ScriptedAgent:
    def __init__(self, run: Path, ranks: int, *words: str, program: Callable[[], None] | None = None) -> None:
        """Ranks are workers of `shoal train`, or run a `program` with a session."""
        self.run = RunFolder(run)
        self._program = program
        # Folders of ranks on machines with their own disk.
        self.own_folders: dict[int, RunFolder] = {}
        self.ranks: dict[int, Rank] = {}
        self.generation = Ballot(0, 0)
        self.lineage = Lineage(name=Ballot(1, 0))
        self.leased: set[int] = set()
        # The generation that every running rank was last ordered to enter.
        self._entered: dict[int, Ballot] = {}
        self._size = ranks
        self._words = words
        self._keys = KvStore()
        # Called with a rank's number and the key that this rank is about to set.
        self.before_set: Callable[[int, str], None] = lambda number, key: None
        self._loop = asyncio.new_event_loop()
        self._serving: list[Future[None]] = []
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._loop.run_forever, daemon=True),
            threading.Thread(target=self._lease, daemon=True),
        ]

    def __enter__(self) -> ScriptedAgent:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        for rank in self.ranks.values():
            rank.process.kill()
            rank.process.wait()
            rank.line.close()
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(5)
        self._loop.call_soon_threadsafe(self._loop.stop)
        for thread in self._threads:
            thread.join(5)
        self._loop.close()

    async def _close(self) -> None:
        """Wait for all tasks: the ranks are dead, so every connection ends."""
        await asyncio.gather(*(task for task in asyncio.all_tasks() if task is not asyncio.current_task()))

    def start(self, *ids: int) -> None:
        for number in ids:
            self._start(number)

    def form(self, ids: tuple[int, ...]) -> None:
        self._call(ids, State(step=0), first=True, holding=ids, among=ids)
        self.await_formed(ids)

    def regroup(self, ids: tuple[int, ...], joining: Collection[int] = (), after_step: bool = False) -> list[State]:
        """Halt the current ranks and start the next generation with the furthest state."""
        staying = [number for number in ids if number not in joining]
        for number in staying:
            self.ranks[number].send(LeaveGeneration(generation=self.generation, after_step=after_step))
        over = self.generation
        states = [
            halted.state
            for number in staying
            if (halted := self.ranks[number].receive(LeftGeneration, lambda message: message.generation == over)).state
            is not None
        ]
        furthest = max(states, key=lambda state: state.step)
        for number in joining:
            self.ranks[number].receive(RankReady)
            self._halt_in_earlier(number)
        self._call(ids, furthest, first=False, holding=staying, among=ids)
        self.await_formed(ids)
        return states

    def _halt_in_earlier(self, number: int) -> None:
        """Halt a frozen rank, as an agent does: without the order it waits in a gloo send to peers that have left until
        the exchange's deadline."""
        if (earlier := self._entered.get(number)) is not None:
            self.ranks[number].send(LeaveGeneration(generation=earlier, after_step=False))
            self.ranks[number].receive(LeftGeneration, lambda message: message.generation == earlier)

    def recover(self, ids: tuple[int, ...]) -> None:
        """Start a generation of ranks without a state, as a new lineage."""
        for number in ids:
            self.ranks[number].receive(RankReady)
        name = Ballot(self.generation.number + 1, 0)
        self.lineage = self.lineage.restart(name, self.generation)
        self._call(ids, State(step=0), first=False, holding=(), among=ids, recovers=True)
        self.await_formed(ids)

    def await_formed(self, ids: Collection[int], within_s: float = 60.0) -> None:
        now = self.generation
        for number in ids:
            self.ranks[number].receive(GroupFormed, lambda message: message.generation == now, within_s)

    def kill(self, number: int, signum: int = signal.SIGKILL) -> None:
        self.leased.discard(number)
        self.ranks[number].process.send_signal(signum)
        if signum == signal.SIGKILL:
            self.ranks[number].process.wait(10)

    def await_step(self, number: int, step: int, within_s: float = 60.0) -> None:
        def is_reached() -> bool:
            code = self.ranks[number].process.poll()
            assert code in (None, 0), f"rank {number} ended with {code}: {self.log(number)[-3000:]}"
            return max((event["step"] for event in self.events(number, "step")), default=0) >= step

        wait_until(is_reached, within_s, why=lambda: f"rank {number}, step {step}: {self.log(number)[-2000:]}")

    def await_standstill(self, number: int, for_s: float = 0.5) -> None:
        """Wait until the rank makes no more steps."""
        before, since = -1, time.monotonic()
        while time.monotonic() - since < for_s:
            if (steps := len(self.events(number, "step"))) != before:
                before, since = steps, time.monotonic()
            time.sleep(0.05)

    def await_end(self, ids: Collection[int], within_s: float = 120.0) -> None:
        for number in ids:
            code = self.ranks[number].process.wait(within_s)
            assert code == 0, f"rank {number} ended with {code}: {self.log(number)[-3000:]}"

    def events(self, number: int, name: str) -> list[dict[str, Any]]:
        path = self._folder(number).events(number)
        return [event for event in read_events(path) if event["event"] == name] if path.exists() else []

    def _folder(self, number: int) -> RunFolder:
        return self.own_folders.get(number, self.run)

    def log(self, number: int) -> str:
        path = self._folder(number).log("local", number)
        return path.read_text() if path.exists() else ""

    def _call(
        self,
        ids: tuple[int, ...],
        state: State,
        first: bool,
        holding: Collection[int],
        among: Collection[int],
        recovers: bool = False,
    ) -> None:
        self.generation = Ballot(self.generation.number + 1, 0)
        for rank, number in enumerate(ids):
            if number in among:
                enter = EnterGeneration(
                    generation=self.generation,
                    lineage=self.lineage,
                    rank=rank,
                    local_rank=rank,
                    local_size=len(ids),
                    ids=ids,
                    nodes=("local",) * len(ids),
                    state=state,
                    source=0,
                    first=first,
                    has_state=number in holding,
                    keeps_files=rank == 0 or number in self.own_folders,
                    recovers=recovers,
                    launched=self._size,
                )
                self.ranks[number].send(enter)
                self._entered[number] = self.generation
        self.leased = set(ids)

    def _start(self, number: int) -> None:
        agent_end, rank_end = socket.socketpair()
        agent_keys, rank_keys = socket.socketpair()
        placement = Placement(number, self._size, number, self._size, launcher="shoal", agent_fd=rank_keys.fileno())
        env = placement.to_env() | {KEEPS_FILES: "0", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        folder = self._folder(number)
        if self._program is not None:
            env[RUN_MARK] = str(folder.path)
        with rank_end, rank_keys:
            process = WorkerProcess(
                ("--folder", str(folder.path), *self._words),
                {**os.environ, **env},
                folder.log("local", number),
                {MEMBERSHIP_FD: rank_end, AGENT_FD: rank_keys},
                self._program,
            )
        if number in self.ranks:
            self.ranks[number].line.close()
        self.ranks[number] = Rank(process, agent_end)
        self._entered.pop(number, None)
        # asyncio holds only weak references to tasks.
        self._serving.append(asyncio.run_coroutine_threadsafe(self._serve(number, agent_keys), self._loop))

    async def _serve(self, number: int, keys: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=keys)
        with suppress(EOFError, OSError):
            while True:
                request = await read_request(reader)
                if request.get("op") == "set":
                    await asyncio.to_thread(self.before_set, number, request["key"])
                derives = request.get("op") == "derive"
                reply = derive_key("a token", request) if derives else await self._keys.answer(request)
                writer.write(key_frame(reply))
                await writer.drain()
        writer.close()

    def _lease(self) -> None:
        while not self._over.wait(0.1):
            for number in list(self.leased):
                self.ranks[number].send(LeaseRenewed(generation=self.generation, at_s=boot_clock()))
