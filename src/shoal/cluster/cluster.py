"""A cluster: the nodes ranks run on, and how to start a process on one of them. One interface for every kind."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from shoal.cluster.agent_link import AgentLink, PipeLink, agent_command
from shoal.cluster.hosts.cluster import HostsCluster, hosts_as_nodes, planned
from shoal.cluster.hosts.cluster import visit as visit_hosts
from shoal.cluster.hosts.spec import HostsSpec
from shoal.cluster.join import Confirm, JoinCluster
from shoal.cluster.lab.lab import Lab, LabCluster, as_nodes, up
from shoal.cluster.lab.spec import LabSpec
from shoal.cluster.node import LocalProgram, Node, RemoteProgram, RunFiles, closing_all, local_node, module_command
from shoal.cluster.target import JoinSpec, LocalSpec, On, StandingLab, parse_on
from shoal.errors import ShoalError, UsageError


class Cluster(Protocol):
    @property
    def nodes(self) -> list[Node]: ...

    def start_agent(self, node: Node, run: Path) -> AgentLink:
        """An agent on the node, which outlives us, for a run whose folder we have at `run`."""
        ...

    def folder(self, node: Node, run: Path) -> str:
        """Where the node has that run folder."""
        ...


class LocalCluster:
    """Processes on this machine."""

    def __init__(self, ranks: int, stdin: int | None = None) -> None:
        """`stdin` is a descriptor from which rank 0 of a script reads."""
        self.nodes = [local_node(ranks)]
        self._stdin = stdin

    def start_agent(self, node: Node, run: Path) -> AgentLink:
        return PipeLink(agent_command(run, node.name), run, node.name, self._stdin)

    def folder(self, node: Node, run: Path) -> str:
        return str(run)


Note = Callable[[str], None]


def planned_nodes(on: str) -> list[Node]:
    """The nodes that `--on` names, with nothing started: for `--dry-run`."""
    match parse_on(on):
        case LocalSpec(ranks=ranks):
            return [local_node(ranks)]
        case StandingLab(name=name):
            return Lab.open(name).nodes
        case LabSpec() as spec:
            return as_nodes(spec)
        case HostsSpec() as hosts:
            return [planned(host) for host in hosts.hosts]
        case JoinSpec(machines=machines, address=address):
            return [Node(f"machine-{number}", address or "", None, 1, None) for number in range(1, machines + 1)]


@dataclass(frozen=True)
class NodePrograms:
    """The nodes of a cluster with nothing started but a program to talk to on each; or why there is none.

    `on` names the same cluster again: a lab that was made for the visit stands until it is over."""

    on: str
    nodes: list[Node]
    talks: dict[str, RemoteProgram]
    unreached: dict[str, ShoalError]


@contextmanager
def visit(on: str, module: str) -> Iterator[NodePrograms]:
    """For looking around before a run: a torch-free module of ours, reading JSON lines, on every node at once."""
    with _visited(parse_on(on), on, module) as (settled_on, nodes, found):
        talks = {name: each for name, each in found.items() if isinstance(each, RemoteProgram)}
        with closing_all(talks):
            unreached = {name: each for name, each in found.items() if isinstance(each, ShoalError)}
            yield NodePrograms(settled_on, nodes, talks, unreached)


@contextmanager
def _visited(
    spec: On, on: str, module: str
) -> Iterator[tuple[str, list[Node], Mapping[str, RemoteProgram | ShoalError]]]:
    match spec:
        case HostsSpec() as hosts:
            yield on, hosts_as_nodes(hosts), visit_hosts(hosts, module)
        case StandingLab(name=name):
            yield on, (lab := Lab.open(name)).nodes, _talks_in(lab, module)
        case LabSpec() as planned_lab:
            with _own_lab(planned_lab) as lab:
                yield f"lab:{lab.name}", lab.nodes, _talks_in(lab, module)
        case LocalSpec(ranks=ranks):
            node = local_node(ranks)
            yield on, [node], {node.name: RemoteProgram(node.name, LocalProgram(module_command(module)))}
        case JoinSpec():
            raise UsageError(
                "machines that join by themselves cannot be looked at before they have joined",
                fix="name them in a hosts file, or look at each: shoal doctor --on local",
            )


def _talks_in(lab: Lab, module: str) -> dict[str, RemoteProgram | ShoalError]:
    """A node that is killed or frozen takes nothing in; the others are still there to be looked at."""
    found: dict[str, RemoteProgram | ShoalError] = {}
    for node in lab.nodes:
        try:
            found[node.name] = RemoteProgram(node.name, LocalProgram(lab.command(node.name, module_command(module))))
        except ShoalError as error:
            found[node.name] = error
    return found


@contextmanager
def _own_lab(spec: LabSpec) -> Iterator[Lab]:
    """For us alone, and gone when we are, whatever ends us."""
    lab = up(spec.model_copy(update={"name": f"run-{os.getpid()}"}), owner=os.getpid())
    try:
        yield lab
    finally:
        lab.close()


@contextmanager
def open_cluster(
    on: str, cargo: RunFiles, note: Note, confirm: Confirm | None = None, stdin: int | None = None
) -> Iterator[Cluster]:
    """The cluster that `--on` names. A lab made for this run goes with it, whatever ends the run.

    `cargo` goes to machines that do not share our disk; `note` gets what a person should hear of later. `confirm` is
    asked before a machine that joins by itself gets anything. `stdin` is for rank 0 of a script on this machine.
    """
    match parse_on(on):
        case LocalSpec(ranks=ranks):
            yield LocalCluster(ranks, stdin)
        case StandingLab(name=name):
            yield LabCluster(Lab.open(name))
        case LabSpec() as spec:
            with _own_lab(spec) as lab:
                yield LabCluster(lab)
        case HostsSpec() as hosts:
            yield HostsCluster.prepare(hosts, cargo, note)
        case JoinSpec() as join:
            with JoinCluster.open(join, cargo, note, confirm) as cluster:
                yield cluster
