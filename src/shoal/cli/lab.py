"""`shoal lab`: emulate a cluster on this machine with network namespaces."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from shoal.cli.command import Group, any_word
from shoal.cli.options import Option, argument
from shoal.cli.output import print_json, print_paragraph, print_table, print_with_command, stdout_console
from shoal.control.processes import find_processes
from shoal.errors import UsageError
from shoal.terminal import end_stage, printable_line
from shoal_lab.errors import LabError
from shoal_lab.spec import DEFAULT_NAME, PROFILES

if TYPE_CHECKING:
    from shoal_lab.commands import Step
    from shoal_lab.lab import Lab
    from shoal_lab.spec import NodeSpec
    from shoal_lab.state import Change, LabState


_LONGEST_COMMAND = 80


class LabGroup(Group):
    """The commands call `shoal_lab` directly; its errors become shoal's in this one place."""

    def call(self, path: str, words: Sequence[str]) -> object:
        try:
            return super().call(path, words)
        except LabError:
            # Imported here: help is printed without what a cluster needs.
            from shoal.cluster.lab import translate_errors

            with translate_errors():
                raise


LAB = LabGroup(
    "lab",
    "Emulate a cluster on this machine: nodes with limited links, CPUs and memory, and faults on demand.",
    node=argument("node1, node2, …"),
    name=Option("Which lab.", shown="the default lab, or the only one"),
    dry_run=Option("Print the commands instead of running them."),
    delay=Option("Delay in one direction, such as 2ms; a ping takes twice that."),
    loss=Option("Lost packets, such as 1%."),
)


@LAB.command(
    nodes=argument("Number of nodes."),
    link=Option("Rate of each link: 100mbit, 1gbit, or 1gbit/1gbit/100mbit."),
    cpu=Option("Cores of each node: 0.5, or 1/1/0.5."),
    memory=Option("Memory of each node: 2gb, or 2gb/1gb/none; above it the kernel kills a process."),
    slots=Option("Ranks on each node: 2, or 2/1/1.", shown="1"),
    profile=Option(f"A kind of link: {', '.join(PROFILES)}.", flags="--kind --profile"),
    name=Option("The lab's name, if you have several."),
    sshd=Option("Run a real SSH server on each node (needs root)."),
)
def up_(
    nodes: int,
    link: str | None = None,
    delay: str | None = None,
    loss: str | None = None,
    cpu: str | None = None,
    memory: str | None = None,
    slots: str | None = None,
    profile: str | None = None,
    name: str = DEFAULT_NAME,
    sshd: bool = False,
    dry_run: bool = False,
    json: bool = False,
) -> None:
    """Build a lab: N nodes on one switch, each with its own eth0, address, host name and processes."""
    from shoal_lab.kernel import find_features
    from shoal_lab.lab import Lab, build_steps, plan_state
    from shoal_lab.spec import make_spec

    limits = {"link": link, "delay": delay, "loss": loss, "cpu": cpu, "memory": memory, "slots": slots}
    spec = make_spec(nodes, name=name, profile=profile, sshd=sshd, **limits)
    if dry_run and json:
        raise UsageError("--json does not go with --dry-run", why="it prints commands for a shell", fix="leave one out")
    if dry_run:
        _print_script(build_steps(plan_state(spec, find_features())))
        return
    _show(Lab.build(spec), json)


@LAB.command()
def status(name: str | None = None, json: bool = False) -> None:
    """Show a lab's nodes, links and processes; without --name, those of every lab and its owner."""
    from shoal_lab import state
    from shoal_lab.lab import Lab

    if name is not None:
        _show(Lab.open(name), json)
        return
    documents = [_any_lab_document(lab_name) for lab_name in state.list_labs()]
    if json:
        print_json({"labs": documents})
    elif documents:
        _print_labs(documents)
    else:
        sys.stdout.write("no lab is up; make one: shoal lab up 3\n")


def _show(opened: Lab, json: bool) -> None:
    document = _lab_document(opened)
    if json:
        print_json(document)
    else:
        _print_lab(document)


@LAB.command(
    takes_words=any_word,
    node=argument("node1, node2, …, or switch."),
    command=argument(metavar="-- COMMAND…"),
)
def exec_(node: str, command: list[str], name: str | None = None) -> None:
    """Run a command on a node and return its exit code."""
    from shoal_lab.lab import Lab

    name, words = split_exec_words(name, command)
    if not words:
        raise UsageError("no command is given", fix=f"shoal lab exec {node} -- hostname")
    argv = Lab.open(name).command(node, words)
    end_stage()
    # Replace this process: the command then owns the terminal, its signals and the exit code.
    os.execvp(argv[0], argv)  # noqa: S606


def split_exec_words(name: str | None, words: list[str]) -> tuple[str | None, list[str]]:
    """Return the lab's name and the command. `--name NAME` may stand before the command, as after other commands."""
    if words and words[0].startswith("--name="):
        name, words = words[0].removeprefix("--name="), words[1:]
    elif words and words[0] == "--name":
        if len(words) == 1:
            raise UsageError("--name has no value", fix="shoal lab exec node1 --name LAB -- hostname")
        name, words = words[1], words[2:]
    return name, words[1:] if words and words[0] == "--" else words


@LAB.command(rate=argument("100mbit, 1gbit, or none (no limit)."))
def link(
    node: str,
    rate: str | None = None,
    delay: str | None = None,
    loss: str | None = None,
    name: str | None = None,
    dry_run: bool = False,
) -> None:
    """Change a node's link, in both directions, while everything runs."""
    from shoal_lab.spec import Link, change_link

    if rate is delay is loss is None:
        raise UsageError("nothing to change", fix=f"shoal lab link {node} 100mbit")
    change_link(Link(), rate, delay, loss)  # refuse wrong words before a lab is looked for
    done = f"the link of {node} is {_link_text(rate, delay, loss)}"
    _perform(name, lambda view: view.set_link(node, lambda link: change_link(link, rate, delay, loss)), dry_run, done)


def _link_text(rate: str | None, delay: str | None, loss: str | None) -> str:
    words = [f"{rate}" if rate not in (None, "none") else "unlimited" if rate else ""]
    words += [f"delay {delay}" if delay is not None else "", f"loss {loss}" if loss is not None else ""]
    return "now " + ", ".join(word for word in words if word)


@LAB.command(cores=argument("0.3 is three tenths of one core; none removes the limit."))
def cpu(node: str, cores: str, name: str | None = None, dry_run: bool = False) -> None:
    """Set a node's CPU limit."""
    from shoal_lab.spec import parse_cpu

    done = f"{node} has no CPU limit" if cores == "none" else f"{node} may keep {cores} cores busy"
    share = parse_cpu(cores)
    _perform(name, lambda view: view.set_cpu(node, share), dry_run, done)


@LAB.command(size=argument("512mb or 2gb, of all its processes together; none removes the limit."))
def memory(node: str, size: str, name: str | None = None, dry_run: bool = False) -> None:
    """Set a node's memory limit. Above it the kernel kills a process of the node."""
    from shoal_lab.spec import parse_memory

    done = f"{node} has no memory limit" if size == "none" else f"{node} has {size} of memory"
    size_bytes = parse_memory(size)
    _perform(name, lambda view: view.set_memory(node, size_bytes), dry_run, done)


@LAB.command(silent=Option("As in a power cut: connections are not closed."))
def kill(node: str, silent: bool = False, name: str | None = None, dry_run: bool = False) -> None:
    """End every process of a node and take it off the network."""
    done = f"{node} is killed; start it again: {_hint(name, 'start', node)}"
    _perform(name, lambda view: view.kill_node(node, silent), dry_run, done)


@LAB.command()
def start(node: str, name: str | None = None, dry_run: bool = False) -> None:
    """Start a killed node again, without processes, with the link and limits it had."""
    _perform(name, lambda view: view.restart_node(node), dry_run, f"{node} is up again, without processes")


@LAB.command()
def freeze(node: str, name: str | None = None, dry_run: bool = False) -> None:
    """Pause all processes of a node, as closing a laptop's lid does."""
    done = f"{node} is frozen; continue it: {_hint(name, 'thaw', node)}"
    _perform(name, lambda view: view.set_frozen(node, frozen=True), dry_run, done)


@LAB.command()
def thaw(node: str, name: str | None = None, dry_run: bool = False) -> None:
    """Continue a frozen node."""
    _perform(name, lambda view: view.set_frozen(node, frozen=False), dry_run, f"{node} continues")


@LAB.command(
    other=argument("The other node; without it, all others."),
    one_way=Option("Drop only what NODE sends; it still receives."),
)
def cut(
    node: str, other: str | None = None, one_way: bool = False, name: str | None = None, dry_run: bool = False
) -> None:
    """Drop every packet between two nodes, silently."""
    from shoal_lab.kernel import need_tools

    need_tools({"nft": "nftables"})
    others = other or "all others"
    receive = "receives" if other else "receive"
    done = f"{others} {receive} nothing from {node}" if one_way else f"{node} is cut off from {others}"
    done += f"; undo it: {_hint(name, 'heal', node)}"
    _perform(name, lambda view: view.cut_off(node, other, one_way), dry_run, done)


@LAB.command(
    node=argument("The node whose cuts to undo; without it, all."),
    other=argument("Undo only the cut between these two."),
)
def heal(node: str | None = None, other: str | None = None, name: str | None = None, dry_run: bool = False) -> None:
    """Undo cuts."""
    done = f"the cuts of {node}{f' and {other}' if other else ''} are undone" if node else "all cuts are undone"
    _perform(name, lambda view: view.heal_cuts(node, other), dry_run, done)


@LAB.command(
    allow=Option("TCP ports that stay open: 22,29500-29600."),
    off=Option("Remove the firewall."),
)
def firewall(node: str, allow: str = "", off: bool = False, name: str | None = None, dry_run: bool = False) -> None:
    """Block incoming connections, as a home firewall does that makes a run hang."""
    from shoal_lab.commands import parse_ports
    from shoal_lab.kernel import need_tools

    if off and allow:
        raise UsageError(
            "--allow does not go with --off",
            why="without a firewall every port is open",
            fix=f"shoal lab firewall {node} --off",
        )
    need_tools({"nft": "nftables"})
    ports = f"only at {allow}" if allow else "at no port"
    done = f"{node} accepts connections {ports}; undo it: {_hint(name, 'firewall', node, '--off')}"
    done = f"{node} has no firewall" if off else done
    allowed = None if off else parse_ports(allow)
    _perform(name, lambda view: view.set_firewall(node, allowed), dry_run, done)


@LAB.command(all_=Option("Every lab of this user, except those of running runs."))
def down(name: str | None = None, all_: bool = False, dry_run: bool = False) -> None:
    """Remove a lab and all its processes; also the remains of a crashed one."""
    from shoal_lab import state
    from shoal_lab.lab import has_owner, removal_steps, remove_lab, why_stale
    from shoal_lab.spec import check_name

    if all_ and name:
        raise UsageError("--all and --name contradict each other", fix="shoal lab down --all")
    chosen = state.list_labs() if all_ else [check_name(name) if name else _lab_to_remove()]
    for lab_name in chosen:
        if all_ and has_owner(lab_name) and not why_stale(lab_name):
            sys.stderr.write(f"lab {lab_name!r} is kept: it belongs to a running run, which will remove it" + "\n")
            continue
        if dry_run:
            _print_script(removal_steps(lab_name))
        else:
            existed = lab_name in state.list_labs()
            remove_lab(lab_name)
            sys.stdout.write(f"lab {lab_name!r} is down\n" if existed else f"there was no lab {lab_name!r}\n")


def _lab_to_remove() -> str:
    """Return the only lab without an owner, or the default name: remains of the default lab are removed too."""
    from shoal_lab import state
    from shoal_lab.lab import choose_lab, has_owner

    names = state.list_labs()
    return choose_lab(names) if any(not has_owner(name) for name in names) else DEFAULT_NAME


def _perform(name: str | None, change: Change, dry_run: bool, done: str) -> None:
    """Change a lab and print what was done, or print only the commands."""
    from shoal_lab.lab import Lab

    opened = Lab.open(name)
    if dry_run:
        _print_script(opened.plan(change)[1])
    else:
        opened.perform(change)
        print_with_command(f"lab {opened.name}: {done}")


def _hint(name: str | None, *words: str) -> str:
    """Return a `shoal lab` command for the lab that the user has named, or for the one that is meant without a name."""
    return shlex.join(["shoal", "lab", *words, *(["--name", name] if name else [])])


def _print_script(steps: Iterable[Step]) -> None:
    from shoal_lab.commands import render
    from shoal_lab.kernel import path_line

    sys.stdout.write(path_line() + render(steps))


def _lab_document(lab: Lab) -> dict[str, Any]:
    state = lab.state
    return {
        "name": lab.name,
        "folder": str(lab.folder),
        "rootless": state.rootless,
        "owner": state.owner.pid if state.owner else None,
        "belongs_to": _belongs_to(state),
        "ssh_config": str(lab.folder / "ssh/config") if state.spec.sshd else None,
        "notes": list(state.notes),
        "nodes": [_node_document(lab, state, node) for node in state.spec.nodes],
        "cuts": [{"from": sender, "to": receiver} for sender, receiver in sorted(state.cuts)],
    }


def _any_lab_document(name: str) -> dict[str, Any]:
    """Return a lab's document or, for a broken lab, its name and what is wrong."""
    from shoal_lab.lab import Lab, why_stale

    lab = Lab(name)
    if reason := why_stale(name):
        return {"name": name, "folder": str(lab.folder), "broken": reason}
    return _lab_document(lab)


def _print_labs(documents: list[dict[str, Any]]) -> None:
    for number, document in enumerate(documents):
        if number:
            stdout_console().print()
        if "broken" in document:
            text = f"lab [bold]{document['name']}[/] is [red]broken[/]: {escape(document['broken'])}"
            print_paragraph(f"{text}; remove it: shoal lab down --name {document['name']}")
        else:
            _print_lab(document)


def _belongs_to(state: LabState) -> str | None:
    """Return the run or process that the lab was made for; None for a lab that the user made."""
    if state.owner is None:
        return None
    pid = state.owner.pid
    run = next((process.run for process in find_processes() if process.pid == pid), None)
    if run is not None:
        return f"the run {run}"
    return f"process {pid}{_command_of(pid)}"


def _command_of(pid: int) -> str:
    """Return ` (COMMAND)`, or nothing for a process that has ended or is hidden from this user."""
    from shoal.host.proc import command_words

    words = command_words(pid)
    return f" ({printable_line(' '.join(words).strip(), _LONGEST_COMMAND)})" if words else ""


def _node_document(lab: Lab, state: LabState, node: NodeSpec) -> dict[str, Any]:
    return {
        "name": node.name,
        "address": node.address,
        "link": str(node.link),
        "rate_bps": node.link.rate_bps,
        "delay_s": node.link.delay_s,
        "loss": node.link.loss,
        "cpu": node.cpu,
        "memory_bytes": node.memory_bytes,
        "slots": node.slots,
        "state": "dead" if not lab.is_alive(node.name) else "frozen" if node.name in state.frozen else "up",
        "firewall": list(state.firewalls[node.name]) if node.name in state.firewalls else None,
        "processes": [{"pid": pid, "command": command} for pid, command in lab.processes(node.name)],
    }


def _print_lab(document: dict[str, Any]) -> None:
    from shoal_lab.spec import format_memory

    console = stdout_console()
    how = "in a user namespace" if document["rootless"] else "as root"
    owner = f"; it belongs to {escape(document['belongs_to'])}, which will remove it" if document["belongs_to"] else ""
    print_paragraph(f"lab [bold]{document['name']}[/], {how}, in {escape(document['folder'])}{owner}", console)
    rows = []
    for node in document["nodes"]:
        processes = "\n".join(
            f"{process['pid']} {printable_line(process['command'], 60)}" for process in node["processes"]
        )
        cpu = "–" if node["cpu"] is None else f"{node['cpu']:g}"
        memory = "–" if node["memory_bytes"] is None else format_memory(node["memory_bytes"])
        cells = (node["name"], node["address"], node["link"], cpu, memory, str(node["slots"]), node["state"])
        rows.append((*cells, processes or "–"))
    print_table(("node", "address", "link", "cpu", "memory", "ranks", "state", "runs"), rows, console=console)
    for line in _remarks(document):
        print_paragraph(line, console)
    if document["ssh_config"]:
        ssh = _hint(None, "exec", *([] if document["name"] == DEFAULT_NAME else ["--name", document["name"]]), "switch")
        # A command to paste stays on one line.
        console.print(f"ssh: {escape(ssh)} -- ssh -F {escape(document['ssh_config'])} node1", soft_wrap=True)


def _remarks(document: dict[str, Any]) -> list[str]:
    firewalled = [node for node in document["nodes"] if node["firewall"] is not None]
    return [
        *(f"cut: {cut['to']} no longer receives from {cut['from']}" for cut in document["cuts"]),
        *(
            f"firewall: {node['name']} accepts connections "
            + (f"only at {', '.join(node['firewall'])}" if node["firewall"] else "at no port")
            for node in firewalled
        ),
        *(f"[yellow]note[/]: {escape(note)}" for note in document["notes"]),
    ]
