"""`shoal lab`: an emulated cluster on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Annotated

import typer

from shoal.cli.labtext import any_lab_document, lab_document, print_lab, print_labs
from shoal.cli.output import print_json
from shoal.cluster.lab import changes, registry
from shoal.cluster.lab.build import build_steps, plan_state, up
from shoal.cluster.lab.changes import Change
from shoal.cluster.lab.filters import parse_ports
from shoal.cluster.lab.kernel import need_tools, observe
from shoal.cluster.lab.lab import Lab, choose, has_owner, why_stale
from shoal.cluster.lab.removal import removal_steps, remove
from shoal.cluster.lab.spec import DEFAULT_NAME, PROFILES, Link, check_name, make_spec, parse_cpu, parse_loss
from shoal.cluster.lab.steps import Step, render
from shoal.cluster.lab.tools import path_line
from shoal.errors import UsageError
from shoal.units import parse_delay, parse_rate

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
    documents = [any_lab_document(each) for each in registry.names()]
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

    def changed(before: Link) -> Link:
        return before.model_copy(update=wanted)

    _perform(name, changes.set_link(node, changed), dry_run)


@app.command()
def cpu(
    node: NodeName,
    cores: Annotated[str, typer.Argument(help="0.3 is three tenths of one core; none takes the limit away.")],
    name: Name = None,
    dry_run: DryRun = False,
) -> None:
    """Make a node slower or faster."""
    _perform(name, changes.set_cpu(node, parse_cpu(cores)), dry_run)


@app.command()
def kill(
    node: NodeName,
    silent: Annotated[bool, typer.Option("--silent", help="Like a power cut: no connection is closed.")] = False,
    name: Name = None,
    dry_run: DryRun = False,
) -> None:
    """End every process of a node and take it off the network."""
    _perform(name, changes.kill(node, silent), dry_run)


@app.command()
def start(node: NodeName, name: Name = None, dry_run: DryRun = False) -> None:
    """Bring a killed node back, empty, with the link and limits it had."""
    _perform(name, changes.restart(node), dry_run)


@app.command()
def freeze(node: NodeName, name: Name = None, dry_run: DryRun = False) -> None:
    """Stop a node between two instructions, as closing the lid does."""
    _perform(name, changes.stop_or_go(node, frozen=True), dry_run)


@app.command()
def thaw(node: NodeName, name: Name = None, dry_run: DryRun = False) -> None:
    """Let a frozen node go on."""
    _perform(name, changes.stop_or_go(node, frozen=False), dry_run)


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
    _perform(name, changes.cut_off(node, other, one_way), dry_run)


@app.command()
def heal(
    node: Annotated[str | None, typer.Argument(help="Whose cuts; without it, all.")] = None,
    other: Annotated[str | None, typer.Argument(help="Only between these two.")] = None,
    name: Name = None,
    dry_run: DryRun = False,
) -> None:
    """Undo cuts."""
    _perform(name, changes.heal_cuts(node, other), dry_run)


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
    _perform(name, changes.set_firewall(node, None if off else parse_ports(allow)), dry_run)


@app.command()
def down(
    name: Name = None,
    all_: Annotated[bool, typer.Option("--all", help="Every lab of this user, but those of runs that go on.")] = False,
    dry_run: DryRun = False,
) -> None:
    """Remove a lab and everything that runs in it; also what a crash left of one."""
    if all_ and name:
        raise UsageError("--all and --name contradict each other", fix="shoal lab down --all")
    wanted = registry.names() if all_ else [check_name(name) if name else _only()]
    for each in wanted:
        if all_ and has_owner(each) and not why_stale(registry.lab_folder(each), registry.read_state(each)):
            typer.echo(f"lab {each!r} is left alone: it belongs to a run that goes on, and goes with it", err=True)
            continue
        if dry_run:
            _print_script(removal_steps(each))
        else:
            stood = each in registry.names()
            remove(each)
            typer.echo(f"lab {each!r} is down" if stood else f"there was no lab {each!r}")


def _only() -> str:
    """What is left of the default lab is cleared away too, where there is nothing else to take down."""
    names = registry.names()
    return choose(names) if any(not has_owner(name) for name in names) else DEFAULT_NAME


def _perform(name: str | None, change: Change, dry_run: bool) -> None:
    found = Lab.open(name)
    if dry_run:
        _print_script(found.plan(change)[1])
    else:
        found.perform(change)


def _print_script(steps: Iterable[Step]) -> None:
    typer.echo(path_line() + render(steps), nl=False)
