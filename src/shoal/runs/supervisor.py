"""The supervisor of a run: `python -P -m shoal.runs.supervisor FOLDER`.

A process of its own on the machine that launched, in a session of its own, so that neither a closed terminal nor a lost
connection ends the run. It opens the cluster, sees the ranks through and sums up. What it has to say stands in
`supervisor.jsonl`; `shoal train` itself is only somebody who reads there, like `shoal attach`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter

from shoal.cluster.cluster import open_cluster
from shoal.cluster.hosts.copy import project_of
from shoal.cluster.node import RunFiles
from shoal.config.load import load_config
from shoal.config.schema import RunConfig
from shoal.control.processes import marks, restore_signals, unmark
from shoal.control.rank_env import find_danger
from shoal.data.prepare import read_facts, to_json
from shoal.errors import DataError, Interrupted, RunFailed, ShoalError
from shoal.events import EventLog
from shoal.launch.launcher import GRACE_S, run_ranks, run_script
from shoal.run_folder import RunFolder, write_atomically
from shoal.runs.confirm import PipeConfirm
from shoal.tools.explain.explain import is_consequence, put_into_words
from shoal.tools.report.manifest import finish
from shoal.tools.report.replicas import judge_replicas

ENDING = {signal.SIGINT, signal.SIGTERM}


@dataclass(frozen=True)
class RunJob:
    """`script` empty: the training whose configuration the folder holds. `on` up to `has_stdin` are a script's:
    `python` runs it, where it is not each machine's own; rank 0 reads the user's standard input if `has_stdin`.
    `confirm`: the owner is asked, through standard input, before a machine that joins gets anything. `commands`: what
    the user typed for each launch of the run, the newest last."""

    resume: bool = False
    script: tuple[str, ...] = ()
    on: str = ""
    threads: int | None = None
    port: int = 0
    grace_s: float = GRACE_S
    python: str = ""
    has_stdin: bool = False
    confirm: bool = False
    commands: tuple[str, ...] = ()


def start_supervisor(run: RunFolder, job: RunJob, lock: int, stdin: int | None = None) -> subprocess.Popen[bytes]:
    """It inherits the lock on the folder, so that the run is never without an owner. Call it with signals `held_back`.
    `stdin` is what a script's rank 0 reads, where that is not our own standard input."""
    write_atomically(run.job, json.dumps(asdict(job)) + "\n")
    with run.supervisor.with_suffix(".log").open("ab") as output:
        return subprocess.Popen(
            (sys.executable, "-P", "-m", "shoal.runs.supervisor", str(run.path)),
            env={**os.environ, **marks(run.path, "supervisor")},
            stdin=subprocess.PIPE if job.confirm else stdin if job.has_stdin else subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=(lock,),
        )


@contextlib.contextmanager
def held_back(signals: set[signal.Signals]) -> Iterator[None]:
    """A child inherits it: what is sent before it has imported everything waits until it can answer in words."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def read_job(run: RunFolder) -> RunJob:
    try:
        return TypeAdapter(RunJob).validate_json(run.job.read_bytes(), strict=True)
    except (OSError, ValueError) as error:
        raise DataError(
            f"{run.job} cannot be used: {str(error).splitlines()[0]}",
            why="it says what to do in this folder, and is written when a run is launched",
            fix=f"launch it anew: shoal train --resume {shlex.quote(str(run.path))}",
        ) from None


def main(folder: Path) -> int:
    run = RunFolder(folder)
    unmark()
    restore_signals(signal.valid_signals() - ENDING)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    # Both end a supervisor in good order, also while it still builds a lab, and also where a shell had them ignored.
    for signum in ENDING:
        signal.signal(signum, signal.default_int_handler)
    # The code of an invitation is in it.
    log = EventLog(run.supervisor, 0, private=True)
    log.write("keeping", pid=os.getpid())
    error: ShoalError | None = None
    with _said_in_words() as said:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
        _keep(run, read_job(run), log)
    error = said[0] if said else None
    if isinstance(error, RunFailed):
        put_into_words(error)
    if error is not None:
        error.fix = run.name_in(error.fix)
    log.write("ended", code=error.exit_code if error else 0, **(error.as_dict() if error else {}))
    return error.exit_code if error else 0


@contextlib.contextmanager
def _said_in_words() -> Iterator[list[ShoalError]]:
    """Whatever goes wrong, as one of our errors; a bug's traceback is in the supervisor's log."""
    said: list[ShoalError] = []
    try:
        yield said
    except ShoalError as error:
        said.append(error)
    except KeyboardInterrupt:
        said.append(Interrupted("interrupted before the ranks were started", fix="start anew"))
    except Exception as error:
        traceback.print_exc()
        said.append(
            RunFailed(
                f"the supervisor of the run failed: {type(error).__name__}: {error}",
                why="that is a bug in shoal, or the machine is in trouble",
                fix="its log has the traceback: supervisor.log in the run folder",
            )
        )


def _keep(run: RunFolder, job: RunJob, log: EventLog) -> None:
    def note(text: str) -> None:
        log.write("note", text=text)

    if job.script:
        stdin = sys.stdin.fileno() if job.has_stdin and sys.stdin is not None else None
        with open_cluster(job.on, RunFiles(project=_project(job)), note, stdin=stdin) as cluster:
            run_script(
                RunConfig(on=job.on, threads=job.threads),
                python_words(job.script, Path.cwd(), note),
                run,
                cluster,
                log,
                is_consequence,
                job.port,
                job.grace_s,
                job.python,
                os.environ,
            )
        return
    config = load_config(run.config)
    try:
        confirm = PipeConfirm(log) if job.confirm else None
        with open_cluster(config.run.on, training_cargo(run), note, confirm) as cluster:
            run_ranks(config.run, config.members, run, cluster, log, read_facts(run).digest, job.resume)
    except ShoalError:
        # Without a folder there is nothing to sum up, and nowhere to write it.
        with contextlib.suppress(ShoalError, OSError):
            if not log.is_removed():
                finish(run)
        raise
    finish(run, judge_replicas(run))


def training_cargo(run: RunFolder) -> RunFiles:
    """The encoded text, and the files that say what to do with it."""
    facts = read_facts(run)
    names = {"train": f"{facts.digest}-train", "val": f"{facts.digest}-val"}

    def texts(places: Mapping[str, str]) -> dict[str, str]:
        there = replace(facts, train=places[names["train"]], val=places[names["val"]])
        whole = (run.config, run.tokenizer)
        return {path.name: path.read_text(encoding="utf-8") for path in whole} | {run.data.name: to_json(there)}

    return RunFiles(files={names["train"]: Path(facts.train), names["val"]: Path(facts.val)}, texts=texts)


def python_words(script: tuple[str, ...], folder: Path, note: Callable[[str], None]) -> tuple[str, ...]:
    """With `-m MODULE`, Python searches the current folder first: not where other users can put modules into it."""
    danger = find_danger(folder) if script[0] == "-m" else ""
    if not danger:
        return script
    note(
        f"modules are not searched in the current folder: {danger}. "
        f"If you trust what is in it: PYTHONPATH={shlex.quote(str(folder))} shoal run -m {shlex.quote(script[1])} …"
    )
    return ("-P", *script)


def _project(job: RunJob) -> Path:
    """What the script may need beside itself: the git project it is in, or its folder; a module's is where we stand."""
    place = Path.cwd() if job.script[0] == "-m" else Path(job.script[0]).parent
    return project_of(place) or place


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
