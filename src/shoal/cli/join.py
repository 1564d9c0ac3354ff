"""`shoal join`: take part in a run that another machine hosts, without SSH; or again, after our agent died."""

from __future__ import annotations

import contextlib
import ctypes
import getpass
import os
import select
import stat
import sys
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.lines import print_note
from shoal.cli.output import shown
from shoal.cli.progress import make_display
from shoal.cluster.join.invitation import parse_invitation
from shoal.config.load import load_config
from shoal.errors import UsageError
from shoal.events import EventTail
from shoal.runfolder import RunFolder
from shoal.trials.joining import join as take_part
from shoal.trials.rejoining import rejoin
from shoal.trials.training import Display, default_out

app = typer.Typer(add_completion=False)


CODE_VARIABLE = "SHOAL_JOIN_CODE"
_MOST_CODE_BYTES = 1024
# A code in a pipe or a file is there by then, and no note is needed.
_QUIET_S = 0.5


# A code after the address is an extra argument, which no help page shows.
@app.command(context_settings={"allow_extra_args": True})
def join(
    context: typer.Context,
    invitation: Annotated[
        str, typer.Argument(help="ADDRESS:PORT, as shoal host printed it; or the folder of a run to come back to.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="This machine's run folder.", show_default="runs/joined-TIME")
    ] = None,
    code_file: Annotated[
        Path | None,
        typer.Option(help="A file with the code, which only you can read.", show_default="the code is asked for"),
    ] = None,
    node: Annotated[str | None, typer.Option(help="With a run folder: which node, where it has several.")] = None,
) -> None:
    """Take part in a run that another machine hosts: type there `shoal host`, and here what it prints.

    The code is asked for. Scripts give it on standard input, in the variable SHOAL_JOIN_CODE or with --code-file; as
    ADDRESS:PORT#CODE, other users of this machine can read it in the list of processes.

    A machine whose agent was killed comes back to a run that goes on elsewhere: shoal join RUN-FOLDER.
    """
    code = " ".join(context.args) if context.args else None
    if Path(invitation).is_dir():
        if code is not None or code_file is not None:
            raise UsageError(f"{invitation} is a run folder: to come back to a run takes no code")
        if out is not None:
            raise UsageError(
                "--out does not go with a run folder",
                why=f"this machine comes back to the run in {invitation}",
                fix=f"leave it out: shoal join {invitation}",
            )
        sys.stdout.write(f"{rejoin(Path(invitation), node)}\n")
        return
    if node is not None:
        raise UsageError(
            "--node goes with a run folder",
            why="it says as which node a machine comes back; one that joins is given its name",
            fix=f"leave it out: shoal join {invitation}",
        )
    invited = parse_invitation(invitation)
    # Also when the code comes another way: no process that is started here inherits it.
    from_environment = take_code_from_environment()
    ways = {
        f"{invited.place}#CODE": invited.code,
        "a second argument": code,
        "--code-file": code_file,
        CODE_VARIABLE: from_environment,
    }
    refuse_two_codes([way for way, given in ways.items() if given not in (None, "")])
    if code is not None:
        invited = invited.with_code(code)
    if invited.code:
        print_note(
            "other users of this machine can read a code that is given as an argument, in the list of processes; "
            f"better: shoal join {invited.place}, and the code when it is asked for"
        )
    else:
        invited = invited.with_code(read_code(code_file, from_environment))
    show = OwnRank()
    try:
        joined = take_part(invited, out or default_out("joined"), print_note, show)
    finally:
        show.close()
    sys.stdout.write(f"the run has ended; its results are on the host, our part is in {shown(joined.run.path)}\n")


def refuse_two_codes(ways: list[str]) -> None:
    """One of them would be ignored, and may be the right one."""
    if len(ways) > 1:
        raise UsageError(
            f"the code is given in two ways: {' and '.join(ways)}",
            why="only one of them can be meant",
            fix=f"leave one out{f'; remove the variable: unset {CODE_VARIABLE}' if CODE_VARIABLE in ways else ''}",
        )


def read_code(file: Path | None, from_environment: str | None) -> str:
    """The code of an invitation, from the file, the environment, the terminal or standard input."""
    if file is not None:
        return read_code_file(file)
    if from_environment:
        return from_environment
    if sys.stdin is not None and sys.stdin.isatty():
        try:
            return getpass.getpass("code: ")
        except EOFError:
            return ""
    return read_code_from_input()


def read_code_from_input() -> str:
    """A line of standard input, which is no terminal. While none comes, a note says what is waited for."""
    line = ""
    # Python has no `stdin` when it was started without one.
    if sys.stdin is not None:
        if not select.select([sys.stdin], [], [], _QUIET_S)[0]:
            print_note("waiting for the code on standard input")
        line = sys.stdin.readline(_MOST_CODE_BYTES)
    if not line:
        raise UsageError(
            "there is no code: standard input was empty",
            why="without a terminal the code cannot be asked for",
            fix=f"give it with --code-file FILE, or in the variable {CODE_VARIABLE}",
        )
    return line


def take_code_from_environment() -> str | None:
    """The variable's value, which is removed: ranks and agents do not inherit it, and `/proc/PID/environ` of this
    process does not show it any longer."""
    code = os.environ.get(CODE_VARIABLE)
    if code is None:
        return None
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    if place := libc.getenv(CODE_VARIABLE.encode()):
        # Removing a variable leaves its bytes where the kernel shows them.
        ctypes.memset(place, ord("x"), len(os.fsencode(code)))
    del os.environ[CODE_VARIABLE]
    return code


def read_code_file(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            status = os.fstat(opened.fileno())
            if stat.S_ISREG(status.st_mode) and status.st_mode & 0o077:
                raise UsageError(
                    f"other users can read or change the code in {file}",
                    why=f"its mode is {stat.S_IMODE(status.st_mode):04o}, and the first machine to use a code gets in",
                    fix=f"chmod 600 {file}; and ask the host for a new code; or: shoal join ADDRESS:PORT < {file}",
                )
            return opened.read(_MOST_CODE_BYTES).decode(errors="replace")
    except OSError as error:
        raise UsageError(
            f"cannot read the code in {file}: {error.strerror}", fix=f"look at it: ls -ld {file.parent}"
        ) from None


class OwnRank:
    """Progress of the rank on this machine, by its own number, as a host shows that of rank 0."""

    def __init__(self) -> None:
        self._display: Display | None = None
        self._tail: EventTail | None = None
        self._gone = False

    def __call__(self, run: RunFolder) -> None:
        try:
            self._show(run)
        except OSError:
            # The terminal is gone; our part of the run is not.
            self._gone = True

    def _show(self, run: RunFolder) -> None:
        if self._gone:
            return
        if self._tail is None and (files := run.event_files()):
            rank, path = next(iter(files.items()))
            self._tail = EventTail(path)
            self._display = make_display(load_config(run.config), rank=rank)
        if self._tail is not None and self._display is not None:
            self._display(self._tail.poll())

    def close(self) -> None:
        if self._display is not None:
            with contextlib.suppress(OSError):
                self._display.close()
