"""Requests to the template, the process that has imported torch and forks ranks: `python -m shoal.train.template`.

The agent sends one request per rank through a socket pair, with the descriptors that the rank inherits. The rank itself
sends its process number once it can be signalled, and ends if it cannot send that: so the agent has the numbers of all
ranks that run. One template serves all emulated nodes of a lab: it
forks one for each node, which enters the node and serves its agent.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TypeVar

from shoal.control.processes import PART_MARK, RUN_MARK
from shoal.control.rank_env import DEFAULT_THREADS, TRAINING, Placement
from shoal.control.rank_messages import MEMBERSHIP_FD

TEMPLATE = "shoal.train.template"
# The environment of the template, over that of its ranks. numpy's OpenBLAS would start threads when it is loaded, and a
# process with threads cannot be forked safely; ranks do not use it. The padding leaves room for the rank's variables.
LOAD_VARIABLES = {"OPENBLAS_NUM_THREADS": "1", "SHOAL_TEMPLATE_PADDING": "." * 4096}
# Variables that a running rank reads. All others are for libraries, which may read them when they are loaded; a forked
# rank sets its number of threads itself.
_RUN_TIME_VARIABLES = {
    *Placement(rank=0, world_size=1, local_rank=0, local_world_size=1, agent_fd=0, link_mbps=0).to_env(),
    *(MEMBERSHIP_FD, RUN_MARK, PART_MARK, "OMP_NUM_THREADS", DEFAULT_THREADS, "GLOO_SOCKET_IFNAME"),
    "NCCL_SOCKET_IFNAME",
}
# Variables that a shell sets between the launcher and an agent.
_SHELL_VARIABLES = {"PWD", "OLDPWD", "SHLVL", "_"}
# Here the supervisor of a lab's training, and the agent of an emulated node, find the number of their socket to the
# template.
TEMPLATE_FD = "SHOAL_TEMPLATE_FD"
_MOST_BYTES = 128 << 10
_MOST_DESCRIPTORS = 8
Received = TypeVar("Received")


@dataclass(frozen=True)
class ForkRequest:
    parent: int  # the agent, which becomes the rank's parent
    argv: tuple[str, ...]  # the command that would start the rank without a template
    env: dict[str, str]  # all of the rank's variables
    # Variables that get the numbers of the descriptors sent along, in this order behind that of the log.
    fd_variables: tuple[str, ...] = ()
    number: int = 0  # of this request, from 1

    @property
    def words(self) -> tuple[str, ...]:
        """Return the arguments of the training program."""
        return self.argv[_module_at(self.argv) + 1 :]


@dataclass(frozen=True)
class EnterRequest:
    """Fork a template for an emulated node. Sent along are its socket to the node's agent, and its log."""

    first: int  # the first process of the node, whose namespaces it enters
    groups: tuple[str, ...]  # the control groups of the node, each a file that takes a process number
    marks: dict[str, str]


@dataclass(frozen=True)
class Reply:
    pid: int = 0  # 0: the template is ready, and has forked nothing yet
    code: int | None = None  # how the rank `pid` ended, where the template is its parent
    refused: str = ""  # why it can fork no rank
    number: int = 0  # the request that this answers; 0: none


def can_be_forked(argv: Sequence[str], python: str) -> bool:
    """Return whether the command starts shoal's own training with this interpreter.

    A user's script keeps its own start: what it imports may have side effects that belong to one process.
    """
    return tuple(argv[:4]) == (python, "-P", "-m", TRAINING)


def template_command(python: str, folder: str, socket_fd: int) -> tuple[str, ...]:
    """Return the command of the template. It is longer than that of a rank, whose command later takes its place."""
    return (python, "-P", "-m", TEMPLATE, "--folder", folder, "--socket", str(socket_fd))


def differing_variables(template: Mapping[str, str], rank: Mapping[str, str]) -> set[str]:
    """Return the variables that the libraries of the template may have read with another value than the rank's."""
    names = (template.keys() | rank.keys()) - LOAD_VARIABLES.keys() - _RUN_TIME_VARIABLES - _SHELL_VARIABLES
    return {name for name in names if template.get(name) != rank.get(name)}


def send_request(to: socket.socket, request: ForkRequest | EnterRequest, descriptors: Sequence[int]) -> None:
    """Send a request without waiting; OSError when it cannot be sent. The first descriptor of a rank is its log."""
    socket.send_fds(to, [json.dumps({type(request).__name__: asdict(request)}).encode()], descriptors)


def receive_request(connection: socket.socket) -> tuple[ForkRequest | EnterRequest, list[int]] | None:
    """Wait for a request; return it and its descriptors. None: the sender has ended.

    The variables for a rank's descriptors have their numbers in this process.
    """
    data, descriptors, _, _ = _despite_reset(lambda: socket.recv_fds(connection, _MOST_BYTES, _MOST_DESCRIPTORS))
    if not data:
        return None
    [(kind, fields)] = json.loads(data).items()
    if kind == EnterRequest.__name__:
        return EnterRequest(fields["first"], tuple(fields["groups"]), fields["marks"]), descriptors
    names = tuple(fields["fd_variables"])
    for fd in descriptors[1:]:
        os.set_inheritable(fd, True)
    numbers = dict(zip(names, map(str, descriptors[1:]), strict=True))
    env = {**fields["env"], **numbers}
    return ForkRequest(fields["parent"], tuple(fields["argv"]), env, names, fields["number"]), descriptors


def send_reply(to: socket.socket, reply: Reply) -> None:
    to.send(json.dumps(asdict(reply)).encode())


def receive_reply(connection: socket.socket) -> Reply | None:
    """Return the next reply; None when the template has ended. BlockingIOError: there is none yet."""
    data = _despite_reset(lambda: connection.recv(_MOST_BYTES))
    return Reply(**json.loads(data)) if data else None


def _despite_reset(receive: Callable[[], Received]) -> Received:
    """Receive what a peer has sent that ended without reading all messages: the kernel reports a reset first, once."""
    try:
        return receive()
    except ConnectionResetError:
        return receive()


def _module_at(argv: Sequence[str]) -> int:
    return argv.index(TRAINING)
