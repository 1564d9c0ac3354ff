"""Plain torchrun: one command a node, to be typed there."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from shoal.cluster.node import Node
from shoal.launch.emit.job import Job, comment, needs, summary, threads_on, worker_words
from shoal.launch.emit.nodescript import FIND_INTERFACE
from shoal.launch.plan import SAFE_PATH

_SHARED = "this folder, on a file system that all nodes share, at the same path"


@dataclass(frozen=True)
class NodeCommand:
    node: str
    address: str
    command: str


def torchrun_commands(job: Job, port: int) -> list[NodeCommand]:
    """Static rendezvous: c10d looks for its own address under names that mean something else in a namespace or on a
    Debian host, and ignores the order of the nodes. Torchrun counts ranks through unequal nodes by itself.
    """
    return [
        NodeCommand(node.name, node.address, _command(job, port, node_rank, node))
        for node_rank, node in enumerate(job.nodes)
    ]


def torchrun_text(job: Job, port: int) -> str:
    first = job.nodes[0]
    lines = [
        comment(f"{summary(job)}, started by torchrun."),
        comment("Type each command on its node, all in the same folder; they wait 15 minutes for each other. Needed:"),
        *(comment(need, "- ") for need in [*needs(job, first.name, _SHARED), _port_need(first, port)]),
    ]
    for each in torchrun_commands(job, port):
        lines += ["", comment(f"{each.node} ({each.address})"), each.command]
    return "\n".join(lines) + "\n"


def _port_need(first: Node, port: int) -> str:
    return f"port {port} free on {first.name} (who has it: ss -ltnp 'sport = :{port}'), or choose another with --port"


def _command(job: Job, port: int, node_rank: int, node: Node) -> str:
    threads = threads_on(job, node)
    flags = {
        "nnodes": len(job.nodes),
        "node-rank": node_rank,
        "nproc-per-node": node.slots,
        "master-addr": job.nodes[0].address,
        "master-port": port,
    }
    torchrun = [
        job.python,
        "-P",
        "-m",
        "torch.distributed.run",
        *(f"--{flag}={value}" for flag, value in flags.items()),
    ]
    worker = ["-m", "shoal.train.worker", *worker_words(job), "--out", str(job.out)]
    # The worker counts the machine's cores itself unless told; a node may be only a part of the machine.
    limit = [] if threads is None else ["--set", f"run.threads={threads}"]
    return f"{_variables(job, node_rank, node)} {shlex.join([*torchrun, *worker, *limit])}"


def _variables(job: Job, node_rank: int, node: Node) -> str:
    threads = threads_on(job, node)
    env = {
        **SAFE_PATH,
        "SHOAL_NODE": node.name,
        **({} if threads is None else {"OMP_NUM_THREADS": str(threads)}),
        **({} if node.link_mbps is None else {"SHOAL_LINK_MBPS": str(node.link_mbps)}),
        # Of the ranks that share a run folder one keeps its checkpoints and ledger: the first of the first node.
        **({} if node_rank == 0 else {"SHOAL_KEEPS_FILES": "0"}),
    }
    words = [f"{name}={shlex.quote(value)}" for name, value in env.items()]
    return " ".join([_interface(job, node), *words])


def _interface(job: Job, node: Node) -> str:
    """The node's own, or, where nobody has looked yet, a search for it in the same command."""
    if node.interface:
        name = shlex.quote(node.interface)
        return f"GLOO_SOCKET_IFNAME={name} NCCL_SOCKET_IFNAME={name}"
    find = shlex.join([job.python, "-P", "-c", FIND_INTERFACE, job.nodes[0].address])
    return f'interface=$({find}) && GLOO_SOCKET_IFNAME="$interface" NCCL_SOCKET_IFNAME="$interface"'
