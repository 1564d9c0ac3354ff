"""`shoal host`, `shoal join` and `shoal setup`: add machines to a run, without and with SSH."""

from __future__ import annotations

import contextlib
import ctypes
import getpass
import os
import select
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from shoal.cli.command import Request, command
from shoal.cli.options import SETTINGS, Option, argument
from shoal.cli.output import (
    advising_flags,
    as_command,
    make_console,
    print_json,
    print_note,
    print_paragraph,
    print_result,
    shown,
    stdout_console,
)
from shoal.config.defaults import DEFAULT_PRESET
from shoal.config.presets import PRESET_NAMES, PRESETS, depth_overrides
from shoal.errors import ShoalError, UsageError
from shoal.events import EventTail
from shoal.run_folder import RunFolder, default_out
from shoal.terminal import begin_stage

if TYPE_CHECKING:
    from shoal.cluster.hosts.setup import SetupResult
    from shoal.cluster.hosts.spec import Host, HostsSpec
    from shoal.config.schema import Config
    from shoal.control.invitation import Invitation
    from shoal.runs.start import TrainDisplay


CODE_VARIABLE = "SHOAL_JOIN_CODE"
_MOST_CODE_BYTES = 1024
# A code from a pipe or a file arrives within this time, and no note is needed.
_QUIET_S = 0.5

Results: TypeAlias = "Mapping[str, SetupResult | ShoalError]"
_COLOURS = {"made": "green", "updated": "green"}


@dataclass(frozen=True, kw_only=True)
class HostRequest(Request):
    preset: str | None = None
    machines: int | None = None
    address: str | None = None
    port: int = 0
    data: Path | None = None
    depth: int | None = None
    steps: int | None = None
    config: Path | None = None
    set_: list[str] | None = None
    out: Path | None = None
    confirm: bool = False
    json: bool = False


@command(
    preset=argument(f"{PRESET_NAMES}; or the folder of a running run.", shown="grammar"),
    machines=Option("How many machines take part, this one included.", shown="2", low=2),
    address=Option("The address at which the others reach this machine.", shown="found"),
    data=replace(SETTINGS["data"], help="A text file, or a folder of text files; it is sent to the others."),
    confirm=Option("Ask here, y or n, before a joining machine receives anything."),
    json=Option("Print the manifest as JSON on stdout."),
)
def host(request: HostRequest) -> None:
    """Train with machines that join without SSH. Prints for each the command to type there, and a one-time code.

    It is the same as shoal train --on join:N, which has all other options of a training. To invite one more machine
    into a running run, type on any of its machines: shoal host RUN-FOLDER.
    """
    from shoal.cli.progress import make_display, name_training
    from shoal.cli.train import clear_leftovers
    from shoal.runs.invite import invite
    from shoal.runs.start import refuse_confirm, start_training

    name = request.preset or DEFAULT_PRESET
    if name not in PRESETS and Path(name).is_dir():
        if request.given.keys() - {"preset", "address", "port", "confirm"}:
            raise UsageError(
                "a running run keeps its settings",
                why="with a run folder, shoal host has only --address, --port and --confirm",
                fix="leave the others out",
            )
        code = invite(Path(name), request.address, request.port, print_note, request.confirm)
        sys.stdout.write(f"{code}\n")
        return
    settings = _host_config(name, request)
    if request.confirm:
        refuse_confirm(settings.run.on)
    clear_leftovers(clean=False)
    with advising_flags(request.flags()):
        out = request.out or default_out(name_training(settings))
        run, manifest = start_training(settings, out, make_display, confirm=request.confirm)
    if manifest is not None:
        print_result(run, manifest, request.json)


def _host_config(preset: str, request: HostRequest) -> Config:
    """Build the settings of a run with joining machines."""
    from shoal.config.load import build_config, refuse_duplicate_settings, refuse_without_effect, typed_settings

    sets = request.set_ or []
    refuse_duplicate_settings(request.flags(), sets)
    if "run.on" in typed_settings(None, sets):
        raise UsageError(
            "--set run.on does not go with shoal host",
            why="shoal host trains with machines that join it",
            fix="give their number: --machines N; or train elsewhere: shoal train --on …",
        )
    parts = [f"join:{request.machines or 2}"]
    parts += [f"address={request.address}"] if request.address else []
    parts += [f"port={request.port}"] if request.port else []
    flags = request.overrides() | {"run": {"on": ",".join(parts)}} | depth_overrides(request.depth)
    settings = build_config(preset, request.config, flags, sets)
    refuse_without_effect(settings, typed_settings(None, sets))
    return settings


@command(
    invitation=argument("ADDRESS:PORT, as shoal host printed it; or the folder of a run to rejoin."),
    out=Option("This machine's run folder.", shown="runs/joined-TIME"),
    code_file=Option("A file with the code that only you can read.", shown="the code is asked for"),
    node=Option("With a run folder that has several nodes: the node to restart."),
    script=Option("To join the run of a script: this machine's copy of it. Its arguments follow after --."),
    # A code after the address is accepted, with a warning; the help does not show it.
    words=argument(is_hidden=True),
)
def join(
    invitation: str,
    out: Path | None = None,
    code_file: Path | None = None,
    node: str | None = None,
    script: Path | None = None,
    words: list[str] | None = None,
) -> None:
    """Join a run that another machine hosts. Type `shoal host` there, and here the command that it prints.

    shoal asks for the code. Scripts give it on standard input, in the variable SHOAL_JOIN_CODE or with --code-file. As
    ADDRESS:PORT#CODE, other users of this machine could read it in the process list.

    A machine whose agent was killed rejoins its run, if that continues elsewhere, with: shoal join RUN-FOLDER.
    """
    from shoal.control.invitation import parse_invitation

    code = " ".join(words) if words and script is None else None
    if Path(invitation).is_dir():
        if code is not None or code_file is not None:
            raise UsageError(f"{invitation} is a run folder: rejoining a run needs no code")
        if out is not None:
            raise UsageError(
                "--out does not go with a run folder",
                why=f"this machine rejoins the run in {invitation}",
                fix=f"leave it out: shoal join {invitation}",
            )
        from shoal.runs.join import rejoin

        begin_stage("starting this machine's agent, which asks the others to let it in")
        print_paragraph(escape(rejoin(Path(invitation), node)))
        return
    if node is not None:
        raise UsageError(
            "--node goes with a run folder",
            why="it selects the node that rejoins; a machine that joins gets a new name",
            fix=f"leave it out: shoal join {invitation}",
        )
    argv = [] if script is None else [str(script), *(words or [])]
    invited = _with_code(parse_invitation(invitation), code, code_file)
    from shoal.runs.join import join as take_part

    show = LocalRankDisplay()
    try:
        joined = take_part(invited, out or default_out("joined"), print_note, show, argv)
    finally:
        show.close()
    print_paragraph(
        f"the run has ended; its results are on the host, this machine's part is in {escape(shown(joined.run.path))}"
    )


def _with_code(invited: Invitation, code: str | None, code_file: Path | None) -> Invitation:
    """Return the invitation with the code, which may be given in several ways, but only in one of them.

    `code` was given as a second argument.
    """
    # Also when the code is given in another way: no process started here may inherit it.
    from_environment = _take_code_from_environment()
    ways = {
        f"{invited.place}#CODE": invited.code,
        "a second argument": code,
        "--code-file": code_file,
        CODE_VARIABLE: from_environment,
    }
    _refuse_two_codes([way for way, given in ways.items() if given not in (None, "")])
    if code is not None:
        invited = invited.with_code(code)
    if not invited.code:
        return invited.with_code(_read_code(code_file, from_environment))
    print_note(
        "other users of this machine can read a code given as an argument, in the process list; "
        f"better: shoal join {invited.place}, then type the code when asked"
    )
    return invited


def _refuse_two_codes(ways: list[str]) -> None:
    if len(ways) > 1:
        raise UsageError(
            f"the code is given in two ways: {' and '.join(ways)}",
            why="only one of them can be right",
            fix=f"leave one out{f'; remove the variable: unset {CODE_VARIABLE}' if CODE_VARIABLE in ways else ''}",
        )


def _read_code(file: Path | None, from_environment: str | None) -> str:
    """Read the code from the file, the environment, the terminal or standard input."""
    if file is not None:
        return read_code_file(file)
    if from_environment:
        return from_environment
    if sys.stdin is not None and sys.stdin.isatty():
        try:
            return getpass.getpass("code: ")
        except EOFError:
            return ""
    line = ""
    # Python has no `stdin` when it was started without one.
    if sys.stdin is not None:
        if not select.select([sys.stdin], [], [], _QUIET_S)[0]:
            print_note("waiting for the code on standard input")
        line = sys.stdin.readline(_MOST_CODE_BYTES)
    if not line:
        raise UsageError(
            "there is no code: standard input was empty",
            why="without a terminal shoal cannot ask for the code",
            fix=f"give it with --code-file FILE, or in the variable {CODE_VARIABLE}",
        )
    return line


def _take_code_from_environment() -> str | None:
    """Return the variable's value and remove the variable.

    Ranks and agents do not inherit it then, and `/proc/PID/environ` of this process no longer shows it.
    """
    code = os.environ.get(CODE_VARIABLE)
    if code is None:
        return None
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    if address := libc.getenv(CODE_VARIABLE.encode()):
        # Removing a variable leaves its bytes where the kernel shows them.
        ctypes.memset(address, ord("x"), len(os.fsencode(code)))
    del os.environ[CODE_VARIABLE]
    return code


def read_code_file(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            status = os.fstat(opened.fileno())
            if stat.S_ISREG(status.st_mode) and status.st_mode & 0o077:
                raise UsageError(
                    f"other users can read or change the code in {file}",
                    why=f"its mode is {stat.S_IMODE(status.st_mode):04o}, and the first user of a code may join",
                    fix=f"chmod 600 {file}; and ask the host for a new code; or: shoal join ADDRESS:PORT < {file}",
                )
            return opened.read(_MOST_CODE_BYTES).decode(errors="replace")
    except OSError as error:
        raise UsageError(
            f"cannot read the code in {file}: {error.strerror}", fix=f"look at it: ls -ld {file.parent}"
        ) from None


class LocalRankDisplay:
    """Show the progress of this machine's rank, as the host shows that of rank 0."""

    def __init__(self) -> None:
        self._display: TrainDisplay | None = None
        self._tail: EventTail | None = None
        self._is_closed = False  # the terminal is gone

    def __call__(self, run: RunFolder) -> None:
        try:
            self._show(run)
        except OSError:
            # The terminal is gone; this machine's part of the run continues.
            self._is_closed = True

    def _show(self, run: RunFolder) -> None:
        from shoal.cli.progress import make_display
        from shoal.config.load import load_settings

        if self._is_closed:
            return
        if self._tail is None and (files := run.event_files()):
            rank, path = next(iter(files.items()))
            self._tail = EventTail(path)
            self._display = make_display(load_settings(run.config), rank=rank)
        if self._tail is not None and self._display is not None:
            self._display(self._tail.poll())

    def close(self) -> None:
        if self._display is not None:
            with contextlib.suppress(OSError):
                self._display.close()


@command(
    hosts=argument("A hosts file in TOML, or an MPI or DeepSpeed hostfile."),
    project=Option("The folder to copy.", shown="the git project you are in"),
    no_project=Option("Copy no project."),
    wheels=Option("Install from this folder of wheels, for hosts without Internet."),
    json=Option("Print what was done as JSON on stdout."),
)
def setup(
    hosts: Path,
    project: Path | None = None,
    no_project: bool = False,
    wheels: Path | None = None,
    json: bool = False,
) -> None:
    """Prepare machines over SSH: environment, shoal and your project; safe to repeat.

    Each host gets the Python packages in the versions used here, in shoal's own folder. Nothing else is changed.
    """
    from shoal.cluster.hosts.copy import describe_left_out, project_of
    from shoal.cluster.hosts.facts import refuse_one_machine_twice
    from shoal.cluster.hosts.setup import make_order, set_up
    from shoal.cluster.hosts.spec import read_hosts
    from shoal.cluster.hosts.ssh import on_each, values_or_raise

    if no_project and project is not None:
        raise UsageError(
            f"--no-project does not go with --project {project}", why="they contradict each other", fix="leave one out"
        )
    spec = read_hosts(hosts)
    refuse_one_machine_twice(spec)
    order = make_order(None if no_project else project or project_of(Path.cwd()), wheels)
    if order.project is not None and (left_out := describe_left_out(order.project)):
        print_note(left_out)
    with _setup_progress(spec) as show:
        results = on_each(spec.hosts, lambda host: set_up(host, spec, order, lambda text: show(host, text)))
    if json:
        print_json(_setup_document(results))
    else:
        _print_setup(spec, results)
    values_or_raise(results)


def _setup_document(results: Results) -> dict[str, Any]:
    """Return the results as JSON. A host that failed has only its error."""
    return {
        "changed": _changed(results),
        "hosts": [
            {"name": name, **(result.as_dict() if isinstance(result, ShoalError) else vars(result))}
            for name, result in results.items()
        ],
    }


def _changed(results: Results) -> bool:
    return any(not isinstance(result, ShoalError) and result.changed for result in results.values())


def _print_setup(spec: HostsSpec, results: Results) -> None:
    console = stdout_console()
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for title in ("host", "environment", "shoal", "project", "python"):
        table.add_column(title, overflow="fold")
    for name, result in results.items():
        table.add_row(escape(name), *_cells(result))
    console.print(table)
    if any(isinstance(result, ShoalError) for result in results.values()):
        return
    if not _changed(results):
        console.print("everything is in place; nothing was changed")
    console.print(f"next: {escape(as_command('train', '--on', shown(spec.path.absolute())))}", soft_wrap=True)


def _cells(result: SetupResult | ShoalError) -> tuple[str, ...]:
    if isinstance(result, ShoalError):
        return ("[red]failed[/]", "–", "–", escape(result.seen))
    states = (result.environment, result.code, result.project or "–")
    coloured = tuple(f"[{_COLOURS[state]}]{state}[/]" if state in _COLOURS else state for state in states)
    return (*coloured, escape(result.python + (f" ({result.why})" if result.why else "")))


@contextlib.contextmanager
def _setup_progress(spec: HostsSpec) -> Iterator[Callable[[Host, str], None]]:
    """Show one changing line per host on a terminal, and one line per action elsewhere."""
    console = make_console(stderr=True)
    if not console.is_terminal:
        yield lambda host, text: console.print(escape(f"{host.name}: {text}"), soft_wrap=True)
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.fields[host]}"),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        tasks = {host.name: progress.add_task("waiting", host=escape(host.name), total=None) for host in spec.hosts}
        yield lambda host, text: progress.update(tasks[host.name], description=escape(text))
