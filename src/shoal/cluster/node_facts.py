"""Prints what a node has: `python -P -m shoal.cluster.node_facts [PEER]`, once on every node before a run.

PEER is an address of the machine that asks; within a step of Slurm it is known.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from shoal import __version__
from shoal.host.facts import installed_release, source_address
from shoal.host.network import interface_addresses


@dataclass(frozen=True)
class NodeFacts:
    shoal: str
    torch: str
    addresses: Mapping[str, list[str]]  # by interface
    source: str  # by which this node reaches PEER; empty where it does not


def collect(peer: str) -> NodeFacts:
    return NodeFacts(__version__, installed_release("torch"), interface_addresses(), _source(peer))


def _source(peer: str) -> str:
    try:
        return source_address(peer) if peer else ""
    except OSError:
        return ""


if __name__ == "__main__":
    peer = "".join(sys.argv[1:2]) or os.environ.get("SLURM_LAUNCH_NODE_IPADDR", "")
    sys.stdout.write(json.dumps(asdict(collect(peer))) + "\n")
