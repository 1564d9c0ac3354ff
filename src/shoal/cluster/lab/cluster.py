"""A lab as a cluster: one rank a node, each in its own namespaces, behind its own shaped link."""

from __future__ import annotations

from pathlib import Path

from shoal.cluster.lab.lab import Lab
from shoal.cluster.link import Link, PipeLink, agent_command
from shoal.cluster.node import Node


class LabCluster:
    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self.nodes = lab.nodes

    def start_agent(self, node: Node, run: Path) -> Link:
        return PipeLink(self._lab.command(node.name, agent_command(run, node.name)), run, node.name)

    def folder(self, node: Node, run: Path) -> str:
        return str(run)
