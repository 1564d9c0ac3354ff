"""Start Python programs as forks of a process that has imported torch and all of shoal, instead of new interpreters.

A command of `programs.shoal` starts a supervisor, that an agent, that a template, and a script has ranks: each would
import for half a second to three seconds of processor time. A fork has its own variables, descriptors, session and
command line, where other processes see them too, and the program runs as `__main__`. Tests of what a new interpreter
does (imports, limits, first signals) use `programs.shoal_in_new_python`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import io
import itertools
import multiprocessing
import os
import random
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
import types
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.control.processes import IGNORED_BY_PYTHON, replace_identity
from shoal.control.rank_env import MEASURE

_SAFE_PATH = "-P"
_FLAGS = {_SAFE_PATH, "-u", "-B"}
_PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
# What `subprocess.Popen` passes to the method that starts the program, after the words.
_OPTIONS = (
    *("executable", "preexec_fn", "close_fds", "pass_fds", "cwd", "env", "startupinfo", "creationflags", "shell"),
    *_PIPES,
    *("restore_signals", "gid", "gids", "uid", "umask", "start_new_session", "process_group"),
)

# A program with other values imports other modules.
_LOADED_WITH = {name: os.environ.get(name) for name in ("PYTHONPATH", "PYTHONHOME", "LD_PRELOAD")}


def install() -> None:
    """From now on this process, and the programs it starts, start programs so."""
    subprocess.Popen = _WarmPopen  # type: ignore[misc]


class _WarmPopen(subprocess.Popen[Any]):
    def _execute_child(self, args: Any, *rest: Any) -> None:
        options = dict(zip(_OPTIONS, rest, strict=True))
        words, variables = _split_variables(args)
        env = {**(os.environ if options["env"] is None else options["env"]), **variables}
        unusual = ("executable", "shell", "gid", "gids", "uid")
        can_fork = _is_program(words) and not any(options[name] for name in unusual if options[name] != -1)
        can_fork = can_fork and {name: env.get(name) for name in _LOADED_WITH} == _LOADED_WITH
        # A lock that another thread holds would stay locked in the fork.
        if not can_fork or len(list(Path("/proc/self/task").iterdir())) > 1:
            super()._execute_child(args, *rest)  # type: ignore[misc]
            return
        sys.stdout.flush()
        sys.stderr.flush()
        if pid := os.fork():
            self.pid, self._child_created = pid, True
            self._close_pipe_fds(*(options[name] for name in _PIPES))  # type: ignore[attr-defined]
            return
        _become_program(words, env, options)


def _split_variables(args: Any) -> tuple[list[str], dict[str, str]]:
    """Return the words of a command without `env NAME=VALUE …`, and those variables."""
    words = [] if isinstance(args, str | bytes | os.PathLike) else [os.fspath(word) for word in args]
    if words[:1] != ["env"]:
        return words, {}
    variables = list(itertools.takewhile(lambda word: "=" in word, words[1:]))
    return words[1 + len(variables) :], dict(word.split("=", 1) for word in variables)


def _is_program(words: Sequence[str]) -> bool:
    """Return whether these are `python [-P -u -B] -m shoal.MODULE …` or `python … SCRIPT.py …`.

    `shoal run --measure` changes torch while it is imported.
    """
    if not words or words[0] != sys.executable:
        return False
    rest = [word for word in words[1:3] if word not in _FLAGS] + list(words[3:])
    if rest[:1] == ["-m"]:
        return len(rest) > 1 and rest[1].startswith("shoal.") and rest[1] != MEASURE
    return bool(rest) and rest[0].endswith(".py") and Path(rest[0]).is_file()


def _become_program(words: list[str], env: Mapping[Any, Any], options: Mapping[str, Any]) -> None:
    """Do in a fork what `subprocess` and the interpreter do for a new program; never return.

    The frames below stay: what they hold must not be closed here by its number, which is another file's by then.
    """
    gc.freeze()
    code = 1
    try:
        _set_up(options)
        replace_identity(words, {os.fsdecode(name): os.fsdecode(value) for name, value in env.items()})
        _forget_parent()
        code = _exit_code(words)
        atexit._run_exitfuncs()
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _exit_code(words: list[str]) -> int:
    try:
        try:
            _run(words)
        except SystemExit:
            raise
        except BaseException as error:
            sys.excepthook(type(error), error, error.__traceback__)
            if isinstance(error, KeyboardInterrupt):
                _end_by_interrupt()
            return 1
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        sys.stderr.write(f"{end.code}\n")
        return 1
    return 0


def _end_by_interrupt() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)


def _set_up(options: Mapping[str, Any]) -> None:
    """Give it its signals, folder, session and descriptors."""
    signal.set_wakeup_fd(-1)
    for signum in signal.valid_signals():
        if signum not in (signal.SIGKILL, signal.SIGSTOP) and callable(signal.getsignal(signum)):
            signal.signal(signum, signal.SIG_DFL)
    wanted = [options["p2cread"], options["c2pwrite"], options["errwrite"]]
    # First above the standard numbers: one of them may be the place of another.
    copies = [os.dup(fd) if fd != -1 else -1 for fd in wanted]
    for standard, fd in enumerate(copies):
        if fd != -1:
            os.dup2(fd, standard)
    if options["cwd"] is not None:
        os.chdir(options["cwd"])
    if options["start_new_session"]:
        os.setsid()
    if options["umask"] >= 0:
        os.umask(options["umask"])
    if options["preexec_fn"] is not None:
        options["preexec_fn"]()
    kept = sorted({0, 1, 2, *map(int, options["pass_fds"])})
    for begin, end in zip(kept, [*kept[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
        os.closerange(begin + 1, min(end, 1 << 16))
    for fd in kept[3:]:
        os.set_inheritable(fd, True)
    for signum in IGNORED_BY_PYTHON:
        signal.signal(signum, signal.SIG_IGN)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _forget_parent() -> None:
    """Forget what a new interpreter would not know."""
    is_direct = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin, sys.stdout, sys.stderr = (
        io.TextIOWrapper(os.fdopen(number, mode, closefd=False), line_buffering=is_line_buffered)
        for number, mode, is_line_buffered in ((0, "rb", False), (1, "wb", is_direct), (2, "wb", True))
    )
    atexit._clear()
    random.seed()
    multiprocessing.set_start_method("fork", force=True)
    # The server's folders: TMPDIR may be another one, and ranks that share one would remove each other's sockets.
    tempfile.tempdir = None
    multiprocessing.current_process()._config.pop("tempdir", None)  # type: ignore[attr-defined]
    for module in [module for name, module in sys.modules.items() if name.startswith("shoal.")]:
        for value in vars(module).values():
            if isinstance(value, functools._lru_cache_wrapper):
                value.cache_clear()


def _run(words: list[str]) -> None:
    import torch

    flags = {word for word in words[1:3] if word in _FLAGS}
    rest = [word for word in words[1:3] if word not in _FLAGS] + words[3:]
    with contextlib.suppress(KeyError, ValueError):
        # torch was loaded with the number of the server.
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if rest[0] == "-m":
        sys.argv = rest[1:]
        # It is imported already; runpy runs it once more under the name __main__.
        warnings.filterwarnings("ignore", category=RuntimeWarning, module="runpy")
        runpy.run_module(rest[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = rest
    if _SAFE_PATH not in flags and not os.environ.get("PYTHONSAFEPATH"):
        sys.path.insert(0, str(Path(rest[0]).resolve().parent))
    # Not by runpy, which clears the script's variables when it ends: a process group would wait for ranks that ended.
    program = sys.modules["__main__"] = types.ModuleType("__main__")
    program.__file__ = rest[0]
    exec(compile(Path(rest[0]).read_bytes(), rest[0], "exec", dont_inherit=True), program.__dict__)  # noqa: S102
