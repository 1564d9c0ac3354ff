"""What one node of a scheduler's job does: find its interface, count its ranks, become torchrun. Plain POSIX shell.

Slurm and Kubernetes run the same lines, one process a node, and differ only in how a node learns its number
(`NODE_RANK`) and where the first one is (`MASTER_ADDR`, `MASTER_PORT`). The run folder comes as `SHOAL_OUT`; with
anything in `SHOAL_RESUME` the run there is gone on with.
"""

from __future__ import annotations

import shlex

from shoal.launch.emit.job import Job, worker_words

# Not `ip route get`: on the first node it says "lo" of the node's own address, containers seldom have it, and on
# Debian it is not on the PATH of ordinary users. shoal is there anyway.
FIND_INTERFACE = (
    "import sys; from shoal.control.route import interface_to; "
    'print(interface_to(sys.argv[1]) or sys.exit("no route to " + sys.argv[1]))'
)


def node_script(job: Job, number: str, count: str, shape: list[str]) -> str:
    """`number` and `count` are how a node learns its own number and how many there are, `shape` the lines that set
    `ranks` and `threads`.
    """
    return "\n".join(
        [
            "set -eu",
            f"python={shlex.quote(job.python)}",
            "# Python must not import from the current folder, which other users may be able to write to.",
            "export PYTHONSAFEPATH=1",
            f"NODE_RANK={number}",
            *shape,
            f'interface=$("$python" -c {shlex.quote(FIND_INTERFACE)} "$MASTER_ADDR")',
            'export GLOO_SOCKET_IFNAME="$interface" NCCL_SOCKET_IFNAME="$interface" OMP_NUM_THREADS="$threads"',
            "# Of the ranks that share a run folder one keeps its checkpoints and ledger: the first of the first node.",
            '[ "$NODE_RANK" = 0 ] || export SHOAL_KEEPS_FILES=0',
            *_worker(job),
            'exec "$python" -m torch.distributed.run \\',
            f'    --nnodes={count} --node-rank="$NODE_RANK" --nproc-per-node="$ranks" \\',
            '    --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" -m shoal.train.worker "$@"',
        ]
    )


def _worker(job: Job) -> list[str]:
    preset, *settings = worker_words(job)
    pairs = [shlex.join(settings[i : i + 2]) for i in range(0, len(settings), 2)]
    words = [shlex.quote(preset), '--out "$SHOAL_OUT"', *pairs, '--set run.threads="$threads"']
    # Asked for, never found out: on NFS a node that looked for the run folder too early would not see it for a while.
    return ["set -- \\", *(f"    {word} \\" for word in words), "    ${SHOAL_RESUME:+--resume}"]


def by_number(lines: list[str]) -> list[str]:
    """One shell line for the node of each number, or only the line when all are the same."""
    if len(set(lines)) == 1:
        return lines[:1]
    numbers = [*map(str, range(len(lines) - 1)), "*"]
    cases = (f"    {number}) {line} ;;" for number, line in zip(numbers, lines, strict=True))
    return ['case "$NODE_RANK" in', *cases, "esac"]
