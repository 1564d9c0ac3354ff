"""Prints what a node of Slurm has: `python -P -m shoal.cluster.slurm.node_facts`, once on every node before a run."""

from __future__ import annotations

import json
import os
import socket
import sys

from shoal import __version__
from shoal.host.facts import installed_release, source_address
from shoal.host.network import interface_addresses


def look() -> dict[str, object]:
    return {
        "node": os.environ.get("SLURMD_NODENAME", socket.gethostname()),
        "shoal": __version__,
        "torch": installed_release("torch"),
        "addresses": interface_addresses(),
        # By which this node reaches the one where the job was started.
        "source": _source(os.environ.get("SLURM_LAUNCH_NODE_IPADDR", "")),
    }


def _source(peer: str) -> str:
    try:
        return source_address(peer) if peer else ""
    except OSError:
        return ""


if __name__ == "__main__":
    sys.stdout.write(json.dumps(look()) + "\n")
