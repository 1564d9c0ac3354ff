"""The process from which an agent's ranks are forked: `python -P -m shoal.train.template --folder RUN --socket FD`.

It imports what a rank needs and waits for requests (`control.fork_request`), so that a rank starts without the seconds
that importing torch takes, and shares the memory of what was imported.

Only a process with one thread can be forked safely: a lock that another thread holds stays locked in the child. So it
computes nothing and never initialises CUDA, and it refuses to fork when a thread has been started all the same.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import sys
from pathlib import Path

from shoal.control.fork_request import (
    EnterRequest,
    ForkRequest,
    Reply,
    differing_variables,
    receive_request,
    send_reply,
)
from shoal.control.processes import IGNORED_BY_PYTHON, default_signals, enter_namespace, replace_identity, tie_to

_LATE_IMPORTS = ("encodings.ascii", "numpy.ctypeslib", "numpy.ma", "pydantic.dataclasses", "tokenizers")


def main() -> int:
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # It ends with its agent, whatever else is asked to stop.
        signal.signal(signum, signal.SIG_IGN)
    options = argparse.ArgumentParser(prog="python -m shoal.train.template", description=__doc__.split("\n")[0])
    options.add_argument("--folder", type=Path, help="the run, for people who read the list of processes")
    options.add_argument("--socket", type=int, required=True, help="the descriptor of the agent's socket")
    agent = socket.socket(fileno=options.parse_args().socket)
    agent.set_inheritable(False)
    import_training()
    if (threads := len(list(Path("/proc/self/task").iterdir()))) != 1:
        send_reply(agent, Reply(refused=f"importing torch started {threads - 1} threads"))
        return 0
    # Collections would write to the pages that it shares with its ranks.
    gc.collect()
    gc.freeze()
    try:
        request = Template(agent).serve()
    except ConnectionError:
        # The agent has ended, or wants no more ranks. So ends also a rank that could not send its number.
        return 0
    return 0 if request is None else run_rank(request)


def import_training() -> None:
    """Import the training, and what it would import later, until its first step."""
    from shoal.train.worker import LateCompiler

    LateCompiler.install()
    for module in _LATE_IMPORTS:
        importlib.import_module(module)


class Template:
    def __init__(self, agent: socket.socket) -> None:
        self._agent = agent
        self._loaded_with = dict(os.environ)  # libraries may have read these when they were loaded
        # On an emulated node its ranks stay its children: no agent there is its ancestor, which could adopt them.
        self._is_on_node = False
        self._children: dict[int, int] = {}  # ranks, by a descriptor that becomes readable when they end

    def serve(self) -> ForkRequest | None:
        """Fork ranks until the agent ends; return in a rank, with its request."""
        with contextlib.suppress(BrokenPipeError):
            # A launcher has sent its requests and closed its end by now.
            send_reply(self._agent, Reply())
        while True:
            ready, _, _ = select.select([self._agent.fileno(), *self._children], [], [])
            for fd in self._children.keys() & ready:
                self._report_end(fd)
            if self._agent.fileno() not in ready:
                continue
            received = receive_request(self._agent)
            if received is None:
                return None
            request, descriptors = received
            if isinstance(request, EnterRequest):
                self._fork_for_node(request, *descriptors)
            elif names := differing_variables(self._loaded_with, request.env):
                self._refuse(request, f"libraries were loaded with other values of {sorted(names)}")
            elif self._fork_rank(request, descriptors[0]):
                return request
            for fd in descriptors:
                os.close(fd)

    def _refuse(self, request: ForkRequest, why: str) -> None:
        send_reply(self._agent, Reply(refused=why, number=request.number))

    def _fork_rank(self, request: ForkRequest, log: int) -> bool:
        """Fork a rank, and wait until it has sent its process number; return True in the rank."""
        sent, has_sent = os.pipe()
        why = "a rank ended before it began"
        try:
            is_rank = self._fork_child() if self._is_on_node else self._fork_orphan(request.parent)
        except OSError as error:
            is_rank, why = False, f"it cannot fork: {error.strerror}"
        if is_rank:
            os.close(sent)
            self._begin_rank(request, log)
            with contextlib.suppress(BrokenPipeError):
                os.write(has_sent, b".")
            os.close(has_sent)
            return True
        os.close(has_sent)
        if not os.read(sent, 1):
            self._refuse(request, why)
        os.close(sent)
        return False

    def _fork_orphan(self, agent: int) -> bool:
        """Fork a rank by a process that ends at once; return True in the rank.

        So the agent adopts it: it sees how the rank ends, and the rank outlives the template.
        """
        adopted, is_adopted = os.pipe()
        with os.fdopen(adopted, "rb", 0) as until_adopted, os.fdopen(is_adopted, "wb", 0) as when_adopted:
            if child := os.fork():
                os.waitpid(child, 0)
                return False
            try:
                is_parent = os.fork() != 0
            except OSError:
                os._exit(1)
            if is_parent:
                os._exit(0)
            when_adopted.close()
            # It is empty: the template has seen that process end, or has ended itself.
            until_adopted.read()
        tie_to(agent)()
        return True

    def _fork_child(self) -> bool:
        """Fork a rank whose end this process reports; return True in the rank."""
        parent = os.getpid()
        if pid := os.fork():
            self._children[os.pidfd_open(pid)] = pid
            return False
        tie_to(parent)()
        for fd in self._children:
            os.close(fd)
        return True

    def _report_end(self, fd: int) -> None:
        pid = self._children.pop(fd)
        _, status = os.waitpid(pid, 0)
        os.close(fd)
        send_reply(self._agent, Reply(pid, os.waitstatus_to_exitcode(status)))

    def _begin_rank(self, request: ForkRequest, log: int) -> None:
        """Do what `cluster.node.start_process` does for a rank that is started as a program of its own."""
        os.setsid()
        default_signals()
        for signum in IGNORED_BY_PYTHON:
            signal.signal(signum, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for fd, standard in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(fd, standard)
        os.close(nothing)
        os.close(log)
        replace_identity(request.argv, request.env)
        sys.argv = [sys.argv[0], *request.words]
        # Only now: from here on the agent may signal it.
        send_reply(self._agent, Reply(os.getpid(), number=request.number))
        self._agent.close()

    def _fork_for_node(self, request: EnterRequest, agent: int, log: int) -> None:
        """Fork a template that serves the agent of an emulated node; if that fails, the agent's socket is closed."""
        if child := os.fork():
            os.waitpid(child, 0)
            return
        for standard in (1, 2):
            os.dup2(log, standard)
        try:
            for group in request.groups:
                Path(group).write_text(str(os.getpid()), encoding="ascii")
            folder = Path.cwd()
            kinds: tuple[str, ...] = ("pid", "net", "uts", "mnt")
            of_node = Path(f"/proc/{request.first}/ns")
            if not (of_node / "user").samefile("/proc/self/ns/user"):
                kinds = ("user", *kinds)
            namespaces = [os.open(of_node / kind, os.O_RDONLY) for kind in kinds]
            for kind, namespace in zip(kinds, namespaces, strict=True):
                enter_namespace(namespace)
                os.close(namespace)
                # Only a child is in the pid namespace.
                if kind == "pid" and os.fork():
                    os._exit(0)
            os.chdir(folder)
        except OSError as error:
            sys.stderr.write(f"cannot enter a node: {error}\n")
            os._exit(1)
        os.setsid()
        replace_identity(sys.orig_argv, {**os.environ, **request.marks})
        self._agent.close()
        self._agent, self._is_on_node = socket.socket(fileno=os.dup(agent)), True
        send_reply(self._agent, Reply())


def run_rank(request: ForkRequest) -> int:
    import torch

    from shoal.train import worker

    with contextlib.suppress(KeyError, ValueError):
        threads = int(request.env["OMP_NUM_THREADS"])
        # The libraries have read the template's. An agent may have started it before the number was known.
        if threads != torch.get_num_threads():
            torch.set_num_threads(threads)
    return worker.main(request.words)


if __name__ == "__main__":
    sys.exit(main())
