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
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Annotated

from pydantic import Field, TypeAdapter

from shoal.cluster.agent_link import agent_command
from shoal.cluster.transfer import FileSender, send_while
from shoal.control.orders import END, STOP, Number, PlainName, read_request_line
from shoal.control.processes import AGENT, ask_to_stop, find_processes, kill_processes, restore_signals
from shoal.errors import ControlError
from shoal.run_folder import RunFolder, write_atomically

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


def _put_piece(name: str, offset: int, piece: bytes) -> None:
    _put({"path": name, "offset": offset, "size": len(piece)}, piece)


def _put(head: Mapping[str, object], piece: bytes = b"") -> None:
    sys.stdout.buffer.write(json.dumps(head).encode() + b"\n" + piece)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main())
