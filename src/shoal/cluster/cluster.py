"""A cluster: the nodes ranks run on, and how to start a process on one of them. One interface for every kind."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from shoal.cluster.cargo import Cargo
from shoal.cluster.hosts.cluster import HostsCluster, planned
from shoal.cluster.hosts.spec import HostsSpec
from shoal.cluster.join.cluster import JoinCluster
from shoal.cluster.join.spec import JoinSpec
from shoal.cluster.lab.build import up
from shoal.cluster.lab.cluster import LabCluster
from shoal.cluster.lab.lab import Lab, as_nodes
from shoal.cluster.lab.spec import LabSpec
from shoal.cluster.link import Link, PipeLink, agent_command
from shoal.cluster.node import Node, local_node
from shoal.cluster.spec import LocalSpec, StandingLab, parse_on


class Cluster(Protocol):
    @property
    def nodes(self) -> list[Node]: ...

    def start_agent(self, node: Node, run: Path) -> Link:
        """An agent on the node, which outlives us, for a run whose folder we have at `run`."""
        ...

    def folder(self, node: Node, run: Path) -> str:
        """Where the node has that run folder."""
        ...


class LocalCluster:
    """Processes on this machine."""

    def __init__(self, ranks: int) -> None:
        self.nodes = [local_node(ranks)]

    def start_agent(self, node: Node, run: Path) -> Link:
        return PipeLink(agent_command(run, node.name), run, node.name)

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


@contextmanager
def open_cluster(on: str, cargo: Cargo, note: Note) -> Iterator[Cluster]:
    """The cluster that `--on` names. A lab made for this run goes with it, whatever ends the run.

    `cargo` goes to machines that do not share our disk; `note` gets what a person should hear of later.
    """
    match parse_on(on):
        case LocalSpec(ranks=ranks):
            yield LocalCluster(ranks)
        case StandingLab(name=name):
            yield LabCluster(Lab.open(name))
        case LabSpec() as spec:
            lab = up(spec.model_copy(update={"name": f"run-{os.getpid()}"}), owner=os.getpid())
            try:
                yield LabCluster(lab)
            finally:
                lab.close()
        case HostsSpec() as hosts:
            yield HostsCluster.prepare(hosts, cargo, note)
        case JoinSpec() as join:
            with JoinCluster.open(join, cargo, note) as cluster:
                yield cluster
