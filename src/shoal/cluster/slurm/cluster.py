"""The nodes of the allocation that this process is in, with an agent on each that srun starts.

All nodes see one file system, with the run folder and the Python that has shoal. Orders, and the token in them, reach
an agent by its standard input: what `scontrol` and `ps` show has neither.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal import __version__
from shoal.cluster.agent_link import AgentLink, PipeLink, agent_command
from shoal.cluster.node import Node
from shoal.cluster.node_program import LocalProgram, RemoteProgram, module_command
from shoal.cluster.slurm.spec import AllocatedNode, SlurmSpec, job_id, node_lists
from shoal.control.rank_env import TERM_IS_FOR_ALL
from shoal.errors import HostError, RunFailed, ShoalError, UsageError
from shoal.host.facts import installed_release

_FACTS_WITHIN_S = 60.0
_COMMAND_TIMEOUT_S = 30.0
# How long an answer counts of a machine that other agents have lost.
_ANSWER_COUNTS_S = 5.0
_ANSWER_WITHIN_S = 1.0
_DISCARD_PORT = 9
# What the allocation was asked for. srun would take it as options of the step, which has one task and all there is.
_OF_THE_ALLOCATION = (
    *("SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_CPUS_PER_GPU", "SLURM_MEM_PER_GPU"),
    *("SLURM_GPUS", "SLURM_GPUS_PER_TASK", "SLURM_GPUS_PER_SOCKET", "SLURM_GPU_BIND", "SLURM_NTASKS_PER_GPU"),
    *("SLURM_NTASKS_PER_NODE", "SLURM_HINT", "SLURM_EXACT", "SLURM_EXCLUSIVE", "SLURM_DISTRIBUTION"),
)
# An agent on a node that does not share the disk would work in an empty folder, unseen.
_IN_FOLDER = 'test -d "$1" || { echo "$1 is not on this node: it is no shared folder" >&2; exit 3; }; shift; exec "$@"'


@dataclass(frozen=True)
class _Facts:
    """What a node says of itself."""

    shoal: str
    torch: str
    addresses: Mapping[str, list[str]]
    source: str


class SlurmCluster:
    def __init__(self, nodes: list[Node], groups: Mapping[str, int | None]) -> None:
        self.nodes = nodes
        self._groups = groups

    @classmethod
    def open(cls, spec: SlurmSpec) -> SlurmCluster:
        """Look at every node of the allocation; refuse one that cannot train with this one."""
        allocated = allocated_nodes(spec)
        facts = _ask(allocated)
        nodes = [
            Node(node.name, _address(node.name, facts[node.name], spec.interface), spec.interface, node.slots, None)
            for node in allocated
        ]
        return cls(nodes, {node.name: node.group for node in allocated})

    def start_agent(self, node: Node, run: Path) -> AgentLink:
        srun = step_command(AllocatedNode(node.name, node.slots, self._groups[node.name]), f"shoal-{run.name}")
        # The whole job gets SIGTERM at once, to save and end.
        agent = ("env", f"{TERM_IS_FOR_ALL}=1", *agent_command(run, node.name))
        return SlurmLink((*srun, "sh", "-c", _IN_FOLDER, "sh", str(run), *agent), run, node)

    def folder(self, node: Node, run: Path) -> str:
        return str(run)


class SlurmLink(PipeLink):
    """A link to the agent of a step. srun itself hears of a lost node only after minutes."""

    def __init__(self, argv: tuple[str, ...], run: Path, node: Node) -> None:
        super().__init__(argv, run, node.name)
        self._address = node.address
        self._answered = (0.0, True)

    def is_reachable(self) -> bool:
        if not super().is_reachable():
            return False
        asked, has_answered = self._answered
        if time.monotonic() - asked > _ANSWER_COUNTS_S:
            has_answered = _answers(self._address)
            self._answered = (time.monotonic(), has_answered)
        return has_answered


def _answers(address: str) -> bool:
    """Whether a machine answers, be it that nothing listens at the port."""
    try:
        socket.create_connection((address, _DISCARD_PORT), timeout=_ANSWER_WITHIN_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return True


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
        nodes = SlurmCluster.open(spec).nodes
    except ShoalError:
        # The caller finds out why.
        nodes = _named_nodes(allocated, spec)
    return nodes, programs


def _named_nodes(allocated: Iterable[AllocatedNode], spec: SlurmSpec) -> list[Node]:
    """Return the nodes with the addresses that their names have here."""
    return [Node(node.name, _resolve(node.name) or "", spec.interface, node.slots, None) for node in allocated]


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


def _ask(nodes: Iterable[AllocatedNode]) -> dict[str, _Facts]:
    """Ask all nodes for their facts at once. Raise for the first that gives none, or others than are needed."""
    nodes = list(nodes)
    programs = {node.name: _start_facts(node) for node in nodes}
    answers: dict[str, _Facts] = {}
    deadline = time.monotonic() + _FACTS_WITHIN_S
    try:
        for name, program in programs.items():
            try:
                output, errors = program.communicate(timeout=max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                program.kill()
                words = program.communicate()[1].splitlines()
                raise HostError(
                    f"{name} gave no answer within {_FACTS_WITHIN_S:.0f} s" + (f": {words[-1]}" if words else ""),
                    why="the node is down or very busy, or Slurm has not noticed yet that it is gone",
                    fix=f"see its state: scontrol show node {name}",
                ) from None
            answers[name] = _read_facts(name, output, errors)
    finally:
        for program in programs.values():
            if program.poll() is None:
                program.kill()
            program.wait()
            for pipe in (program.stdout, program.stderr):
                if pipe is not None:
                    pipe.close()
    return answers


def _start_facts(node: AllocatedNode) -> subprocess.Popen[str]:
    command = (*step_command(node, "shoal-look"), *module_command("shoal.cluster.slurm.node_facts"))
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def _read_facts(name: str, output: str, errors: str) -> _Facts:
    try:
        answer: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
        facts = _Facts(answer["shoal"], answer["torch"], answer["addresses"], answer["source"])
    except (IndexError, ValueError, KeyError, TypeError):
        words = [line for line in errors.splitlines() if "cpu binding" not in line]
        raise HostError(
            f"{name} cannot run shoal: {words[-1] if words else 'it printed nothing'}",
            why=f"every node needs {sys.executable} with shoal, at this path: a folder that all nodes share",
            fix="make the environment in your home folder, or where all nodes see it",
        ) from None
    here = {"shoal": __version__, "torch": installed_release("torch")}
    for package, there in (("shoal", facts.shoal), ("torch", facts.torch)):
        if there != here[package]:
            raise HostError(
                f"{name} has {package} {there or 'not at all'}, and here is {here[package]}",
                why="ranks with different versions do not train to the same bits",
                fix=f"use one environment on all nodes, such as {sys.prefix}",
            )
    return facts


def _address(name: str, facts: _Facts, interface: str | None) -> str:
    """Choose the address by which the other nodes reach this one."""
    own = {address for addresses in facts.addresses.values() for address in addresses}
    if interface is not None:
        addresses = [address for address in facts.addresses.get(interface, []) if ":" not in address]
        if not addresses:
            raise UsageError(
                f"{name} has no address on an interface {interface}",
                why=f"it has {', '.join(sorted(facts.addresses))}",
                fix="name another one: --on slurm,interface=NAME",
            )
        return addresses[0]
    known = _resolve(name)
    for address in (known, facts.source):
        if address and address in own and not address.startswith("127."):
            return address
    raise HostError(
        f"no address of {name} is known that the other nodes reach",
        why=f"its name means {known or 'nothing'} here, and it has {', '.join(sorted(own))}",
        fix="name the interface between the nodes: --on slurm,interface=NAME",
    )


def _resolve(name: str) -> str | None:
    try:
        return str(socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return None
