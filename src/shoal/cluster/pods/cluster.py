"""The pods of the job that this process is in, with an agent on each."""

from __future__ import annotations

from pathlib import Path

from shoal.cluster.node import Node
from shoal.cluster.node_program import LocalProgram, RemoteProgram, module_command
from shoal.cluster.pods.spec import PodsSpec, node_name, own_job
from shoal.cluster.shared_folder import SharedFolderCluster, ask_facts, choose_address, resolve
from shoal.errors import ShoalError


def open_pods(spec: PodsSpec) -> SharedFolderCluster:
    """Look at every pod; refuse one that cannot train with this one."""
    job = own_job(spec)
    names = {node_name(index): index for index in range(spec.pods)}
    commands = {name: _enter(index, "run", "shoal.cluster.node_facts") for name, index in names.items()}
    facts = ask_facts(commands, "kubectl get pods")
    addresses = {
        name: choose_address(name, job.hosts[index], facts[name], spec.interface, f"pods:{spec.pods}")
        for name, index in names.items()
    }
    nodes = [Node(name, address, spec.interface, spec.slots, None) for name, address in addresses.items()]

    def start(node: Node, run: Path) -> list[str]:
        return _enter(names[node.name], "agent", str(run.absolute()))

    return SharedFolderCluster(nodes, start)


def planned_nodes(spec: PodsSpec) -> list[Node]:
    """Return the pods without looking at them: they need not be there yet."""
    return [Node(node_name(index), "", spec.interface, spec.slots, None) for index in range(spec.pods)]


def visit(spec: PodsSpec, module: str) -> tuple[list[Node], dict[str, RemoteProgram | ShoalError]]:
    """Start a module in every pod; return the pods, and a program to exchange requests with for each."""
    hosts = own_job(spec).hosts[: spec.pods]
    nodes = [
        Node(node_name(index), resolve(host) or "", spec.interface, spec.slots, None)
        for index, host in enumerate(hosts)
    ]
    return nodes, {
        node.name: RemoteProgram(node.name, LocalProgram(_enter(index, "run", module)))
        for index, node in enumerate(nodes)
    }


def _enter(index: int, *words: str) -> list[str]:
    return [*module_command("shoal.cluster.pods.enter"), str(index), *words]
