"""Start the rank processes of a node, log their output, notice their exits, and leave none behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from shoal.agent.kv_store import KvStoreClient, read_request, to_frame
from shoal.agent.local_ranks import LocalRank, RankConnection
from shoal.agent.mesh import AgentAddresses, BackgroundTasks
from shoal.agent.rank_template import ForkedRank, RankTemplate
from shoal.cluster.agent_link import STDIN_FD
from shoal.cluster.node import start_process
from shoal.control.agent_events import AbandonRecorded, AgentEvent, AgentNote, LineageAbandoned, ScriptStoreKeys
from shoal.control.fork_request import TEMPLATE_FD, can_be_forked
from shoal.control.membership.settings import SCRIPT_STORE_EXIT_S
from shoal.control.membership.types import Generation, read_ballot
from shoal.control.orders import StartProcess
from shoal.control.processes import TEMPLATE, make_marks
from shoal.control.rank_env import AGENT_FD, KEEPS_FILES, SAFE_PATH, SESSION_FD, script_store_command, torch_caches
from shoal.control.rank_messages import MEMBERSHIP_FD, AbandonCommits, ToAgent
from shoal.control.rank_stacks import RankStacks, ask_for_stacks, read_stacks
from shoal.cost.memory import OUT_OF_MEMORY_ADVICE
from shoal.errors import ControlError, RunFailed
from shoal.events import Event, read_events, read_last_events
from shoal.host.memory import count_oom_kills, memory_limit_bytes
from shoal.host.proc import unix_sockets_of
from shoal.run_folder import RunFolder
from shoal.units import format_si

# The error names in the last event of a rank that ran out of memory.
_OUT_OF_MEMORY = ("OutOfMemory", "MemoryError")
_LAST_BYTES = 1 << 16


@dataclass(frozen=True)
class RankExit:
    start: StartProcess
    code: int
    by_agent: bool  # the agent killed it
    out_of_memory: bool  # the kernel killed a process for lack of memory while this one ran
    memory_limit_bytes: int | None = None  # of the control group in which it ran out of memory


@dataclass
class _Running:
    start: StartProcess
    process: subprocess.Popen[bytes] | ForkedRank
    clock: LogClock
    oom_kills_before: int
    by_agent: bool = False


class RankProcesses:
    def __init__(
        self, run: RunFolder, node: str, now: Callable[[], float], note: Callable[[str], None] = lambda text: None
    ) -> None:
        self._run = run
        self._node = node
        self._now = now
        self._note = note
        self._running: list[_Running] = []
        self._template: RankTemplate | None = None
        self._orphaned: list[int] = []  # ended ranks whose children may still be waited for

    def start(
        self, start: StartProcess, env: Mapping[str, str], fds: Mapping[str, int], stdin: int | None = None
    ) -> None:
        """Start a rank; the numbers of the descriptors `fds` are in the variables of these names."""
        log = self._run.log(self._node, start.name)
        # Both before it runs: it may print, or run out of memory, at once.
        clock, oom_kills_before = LogClock(log, self._now), count_oom_kills()
        # Every rank of every launcher is started here, so it always gets the private caches of its own machine.
        variables = {**start.env, **env, **torch_caches().variables}

        def start_plain(fds: Mapping[str, int]) -> subprocess.Popen[bytes]:
            numbers = {name: str(fd) for name, fd in fds.items()}
            try:
                return start_process(start.argv, {**variables, **numbers}, log, tuple(fds.values()), stdin)
            except OSError as error:
                raise _cannot_start(start.name, self._node, error) from error

        process: subprocess.Popen[bytes] | ForkedRank
        self.prepare(start)
        template = self._template
        if template is not None and template.can_be_asked and can_be_forked(start.argv, sys.executable):
            process = template.fork(start.argv, variables, log, fds, start_plain)
        else:
            process = start_plain(fds)
        self._running.append(_Running(start, process, clock, oom_kills_before))

    def prepare(self, start: StartProcess) -> None:
        """Start the template for ranks such as this one, which then start sooner; not again after it has ended."""
        if self._template is not None or sys.platform != "linux" or not can_be_forked(start.argv, sys.executable):
            return
        log = self._run.template_log(self._node)
        if (fd := os.environ.pop(TEMPLATE_FD, None)) is not None:
            self._template = RankTemplate(socket.socket(fileno=int(fd)), None, log, self._note)
            return
        marks = {**make_marks(self._run.path, TEMPLATE), "SHOAL_NODE": self._node}
        with contextlib.suppress(OSError):
            env = {**start.env, **torch_caches().variables, **marks}
            self._template = RankTemplate.start(env, str(self._run.path), log, self._note)

    def close(self) -> None:
        """End the template: no rank will be started again."""
        if self._template is not None:
            self._template.end()

    def alive(self) -> dict[str, int]:
        """Return the processes of the ranks; 0 for one that is not forked yet."""
        return {running.start.name: running.process.pid for running in self._running}

    def reap(self) -> Iterator[RankExit]:
        """Yield the ranks that ended since the last call, and note the growth of all logs."""
        for running in list(self._running):
            code = running.process.poll()
            running.clock.note()
            if code is not None:
                self._running.remove(running)
                # Processes that it started and did not wait for end with it.
                _kill(running.process)
                self._orphaned.append(running.process.pid)
                out_of_memory = code == -signal.SIGKILL and count_oom_kills() > running.oom_kills_before
                limit_bytes = memory_limit_bytes() if out_of_memory else None
                yield RankExit(running.start, code, running.by_agent, out_of_memory, limit_bytes)
        self._orphaned = [leader for leader in self._orphaned if _has_children_in(leader)]

    def ask_to_stop(self) -> None:
        for running in self._running:
            running.process.send_signal(signal.SIGINT)

    def end(self, name: str) -> None:
        """Kill one rank; its exit is judged like a fault, not as `by_agent`."""
        for running in self._running:
            if running.start.name == name:
                _kill(running.process)

    def kill(self) -> None:
        """Kill the whole session of every rank, so that a launcher's own children end too."""
        for running in self._running:
            running.by_agent = True
            _kill(running.process)


class LogClock:
    """Records beside a log when it grew to which size, so that the logs of several ranks can be merged by time."""

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


def _kill(process: subprocess.Popen[bytes] | ForkedRank) -> None:
    """Kill a rank with all processes of its session, or keep one that is not forked yet from being so.

    Each worker of a DataLoader has a folder in the temporary folder (Python's multiprocessing, `pymp-…`), with the
    socket by which it shares tensors. A killed worker cannot remove it.
    """
    if isinstance(process, ForkedRank) and not process.pid:
        process.cancel()
        return
    sockets = unix_sockets_of(process.pid, "/pymp-")
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    for path in sockets:
        # A folder that other processes use, too, is not empty and stays.
        with contextlib.suppress(OSError):
            path.unlink()
            path.parent.rmdir()


def _has_children_in(group: int) -> bool:
    """Wait for ended children of a rank that has ended: an agent with a template adopts them."""
    try:
        while group and os.waitpid(-group, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return bool(group)


class RankEnvironment:
    """Starts ranks with their marks, log, key-value store, and in an elastic run a connection for membership."""

    def __init__(
        self,
        run: RunFolder,
        node: str,
        ranks: RankProcesses,
        keys: KvStoreClient,
        places: AgentAddresses,
        write: Callable[[AgentEvent], None],
    ) -> None:
        self._run = run
        self.run_folder = shlex.quote(str(run.path))
        self.node = node
        self._ranks = ranks
        self._keys = keys
        self._places = places
        self._tasks = BackgroundTasks()
        self._store: subprocess.Popen[bytes] | None = None
        self.write = write

    def note(self, text: str) -> None:
        self.write(AgentNote(text))

    def start(self, start: StartProcess, has_own_folder: bool) -> None:
        env = make_marks(self._run.path, start.name)
        if not has_own_folder:
            env[KEEPS_FILES] = "0"
        env |= self._script_variables(start)
        with self._starting(start), ExitStack() as inherited:
            stdin = self._script_stdin(start, inherited)
            fds = {AGENT_FD: self._serve_keys(inherited)} if start.store else {}
            self._ranks.start(start, env, fds, stdin)

    def _script_variables(self, start: StartProcess) -> dict[str, str]:
        """Return where torch's `@record` writes the exception of a rank, as under torchrun."""
        file = self._run.log(self.node, start.name).with_suffix(".error.json")
        return {"TORCHELASTIC_ERROR_FILE": str(file)} if start.is_script_rank else {}

    def _script_stdin(self, start: StartProcess, inherited: ExitStack) -> int | None:
        """Return what rank 0 of a script reads. Afterwards only the rank has it."""
        stdin = _take_stdin() if start.is_script_rank and start.ranks == (0,) else None
        if stdin is not None:
            inherited.callback(os.close, stdin)
        return stdin

    def start_elastic(self, rank: LocalRank, on_message: Callable[[LocalRank, ToAgent], None]) -> None:
        """Start a rank of an elastic run; every generation tells it whether it keeps files."""

        def refuse(why: str) -> None:
            self.note(f"{rank.start.name} was killed: {why}")
            self._ranks.end(rank.start.name)

        with self._starting(rank.start), ExitStack() as inherited:
            agent_end, rank_end = socket.socketpair()
            inherited.enter_context(rank_end)
            store = SESSION_FD if rank.start.is_script_rank else AGENT_FD
            fds = {store: self._serve_keys(inherited), MEMBERSHIP_FD: rank_end.fileno()}
            env = {**make_marks(self._run.path, rank.start.name), **self._script_variables(rank.start)}
            stdin = self._script_stdin(rank.start, inherited)
            self._ranks.start(rank.start, env, fds, stdin)
            connection = RankConnection(agent_end, lambda message: on_message(rank, message), refuse)
            rank.begin(connection)
            self._tasks.spawn(connection.listen())

    def serve_script_store(self, listener: socket.socket) -> None:
        """Start the process that serves torch's own store: it needs torch, which the agent does not import.

        It ends with this agent, or by `close` once every rank of all nodes has ended.
        """
        address, port = listener.getsockname()[:2]
        command = script_store_command(address, port, listener.fileno())
        env = {**make_marks(self._run.path, "store"), **SAFE_PATH, "SHOAL_NODE": self.node}
        try:
            self._store = start_process(command, env, self._store_log, (listener.fileno(),))
        except OSError as error:
            raise _cannot_start("the store of the script's ranks", self.node, error) from error
        finally:
            # Only the store keeps it: if the store dies, ranks are refused and do not wait forever.
            listener.close()

    @property
    def _store_log(self) -> Path:
        return self._run.journal(self.node).with_suffix(".store.log")

    def check_script_store(self) -> None:
        """Note, once, that the store has ended while ranks run: torch would retry for minutes without a message."""
        if self._store is None or self._store.poll() is None or not self._ranks.alive():
            return
        code, self._store, log = self._store.returncode, None, self._store_log
        with suppress(OSError):
            last = log.read_bytes()[-_LAST_BYTES:].decode(errors="replace").strip().rpartition("\n")[2]
            self.note(f"the store of the script's ranks ended with {code}: {last or 'it printed nothing'} ({log})")

    def close(self) -> None:
        """End the store, and record in the journal how many keys the ranks have left in it."""
        store, self._store = self._store, None
        if store is None:
            return
        store.terminate()
        try:
            store.wait(SCRIPT_STORE_EXIT_S)
        except subprocess.TimeoutExpired:
            store.kill()
            store.wait()
        self.write(ScriptStoreKeys(self._count_store_keys(store.returncode)))

    def _count_store_keys(self, code: int) -> int | None:
        """Return the number that the store printed; 0 if it ended while importing torch, None if it printed none."""
        if code == -signal.SIGTERM:
            return 0
        with suppress(OSError, ValueError, LookupError, TypeError):
            keys = json.loads(self._store_log.read_text(encoding="utf-8").splitlines()[-1])["keys"]
            return keys if isinstance(keys, int) else None
        return None

    def kill(self, name: str) -> None:
        self._ranks.end(name)

    def ask_for_stacks(self, name: str) -> None:
        ask_for_stacks(self._run, name, self._ranks.alive().get(name, 0))

    def read_stacks(self, name: str) -> RankStacks | None:
        return read_stacks(self._run, name)

    def enter(self, generation: Generation) -> None:
        """Serve the keys of a new generation to the ranks."""
        self._keys.enter(generation)

    def kill_all(self) -> None:
        self._ranks.kill()

    def ran_out_of_memory(self, ended: RankExit) -> bool:
        """Return whether the kernel killed it for lack of memory, or its last event reports that.

        It is restarted then. A note tells the user, because only a smaller batch solves it for good.
        """
        if ended.out_of_memory:
            name = ended.start.name.replace("-", " ")
            cause = "the machine ran out of memory while it ran"
            if ended.memory_limit_bytes is not None:
                cause = f"{self.node} had reached its memory limit of {format_si(ended.memory_limit_bytes, 'B')}"
            self.note(f"{name} was killed, and {cause} ({OUT_OF_MEMORY_ADVICE})")
            return True
        if ended.code < 0:
            return False
        last = read_last_events(self._run.events(ended.start.ranks[0]), _LAST_BYTES)[-1:]
        faults = [event for event in last if event["event"] == "fault" and event.get("error") in _OUT_OF_MEMORY]
        for event in faults:
            advice = str(event["fix"]).replace("\n", ", ")
            self.note(f"{event['seen']} ({advice})")
        return bool(faults)

    def pending_abandon(self) -> AbandonCommits | None:
        return pending_abandon(read_events(self._run.journal(self.node)))

    def shares_folder_with(self, member: int) -> bool:
        """Return whether the member's mark is in this agent's folder, where only that member could have written it."""
        place = self._places[member]
        with suppress(OSError):
            return place.mark in self._run.journal(place.node).read_text(encoding="utf-8")
        return False

    def _serve_keys(self, inherited: ExitStack) -> int:
        agent_end, rank_end = socket.socketpair()
        inherited.enter_context(rank_end)
        self._tasks.spawn(self._answer_requests(agent_end))
        return rank_end.fileno()

    async def _answer_requests(self, agent_end: socket.socket) -> None:
        """Answer one rank's key-value requests until it closes its end."""
        reader, writer = await asyncio.open_connection(sock=agent_end)
        try:
            with suppress(EOFError, OSError):
                while True:
                    writer.write(to_frame(await self._keys.ask(await read_request(reader))))
                    await writer.drain()
        except ControlError as error:
            # The rank sees its connection closed and ends with an error of its own.
            self.note(f"{error.seen}: {error.why}")
        finally:
            writer.close()

    @contextmanager
    def _starting(self, start: StartProcess) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise _cannot_start(start.name, self.node, error) from error


def _cannot_start(name: str, node: str, error: OSError) -> RunFailed:
    return RunFailed(
        f"cannot start {name} on {node}: {error.strerror}",
        why="the machine is out of processes or memory, or the run folder is not writable",
        fix="check there: ulimit -u; df -h",
    )


def _take_stdin() -> int | None:
    """Return the standard input of the user's command, which the launcher passed to this agent."""
    fd = os.environ.pop(STDIN_FD, None)
    return None if fd is None else int(fd)


def pending_abandon(journal: Iterable[Event]) -> AbandonCommits | None:
    """Return a lineage that an earlier life of this agent abandoned and that no ledger has recorded yet."""
    last = deque(
        (event for event in journal if event["event"] in (LineageAbandoned.kind, AbandonRecorded.kind)), maxlen=1
    )
    if not last or last[-1]["event"] == AbandonRecorded.kind:
        return None
    lineage, surviving = (read_ballot(last[-1][name]) for name in ("lineage", "surviving"))
    return AbandonCommits(lineage=lineage, surviving=surviving, shared_step=last[-1]["shared_step"])
