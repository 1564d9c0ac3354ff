"""A cluster: the nodes that `--on` names, and how an agent is started on each. One interface for every kind."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from shoal.cluster.hosts.spec import HostsSpec
from shoal.cluster.node import Node, Note, RunFiles, local_node
from shoal.cluster.node_program import LocalProgram, RemoteProgram, closing_all, module_command
from shoal.cluster.pods.spec import PodsSpec
from shoal.cluster.slurm.spec import SlurmSpec
from shoal.cluster.target import ExistingLab, JoinSpec, LocalSpec, parse_on
from shoal.errors import ShoalError, UsageError
from shoal_lab.spec import LabSpec

if TYPE_CHECKING:
    from shoal.cluster.agent_link import AgentLink
    from shoal.cluster.join import Confirm
    from shoal.cluster.lab import LabTemplate, ShoalLab


class Cluster(Protocol):
    @property
    def nodes(self) -> list[Node]: ...

    def start_agent(self, node: Node, run: Path) -> AgentLink:
        """Start an agent on the node for the run in the local folder `run`. The agent outlives this process."""
        ...

    def folder(self, node: Node, run: Path) -> str:
        """Return where the node has that run folder."""
        ...


def without_nodes(cluster: Cluster, lost: Collection[str]) -> Cluster:
    """Return the cluster without the nodes of these names; the first of the others is its first node."""
    if not lost:
        return cluster
    remaining = copy(cluster)
    # Not by assignment: the cluster of a hosts file is frozen.
    object.__setattr__(remaining, "nodes", [node for node in cluster.nodes if node.name not in lost])
    return remaining


class LocalCluster:
    """Processes on this machine."""

    def __init__(self, ranks: int, stdin: int | None = None) -> None:
        """`stdin` is a descriptor from which rank 0 of a script reads."""
        self.nodes = [local_node(ranks)]
        self._stdin = stdin

    def start_agent(self, node: Node, run: Path) -> AgentLink:
        from shoal.cluster.agent_link import PipeLink, agent_command

        return PipeLink(agent_command(run, node.name), run, node.name, self._stdin)

    def folder(self, node: Node, run: Path) -> str:
        return str(run)


@contextmanager
def open_cluster(
    on: str,
    run_files: RunFiles,
    note: Note,
    confirm: Confirm | None = None,
    stdin: int | None = None,
    template: LabTemplate | None = None,
) -> Iterator[Cluster]:
    """Open the cluster that `--on` names. A lab made for this run is removed with it, however the run ends.

    `run_files` are sent to machines that do not share this disk. `note` receives messages for the user. `confirm` is
    asked before a joining machine gets anything. `stdin` is for rank 0 of a script on this machine. From `template` the
    ranks of a lab are forked.
    """
    from shoal.cluster.hosts.cluster import HostsCluster
    from shoal.cluster.join import JoinCluster
    from shoal.cluster.lab import LabCluster, ShoalLab
    from shoal.cluster.pods.cluster import open_pods
    from shoal.cluster.slurm.cluster import open_allocation

    match parse_on(on):
        case LocalSpec(ranks=ranks):
            yield LocalCluster(ranks, stdin)
        case ExistingLab(name=name):
            yield LabCluster(ShoalLab.open(name), template)
        case LabSpec() as spec:
            with _own_lab(spec) as lab:
                yield LabCluster(lab, template)
        case HostsSpec() as hosts:
            yield HostsCluster.prepare(hosts, run_files, note)
        case JoinSpec() as join:
            with JoinCluster.open(join, run_files, note, confirm) as cluster:
                yield cluster
        case SlurmSpec() as slurm:
            yield open_allocation(slurm)
        case PodsSpec() as pods:
            yield open_pods(pods)


@contextmanager
def _own_lab(spec: LabSpec) -> Iterator[ShoalLab]:
    """Build a lab that is removed when this process ends, however that happens."""
    from shoal.cluster.lab import ShoalLab

    with ShoalLab.build(replace(spec, name=f"run-{os.getpid()}"), owner=os.getpid()) as lab:
        yield lab


def temporary_parent(on: str) -> Path | None:
    """Return where the folder of a temporary run may be; None: anywhere. Each node of Slurm and each pod has a /tmp of
    its own, and all of them share the current folder."""
    return Path.cwd() if isinstance(parse_on(on), SlurmSpec | PodsSpec) else None


def planned_nodes(on: str) -> list[Node]:
    """Return the nodes that `--on` names without starting anything, for `--dry-run`."""

    match parse_on(on):
        case LocalSpec(ranks=ranks):
            return [local_node(ranks)]
        case ExistingLab(name=name):
            from shoal.cluster.lab import ShoalLab, as_nodes

            return as_nodes(ShoalLab.open(name).state.spec)
        case LabSpec() as spec:
            from shoal.cluster.lab import as_nodes

            return as_nodes(spec)
        case HostsSpec() as hosts:
            from shoal.cluster.hosts.cluster import planned_node

            return [planned_node(host) for host in hosts.hosts]
        case JoinSpec(machines=machines, address=address):
            return [Node(f"machine-{number}", address or "", None, 1, None) for number in range(1, machines + 1)]
        case SlurmSpec() as slurm:
            from shoal.cluster.slurm.cluster import planned_nodes as planned_slurm_nodes

            return planned_slurm_nodes(slurm)
        case PodsSpec() as pods:
            from shoal.cluster.pods.cluster import planned_nodes as planned_pods

            return planned_pods(pods)


@dataclass(frozen=True)
class NodePrograms:
    """The nodes of a cluster, with a program on each that answers requests, or the reason why there is none."""

    on: str  # names the same cluster again, while a lab that was made for this visit exists
    nodes: list[Node]
    programs: dict[str, RemoteProgram]  # by node
    unreached: dict[str, ShoalError]  # by node


@contextmanager
def start_on_nodes(on: str, module: str) -> Iterator[NodePrograms]:
    """Start a torch-free module of shoal, which reads JSON lines, on every node at once; for checks before a run."""
    from shoal.cluster.hosts.cluster import hosts_as_nodes
    from shoal.cluster.hosts.cluster import visit as visit_hosts
    from shoal.cluster.lab import ShoalLab, as_nodes
    from shoal.cluster.pods.cluster import visit as visit_pods
    from shoal.cluster.slurm.cluster import visit as visit_slurm

    with ExitStack() as stack:
        started: Mapping[str, RemoteProgram | ShoalError]
        match parse_on(on):
            case HostsSpec() as hosts:
                nodes, started = hosts_as_nodes(hosts), visit_hosts(hosts, module)
            case ExistingLab(name=name):
                lab = ShoalLab.open(name)
                nodes, started = as_nodes(lab.state.spec), _visit_lab(lab, module)
            case LabSpec() as spec:
                lab = stack.enter_context(_own_lab(spec))
                on, nodes, started = f"lab:{lab.name}", as_nodes(lab.state.spec), _visit_lab(lab, module)
            case LocalSpec(ranks=ranks):
                nodes = [local_node(ranks)]
                started = {nodes[0].name: RemoteProgram(nodes[0].name, LocalProgram(module_command(module)))}
            case SlurmSpec() as slurm:
                nodes, started = visit_slurm(slurm, module)
            case PodsSpec() as pods:
                nodes, started = visit_pods(pods, module)
            case JoinSpec():
                raise UsageError(
                    "machines that join by themselves cannot be looked at before they have joined",
                    fix="name them in a hosts file, or look at each: shoal doctor --on local",
                )
        programs = {name: program for name, program in started.items() if isinstance(program, RemoteProgram)}
        unreached = {name: error for name, error in started.items() if isinstance(error, ShoalError)}
        stack.enter_context(closing_all(programs))
        yield NodePrograms(on, nodes, programs, unreached)


def _visit_lab(lab: ShoalLab, module: str) -> dict[str, RemoteProgram | ShoalError]:
    """Start the module on every node; a killed or frozen node gives an error, the others a program."""
    programs: dict[str, RemoteProgram | ShoalError] = {}
    for node in lab.nodes:
        try:
            program = LocalProgram(lab.command(node.name, module_command(module)))
            programs[node.name] = RemoteProgram(node.name, program)
        except ShoalError as error:
            programs[node.name] = error
    return programs
