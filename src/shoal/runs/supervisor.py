"""The supervisor of a run: `python -P -m shoal.runs.supervisor FOLDER`.

It runs on the machine that launched, in a session of its own, so that neither a closed terminal nor a lost connection
ends the run. It opens the cluster, waits for the ranks and writes the manifest. Its events are in `supervisor.jsonl`;
`shoal train` itself only reads them, like `shoal attach`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter

from shoal.cluster.cluster import open_cluster
from shoal.cluster.hosts.copy import project_of
from shoal.cluster.lab import LabTemplate
from shoal.cluster.node import RunFiles
from shoal.cluster.target import JoinSpec, parse_on
from shoal.config.defaults import GRACE_S
from shoal.config.load import load_config, to_toml, typed_settings, validate_session
from shoal.config.schema import RunConfig
from shoal.control.fork_request import TEMPLATE_FD
from shoal.control.processes import make_marks, remove_own_marks, restore_signals
from shoal.control.rank_env import find_danger
from shoal.data.prepare import facts_to_json, read_data_facts
from shoal.errors import DataError, RunFailed, ShoalError
from shoal.events import EventLog
from shoal.explain.explain import add_explanation, is_consequence
from shoal.launch.launcher import ScriptJob, SessionSettings, interrupted_early, run_ranks, run_script
from shoal.records.final_states import judge_replicas
from shoal.records.history import logs_of_last_launch
from shoal.records.manifest import compare_if_finished, write_derived_files
from shoal.records.measured_script import (
    NO_EXCHANGE,
    exchange_findings,
    find_stragglers,
    has_own_exchanges,
    is_measured,
    name_collectives,
)
from shoal.records.rank_log import read_rank_logs
from shoal.records.summary import summarize
from shoal.run_folder import RunFolder, write_atomically
from shoal.runs.confirm import PipeConfirm
from shoal.runs.slurm_job import job_spec, recorded_job, supervise_job
from shoal.units import format_ms, format_percent, pluralize

END_SIGNALS = {signal.SIGINT, signal.SIGTERM}


@dataclass(frozen=True)
class RunJob:
    """What the supervisor shall do; `job.json` in the run folder."""

    resume: bool = False
    script: tuple[str, ...] = ()  # empty: the training whose configuration is in the folder
    # The fields from `on` to `has_stdin` are for a script.
    on: str = ""
    port: int = 0
    grace_s: float = GRACE_S
    python: str = ""  # runs the script; empty: each machine's own
    has_stdin: bool = False  # rank 0 reads the user's standard input
    confirm: bool = False  # ask the owner, through standard input, before a joining node gets anything
    session: str = "{}"  # settings of the command line for the sessions of a script, as JSON
    measure: bool = False  # record the steps of the script
    restarts: int = 0  # how often the ranks of the script are started again after a failure
    commands: tuple[str, ...] = ()  # the user's command line for each launch of the run, the newest last


@dataclass(frozen=True)
class SharedScript:
    """The program of a script's run; `script.json` in the run folder.

    A machine that joins is not sent the program, because a host can make it run nothing. Its owner names the same one.
    """

    name: Annotated[str, Field(min_length=1, max_length=255)]
    arguments: tuple[str, ...]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    settings: str  # those of the command line for its sessions, as JSON

    @property
    def join_words(self) -> tuple[str, ...]:
        """What its owner types behind `shoal join ADDRESS:PORT`."""
        return ("--script", self.name, *(("--", *self.arguments) if self.arguments else ()))


def digest_script(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def read_shared_script(text: str) -> SharedScript:
    """Raise ValueError for a text that describes no script."""
    return TypeAdapter(SharedScript).validate_json(text, strict=True)


def script_files(run: RunFolder) -> RunFiles:
    """Return what a machine that joins the run of a script is sent: a description of it, and no program."""
    text = run.script.read_text(encoding="utf-8")
    return RunFiles(texts=lambda _: {run.script.name: text}, join_words=read_shared_script(text).join_words)


def start_supervisor(
    run: RunFolder, job: RunJob, lock: int, stdin: int | None = None, template: int | None = None
) -> subprocess.Popen[bytes]:
    """Start the supervisor. It inherits the lock on the folder, so that the run is never unlocked.

    Call it inside `blocked_signals`. `stdin` is what a script's rank 0 reads, if not this process's standard input;
    `template` is the socket to the template of a lab.
    """
    variables = {} if template is None else {TEMPLATE_FD: str(template)}
    write_job(run, job)
    with run.supervisor.with_suffix(".log").open("ab") as output:
        return subprocess.Popen(
            (sys.executable, "-P", "-m", "shoal.runs.supervisor", str(run.path)),
            env={**os.environ, **make_marks(run.path, "supervisor"), **variables},
            stdin=subprocess.PIPE if job.confirm else stdin if job.has_stdin else subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=(lock, *map(int, variables.values())),
        )


@contextlib.contextmanager
def blocked_signals(signals: set[signal.Signals]) -> Iterator[None]:
    """Block signals, also in children: a signal waits until a child has imported everything and set its handlers."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def write_job(run: RunFolder, job: RunJob) -> None:
    write_atomically(run.job, json.dumps(asdict(job)) + "\n")


def read_job(run: RunFolder) -> RunJob:
    try:
        return TypeAdapter(RunJob).validate_json(run.job.read_bytes(), strict=True)
    except (OSError, ValueError) as error:
        raise DataError(
            f"{run.job} cannot be used: {str(error).splitlines()[0]}",
            why="it says what to do in this folder, and is written when a run is launched",
            fix=f"launch it anew: shoal train --resume {shlex.quote(str(run.path))}",
        ) from None


def is_script(run: RunFolder) -> bool:
    """Return whether `shoal run` started a user's script in this folder."""
    try:
        return bool(read_job(run).script)
    except DataError:
        return False


def main(folder: Path, begins_with: str = "") -> int:
    """Supervise the run; `begins_with` is the first note for the user."""
    run = RunFolder(folder)
    remove_own_marks()
    restore_signals(signal.valid_signals() - END_SIGNALS)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    # Both end the supervisor in good order, also while it still builds a lab, and also where a shell had them ignored.
    for signum in END_SIGNALS:
        signal.signal(signum, signal.default_int_handler)
    # Private: it contains the code of an invitation.
    log = EventLog(run.supervisor, 0, private=True)
    log.write("supervising", pid=os.getpid())
    if begins_with:
        log.write("note", text=begins_with)
    error: ShoalError | None = None
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, END_SIGNALS)
        job = read_job(run)
        on = job.on if job.script else load_config(run.config).run.on
        if spec := job_spec(on):
            # Its end is written by the supervisor in the job.
            return int(supervise_job(run, spec, log)["code"])
        with recorded_job(run, on):
            _supervise(run, job, log)
    except ShoalError as raised:
        error = raised
    except KeyboardInterrupt:
        error = interrupted_early(run, is_script(run))
    except Exception as raised:
        traceback.print_exc()
        error = RunFailed(
            f"the supervisor of the run failed: {type(raised).__name__}: {raised}",
            why="that is a bug in shoal, or the machine is in trouble",
            fix="its log has the traceback: supervisor.log in the run folder",
        )
    remove_dead_sockets(run)
    if error is None:
        log.write("ended", code=0)
        return 0
    if isinstance(error, RunFailed):
        add_explanation(error)
    error.fix = run.name_in(error.fix)
    log.write("ended", code=error.exit_code, **error.as_dict())
    return error.exit_code


def _supervise(run: RunFolder, job: RunJob, log: EventLog) -> None:
    def note(text: str) -> None:
        log.write("note", text=text)

    if job.script:
        stdin = sys.stdin.fileno() if job.has_stdin and sys.stdin is not None else None
        # What the script may need beside itself: its git project, or its folder; for a module the current folder.
        place = Path.cwd() if job.script[0] == "-m" else Path(job.script[0]).parent
        files = RunFiles(project=project_of(place) or place)
        if job.script[0] != "-m":
            path, *arguments = job.script
            shared = SharedScript(Path(path).name, tuple(arguments), digest_script(Path(path)), job.session)
            write_atomically(run.script, json.dumps(asdict(shared)))
            if isinstance(parse_on(job.on), JoinSpec):
                files = script_files(run)
        try:
            with open_cluster(job.on, files, note, stdin=stdin) as cluster:
                script = ScriptJob(
                    config=RunConfig(on=job.on, threads=json.loads(job.session).get("run", {}).get("threads")),
                    argv=python_words(job.script, Path.cwd(), note),
                    is_consequence=is_consequence,
                    port=job.port,
                    grace_s=job.grace_s,
                    python=job.python,
                    user_env=os.environ,
                    session=SessionSettings(job.session, job.resume),
                    measure=job.measure,
                    restarts=job.restarts,
                )
                with _measured(run, job, log) if job.measure else contextlib.nullcontext():
                    run_script(script, run, cluster, log)
        finally:
            if not job.measure:
                _sum_up_session(run, log)
        for text in find_unused_options(run, job):
            note(text)
        return
    config = load_config(run.config)
    try:
        confirm = PipeConfirm(log) if job.confirm else None
        template = LabTemplate.inherited(run.path)
        with open_cluster(config.run.on, training_files(run), note, confirm, template=template) as cluster:
            run_ranks(config.run, config.members, run, cluster, log, read_data_facts(run).digest, job.resume)
    except ShoalError:
        # Without a folder there is nothing to sum up, and no place for it.
        with contextlib.suppress(ShoalError, OSError):
            if not log.is_removed():
                write_derived_files(run)
        raise
    try:
        replicas = judge_replicas(run)
    except ShoalError:
        # The training itself is done: its manifest has everything but the comparison.
        write_derived_files(run)
        raise
    write_derived_files(run, replicas)


def remove_dead_sockets(run: RunFolder) -> None:
    """Remove the sockets of agents that were killed, at which no process listens any more."""
    for path in run.path.glob("agents/*.sock"):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()


def _sum_up_session(run: RunFolder, log: EventLog) -> None:
    """Write the derived files of a script that trained with `shoal.Session`; another script has no configuration."""
    with contextlib.suppress(ShoalError, OSError):
        if run.config.is_file() and not log.is_removed():
            write_derived_files(run, compare_if_finished(run))


def find_unused_options(run: RunFolder, job: RunJob) -> Iterator[str]:
    """Yield sentences on options that had no effect: only its end shows whether a script uses `shoal.Session`."""
    settings = json.loads(job.session)
    names = [name for name in typed_settings(settings, ()) if name not in ("run.on", "run.threads")]
    if not names and not job.restarts:
        return
    has_session = has_session_events(run)
    if names and not has_session:
        yield f"without effect: {', '.join(names)}; the script has not used shoal.Session"
    if job.restarts and has_session:
        yield "without effect: --restarts; with shoal.Session single ranks are restarted (--set members.restarts=…)"


def has_session_events(run: RunFolder) -> bool:
    """Return whether the script of the run has trained with `shoal.Session`."""
    return any(event["event"] == "start" and not event.get("measured") for event in run.read_all_events())


@contextlib.contextmanager
def _measured(run: RunFolder, job: RunJob, log: EventLog) -> Iterator[None]:
    """Make the folder of a measured script one that `shoal report` and `verify` read; at the end note what was seen."""
    words = job.script[1:] if job.script[0] == "-m" else job.script
    name = words[0].rpartition(".")[2] if job.script[0] == "-m" else Path(words[0]).stem
    write_atomically(run.config, to_toml(validate_session({"run": {"on": job.on, "preset": name}})))
    try:
        yield
    finally:
        if not log.is_removed():
            with contextlib.suppress(ShoalError, OSError):
                if has_session_events(run):
                    # A rank has printed that a session is measured anyway.
                    _sum_up_session(run, log)
                else:
                    for text in describe_measured(run):
                        log.write("note", text=text)


def describe_measured(run: RunFolder) -> Iterator[str]:
    """Write the derived files of a measured script, and yield sentences about it for the user."""
    logs = read_rank_logs(run.read_all_events())
    if not is_measured(logs):
        yield "nothing was measured: no rank has called the step of a torch optimizer"
        return
    summary = summarize(run.read_all_events())
    replicas = judge_replicas(run) if summary.status == "finished" else None
    write_derived_files(run, replicas)
    if summary.step_s is not None:
        parts = [f"{pluralize(summary.steps_done, 'step')}, {format_ms(summary.step_s.median)} each"]
        is_own, own = has_own_exchanges(summary.start), name_collectives(summary.collectives)
        if summary.allreduce_s is not None and not is_own:
            parts.append(f"all-reduce {format_ms(summary.allreduce_s.median)}")
        if own:
            parts.append(own if is_own else f"own collectives: {own}")
        elif is_own and summary.world_size > 1:
            parts.append(NO_EXCHANGE)
        if "wait" in summary.phases:
            parts.append(f"waiting {format_percent(summary.phases['wait'] / summary.step_s.median)}")
        yield f"measured: {'; '.join(parts)}"
    if replicas is not None and len(replicas.digests) > 1:
        equal = "equal to the bit" if replicas.byte_equivalent else "DIFFERENT"
        yield f"parameters of {pluralize(replicas.ranks, 'rank')} at the end: {equal}"
    for text, _ in exchange_findings(logs):
        yield text
    for warning in find_stragglers(logs_of_last_launch(logs)):
        yield f"{warning['seen']} ({warning['fix']})"
    yield f"more: shoal report {run.path}; shoal verify {run.path}"


def training_files(run: RunFolder) -> RunFiles:
    """Return the files that a training needs on another disk: the encoded text, and those that describe the run."""
    facts = read_data_facts(run)
    names = {"train": f"{facts.digest}-train", "val": f"{facts.digest}-val"}

    def texts(places: Mapping[str, str]) -> dict[str, str]:
        there = replace(facts, train=places[names["train"]], val=places[names["val"]])
        unchanged = (run.config, run.tokenizer)
        return {path.name: path.read_text(encoding="utf-8") for path in unchanged} | {
            run.data.name: facts_to_json(there)
        }

    return RunFiles(files={names["train"]: Path(facts.train), names["val"]: Path(facts.val)}, texts=texts)


def python_words(script: tuple[str, ...], folder: Path, note: Callable[[str], None]) -> tuple[str, ...]:
    """Return Python's arguments for a script, with `-P` for a module in a folder that other users can write to.

    With `-m MODULE` Python would search that folder first.
    """
    danger = find_danger(folder) if script[0] == "-m" else ""
    if not danger:
        return script
    note(
        f"modules are not searched in the current folder: {danger}. "
        f"If you trust what is in it: PYTHONPATH={shlex.quote(str(folder))} shoal run -m {shlex.quote(script[1])} …"
    )
    return ("-P", *script)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
