"""An sbatch script: Slurm starts one torchrun on every node."""

from __future__ import annotations

import shlex
from pathlib import Path

from shoal.launch.emit.job import Job, comment, cores_per_node, needs, slug, summary
from shoal.launch.emit.nodescript import by_number, node_script

# On the first node, whose own name may mean 127.0.1.1 there: the address it has on the way to the second.
_OWN_ADDRESS = (
    "import socket, sys; from shoal.control.route import source_address; "
    "print(source_address(socket.gethostbyname(sys.argv[1])))"
)
_SHARED = "the folder you submit from, on a file system that all nodes share, at the same path"
_NODE_END = "END_OF_NODE_SCRIPT"


def slurm_text(job: Job, new_folder: bool) -> str:
    """`new_folder`: every submission gets a run folder of its own, named after the job."""
    name = f"shoal-{slug(job.config.run.preset)}"
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH --{option}" for option in _options(job, name)),
            *_head(job),
            "",
            "set -euo pipefail",
            *_run_folder(job.out, new_folder),
            *_meeting(job),
            "",
            f"node_script=$(cat <<'{_NODE_END}'",
            node_script(job, "$SLURM_NODEID", '"$SLURM_NNODES"', _shape(job)),
            _NODE_END,
            ")",
            "# srun asks for its CPUs anew since Slurm 22.05; without this each torchrun is bound to a single one.",
            'exec srun --nodes="$SLURM_NNODES" --ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" \\',
            '    --kill-on-bad-exit=1 --label sh -c "$node_script"',
            "",
        ]
    )


def _options(job: Job, name: str) -> list[str]:
    options = [
        f"job-name={name}",
        f"nodes={len(job.nodes)}",
        "ntasks-per-node=1",
        f"cpus-per-task={cores_per_node(job)}",
        f"output={name}-%j.log",
        "signal=TERM@90",
    ]
    if job.config.train.device == "cuda":
        options.append(f"gpus-per-node={max(node.slots for node in job.nodes)}")
    return options


def _head(job: Job) -> list[str]:
    about = [
        f"{summary(job)}. One task a node runs torchrun, which "
        "starts the node's ranks: Slurm then need not know how ranks share its CPUs and GPUs, and a rank sees all GPUs "
        "of its node, as it would anywhere else.",
        "Submit it with what your site asks for: sbatch --partition=… --account=… --time=… THIS_FILE. Options there "
        "beat those above. 90 s before the time is over the ranks finish their step and save; to go on: "
        "SHOAL_RESUME=RUN_FOLDER sbatch … THIS_FILE. Needed:",
    ]
    return [
        *(comment(text) for text in about),
        *(comment(need, "- ") for need in needs(job, "the first node", _SHARED)),
    ]


def _run_folder(out: Path, new_folder: bool) -> list[str]:
    where = shlex.quote(str(out)) + ("-$SLURM_JOB_ID" if new_folder else "")
    return ["export SHOAL_OUT=${SHOAL_RESUME:-}", f'[ -n "$SHOAL_OUT" ] || SHOAL_OUT={where}']


def _meeting(job: Job) -> list[str]:
    """The first node's address; a port below those that the kernel hands out, not the one of another job there."""
    return [
        'hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")',
        'mapfile -t hosts <<<"$hosts"',
        "export MASTER_ADDR=127.0.0.1 MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))",
        "if ((${#hosts[@]} > 1)); then",
        "    # We are on the first node, where its own name may mean 127.0.1.1: take its address towards the second.",
        f'    MASTER_ADDR=$({shlex.quote(job.python)} -P -c {shlex.quote(_OWN_ADDRESS)} "${{hosts[1]}}")',
        "fi",
    ]


def _shape(job: Job) -> list[str]:
    ranks = by_number([f"ranks={node.slots}" for node in job.nodes])
    if job.config.run.threads:
        threads = [f"threads={job.config.run.threads}"]
    else:
        threads = ["threads=$((SLURM_CPUS_PER_TASK / ranks))", '[ "$threads" -gt 0 ] || threads=1']
    return ["export SHOAL_NODE=$SLURMD_NODENAME", *ranks, *threads]
