"""The near end of SSH on another machine: `python -P -m shoal.cluster.hosts.messenger`.

It starts the agent there, or finds the one that an earlier connection started, passes orders on to it, and sends home
what the run writes on that machine. It is only a messenger: when the connection breaks it goes, and the agent stays.

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
from shoal.control.orders import END, STOP, Number, PlainName, read_wish
from shoal.control.processes import AGENT, ask, end, find, restore_signals
from shoal.errors import ControlError
from shoal.run_folder import RunFolder, is_plain_name, list_below, open_below, write_atomically

POLL_S = 0.1
# An errand carries the tokenizer's file, an order the plan of all ranks.
_MOST_LINE_BYTES = 64 << 20


@dataclass(frozen=True)
class MessengerOrder:
    """`texts` are small files of the run folder to put there; `have` is how much of each file is at home already.
    `ranks` are the node's own, whose events are sent.
    `keeps`: the ledger and, at the end, the newest checkpoint are wanted. `follow`: the agent runs already.
    `discard`: nothing of the run is to stay there."""

    folder: str
    node: PlainName
    ranks: tuple[Number, ...] = ()
    texts: dict[str, str] = field(default_factory=dict)
    have: dict[str, Annotated[int, Field(ge=0)]] = field(default_factory=dict)
    keeps: bool = False
    follow: bool = False
    discard: bool = False


def main() -> int:
    restore_signals()
    errand = read_errand(sys.stdin.buffer.readline(_MOST_LINE_BYTES))
    run = RunFolder(Path(errand.folder).expanduser())
    agent = None if errand.follow else _start(errand, run)
    threading.Thread(target=_pass_on, args=(sys.stdin.buffer, agent, run), daemon=True).start()
    freight = FileSender(run, errand.node, errand.ranks, errand.have, errand.keeps, _put_piece)
    if not errand.follow:
        _put({"begins": freight.begin_anew()})
    with contextlib.suppress(BrokenPipeError):
        send_while(lambda: _is_alive(agent, run), freight)
        if errand.keeps:
            freight.add_newest_checkpoint()
            freight.send_new()
        if errand.discard:
            shutil.rmtree(run.path, ignore_errors=True)
        _put({"end": True})
    # The descriptor may be broken: nothing is to be said any more when Python closes it.
    os._exit(0)


def read_errand(line: bytes) -> MessengerOrder:
    try:
        return TypeAdapter(MessengerOrder).validate_json(line, strict=True)
    except ValueError as error:
        raise ControlError(
            f"a messenger got an errand that it cannot read: {str(error).splitlines()[0]}",
            why="launcher and messenger are of different versions of shoal",
            fix="bring all machines to the same one: shoal setup HOSTS",
        ) from None


def _start(errand: MessengerOrder, run: RunFolder) -> subprocess.Popen[bytes]:
    (run.path / "events").mkdir(parents=True, exist_ok=True)
    (run.path / "agents").mkdir(exist_ok=True)
    for name, text in errand.texts.items():
        write_atomically(run.text(name), text)
    with run.agent_log(errand.node).open("ab") as log:
        return subprocess.Popen(
            agent_command(run.path, errand.node),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _pass_on(lines: IO[bytes], agent: subprocess.Popen[bytes] | None, run: RunFolder) -> None:
    """To an agent that an earlier connection started, a wish is a signal."""
    for line in iter(lambda: lines.readline(_MOST_LINE_BYTES), b""):
        if agent is not None and agent.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                agent.stdin.write(line)
                agent.stdin.flush()
        elif (wish := read_wish(line)) in (STOP, END):
            agents = [found for found in find(run.path) if found.part == AGENT]
            ask(agents) if wish == STOP else end(agents)
    # Whoever sent us is gone, or has lost us.
    os._exit(0)


def _is_alive(agent: subprocess.Popen[bytes] | None, run: RunFolder) -> bool:
    if agent is not None:
        return agent.poll() is None
    return any(found.part == AGENT for found in find(run.path))


def send_while(alive: Callable[[], bool], freight: FileSender) -> None:
    """And once more afterwards: the agent's last words come just before its end."""
    while True:
        was_alive = alive()
        freight.send_new()
        if not was_alive:
            return
        time.sleep(POLL_S)


class FileSender:
    """The files to send home, and how much of each has gone. `put` gets a file's name, an offset and bytes.

    They are the node's journal and agent log, the logs of its processes and the events of its `ranks`, which may be
    added later. Nothing outside the run folder is ever sent: no symbolic link in it is followed.
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
        self._sent = dict(have)
        self._logs = self._name(run.logs(node))
        # Not its orders, in which the run's token is, and not its votes: those are nobody else's.
        self._always = [self._name(run.journal(node)), self._name(run.agent_log(node))]
        if keeps:
            self._always.append(run.commits.name)
        self._last: list[str] = []

    def begin_anew(self) -> dict[str, int]:
        """A new launch: what is at home already and not here any more was another folder's, and is not waited for."""
        sizes: dict[str, int] = {}
        for name in self._names():
            with self._opened(name) as file:
                if file is not None:
                    sizes[name] = os.fstat(file.fileno()).st_size
        self._sent = {name: min(self._sent.get(name, 0), size) for name, size in sizes.items()}
        return dict(self._sent)

    def add_newest_checkpoint(self) -> None:
        """Its manifest last, as it was written: what is whole at home is known by it."""
        if newest := max(self._run.checkpoints.glob("step-????????"), default=None):
            folder = self._name(newest)
            inside = sorted(list_below(self._run.path, folder), key=lambda name: name == "manifest.json")
            self._last = [f"{folder}/{name}" for name in inside]

    def send_new(self) -> None:
        for name in self._names():
            with self._opened(name) as file:
                if file is not None:
                    self._send(name, file)

    def _send(self, name: str, file: IO[bytes]) -> None:
        # No further than it is now: a rank that prints faster than the link carries must not starve the others.
        left = os.fstat(file.fileno()).st_size - file.seek(self._sent.get(name, 0))
        while left > 0 and (piece := _whole_lines(name, file.read(min(left, PIECE_BYTES)))):
            self._put(name, self._sent.get(name, 0), piece)
            self._sent[name] = self._sent.get(name, 0) + len(piece)
            file.seek(self._sent[name])
            left -= len(piece)

    def _names(self) -> list[str]:
        logs = [f"{self._logs}/{name}" for name in list_below(self._run.path, self._logs) if is_plain_name(name)]
        events = [self._name(self._run.events(rank)) for rank in sorted(self._ranks)]
        return [*self._always, *events, *logs, *self._last]

    def _name(self, path: Path) -> str:
        return str(path.relative_to(self._run.path))

    @contextlib.contextmanager
    def _opened(self, name: str) -> Iterator[IO[bytes] | None]:
        """None for what is not there, and for a link, a folder or anything else that is no regular file."""
        try:
            file = os.fdopen(open_below(self._run.path, name, os.O_RDONLY), "rb")
        except OSError:
            yield None
            return
        with file:
            yield file


def _whole_lines(name: str, piece: bytes) -> bytes:
    """Of a file of records: half a line, which a killed rank leaves, is cut off by the next writer of the file."""
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
