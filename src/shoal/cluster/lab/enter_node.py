"""The parent of a program on a node: enters the pid namespace, has it as a child there, and ends as it did.

    python -I -S parent.py FIRST-PROCESS FOLDER PROGRAM WORD…

A process cannot move itself into another pid namespace, only its child is born there. nsenter does all of this too, but
stops itself when its child is stopped, and no SIGCONT on the node ever reaches it: the child's end was then never told.
Run by its path and with few imports, because every program waits for it: 20 ms; with contextlib and typing it was 30.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import warnings  # noqa: F401 - execvp wants it, and a user namespace may close the library to us

# A terminal sends these to everyone in front of it, so the program has them already.
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
    # Whatever is sent while there are two of us and one is not ready waits until both are.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    child = os.fork()
    if child == 0:
        _become(program, folder, others, mask)
    _prepare(child)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    _end_like(os.waitpid(child, 0)[1])


def _open(process: str, kind: str) -> int:
    return os.open(f"/proc/{process}/ns/{kind}", os.O_RDONLY)


def _enter(namespace: int) -> None:
    """os.setns came with Python 3.12."""
    if _LIBC.setns(namespace, 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _become(program: tuple[str, ...], folder: str, namespaces: list[int], mask: set[int]) -> None:
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


def _prepare(child: int) -> None:
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
    """By the same signal, if it was one, but without a core file: ours would be written over the program's."""
    if os.WIFSIGNALED(status):
        signum = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if signum != signal.SIGKILL:
            signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)
    sys.exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main(*sys.argv[1:])
