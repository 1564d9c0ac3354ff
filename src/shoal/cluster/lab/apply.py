"""Does what the topology says, step by step, and explains the step that failed."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from shoal.cluster.lab.processes import end_node, first_process
from shoal.cluster.lab.steps import Await, Kill, PidOf, RemoveGroup, Run, Step, Word, Write, render_step
from shoal.cluster.lab.tools import with_tools
from shoal.errors import LabError

_DEADLINE_S = 10.0
_POLL_S = 0.005


def apply(steps: Iterable[Step]) -> None:
    for step in steps:
        _do(step)


def _do(step: Step) -> None:
    match step:
        case Run(words, log):
            _run(step, resolve(words), log)
        case Write(path, text):
            _write(step, path, text)
        case Await(file, log):
            _await(step, file, log)
        case Kill(pid):
            _kill(pid)
        case RemoveGroup(path):
            _remove_group(step, path)


def resolve(words: Sequence[Word]) -> list[str]:
    """Words with the numbers filled in. A node whose first process is gone cannot be entered."""
    return [_number(word) if isinstance(word, PidOf) else word for word in words]


def _number(pid: PidOf) -> str:
    node = pid.file.stem
    first = first_process(pid.file.parent, node)
    if first is None:
        lab = pid.file.parent.name
        raise LabError(f"{node} of lab {lab!r} is not running", fix=f"shoal lab start {node} --name {lab}")
    return str(first)


def _run(step: Step, argv: list[str], log: Path | None) -> None:
    try:
        with log.open("wb") if log else contextlib.nullcontext(subprocess.PIPE) as output:
            done = subprocess.run(
                argv,
                env=with_tools(os.environ),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                text=True,
                errors="replace",
                timeout=_DEADLINE_S,
            )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _failed(step, str(error)) from error
    if done.returncode:
        raise _failed(step, (done.stderr if log is None else _tail(log)) or f"exit code {done.returncode}")


def _write(step: Step, path: Path, text: str) -> None:
    try:
        path.write_text(text if text.endswith("\n") else f"{text}\n", encoding="utf-8")
    except OSError as error:
        raise _failed(step, str(error.strerror)) from error


def _await(step: Step, file: Path, log: Path) -> None:
    deadline = time.monotonic() + _DEADLINE_S
    while not (file.exists() and file.stat().st_size):
        said = _tail(log)
        if said or time.monotonic() > deadline:
            raise _failed(step, said or f"nothing after {_DEADLINE_S:.0f} s")
        time.sleep(_POLL_S)


def _kill(pid: PidOf) -> None:
    first = first_process(pid.file.parent, pid.file.stem)
    if first is not None:
        end_node(first)


def _remove_group(step: Step, path: Path) -> None:
    deadline = time.monotonic() + _DEADLINE_S
    while path.is_dir():
        try:
            path.rmdir()
        except OSError as error:
            if time.monotonic() > deadline:
                raise _failed(step, str(error.strerror)) from error
            time.sleep(0.01)


def _failed(step: Step, said: str) -> LabError:
    return LabError(
        f"a step of the lab failed: {said.strip()}",
        why=f"it was: {render_step(step)}",
        fix="shoal lab up --dry-run prints all steps; --debug shows where this one came from",
    )


def _tail(log: Path) -> str:
    try:
        return log.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
