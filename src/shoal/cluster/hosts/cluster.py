"""Machines over SSH as a cluster: each with its own disk, its own Python and its own copy of what the run needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shoal.cluster.cargo import Cargo
from shoal.cluster.hosts.link import SshLink
from shoal.cluster.hosts.ready import ReadyHost, make_ready
from shoal.cluster.hosts.spec import Host, HostsSpec
from shoal.cluster.link import Link, PipeLink, agent_command
from shoal.cluster.node import Node, Project, ranks_of
from shoal.runfolder import RunFolder


@dataclass(frozen=True)
class HostsCluster:
    spec: HostsSpec
    ready: dict[str, ReadyHost]
    nodes: list[Node]
    cargo: Cargo
    note: Callable[[str], None]

    @classmethod
    def prepare(cls, spec: HostsSpec, cargo: Cargo, note: Callable[[str], None]) -> HostsCluster:
        """Everything that can be wrong with a host is found here, before anything runs on any of them."""
        found = make_ready(spec, cargo.project, cargo.files, note)
        return cls(spec, {each.host.name: each for each in found}, [_node(each, cargo) for each in found], cargo, note)

    def start_agent(self, node: Node, run: Path) -> Link:
        ready = self.ready[node.name]
        if ready.here:
            return PipeLink(agent_command(run, node.name, ready.python), run, node.name)
        errand = {
            "folder": self.folder(node, run),
            "node": node.name,
            "ranks": list(ranks_of(self.nodes, node)),
            "texts": self.cargo.texts(ready.files),
            "keeps": node is self.nodes[0] and not any(each.here for each in self.ready.values()),
            "follow": False,
            "discard": not self.cargo.stays,
        }
        return SshLink(ready, self.spec, run, node.project, errand, self.note)

    def folder(self, node: Node, run: Path) -> str:
        """Called after the run here, and told apart from any other runs/first, of this machine or another one."""
        ready = self.ready[node.name]
        if ready.here:
            return str(run)
        return f"{ready.runs}/{run.name}-{RunFolder(run).identity()}"


def planned(host: Host) -> Node:
    """What the file alone says, for `--dry-run`."""
    return Node(host.name, host.address or host.host, host.interface, host.slots, None, threads=host.threads)


def _node(ready: ReadyHost, cargo: Cargo) -> Node:
    host = ready.host
    project = Project(cargo.project, ready.project) if cargo.project and ready.project and not ready.here else None
    return Node(
        name=host.name,
        address=ready.address,
        interface=ready.interface,
        slots=host.slots,
        cores=ready.cores,
        link_mbps=ready.link_mbps,
        threads=host.threads,
        python=ready.python,
        project=project,
    )
