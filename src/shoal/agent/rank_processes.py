"""The processes an agent has started: their output in files, their ends noticed, none of them left."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from shoal.agent.kv_store import KvStoreClient, read_request, to_frame
from shoal.agent.local_ranks import LocalRank, RankConnection
from shoal.agent.mesh import AgentAddresses
from shoal.cluster.agent_link import STDIN_FD
from shoal.cluster.node import start_process
from shoal.control.membership.types import read_ballot
from shoal.control.orders import StartProcess
from shoal.control.processes import marks
from shoal.control.rank_env import AGENT_FD, KEEPS_FILES, SAFE_PATH, script_store_command, torch_caches
from shoal.control.rank_messages import LINE_FD, AbandonCommits, ToAgent
from shoal.cost.memory import RELIEF
from shoal.errors import ControlError, RunFailed
from shoal.events import Event, read_events, read_last_events
from shoal.run_folder import RunFolder


@dataclass(frozen=True)
class RankExit:
    """`by_us`: we killed it. `starved`: the kernel killed some process for lack of memory while this one ran."""

    start: StartProcess
    code: int
    by_us: bool
    starved: bool


@dataclass
class _Running:
    start: StartProcess
    process: subprocess.Popen[bytes]
    clock: LogClock
    starved_before: int
    by_us: bool = False


class RankProcesses:
    def __init__(self, run: RunFolder, node: str, now: Callable[[], float]) -> None:
        self._run = run
        self._node = node
        self._now = now
        self._running: list[_Running] = []

    def start(
        self, start: StartProcess, env: Mapping[str, str], pass_fds: Sequence[int] = (), stdin: int | None = None
    ) -> int:
        log = self._run.log(self._node, start.name)
        # Both before it runs: it may have printed or starved by the time we look.
        clock, starved_before = LogClock(log, self._now), kills_for_memory()
        # The one place that every rank of every launcher passes, on its own machine.
        process = start_process(start.argv, {**start.env, **env, **torch_caches().variables}, log, pass_fds, stdin)
        self._running.append(_Running(start, process, clock, starved_before))
        return process.pid

    def alive(self) -> dict[str, int]:
        return {running.start.name: running.process.pid for running in self._running}

    def reap(self) -> Iterator[RankExit]:
        """Those that ended since the last look. The others' logs get their time notes on the way."""
        for running in list(self._running):
            code = running.process.poll()
            running.clock.note()
            if code is not None:
                self._running.remove(running)
                # What it started itself and did not wait for goes with it.
                _kill_session(running.process.pid)
                starved = code == -signal.SIGKILL and kills_for_memory() > running.starved_before
                yield RankExit(running.start, code, running.by_us, starved)

    def ask_to_stop(self) -> None:
        for running in self._running:
            running.process.send_signal(signal.SIGINT)

    def end(self, name: str) -> None:
        """This one, as a fault would: what becomes of it is judged like any other loss."""
        for running in self._running:
            if running.start.name == name:
                _kill_session(running.process.pid)

    def kill(self) -> None:
        """The whole session of each, so that a launcher's own children go too."""
        for running in self._running:
            running.by_us = True
            _kill_session(running.process.pid)


class LogClock:
    """Notes beside a log when it grew to which size, so that the logs of several ranks can be read in one order."""

    def __init__(self, log: Path, now: Callable[[], float]) -> None:
        self._log = log
        self._now = now
        self._notes = times_of(log)
        self._size = log.stat().st_size if log.exists() else 0

    def note(self) -> None:
        with contextlib.suppress(OSError):
            size = self._log.stat().st_size
            if size != self._size:
                self._size = size
                with self._notes.open("a", encoding="ascii") as file:
                    file.write(f"{self._now():.3f} {size}\n")


def times_of(log: Path) -> Path:
    return log.with_suffix(".times")


def kills_for_memory() -> int:
    """How often the kernel has ended a process for lack of memory since it booted."""
    try:
        lines = Path("/proc/vmstat").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
    except (OSError, StopIteration, ValueError):
        return 0


def _kill_session(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


# SECTION launch/workplace
# Where an agent's ranks are started: each with its marks, its log, a way to the keys, and in a run whose machines come
# and go a line of its own.


# What a rank calls it in its last event.
_OUT_OF_MEMORY = ("OutOfMemory", "MemoryError")
_LAST_BYTES = 1 << 16
_STORE_ENDS_S = 3.0

Write = Callable[..., None]


class RankEnvironment:
    def __init__(
        self, run: RunFolder, node: str, ranks: RankProcesses, keys: KvStoreClient, places: AgentAddresses, write: Write
    ) -> None:
        self._run = run
        self.run_folder = shlex.quote(str(run.path))
        self._node = node
        self._ranks = ranks
        self._keys = keys
        self._places = places
        self._serving: set[asyncio.Task[None]] = set()
        self._store: subprocess.Popen[bytes] | None = None
        self.write = write

    def start(self, start: StartProcess, alone_with_folder: bool) -> None:
        env = marks(self._run.path, start.name)
        if not alone_with_folder:
            env[KEEPS_FILES] = "0"
        if start.is_script_rank:
            # Where torch's `@record` writes the exception of a rank, as under torchrun.
            env["TORCHELASTIC_ERROR_FILE"] = str(self._run.log(self._node, start.name).with_suffix(".error.json"))
        stdin = self._take_stdin() if start.is_script_rank and start.ranks == (0,) else None
        with self._starting(start), ExitStack() as theirs:
            if stdin is not None:
                # Only the rank has it then.
                theirs.callback(os.close, stdin)
            if start.store:
                env[AGENT_FD] = str(self._serve_keys(theirs))
            self._ranks.start(start, env, _descriptors(env), stdin)

    def start_with_line(self, hand: LocalRank, hear: Callable[[LocalRank, ToAgent], None]) -> None:
        """Whether it keeps files it is told with each generation."""

        def refuse(why: str) -> None:
            self.write("note", text=f"{hand.start.name} was killed: {why}")
            self._ranks.end(hand.start.name)

        with self._starting(hand.start), ExitStack() as theirs:
            ours, line_end = socket.socketpair()
            theirs.enter_context(line_end)
            fds = {AGENT_FD: str(self._serve_keys(theirs)), LINE_FD: str(line_end.fileno())}
            self._ranks.start(hand.start, {**marks(self._run.path, hand.start.name), **fds}, _descriptors(fds))
            line = RankConnection(ours, lambda message: hear(hand, message), refuse)
            hand.begin(line)
            self._keep(line.listen())

    def serve_script_store(self, listener: socket.socket) -> None:
        """Starts the process that serves torch's own store, which needs torch: it is imported beside the ranks.

        Tied to this agent, and ended by `close` once every rank of all nodes has ended."""
        address, port = listener.getsockname()[:2]
        command = script_store_command(address, port, listener.fileno())
        env = {**marks(self._run.path, "store"), **SAFE_PATH, "SHOAL_NODE": self._node}
        log = self._run.journal(self._node).with_suffix(".store.log")
        try:
            self._store = start_process(command, env, log, (listener.fileno(),))
        except OSError as error:
            raise RunFailed(
                f"cannot start the store of the script's ranks on {self._node}: {error.strerror}",
                why="the machine is out of processes or memory, or the run folder is not writable",
                fix="check there: ulimit -u; df -h",
            ) from error
        finally:
            # Only the store keeps it: ranks are refused, and do not wait for ever, if it dies.
            listener.close()

    def look_at_store(self) -> None:
        """Notes once that the store has ended while ranks run: torch would retry for minutes without a word."""
        if self._store is None or self._store.poll() is None or not self._ranks.alive():
            return
        code, self._store = self._store.returncode, None
        log = self._run.journal(self._node).with_suffix(".store.log")
        with suppress(OSError):
            last = log.read_bytes()[-_LAST_BYTES:].decode(errors="replace").strip().rpartition("\n")[2]
            self.write(
                "note",
                text=f"the store of the script's ranks ended with {code}: {last or 'it printed nothing'} ({log})",
            )

    def close(self) -> None:
        """Ends the store, and writes into the journal how many keys the ranks have left in it."""
        store, self._store = self._store, None
        if store is None:
            return
        store.terminate()
        try:
            store.wait(_STORE_ENDS_S)
        except subprocess.TimeoutExpired:
            store.kill()
            store.wait()
        self.write("meeting", keys=self._keys_in_store(store.returncode))

    def _keys_in_store(self, code: int) -> int | None:
        """None where it did not say so. One that still imported torch has served no rank."""
        if code == -signal.SIGTERM:
            return 0
        with suppress(OSError, ValueError, LookupError, TypeError):
            text = self._run.journal(self._node).with_suffix(".store.log").read_text(encoding="utf-8")
            keys = json.loads(text.splitlines()[-1])["keys"]
            return keys if isinstance(keys, int) else None
        return None

    def kill(self, name: str) -> None:
        self._ranks.end(name)

    def kill_all(self) -> None:
        self._ranks.kill()

    def ran_out_of_memory(self, ended: RankExit) -> bool:
        """Whether the kernel killed for lack of memory, or the rank could say so itself: as good a reason to start it
        again. The user hears of it, since only a smaller batch ends it for good."""
        if ended.starved:
            name = ended.start.name.replace("-", " ")
            self.write("note", text=f"{name} was killed, and the machine ran out of memory while it ran ({RELIEF})")
            return True
        if ended.code < 0:
            return False
        last = read_last_events(self._run.events(ended.start.ranks[0]), _LAST_BYTES)[-1:]
        said = [event for event in last if event["event"] == "fault" and event.get("error") in _OUT_OF_MEMORY]
        for event in said:
            self.write("note", text=f"{event['seen']} ({event['fix']})")
        return bool(said)

    def unsaid_give_up(self) -> AbandonCommits | None:
        return unsaid_give_up(read_events(self._run.journal(self._node)))

    def shares_folder_with(self, member: int) -> bool:
        """Whoever's mark is in our folder wrote it there."""
        place = self._places[member]
        with suppress(OSError):
            return place.mark in self._run.journal(place.node).read_text(encoding="utf-8")
        return False

    @staticmethod
    def _take_stdin() -> int | None:
        """The standard input of the user's command, which the launcher handed to this agent."""
        fd = os.environ.pop(STDIN_FD, None)
        return None if fd is None else int(fd)

    def _serve_keys(self, theirs: ExitStack) -> int:
        ours, end = socket.socketpair()
        theirs.enter_context(end)
        self._keep(self._serve(ours))
        return end.fileno()

    async def _serve(self, ours: socket.socket) -> None:
        """One rank's questions, until it closes its end."""
        reader, writer = await asyncio.open_connection(sock=ours)
        try:
            with suppress(EOFError, OSError):
                while True:
                    writer.write(to_frame(await self._keys.ask(await read_request(reader))))
                    await writer.drain()
        except ControlError as error:
            # The rank finds its connection closed, and ends with an error of its own.
            self.write("note", text=f"{error.seen}: {error.why}")
        finally:
            writer.close()

    def _keep(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(work)
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    @contextmanager
    def _starting(self, start: StartProcess) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunFailed(
                f"cannot start {start.name} on {self._node}: {error.strerror}",
                why="the machine is out of processes or memory, or the run folder is not writable",
                fix="check there: ulimit -u; df -h",
            ) from error


def _descriptors(env: dict[str, str]) -> tuple[int, ...]:
    return tuple(int(env[name]) for name in (AGENT_FD, LINE_FD) if name in env)


def unsaid_give_up(journal: Iterable[Event]) -> AbandonCommits | None:
    """Of an earlier life: a lineage that was given up, and that no ledger has it from us yet."""
    said = deque((event for event in journal if event["event"] in ("abandon", "given-up")), maxlen=1)
    if not said or said[-1]["event"] == "given-up":
        return None
    lineage, standing = (read_ballot(said[-1][name]) for name in ("lineage", "standing"))
    return AbandonCommits(lineage=lineage, standing=standing, shared_step=said[-1]["shared_step"])
