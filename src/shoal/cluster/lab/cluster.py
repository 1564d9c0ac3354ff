"""A lab as a cluster: one rank a node, each in its own namespaces, behind its own shaped link."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from shoal.cluster.lab.lab import Lab
from shoal.cluster.node import Meeting, Node


class LabCluster:
    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self.nodes = lab.nodes

    def start(
        self, node: Node, argv: Sequence[str], env: Mapping[str, str], log: Path, pass_fds: Sequence[int] = ()
    ) -> subprocess.Popen[bytes]:
        return self._lab.start(node.name, argv, env, log, pass_fds)

    @contextlib.contextmanager
    def bind(self, node: Node) -> Iterator[Meeting]:
        """Made inside the node's network and handed out to us: a socket bound here would stay on the host."""
        with self._lab.listen(node.name) as listener:
            yield Meeting(node.address, listener.getsockname()[1], listener.fileno())
