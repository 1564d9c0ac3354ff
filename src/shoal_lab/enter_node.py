"""Run a program on a node: enter its namespaces, fork the program as a child there, and end as it does.

    python -I -S enter_node.py FIRST-PROCESS FOLDER PROGRAM WORD…

A process cannot move itself into another pid namespace; only its children are in it. nsenter does the same, but stops
itself when its child is stopped, and no SIGCONT on the node ever reaches it: the child's end was then never reported.
This file is run by its path and has few imports, because every program waits for it: it takes 20 ms; with contextlib
and typing it was 30.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import warnings  # noqa: F401 - execvp imports it, and a user namespace may make the library unreadable

# A terminal sends these to its whole foreground process group, so the program has them already.
_FROM_TERMINAL = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)
_PASSED_ON = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)
_NOT_FOUND, _NOT_RUNNABLE = 127, 126
_LIBC = ctypes.CDLL(None, use_errno=True)


def main(first: str, folder: str, *program: str) -> None:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        user, pid, *others = (_open(first, kind) for kind in ("user", "pid", "net", "uts", "mnt"))
        if not os.path.sameopenfile(user, _open("self", "user")):
            _enter(user)
        _enter(pid)
    except OSError as error:
        sys.exit(f"cannot enter the node: {error.strerror}")
    # A signal that arrives while one of the two processes is not ready waits until both are.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    child = os.fork()
    if child == 0:
        _exec(program, folder, others, mask)
    _pass_signals_to(child)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    _end_like(os.waitpid(child, 0)[1])


def _open(process: str, kind: str) -> int:
    return os.open(f"/proc/{process}/ns/{kind}", os.O_RDONLY)


def _enter(namespace: int) -> None:
    """os.setns came with Python 3.12."""
    if _LIBC.setns(namespace, 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _exec(program: tuple[str, ...], folder: str, namespaces: list[int], mask: set[int]) -> None:
    try:
        for namespace in namespaces:
            _enter(namespace)
        os.chdir(folder)
        for signum in _IGNORED_BY_PYTHON:
            signal.signal(signum, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.execvp(program[0], program)  # noqa: S606
    except OSError as error:
        os.write(2, f"cannot run {program[0]} in {folder}: {error.strerror}\n".encode())
        os._exit(_NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_RUNNABLE)


def _pass_signals_to(child: int) -> None:
    def pass_on(signum: int, _: object) -> None:
        try:  # noqa: SIM105
            os.kill(child, signum)
        except ProcessLookupError:
            pass

    for signum in _FROM_TERMINAL:
        signal.signal(signum, lambda *_: None)
    for signum in _PASSED_ON:
        signal.signal(signum, pass_on)


def _end_like(status: int) -> None:
    """End with the same exit code or signal, without a core file: it would overwrite the program's."""
    if os.WIFSIGNALED(status):
        signum = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if signum != signal.SIGKILL:
            signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)
    sys.exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main(*sys.argv[1:])
