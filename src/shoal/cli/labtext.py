"""A lab as a document for scripts and as a table for people."""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from shoal.cli.output import stdout_console
from shoal.cluster.lab.lab import Lab
from shoal.cluster.lab.spec import LabNode
from shoal.cluster.lab.state import LabState


def lab_document(lab: Lab) -> dict[str, Any]:
    state = lab.state
    return {
        "name": lab.name,
        "folder": str(lab.folder),
        "rootless": state.rootless,
        "owner": state.owner.pid if state.owner else None,
        "ssh_config": str(lab.folder / "ssh/config") if state.spec.sshd else None,
        "notes": list(state.notes),
        "nodes": [_node(lab, state, node) for node in state.spec.nodes],
        "cuts": [{"from": sender, "to": hearer} for sender, hearer in sorted(state.cuts)],
    }


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
    console.print(f"lab [bold]{document['name']}[/], {how}, in {escape(document['folder'])}", soft_wrap=True)
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
