"""The remote end of an SSH link: `python -P -m shoal.cluster.hosts.messenger`.

It starts the agent on its machine, or finds the one that an earlier connection started, passes orders on to it, and
sends back what the run writes there. When the connection breaks the messenger ends, and the agent continues.

In:  one JSON line (`MessengerOrder`), then the agent's own orders, line by line.
Out: for each piece of a file a JSON line with path, offset and size, and then its bytes; at the very end {"end": true}.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Annotated

from pydantic import Field, TypeAdapter

from shoal.cluster.agent_link import PIECE_BYTES, agent_command
from shoal.control.orders import END, STOP, Number, PlainName, read_request_line
from shoal.control.processes import AGENT, ask_to_stop, find_processes, kill_processes, restore_signals
from shoal.errors import ControlError
from shoal.run_folder import RunFolder, is_plain_name, list_below, open_below, write_atomically

POLL_S = 0.1
# The first line carries the tokenizer's file, an order of the agent the plan of all ranks.
_MOST_LINE_BYTES = 64 << 20


@dataclass(frozen=True)
class MessengerOrder:
    folder: str
    node: PlainName
    ranks: tuple[Number, ...] = ()  # of this node: their events are sent
    texts: dict[str, str] = field(default_factory=dict)  # small files to write into the run folder
    have: dict[str, Annotated[int, Field(ge=0)]] = field(default_factory=dict)  # bytes of each file the launcher has
    keeps: bool = False  # send also the ledger and, at the end, the newest checkpoint
    follow: bool = False  # the agent runs already
    discard: bool = False  # remove the run folder at the end


def main() -> int:
    restore_signals()
    order = parse_order(sys.stdin.buffer.readline(_MOST_LINE_BYTES))
    run = RunFolder(Path(order.folder).expanduser())
    agent = None if order.follow else _start_agent(order, run)
    threading.Thread(target=_pass_on, args=(sys.stdin.buffer, agent, run), daemon=True).start()
    files = FileSender(run, order.node, order.ranks, order.have, order.keeps, _put_piece)
    if not order.follow:
        _put({"begins": files.reset()})
    with contextlib.suppress(BrokenPipeError):
        send_while(lambda: _is_alive(agent, run), files)
        if order.keeps:
            files.add_newest_checkpoint()
            files.send_new()
        if order.discard:
            shutil.rmtree(run.path, ignore_errors=True)
        _put({"end": True})
    # The pipe may be broken: Python must not report that when it closes stdout.
    os._exit(0)


def parse_order(line: bytes) -> MessengerOrder:
    try:
        return TypeAdapter(MessengerOrder).validate_json(line, strict=True)
    except ValueError as error:
        raise ControlError(
            f"a messenger got an order that it cannot read: {str(error).splitlines()[0]}",
            why="launcher and messenger are of different versions of shoal",
            fix="bring all machines to the same one: shoal setup HOSTS",
        ) from None


def _text_file(run: RunFolder, name: str) -> Path:
    """Return the path of one of the small files that are sent to a machine with another disk."""
    texts = {path.name: path for path in (run.config, run.tokenizer, run.data)}
    if name not in texts:
        raise ControlError(
            f"the file {ascii(name)[:60]} was sent for the run folder",
            why=f"only {', '.join(texts)} are sent that way",
            fix="compare versions on all machines: shoal --version",
        )
    return texts[name]


def _start_agent(order: MessengerOrder, run: RunFolder) -> subprocess.Popen[bytes]:
    (run.path / "events").mkdir(parents=True, exist_ok=True)
    (run.path / "agents").mkdir(exist_ok=True)
    for name, text in order.texts.items():
        write_atomically(_text_file(run, name), text)
    with run.agent_log(order.node).open("ab") as log:
        return subprocess.Popen(
            agent_command(run.path, order.node),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _pass_on(lines: IO[bytes], agent: subprocess.Popen[bytes] | None, run: RunFolder) -> None:
    """Pass orders on to the agent. One that an earlier connection started gets stop requests as signals."""
    for line in iter(lambda: lines.readline(_MOST_LINE_BYTES), b""):
        if agent is not None and agent.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                agent.stdin.write(line)
                agent.stdin.flush()
        elif (request := read_request_line(line)) in (STOP, END):
            agents = [process for process in find_processes(run.path) if process.part == AGENT]
            ask_to_stop(agents) if request == STOP else kill_processes(agents)
    # The launcher has ended, or the connection is lost.
    os._exit(0)


def _is_alive(agent: subprocess.Popen[bytes] | None, run: RunFolder) -> bool:
    if agent is not None:
        return agent.poll() is None
    return any(process.part == AGENT for process in find_processes(run.path))


def send_while(is_alive: Callable[[], bool], files: FileSender) -> None:
    """Send files while the agent runs, and once more afterwards: it writes its last lines just before its end."""
    while True:
        was_alive = is_alive()
        files.send_new()
        if not was_alive:
            return
        time.sleep(POLL_S)


class FileSender:
    """Sends what a node writes: its journal and agent log, the logs of its processes and the events of its `ranks`, to
    which the caller may add later. `keeps`: also the ledger. `put` gets a file's name, an offset and bytes.

    Nothing outside the run folder is ever sent: no symbolic link in it is followed.
    """

    def __init__(
        self,
        run: RunFolder,
        node: str,
        ranks: Collection[int],
        have: Mapping[str, int],
        keeps: bool,
        put: Callable[[str, int, bytes], None],
    ) -> None:
        self._run = run
        self._put = put
        self._ranks = ranks
        self._sent = dict(have)  # bytes of each file that were sent
        self._logs = self._name(run.logs(node))
        # Neither its orders, which hold the run's token, nor its votes, which no other node needs.
        self._always = [self._name(run.journal(node)), self._name(run.agent_log(node)), self._name(run.samples(node))]
        if keeps:
            self._always.append(run.commits.name)
        self._checkpoint: list[str] = []

    def reset(self) -> dict[str, int]:
        """Begin a launch and return the first byte that is sent of each file. What the launcher has and this folder has
        not was sent from another folder."""
        sizes: dict[str, int] = {}
        for name in self._names():
            with self._opened(name) as file:
                if file is not None:
                    sizes[name] = os.fstat(file.fileno()).st_size
        self._sent = {name: min(self._sent.get(name, 0), size) for name, size in sizes.items()}
        return dict(self._sent)

    def add_newest_checkpoint(self) -> None:
        """Send also the newest checkpoint, its manifest last, as it was written: it marks a complete copy."""
        if newest := max(self._run.checkpoints.glob("step-????????"), default=None):
            folder = self._name(newest)
            inside = sorted(list_below(self._run.path, folder), key=lambda name: name == "manifest.json")
            self._checkpoint = [f"{folder}/{name}" for name in inside]

    def send_new(self) -> None:
        for name in self._names():
            with self._opened(name) as file:
                if file is not None:
                    self._send(name, file)

    def _send(self, name: str, file: IO[bytes]) -> None:
        # Only what is there now: a rank that prints faster than the link carries must not starve the other files.
        left = os.fstat(file.fileno()).st_size - file.seek(self._sent.get(name, 0))
        while left > 0 and (piece := _whole_lines(name, file.read(min(left, PIECE_BYTES)))):
            self._put(name, self._sent.get(name, 0), piece)
            self._sent[name] = self._sent.get(name, 0) + len(piece)
            file.seek(self._sent[name])
            left -= len(piece)

    def _names(self) -> list[str]:
        logs = [f"{self._logs}/{name}" for name in list_below(self._run.path, self._logs) if is_plain_name(name)]
        events = [self._name(self._run.events(rank)) for rank in sorted(self._ranks)]
        profiles = [self._name(self._run.profile(rank)) for rank in sorted(self._ranks)]
        return [*self._always, *events, *profiles, *logs, *self._checkpoint]

    def _name(self, path: Path) -> str:
        return str(path.relative_to(self._run.path))

    @contextlib.contextmanager
    def _opened(self, name: str) -> Iterator[IO[bytes] | None]:
        """Open a file; None for one that is missing or no regular file, such as a link."""
        try:
            file = os.fdopen(open_below(self._run.path, name, os.O_RDONLY), "rb")
        except OSError:
            yield None
            return
        with file:
            yield file


def _whole_lines(name: str, piece: bytes) -> bytes:
    """Leave out half a line of a record file: a killed rank leaves one, which the next writer of the file removes."""
    if not name.endswith(".jsonl") or (len(piece) == PIECE_BYTES and b"\n" not in piece):
        return piece
    return piece[: piece.rfind(b"\n") + 1]


def _put_piece(name: str, offset: int, piece: bytes) -> None:
    _put({"path": name, "offset": offset, "size": len(piece)}, piece)


def _put(head: Mapping[str, object], piece: bytes = b"") -> None:
    sys.stdout.buffer.write(json.dumps(head).encode() + b"\n" + piece)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main())
