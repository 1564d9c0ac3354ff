"""`shoal lab`: an emulated cluster on this machine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from shoal.cli.output import print_json, stdout_console
from shoal.cluster.lab import lab as lab_lab
from shoal.cluster.lab import state
from shoal.cluster.lab import state as lab_state
from shoal.cluster.lab.commands import Step, parse_ports, render
from shoal.cluster.lab.kernel import need_tools, observe, path_line
from shoal.cluster.lab.lab import (
    Change,
    Lab,
    build_steps,
    choose,
    has_owner,
    plan_state,
    removal_steps,
    remove,
    up,
    why_stale,
)
from shoal.cluster.lab.spec import (
    DEFAULT_NAME,
    PROFILES,
    LabLink,
    LabNode,
    check_name,
    make_spec,
    parse_cpu,
    parse_loss,
)
from shoal.cluster.lab.state import LabState
from shoal.control.processes import find
from shoal.errors import UsageError
from shoal.terminal import printable_line
from shoal.units import parse_delay, parse_rate

# SECTION cli/labtext
# A lab as a document for scripts and as a table for people.


_LONGEST_COMMAND = 80


def lab_document(lab: Lab) -> dict[str, Any]:
    state = lab.state
    return {
        "name": lab.name,
        "folder": str(lab.folder),
        "rootless": state.rootless,
        "owner": state.owner.pid if state.owner else None,
        "belongs_to": _belongs_to(state),
        "ssh_config": str(lab.folder / "ssh/config") if state.spec.sshd else None,
        "notes": list(state.notes),
        "nodes": [_node(lab, state, node) for node in state.spec.nodes],
        "cuts": [{"from": sender, "to": hearer} for sender, hearer in sorted(state.cuts)],
    }


def any_lab_document(name: str) -> dict[str, Any]:
    """Of a lab that stands what `lab_document` has, of a broken one its name and what is wrong with it."""
    lab = Lab(name)
    fault = why_stale(lab.folder, lab_state.read_state(name))
    if fault:
        return {"name": name, "folder": str(lab.folder), "broken": fault}
    return lab_document(lab)


def print_labs(documents: list[dict[str, Any]]) -> None:
    for number, document in enumerate(documents):
        if number:
            stdout_console().print()
        if "broken" in document:
            text = f"lab [bold]{document['name']}[/] is [red]broken[/]: {escape(document['broken'])}"
            stdout_console().print(f"{text}; remove it: shoal lab down --name {document['name']}", soft_wrap=True)
        else:
            print_lab(document)


def _belongs_to(state: LabState) -> str | None:
    """The run folder of the process that the lab was made for, or that process; None for a lab of the user's own."""
    if state.owner is None:
        return None
    run = next((found.run for found in find() if found.pid == state.owner.pid), None)
    if run is not None:
        return f"the run {run}"
    return f"process {state.owner.pid}{_command_of(state.owner.pid)}"


def _command_of(pid: int) -> str:
    """` (COMMAND)`; empty for a process that has ended meanwhile, or is hidden from this user."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        return f" ({printable_line(' '.join(words).strip(), _LONGEST_COMMAND)})"
    return ""


def _node(lab: Lab, state: LabState, node: LabNode) -> dict[str, Any]:
    return {
        "name": node.name,
        "address": node.address,
        "link": str(node.link),
        "rate_bps": node.link.rate_bps,
        "delay_s": node.link.delay_s,
        "loss": node.link.loss,
        "cpu": node.cpu,
        "state": _condition(lab, state, node.name),
        "firewall": list(state.firewalls[node.name]) if node.name in state.firewalls else None,
        "processes": [{"pid": pid, "command": command} for pid, command in lab.processes(node.name)],
    }


def _condition(lab: Lab, state: LabState, node: str) -> str:
    if not lab.is_alive(node):
        return "dead"
    return "frozen" if node in state.frozen else "up"


def print_lab(document: dict[str, Any]) -> None:
    console = stdout_console()
    how = "in a user namespace" if document["rootless"] else "as root"
    whose = f"; it belongs to {escape(document['belongs_to'])}, and goes with it" if document["belongs_to"] else ""
    console.print(f"lab [bold]{document['name']}[/], {how}, in {escape(document['folder'])}{whose}", soft_wrap=True)
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for title in ("node", "address", "link", "cpu", "state", "runs"):
        table.add_column(title)
    for node in document["nodes"]:
        table.add_row(*_row(node))
    console.print(table)
    for line in _below(document):
        console.print(line, soft_wrap=True)


def _row(node: dict[str, Any]) -> tuple[str, ...]:
    runs = "\n".join(f"{process['pid']} {process['command'][:60]}" for process in node["processes"])
    cpu = "–" if node["cpu"] is None else f"{node['cpu']:g}"
    return node["name"], node["address"], node["link"], cpu, node["state"], escape(runs) or "–"


def _below(document: dict[str, Any]) -> list[str]:
    walled = [node for node in document["nodes"] if node["firewall"] is not None]
    return [
        *(f"cut: {cut['to']} no longer hears {cut['from']}" for cut in document["cuts"]),
        *(
            f"firewall: {node['name']} lets strangers in at {', '.join(node['firewall']) or 'no port'}"
            for node in walled
        ),
        *([f"ssh: shoal lab exec switch -- ssh -F {document['ssh_config']} node1"] if document["ssh_config"] else []),
        *(f"[yellow]note[/]: {escape(note)}" for note in document["notes"]),
    ]


app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode="rich")

NodeName = Annotated[str, typer.Argument(metavar="NODE", help="node1, node2, …")]
Name = Annotated[str | None, typer.Option("--name", help="Which lab.", show_default="the default lab, or the only one")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the commands instead of running them.")]
Json = Annotated[bool, typer.Option("--json", help="Print the lab as JSON on stdout.")]
Delay = Annotated[str | None, typer.Option(help="One way, as in 2ms; a ping sees it twice.")]
Loss = Annotated[str | None, typer.Option(help="Packets lost, as in 1%.")]


@app.callback()
def lab() -> None:
    """An emulated cluster on this machine: nodes with links, CPU limits and faults as you like."""


@app.command("up")
def up_(
    nodes: Annotated[int, typer.Argument(help="How many nodes.")],
    link: Annotated[str | None, typer.Option(help="Rate of each link: 100mbit, 1gbit, or 1gbit/1gbit/100mbit.")] = None,
    delay: Delay = None,
    loss: Loss = None,
    cpu: Annotated[str | None, typer.Option(help="Cores of each node: 0.5, or 1/1/0.5.")] = None,
    profile: Annotated[str | None, typer.Option(help=f"A kind of link: {', '.join(PROFILES)}.")] = None,
    name: Annotated[str, typer.Option(help="A name, to have several labs.")] = DEFAULT_NAME,
    sshd: Annotated[bool, typer.Option("--sshd", help="Run a real SSH server on each node (needs root).")] = False,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Build a lab: N nodes, each with its own eth0, address, host name and processes, on one switch."""
    spec = make_spec(nodes, name=name, link=link, delay=delay, loss=loss, cpu=cpu, profile=profile, sshd=sshd)
    if dry_run and json:
        raise UsageError("--json does not go with --dry-run", why="it prints commands for a shell", fix="leave one out")
    if dry_run:
        _print_script(build_steps(plan_state(spec, observe())))
        return
    _show(up(spec), json)


@app.command()
def status(name: Name = None, json: Json = False) -> None:
    """What stands, how it is linked, and what runs where; without --name, of every lab and what it belongs to."""
    if name is not None:
        _show(Lab.open(name), json)
        return
    documents = [any_lab_document(each) for each in state.names()]
    if json:
        print_json({"labs": documents})
    elif documents:
        print_labs(documents)
    else:
        typer.echo("no lab is up; make one: shoal lab up 3")


def _show(found: Lab, json: bool) -> None:
    document = lab_document(found)
    if json:
        print_json(document)
    else:
        print_lab(document)


@app.command("exec", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def exec_(
    node: Annotated[str, typer.Argument(metavar="NODE", help="node1, node2, …, or switch.")],
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND…")],
    name: Name = None,
) -> None:
    """Run a command on a node; its exit code is ours. Options go before NODE."""
    words = command[1:] if command[0] == "--" else command
    if not words:
        raise UsageError("which command?", fix=f"shoal lab exec {node} -- hostname")
    argv = Lab.open(name).command(node, words)
    # Not a child: the terminal, its signals and the exit code are then the command's own.
    os.execvp(argv[0], argv)  # noqa: S606


@app.command()
def link(
    node: NodeName,
    rate: Annotated[str | None, typer.Argument(help="100mbit, 1gbit, or none for no limit.")] = None,
    delay: Delay = None,
    loss: Loss = None,
    name: Name = None,
    dry_run: DryRun = False,
) -> None:
    """Change a node's link, both directions of it, while everything runs."""
    wanted: dict[str, float | None] = {}
    if rate is not None:
        wanted["rate_bps"] = None if rate == "none" else parse_rate(rate)
    if delay is not None:
        wanted["delay_s"] = parse_delay(delay)
    if loss is not None:
        wanted["loss"] = parse_loss(loss)
    if not wanted:
        raise UsageError("nothing to change", fix=f"shoal lab link {node} 100mbit")

    def changed(before: LabLink) -> LabLink:
        return before.model_copy(update=wanted)

    _perform(name, lab_lab.set_link(node, changed), dry_run)


@app.command()
def cpu(
    node: NodeName,
    cores: Annotated[str, typer.Argument(help="0.3 is three tenths of one core; none takes the limit away.")],
    name: Name = None,
    dry_run: DryRun = False,
) -> None:
    """Make a node slower or faster."""
    _perform(name, lab_lab.set_cpu(node, parse_cpu(cores)), dry_run)


@app.command()
def kill(
    node: NodeName,
    silent: Annotated[bool, typer.Option("--silent", help="Like a power cut: no connection is closed.")] = False,
    name: Name = None,
    dry_run: DryRun = False,
) -> None:
    """End every process of a node and take it off the network."""
    _perform(name, lab_lab.kill(node, silent), dry_run)


@app.command()
def start(node: NodeName, name: Name = None, dry_run: DryRun = False) -> None:
    """Bring a killed node back, empty, with the link and limits it had."""
    _perform(name, lab_lab.restart(node), dry_run)


@app.command()
def freeze(node: NodeName, name: Name = None, dry_run: DryRun = False) -> None:
    """Stop a node between two instructions, as closing the lid does."""
    _perform(name, lab_lab.stop_or_go(node, frozen=True), dry_run)


@app.command()
def thaw(node: NodeName, name: Name = None, dry_run: DryRun = False) -> None:
    """Let a frozen node go on."""
    _perform(name, lab_lab.stop_or_go(node, frozen=False), dry_run)


@app.command()
def cut(
    node: NodeName,
    other: Annotated[str | None, typer.Argument(help="The other one; without it, all others.")] = None,
    one_way: Annotated[bool, typer.Option("--one-way", help="Only what NODE sends is lost; it still hears.")] = False,
    name: Name = None,
    dry_run: DryRun = False,
) -> None:
    """Lose every packet between two nodes, silently."""
    need_tools({"nft": "nftables"})
    _perform(name, lab_lab.cut_off(node, other, one_way), dry_run)


@app.command()
def heal(
    node: Annotated[str | None, typer.Argument(help="Whose cuts; without it, all.")] = None,
    other: Annotated[str | None, typer.Argument(help="Only between these two.")] = None,
    name: Name = None,
    dry_run: DryRun = False,
) -> None:
    """Undo cuts."""
    _perform(name, lab_lab.heal_cuts(node, other), dry_run)


@app.command()
def firewall(
    node: NodeName,
    allow: Annotated[str, typer.Option(help="TCP ports that stay open: 22,29500-29600.")] = "",
    off: Annotated[bool, typer.Option("--off", help="Take the firewall away.")] = False,
    name: Name = None,
    dry_run: DryRun = False,
) -> None:
    """Let nobody in who was not asked: the home firewall that makes a run hang."""
    if off and allow:
        raise UsageError(
            "--allow does not go with --off",
            why="without a firewall every port is open",
            fix=f"shoal lab firewall {node} --off",
        )
    need_tools({"nft": "nftables"})
    _perform(name, lab_lab.set_firewall(node, None if off else parse_ports(allow)), dry_run)


@app.command()
def down(
    name: Name = None,
    all_: Annotated[bool, typer.Option("--all", help="Every lab of this user, but those of runs that go on.")] = False,
    dry_run: DryRun = False,
) -> None:
    """Remove a lab and everything that runs in it; also what a crash left of one."""
    if all_ and name:
        raise UsageError("--all and --name contradict each other", fix="shoal lab down --all")
    wanted = state.names() if all_ else [check_name(name) if name else _only()]
    for each in wanted:
        if all_ and has_owner(each) and not why_stale(state.lab_folder(each), state.read_state(each)):
            typer.echo(f"lab {each!r} is left alone: it belongs to a run that goes on, and goes with it", err=True)
            continue
        if dry_run:
            _print_script(removal_steps(each))
        else:
            stood = each in state.names()
            remove(each)
            typer.echo(f"lab {each!r} is down" if stood else f"there was no lab {each!r}")


def _only() -> str:
    """What is left of the default lab is cleared away too, where there is nothing else to take down."""
    names = state.names()
    return choose(names) if any(not has_owner(name) for name in names) else DEFAULT_NAME


def _perform(name: str | None, change: Change, dry_run: bool) -> None:
    found = Lab.open(name)
    if dry_run:
        _print_script(found.plan(change)[1])
    else:
        found.perform(change)


def _print_script(steps: Iterable[Step]) -> None:
    typer.echo(path_line() + render(steps), nl=False)
