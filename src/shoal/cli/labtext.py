"""A lab as a document for scripts and as a table for people."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from shoal.cli.output import stdout_console
from shoal.cluster.lab import registry
from shoal.cluster.lab.lab import Lab, why_stale
from shoal.cluster.lab.spec import LabNode
from shoal.cluster.lab.state import LabState
from shoal.launch.found import find
from shoal.terminal import printable_line

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
    fault = why_stale(lab.folder, registry.read_state(name))
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
