"""`shoal setup`: make the machines of a hosts file ready, over SSH."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from shoal.cli.lines import print_note
from shoal.cli.output import command, make_console, print_json, shown, stdout_console
from shoal.cluster.hosts.each import on_each, values_or_raise
from shoal.cluster.hosts.files import project_of, say_left_out
from shoal.cluster.hosts.setup import Outcome, make_order, set_up
from shoal.cluster.hosts.spec import Host, HostsSpec, read_hosts
from shoal.errors import ShoalError, UsageError

app = typer.Typer(add_completion=False)

Results = Mapping[str, Outcome | ShoalError]
_COLOURS = {"made": "green", "updated": "green"}


@app.command()
def setup(
    hosts: Annotated[Path, typer.Argument(help="A cluster file in TOML, or an MPI or DeepSpeed hostfile.")],
    project: Annotated[
        Path | None, typer.Option(help="The folder to copy.", show_default="the git project you are in")
    ] = None,
    no_project: Annotated[bool, typer.Option("--no-project", help="Copy no project.")] = False,
    wheels: Annotated[
        Path | None, typer.Option(help="Install from this folder of wheels: for hosts without Internet.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print what was done as JSON on stdout.")] = False,
) -> None:
    """Prepare machines over SSH: environment, shoal and your project; safe to repeat.

    Each host gets the Python packages in the versions used here, in a folder of shoal's own; what is there stays.
    """
    if no_project and project is not None:
        raise UsageError(
            f"--no-project does not go with --project {project}", why="they contradict each other", fix="leave one out"
        )
    spec = read_hosts(hosts)
    order = make_order(None if no_project else project or project_of(Path.cwd()), wheels)
    if order.project is not None and (left_out := say_left_out(order.project)):
        print_note(left_out)
    with _display(spec) as say:
        results = on_each(spec.hosts, lambda host: set_up(host, spec, order, lambda text: say(host, text)))
    if json:
        print_json(document(results))
    else:
        _print(spec, results)
    values_or_raise(results)


def document(results: Results) -> dict[str, Any]:
    """For scripts; a host that failed has only its error."""
    return {
        "changed": _changed(results),
        "hosts": [
            {"name": name, **(result.as_dict() if isinstance(result, ShoalError) else vars(result))}
            for name, result in results.items()
        ],
    }


def _changed(results: Results) -> bool:
    return any(isinstance(result, Outcome) and result.changed for result in results.values())


def _print(spec: HostsSpec, results: Results) -> None:
    console = stdout_console()
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for title in ("host", "environment", "shoal", "project", "python"):
        table.add_column(title)
    for name, result in results.items():
        table.add_row(escape(name), *_cells(result))
    console.print(table)
    if any(isinstance(result, ShoalError) for result in results.values()):
        return
    if not _changed(results):
        console.print("everything is in place; nothing was changed")
    console.print(f"next: {escape(command('train', '--on', shown(spec.path.absolute())))}", soft_wrap=True)


def _cells(result: Outcome | ShoalError) -> tuple[str, ...]:
    if isinstance(result, ShoalError):
        return ("[red]failed[/]", "–", "–", escape(result.seen))
    states = (result.environment, result.code, result.project or "–")
    coloured = tuple(f"[{_COLOURS[state]}]{state}[/]" if state in _COLOURS else state for state in states)
    return (*coloured, escape(result.python + (f" ({result.why})" if result.why else "")))


@contextlib.contextmanager
def _display(spec: HostsSpec) -> Iterator[Callable[[Host, str], None]]:
    """A line for each host on a terminal, rewritten as it goes; elsewhere a line for each thing that is done."""
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
