"""A cluster: the nodes ranks run on, and how to start a process on one of them. One interface for every kind."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

from shoal.cluster.lab.build import up
from shoal.cluster.lab.cluster import LabCluster
from shoal.cluster.lab.lab import Lab, as_nodes
from shoal.cluster.lab.spec import LabSpec
from shoal.cluster.node import Meeting, Node, bind, local_node, start_process
from shoal.cluster.spec import LocalSpec, StandingLab, parse_on


class Cluster(Protocol):
    @property
    def nodes(self) -> list[Node]: ...

    def start(
        self, node: Node, argv: Sequence[str], env: Mapping[str, str], log: Path, pass_fds: Sequence[int] = ()
    ) -> subprocess.Popen[bytes]:
        """A process on the node, in a session of its own, that dies with us."""
        ...

    def bind(self, node: Node) -> AbstractContextManager[Meeting]:
        """A listening socket on the node's own address, for a process there to inherit."""
        ...


class LocalCluster:
    """Processes on this machine."""

    def __init__(self, ranks: int) -> None:
        self.nodes = [local_node(ranks)]

    def start(
        self, node: Node, argv: Sequence[str], env: Mapping[str, str], log: Path, pass_fds: Sequence[int] = ()
    ) -> subprocess.Popen[bytes]:
        return start_process(argv, env, log, pass_fds)

    def bind(self, node: Node) -> AbstractContextManager[Meeting]:
        return bind(node.address)


def planned_nodes(on: str) -> list[Node]:
    """The nodes that `--on` names, with nothing started: for `--dry-run`."""
    match parse_on(on):
        case LocalSpec(ranks=ranks):
            return [local_node(ranks)]
        case StandingLab(name=name):
            return Lab.open(name).nodes
        case LabSpec() as spec:
            return as_nodes(spec)


@contextmanager
def open_cluster(on: str) -> Iterator[Cluster]:
    """The cluster that `--on` names. A lab made for this run goes with it, whatever ends the run."""
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
