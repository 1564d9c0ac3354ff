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
import signal
import socket
import sys
from pathlib import Path

from shoal.control.fork_request import ForkRequest, Reply, receive_request, send_reply
from shoal.control.processes import IGNORED_BY_PYTHON, default_signals, replace_identity, tie_to

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
    send_reply(agent, Reply())
    while received := receive_request(agent):
        request, log = received
        if become_rank(agent, request, log):
            return run_rank(request)
    return 0


def import_training() -> None:
    """Import the training, and what it would import later, until its first step."""
    from shoal.train.worker import LateCompiler

    LateCompiler.install()
    for module in _LATE_IMPORTS:
        importlib.import_module(module)


def become_rank(agent: socket.socket, request: ForkRequest, log: int) -> bool:
    """Fork a rank; return True in the rank, which goes on as the program that the request names.

    It is forked by a process that ends at once, so that the agent adopts it: the agent sees how it ends, and it
    outlives the template.
    """
    began, begin = os.pipe()
    pids, pid_to = os.pipe()
    if child := os.fork():
        os.waitpid(child, 0)
        os.close(pid_to)
        if number := os.read(pids, 32):
            send_reply(agent, Reply(int(number)))
            os.write(begin, b".")
        for fd in (began, begin, pids, log, *(int(request.env[name]) for name in request.fd_variables)):
            os.close(fd)
        return False
    if pid := os.fork():
        os.write(pid_to, str(pid).encode())
        os._exit(0)
    os.close(pid_to)
    os.close(pids)
    os.close(begin)
    agent.close()
    # Until the agent has its number and is its parent.
    if not os.read(began, 1):
        os.kill(os.getpid(), signal.SIGKILL)
    os.close(began)
    _detach(request, log)
    return True


def _detach(request: ForkRequest, log: int) -> None:
    """Do what `cluster.node.start_process` does for a rank that is started as a program of its own."""
    os.setsid()
    tie_to(request.parent)()
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


def run_rank(request: ForkRequest) -> int:
    import torch

    from shoal.train import worker

    with contextlib.suppress(KeyError, ValueError):
        # The libraries have read the template's.
        torch.set_num_threads(int(request.env["OMP_NUM_THREADS"]))
    return worker.main(request.words)


if __name__ == "__main__":
    sys.exit(main())
