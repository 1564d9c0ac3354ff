"""A run as a job of Slurm: `python -P -m shoal.runs.slurm_job FOLDER` is the job's first process.

There the supervisor works as it does anywhere. The one on the machine where the run was started submits the job, waits
for it, passes on Ctrl-C, and says how the job ended where the other could not. All files are in the shared run folder.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType

from shoal.cluster.slurm.job import JobState, cancel, look_at, send_signal, submit
from shoal.cluster.slurm.spec import SlurmSpec, in_allocation, in_batch_job, job_id, restart_count
from shoal.cluster.target import parse_on
from shoal.control.processes import SUPERVISOR, make_marks
from shoal.errors import Interrupted, RunFailed, UsageError
from shoal.events import Event, EventLog, EventTail
from shoal.records.documents import read_document
from shoal.run_folder import RunFolder, write_atomically

POLL_S = 2.0
# How long a job that was asked twice to end may take before it is cancelled.
_CANCEL_AFTER_S = 10.0
_WATCH_S = 5.0
# How often the rest of a run is submitted that has lost its first node.
_SUBMISSIONS = 5
_FIRST_NODE_LOST = "its first node, with the supervisor, was lost"
# A shared file system may show the last line a moment after the job's end.
_LAG_S = 5.0
# A node that Slurm has lost may still run, and see the run folder: its ranks end, or write within this time.
_QUIET_S = 15.0


def job_spec(on: str) -> SlurmSpec | None:
    """Return what to ask Slurm for, if this run is to be a job and this process is in none."""
    spec = parse_on(on)
    return spec if isinstance(spec, SlurmSpec) and not in_allocation() else None


def running_job(run: RunFolder) -> tuple[str, JobState] | None:
    """Return the job of this run and its state, if it waits or runs; it continues without the process that submitted
    it."""
    job = read_document(run.slurm).get("job")
    if not isinstance(job, str) or job == job_id():
        return None
    with contextlib.suppress(UsageError):  # There is no Slurm on this machine.
        if not (state := look_at(job)).has_ended:
            return job, state
    return None


def refuse_running_job(run: RunFolder) -> None:
    """Refuse a second launch in the folder of a job that waits or runs."""
    if running := running_job(run):
        job, state = running
        raise UsageError(
            f"{run.path} is being trained in: {state.sentence(job)}",
            why="the process that submitted it has ended, and the job continues",
            fix=f"watch it: shoal attach {shlex.quote(str(run.path))}\nor end it: shoal stop "
            f"{shlex.quote(str(run.path))}",
        )


def stop_job(run: RunFolder, wait_s: float) -> bool | None:
    """Have the ranks of a job save and end; cancel it if that takes too long. Return whether they could, None if no job
    of this run is there."""
    running = running_job(run)
    if running is None:
        return None
    job, state = running
    if not state.has_begun or not wait_s:
        cancel(job)
        return False
    send_signal(job, signal.SIGINT)
    until = time.monotonic() + wait_s
    while time.monotonic() < until:
        with contextlib.suppress(RunFailed):
            if look_at(job).has_ended:
                return True
        time.sleep(POLL_S / 2)
    cancel(job)
    return False


class JobWatch:
    """Tells whether the job of a run is still there; asks Slurm seldom."""

    def __init__(self, run: RunFolder) -> None:
        self._run, self._asked_at, self._is_there = run, 0.0, True

    def __call__(self) -> bool:
        if self._is_there and time.monotonic() - self._asked_at > _WATCH_S:
            with contextlib.suppress(RunFailed):
                self._is_there = running_job(self._run) is not None
            self._asked_at = time.monotonic()
        return self._is_there


class JobFollower:
    """The job of a run, as seen from where it was submitted."""

    def __init__(self, run: RunFolder, log: EventLog) -> None:
        self._log = log
        self._job = ""
        self._events = EventTail(run.supervisor)
        self._events.skip_to_end()
        self._shown = ""
        self._state = JobState("PENDING")
        self._interrupts = self._sent = 0
        self._asked_at = 0.0
        self._must_leave = False
        self.ended: Event | None = None

    def interrupt(self, signum: int, frame: FrameType | None) -> None:
        """Count a signal; the loop acts on it. SIGTERM is for this process: some machines send it after a logout."""
        if signum == signal.SIGTERM:
            self._must_leave = True
        else:
            self._interrupts += 1

    def wait(self, job: str) -> JobState:
        """Wait until the job has ended."""
        self._job, self._state, self._shown = job, JobState("PENDING"), ""
        while True:
            state = self._look()
            self._take_events()
            if state.has_ended:
                return state
            if self._must_leave:
                # Without an end of the run, which is the job's to write.
                raise SystemExit(Interrupted.exit_code)
            self._pass_on(state)
            seen, until = self._interrupts, time.monotonic() + POLL_S
            while time.monotonic() < until and self._interrupts == seen and not self._must_leave:
                time.sleep(0.05)

    def read_end(self) -> Event | None:
        """Return how the supervisor in the job says that the run has ended."""
        until = time.monotonic() + _LAG_S
        while self.ended is None and time.monotonic() < until:
            time.sleep(0.1)
            self._take_events()
        return self.ended

    def _look(self) -> JobState:
        try:
            state = look_at(self._job)
        except RunFailed as error:
            # Slurm's controller is restarted now and then; the job does not notice.
            self.show(f"{error.seen}; asking again")
            return self._state
        if not state.has_ended:
            self.show(state.sentence(self._job))
        self._state = state
        return state

    def show(self, sentence: str) -> None:
        # A time at which the job is expected to begin moves.
        if (seen := sentence.partition(", and")[0]) != self._shown:
            self._shown = seen
            self._log.write("note", text=sentence)

    def _take_events(self) -> None:
        for event in self._events.poll():
            if event["event"] == "supervising":
                self.ended = None
            elif event["event"] == "ended":
                self.ended = event

    def _pass_on(self, state: JobState) -> None:
        has_new = self._interrupts > self._sent
        is_late = self._sent > 1 and time.monotonic() - self._asked_at > _CANCEL_AFTER_S
        if not has_new and not is_late:
            return
        try:
            if is_late or not state.has_begun:
                cancel(self._job)
            else:
                send_signal(self._job, signal.SIGINT)
        except RunFailed as error:
            # Also where the job has just ended, as the next look shows.
            self.show(f"{error.seen}; trying again")
            return
        self._sent, self._asked_at = self._interrupts, time.monotonic()

    @property
    def was_interrupted(self) -> bool:
        return self._interrupts > 0


def supervise_job(run: RunFolder, spec: SlurmSpec, log: EventLog) -> Event:
    """Submit the run as a job and wait for its end. Return the end that the supervisor in the job has recorded; raise
    what ended the job before it could."""
    refuse_running_job(run)
    command = (sys.executable, "-P", "-m", "shoal.runs.slurm_job", str(run.path))
    log_file = str(run.supervisor.with_suffix(".log"))
    follower = JobFollower(run, log)
    # Before the job exists: an interrupt that came in between would leave it behind.
    with _handling_signals(follower):
        for submission in itertools.count(1):
            job = submit(spec, f"shoal-{run.path.name}", log_file, command, make_marks(run.path, SUPERVISOR))
            _record_job(run, job)
            log.write("submitted", job=job)
            state = follower.wait(job)
            if end := follower.read_end():
                return end
            may_resume = _has_lost_first_node(state) and run.has_checkpoint() and not follower.was_interrupted
            if not may_resume or submission == _SUBMISSIONS:
                break
            while still_trains(run) and not follower.was_interrupted:
                follower.show(f"ranks of job {job} still train on a node that Slurm has lost; waiting for them")
            if end := follower.ended or follower.read_end():
                return end
            continues = _resume(run)
            log.write("note", text=f"Slurm job {job} has lost its first node, with the supervisor: {continues}")
    if follower.was_interrupted:
        raise Interrupted(f"Slurm job {job} was cancelled before the run began", fix="start it again")
    folder = shlex.quote(str(run.path))
    raise RunFailed(
        f"Slurm job {job} ended without an end of the run: {state.state or 'Slurm has forgotten it'}",
        why=_why(state),
        fix=f"continue from the last checkpoint: shoal {'run' if run.script.is_file() else 'train'} --resume {folder}"
        if run.has_checkpoint()
        else f"see what it printed: shoal logs {folder}",
    )


def still_trains(run: RunFolder) -> bool:
    """Whether ranks write events while this waits."""

    def sizes() -> dict[Path, int]:
        return {path: path.stat().st_size for path in run.path.glob("events/rank-*.jsonl")}

    before = sizes()
    time.sleep(_QUIET_S)
    return sizes() != before


def _record_job(run: RunFolder, job: str) -> None:
    write_atomically(run.slurm, json.dumps({"job": job}) + "\n")


@contextlib.contextmanager
def recorded_job(run: RunFolder, on: str) -> Iterator[None]:
    """Let commands on other machines find the job that this run is in, be it of its own or of a script of the user."""
    if not in_batch_job() or not isinstance(parse_on(on), SlurmSpec):
        yield
        return
    # Another job: one that was submitted although sbatch answered too late, or was started by hand.
    refuse_running_job(run)
    _record_job(run, job_id())
    yield
    # A job script may do other things now. A run that was interrupted may go on when Slurm starts the job again.
    run.slurm.unlink(missing_ok=True)


def _why(state: JobState) -> str:
    reasons = {
        "TIMEOUT": "its time limit ended it, before the ranks had saved",
        "CANCELLED": "it was cancelled, and the ranks did not save in time",
        "PREEMPTED": "another job took its nodes",
        "OUT_OF_MEMORY": "it needed more memory than it was given; ask for more: --on slurm:N,memory=…",
    }
    given = state.reason if state.reason not in ("", "None") else "its first process ended before it could say why"
    return _FIRST_NODE_LOST if _has_lost_first_node(state) else reasons.get(state.state, given)


def _has_lost_first_node(state: JobState) -> bool:
    """Whether a job with --no-kill ended by the loss of the node where its supervisor was; others it survives."""
    # What Slurm 22.05 calls that.
    return state.state == "NODE_FAIL" or state.reason == "JobLaunchFailure"


@contextlib.contextmanager
def _handling_signals(follower: JobFollower) -> Iterator[None]:
    before = {signum: signal.signal(signum, follower.interrupt) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def is_requeued(run: RunFolder) -> bool:
    """Whether Slurm has started this job again, and it began this run before."""
    return in_allocation() and restart_count() > 0 and run.job.is_file()


def main(folder: Path) -> int:
    """Supervise the run within its job; after a requeue from its newest checkpoint."""
    from shoal.runs.supervisor import main as supervise

    run, note = RunFolder(folder), ""
    if is_requeued(run):
        note = f"Slurm has started job {job_id()} again, and {_resume(run)}"
    return supervise(folder, note)


def _resume(run: RunFolder) -> str:
    """Have the next supervisor of the run resume it; return a sentence about that."""
    from shoal.data.prepare import reopen_run
    from shoal.runs.supervisor import read_job, write_job

    job, has_begun = read_job(run), run.has_begun()
    if not job.script and has_begun:
        reopen_run(run.path)
    write_job(run, replace(job, resume=run.has_checkpoint() if job.script else has_begun))
    where = f"the checkpoint of step {step}" if (step := run.newest_checkpoint()) else "the beginning"
    return f"the run continues from {where}"


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
