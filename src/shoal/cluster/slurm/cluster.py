"""The nodes of the allocation that this process is in, with an agent on each that srun starts."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from shoal.cluster.agent_link import agent_command
from shoal.cluster.node import Node
from shoal.cluster.node_program import LocalProgram, RemoteProgram, module_command
from shoal.cluster.shared_folder import SharedFolderCluster, ask_facts, choose_address, resolve
from shoal.cluster.slurm.spec import AllocatedNode, SlurmSpec, job_id, node_lists
from shoal.control.rank_env import TERM_IS_FOR_ALL
from shoal.errors import RunFailed, ShoalError, UsageError

_COMMAND_TIMEOUT_S = 30.0
# What the allocation was asked for. srun would take it as options of the step, which has one task and all there is.
_OF_THE_ALLOCATION = (
    *("SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_CPUS_PER_GPU", "SLURM_MEM_PER_GPU"),
    *("SLURM_GPUS", "SLURM_GPUS_PER_TASK", "SLURM_GPUS_PER_SOCKET", "SLURM_GPU_BIND", "SLURM_NTASKS_PER_GPU"),
    *("SLURM_NTASKS_PER_NODE", "SLURM_HINT", "SLURM_EXACT", "SLURM_EXCLUSIVE", "SLURM_DISTRIBUTION"),
)
# An agent on a node that does not share the disk would work in an empty folder, unseen.
_IN_FOLDER = 'test -d "$1" || { echo "$1 is not on this node: it is no shared folder" >&2; exit 3; }; shift; exec "$@"'


def open_allocation(spec: SlurmSpec) -> SharedFolderCluster:
    """Look at every node of the allocation; refuse one that cannot train with this one."""
    allocated = {node.name: node for node in allocated_nodes(spec)}
    look = module_command("shoal.cluster.node_facts")
    commands = {name: (*step_command(node, "shoal-look"), *look) for name, node in allocated.items()}
    facts = ask_facts(commands, "scontrol show node NODE")
    nodes = [
        Node(name, choose_address(name, name, facts[name], spec.interface, "slurm"), spec.interface, node.slots, None)
        for name, node in allocated.items()
    ]

    def start(node: Node, run: Path) -> tuple[str, ...]:
        # The whole job gets SIGTERM at once, to save and end.
        agent = ("env", f"{TERM_IS_FOR_ALL}=1", *agent_command(run, node.name))
        return (
            *step_command(allocated[node.name], f"shoal-{run.name}"),
            "sh",
            "-c",
            _IN_FOLDER,
            "sh",
            str(run),
            *agent,
        )

    return SharedFolderCluster(nodes, start)


def planned_nodes(spec: SlurmSpec) -> list[Node]:
    """Return the nodes of the allocation, or as many without names as are asked for; nothing is started."""
    if job_id():
        return _named_nodes(allocated_nodes(spec), spec)
    count, slots = int(spec.absolute().partition(",")[0].partition(":")[2]), spec.slots or 1
    return [Node(f"slurm-{number}", "", spec.interface, slots, None) for number in range(1, count + 1)]


def visit(spec: SlurmSpec, module: str) -> tuple[list[Node], dict[str, RemoteProgram | ShoalError]]:
    """Start a module on every node; return the nodes, and a program to exchange requests with for each."""
    allocated = allocated_nodes(spec)
    programs: dict[str, RemoteProgram | ShoalError] = {}
    for node in allocated:
        program = LocalProgram((*step_command(node, "shoal-look"), *module_command(module)))
        programs[node.name] = RemoteProgram(node.name, program)
    try:
        nodes = open_allocation(spec).nodes
    except ShoalError:
        # The caller finds out why.
        nodes = _named_nodes(allocated, spec)
    return nodes, programs


def _named_nodes(allocated: Iterable[AllocatedNode], spec: SlurmSpec) -> list[Node]:
    """Return the nodes with the addresses that their names have here."""
    return [Node(node.name, resolve(node.name) or "", spec.interface, node.slots, None) for node in allocated]


def allocated_nodes(spec: SlurmSpec) -> list[AllocatedNode]:
    places = spec.places()
    names = [name for text, _ in node_lists(os.environ) for name in _host_names(text)]
    return [AllocatedNode(name, slots, group) for name, (slots, group) in zip(names, places, strict=False)]


def step_command(node: AllocatedNode, name: str) -> tuple[str, ...]:
    """Return the command that starts a program on one node, beside what else runs there."""
    # --overlap: other steps have the same cores, memory and GPUs. --mem=0: all memory of the job.
    resources = ("--overlap", "--mem=0", "--cpu-bind=none")
    group = () if node.group is None else (f"--het-group={node.group}",)
    place = (*group, "--nodes=1", "--ntasks=1", f"--nodelist={node.name}")
    unset = (f"--unset={variable}" for variable in _OF_THE_ALLOCATION)
    words = ("--export=ALL", "--quit-on-interrupt", "--unbuffered", f"--job-name={name}")
    return ("env", *unset, "srun", *resources, *place, *words)


def run_slurm(*argv: str, stdin: str = "", within_s: float = _COMMAND_TIMEOUT_S) -> str:
    """Run a command of Slurm and return what it prints."""
    if shutil.which(argv[0]) is None:
        raise UsageError(
            f"there is no {argv[0]} on this machine",
            why="--on slurm works where Slurm's commands are: on its login nodes and inside its jobs",
            fix="log in there; or write a job for it here: shoal emit slurm",
        )
    try:
        done = subprocess.run(argv, input=stdin, capture_output=True, text=True, timeout=within_s)
    except subprocess.TimeoutExpired:
        raise RunFailed(
            f"{argv[0]} did not answer within {within_s:.0f} s",
            why="Slurm's controller is busy or gone",
            fix="look at it: sinfo",
        ) from None
    if done.returncode:
        words = " ".join(done.stderr.split())
        raise RunFailed(f"{argv[0]} failed: {words[-300:]}", why="Slurm refused it", fix="see what there is: sinfo")
    return done.stdout


def _host_names(short: str) -> list[str]:
    """Return the names behind Slurm's short form, such as node[2-3,7]."""
    return run_slurm("scontrol", "show", "hostnames", short).split()
