"""Nodes that see one file system, with the run folder and the Python that has shoal; each is entered by a command.

srun enters the nodes of a Slurm job, `shoal.cluster.pods.enter` the pods of a Kubernetes Job. Orders, and the token in
them, reach an agent by its standard input: lists of processes and jobs show neither.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from shoal import __version__
from shoal.cluster.agent_link import AgentLink, PipeLink
from shoal.cluster.node import Node
from shoal.cluster.node_facts import NodeFacts
from shoal.errors import HostError, UsageError
from shoal.host.facts import installed_release

_FACTS_WITHIN_S = 60.0
# How long an answer counts of a machine that other agents have lost.
_ANSWER_COUNTS_S = 5.0
_ANSWER_WITHIN_S = 1.0
_DISCARD_PORT = 9

# Given a node and a run folder, returns the command that starts the node's agent.
AgentCommand = Callable[[Node, Path], Sequence[str]]


class SharedFolderCluster:
    def __init__(self, nodes: list[Node], agent_command: AgentCommand) -> None:
        self.nodes = nodes
        self._agent_command = agent_command

    def start_agent(self, node: Node, run: Path) -> AgentLink:
        return EnteredLink(self._agent_command(node, run), run, node)

    def folder(self, node: Node, run: Path) -> str:
        return str(run)


class EnteredLink(PipeLink):
    """A link through the command that enters the node, which hears of a lost node late or never."""

    def __init__(self, argv: Sequence[str], run: Path, node: Node) -> None:
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


def ask_facts(commands: Mapping[str, Sequence[str]], look: str) -> dict[str, NodeFacts]:
    """Ask all nodes for their facts at once, each by its command. Raise for the first that gives none, or others than
    are needed. `look` is a command that shows the state of NODE."""
    programs = {name: _start(command) for name, command in commands.items()}
    answers: dict[str, NodeFacts] = {}
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
                    why="it is down or very busy, or it is not noticed yet that it is gone",
                    fix=f"see its state: {look.replace('NODE', name)}",
                ) from None
            answers[name] = _read_facts(name, output, errors)
    finally:
        for program in programs.values():
            if program.poll() is None:
                program.kill()
            program.wait()
            for pipe in (program.stdin, program.stdout, program.stderr):
                if pipe is not None:
                    pipe.close()
    return answers


def _start(command: Sequence[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _read_facts(name: str, output: str, errors: str) -> NodeFacts:
    try:
        facts = NodeFacts(**json.loads(output.strip().splitlines()[-1]))
    except (IndexError, ValueError, TypeError):
        words = [line for line in errors.splitlines() if "cpu binding" not in line]
        raise HostError(
            f"{name} cannot run shoal: {words[-1] if words else 'it printed nothing'}",
            why=f"every node needs {sys.executable} with shoal, at this path",
            fix="give all nodes the same environment: in a folder that they share, or in one image",
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


def choose_address(name: str, host: str, facts: NodeFacts, interface: str | None, on: str) -> str:
    """Choose the address by which the other nodes reach this one, whose name in the network is `host`."""
    own = {address for addresses in facts.addresses.values() for address in addresses}
    if interface is not None:
        addresses = [address for address in facts.addresses.get(interface, []) if ":" not in address]
        if not addresses:
            raise UsageError(
                f"{name} has no address on an interface {interface}",
                why=f"it has {', '.join(sorted(facts.addresses))}",
                fix=f"name another one: --on {on},interface=NAME",
            )
        return addresses[0]
    known = resolve(host)
    for address in (known, facts.source):
        if address and address in own and not address.startswith("127."):
            return address
    raise HostError(
        f"no address of {name} is known that the other nodes reach",
        why=f"its name means {known or 'nothing'} here, and it has {', '.join(sorted(own))}",
        fix=f"name the interface between the nodes: --on {on},interface=NAME",
    )


def resolve(host: str) -> str | None:
    try:
        return str(socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return None
