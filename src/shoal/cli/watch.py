"""`shoal watch`: look at a run while it runs, on a page in the browser or in the terminal.

Nothing here imports the server or the reader until it is needed: `train` and `run` use this module for `--watch`.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import json as json_module
import os
import re
import secrets
import shlex
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from shoal.cli.command import command
from shoal.cli.options import Option
from shoal.cli.output import as_command, make_console, open_browser, print_json, shown
from shoal.errors import UsageError
from shoal.run_folder import RunFolder
from shoal.units import (
    format_duration,
    format_loss,
    format_ms,
    format_percent,
    format_rounded,
    format_si,
    pluralize,
    whole_percents,
)

_LOOPBACK = "127.0.0.1"
_TERMINAL_S = 0.5
# Of a token in a file: what an address can hold as it is, and what no one guesses.
_TOKEN = re.compile(r"[A-Za-z0-9_-]{16,200}")
_LONGEST_TOKEN = 1_000
# How long a command waits at its end for the page's server, which sends the last state first.
_END_S = 3.0
_BAR_CELLS = 30
_FEWEST_BAR_CELLS = 8
# Columns of a narrower terminal stand closer.
_NARROW = 72
_MOST_EVENTS = 5
_OVER = ("finished", "failed", "interrupted", "unfinished")


@command(
    terminal=Option("A live table in this terminal instead of a page."),
    host=Option("The address to listen at; 0.0.0.0 lets other machines look, with the token."),
    port=Option("The port to listen at.", shown="a free one", low=0, high=65_535),
    token_file=Option("Read the token from this file; it is made if it is missing.", shown="a new token"),
    open_=Option("Open the page in the browser."),
    json=Option("Print the page's address as JSON on stdout."),
)
def watch(
    run: Path,
    terminal: bool = False,
    host: str = _LOOPBACK,
    port: int = 0,
    token_file: Path | None = None,
    open_: bool = False,
    json: bool = False,
) -> None:
    """Show a run while it trains, or after it has ended: nodes, progress, loss, speed, step times, what happened.

    It prints the address of a page; Ctrl-C ends the page and leaves the run alone. The address has a token: only
    requests with it are answered. The page works without internet access, and any number of browsers may open it.

    Over SSH, use --terminal, or forward the port: ssh -L 8000:127.0.0.1:PORT MACHINE, and open the address with 8000.

    With --port and --token-file the address stays the same when the page is started again.
    """
    folder = RunFolder.find(run)
    if terminal:
        _refuse_with_terminal(host, port, token_file, open_, json)
        watch_in_terminal(folder)
        return
    token = new_token() if token_file is None else keep_token(token_file)
    listener = listen(host, port)
    url = page_url(host, listener, token)
    if json:
        print_json({"run": str(folder.path), "url": url})
        sys.stdout.flush()
    else:
        sys.stdout.write(f"{url}\n")
        sys.stdout.flush()
        sys.stderr.write("Ctrl-C ends the page and leaves the run alone\n")
    if not is_loopback(host):
        sys.stderr.write(
            "every machine that reaches this address and has the whole line above, token included, can see this run: "
            "names, addresses, losses, messages. The connection is not encrypted; ssh -L is the safer way.\n"
        )
    if open_:
        open_browser(url)
    _serve(folder, listener, token, host)


def _refuse_with_terminal(host: str, port: int, token_file: Path | None, open_: bool, json: bool) -> None:
    given = {
        "--host": host != _LOOPBACK,
        "--port": port,
        "--token-file": token_file is not None,
        "--open": open_,
        "--json": json,
    }
    for flag, is_given in given.items():
        if is_given:
            raise UsageError(
                f"{flag} does not go with --terminal", why="--terminal serves no page", fix="leave one of them out"
            )


def _serve(folder: RunFolder, listener: socket.socket, token: str, host: str) -> None:
    # Imported here: no other command needs a web server.
    import asyncio

    from shoal.tools.watch.server import serve

    names = frozenset((host, socket.gethostname())) if not is_loopback(host) else frozenset[str]()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(folder, listener, token, names))


def new_token() -> str:
    return secrets.token_urlsafe(24)


def keep_token(path: Path) -> str:
    """Return the token in a file. A missing file is made, readable only by its owner from the first moment."""
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            token = new_token()
            file.write(f"{token}\n")
        return token
    except FileExistsError:
        pass
    except OSError as error:
        raise UsageError(
            f"--token-file {path} cannot be written: {(error.strerror or str(error)).lower()}",
            fix="name a file in a folder of yours",
        ) from None
    try:
        with path.open(encoding="ascii") as file:
            mode, token = os.fstat(file.fileno()).st_mode, file.read(_LONGEST_TOKEN).strip()
    except (OSError, ValueError):
        mode, token = 0, ""
    if not _TOKEN.fullmatch(token):
        raise UsageError(
            f"--token-file {path} holds no token",
            why="a token has 16 to 200 letters, digits, dashes and underscores, and stands alone in its file",
            fix="name a file that does not exist yet: it is made, with a new token",
        )
    if mode & 0o077:
        raise UsageError(
            f"--token-file {path} can be read by other users",
            why=f"its mode is {stat.S_IMODE(mode):04o}, and who has the token can see the run",
            fix=f"chmod 600 {shlex.quote(str(path))}",
        )
    return token


_WHY_NOT_SERVED = {
    errno.EACCES: ("only root may listen at ports below 1024", "use another, such as --port 8080, or leave --port out"),
    errno.EADDRINUSE: ("another program has the port", "leave --port out for a free one"),
}


def listen(host: str, port: int) -> socket.socket:
    """Listen at an address of this machine."""
    listener = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(64)
    except OSError as error:
        if listener is not None:
            listener.close()
        where = f"{host}:{port}" if port else host
        why, fix = _WHY_NOT_SERVED.get(
            error.errno or 0,
            ("the address is not one of this machine", "leave --host out: the page is for this machine only"),
        )
        raise UsageError(
            f"the page cannot be served at {where}: {(error.strerror or str(error)).lower()}", why=why, fix=fix
        ) from None
    return listener


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def page_url(host: str, listener: socket.socket, token: str) -> str:
    """Return the address of the page. Listening at every address, it has the name of this machine."""
    port = listener.getsockname()[1]
    if host in ("0.0.0.0", "::"):  # noqa: S104 - the user's choice
        host = socket.gethostname()
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/?token={token}"


class WatchedRun:
    """The page's server beside a run that this command starts: a process of its own, so that it slows nothing here."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, run: RunFolder) -> None:
        """Start the server and print the page's address."""
        token = new_token()
        with contextlib.closing(listen(_LOOPBACK, 0)) as listener:
            orders = {"run": str(run.path), "token": token, "listener": listener.fileno()}
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "shoal.tools.watch.server"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(listener.fileno(),),
                # Ctrl-C is for the run, which continues to its next step; the page shows how it ends.
                start_new_session=True,
            )
            sys.stderr.write(f"watch: {page_url(_LOOPBACK, listener, token)}\n")
        assert self._process.stdin is not None  # noqa: S101 - it is a pipe
        # Not as an argument: other users of this machine see those.
        self._process.stdin.write(json_module.dumps(orders).encode() + b"\n")
        self._process.stdin.flush()

    def close(self) -> None:
        """End the server. It ends by itself if this process is killed: it waits for the end of its standard input."""
        if self._process is None or self._process.stdin is None:
            return
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextlib.contextmanager
def watched(is_wanted: bool, detach: bool) -> Iterator[WatchedRun | None]:
    """Make the page of a run for `--watch`; None without it."""
    if not is_wanted:
        yield None
        return
    if detach:
        raise UsageError(
            "--watch does not go with --detach",
            why="the page ends with the command, and --detach ends the command at once",
            fix="leave --watch out, and look at the run with: shoal watch RUN",
        )
    with contextlib.closing(WatchedRun()) as page:
        yield page


def watch_in_terminal(folder: RunFolder) -> None:
    """Show the essentials as a live table until the run has ended; piped, print them once."""
    from rich.live import Live

    from shoal.tools.watch.figures import snapshot
    from shoal.tools.watch.run_state import LiveState

    state, console = LiveState(folder), make_console()
    state.poll()
    while state.is_behind:
        state.poll()
    if not console.is_terminal:
        console.print(state_table(snapshot(state), console.width))
        return
    shown_state = snapshot(state)
    with Live(state_table(shown_state, console.width), console=console, auto_refresh=False) as live:
        try:
            while shown_state["summary"]["status"] not in _OVER:
                time.sleep(_TERMINAL_S)
                state.poll()
                shown_state = snapshot(state)
                live.update(state_table(shown_state, console.width), refresh=True)
        except KeyboardInterrupt:
            return
    console.print(f"next: {escape(as_command('report', shown(folder.path)))}", soft_wrap=True)


def state_table(state: dict[str, Any], width: int) -> Table:
    """Return the essentials of a run's state: progress, figures, ranks, what happened."""
    summary = state["summary"]
    page = Table.grid(padding=(0, 0))
    page.add_column(overflow="fold")
    colours = {"running": "green", "finished": "green", **dict.fromkeys(("failed", "unfinished", "lost"), "red")}
    colour = colours.get(summary["status"], "yellow")
    page.add_row(f"[bold]{escape(summary['name'])}[/]  [{colour}]{summary['status']}[/]  {escape(_about(summary))}")
    page.add_row(_progress(summary, width))
    page.add_row(_figures(summary))
    page.add_row("")
    page.add_row(_rank_table(summary, 1 if width < _NARROW else 2))
    marks = sorted(state["marks"], key=lambda mark: mark["time"])
    texts = {mark["text"]: mark for mark in marks if mark["kind"] != "checkpoint"}
    if texts:
        page.add_row("")
    for mark in list(texts.values())[-_MOST_EVENTS:]:
        at = time.strftime("%H:%M:%S", time.localtime(mark["time"]))
        page.add_row(f"[dim]{at}[/]  {escape(mark['text'])}")
    if summary["unreadable"] or summary["unfinished"]:
        page.add_row(
            f"[yellow]{pluralize(summary['unreadable'], 'line')} of the run folder could not be read, and "
            f"{pluralize(summary['unfinished'], 'file')} end in half a line[/]"
        )
    return page


def _about(summary: dict[str, Any]) -> str:
    texts = (summary["what"], f"on {summary['on']}" if summary["on"] else "", summary["status_text"])
    return " · ".join(text for text in texts if text)


def _progress(summary: dict[str, Any], width: int) -> str:
    step, steps = summary["step"], summary["steps"]
    if not steps:
        return f"step {step:,}"
    left = "" if summary["left_s"] is None else f"  {format_duration(summary['left_s'])} left"
    text = f"  step {step:,} of {steps:,} ({format_percent(step / steps)}){left}"
    cells = max(_FEWEST_BAR_CELLS, min(_BAR_CELLS, width - len(text)))
    done = min(cells, round(cells * step / steps))
    return f"[cyan]{'━' * done}[/][dim]{'━' * (cells - done)}[/]{text}"


def _figures(summary: dict[str, Any]) -> str:
    texts = []
    if summary["loss"] is not None:
        texts.append(f"loss {format_loss(summary['loss'])}")
    if summary["val_loss"] is not None:
        texts.append(f"validation {format_loss(summary['val_loss'])}")
    if summary["speed"] is not None:
        texts.append(f"{format_rounded(summary['speed'])} {summary['unit']}/s")
    if (speedup := summary["speedup"]) is not None:
        about = "about " if speedup["is_estimate"] else ""
        texts.append(f"{about}{speedup['ratio']:.2f}× {speedup['than']}")
    if summary["step_s"]:
        predicted = summary["predicted"]
        beside = f" (predicted {format_ms(predicted['step_s'])})" if predicted else ""
        texts.append(f"{format_ms(summary['step_s'])} a step{beside}")
    return " · ".join(texts) or "no step yet"


def _rank_table(summary: dict[str, Any], gap: int) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold")
    table.add_column("rank", no_wrap=True)
    table.add_column("node", overflow="fold", min_width=4)
    for title in ("step", "step time", "compute", "comm", "wait", "sends"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("")
    nodes = {node["name"]: node for node in summary["nodes"]}
    for rank in summary["ranks"]:
        step_s, node = rank["step_s"], nodes.get(rank["node"], {})
        parts = [rank[f"{part}_s"] or 0.0 for part in ("compute", "exposed", "wait")]
        shares = [f"{share}%" if step_s else "–" for share in whole_percents(parts)]
        sends = "–" if not node.get("sent_bps") else format_si(node["sent_bps"], "bit/s")
        state = "[red]away[/]" if not rank["is_present"] else ""
        if rank["slow"] is not None:
            state = f"[yellow]straggler: {rank['slow']:.2f}× the median[/]"
        table.add_row(
            str(rank["rank"]), escape(rank["node"]), f"{rank['step']:,}", format_ms(step_s) if step_s else "–", *shares,
            sends, state or escape(rank["doing"]),
        )  # fmt: skip
    return table
