"""Jobs of Slurm: submitted, looked at, signalled."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal.cluster.slurm.cluster import run_slurm
from shoal.cluster.slurm.spec import SlurmSpec, in_allocation
from shoal.cluster.target import parse_on
from shoal.errors import RunFailed

# How long before its time limit a job is asked to save and end. Slurm may ask a minute earlier.
SAVE_S = 60
# A busy controller takes its time, and a job that is submitted after all would be a second one.
_SUBMIT_WITHIN_S = 180.0
_ENDED = (
    "COMPLETED",
    "FAILED",
    "CANCELLED",
    "TIMEOUT",
    "NODE_FAIL",
    "PREEMPTED",
    "BOOT_FAIL",
    "DEADLINE",
    "OUT_OF_MEMORY",
    "REVOKED",
)


@dataclass(frozen=True)
class JobState:
    """A job as Slurm sees it."""

    state: str  # PENDING, RUNNING, COMPLETING, or how it ended; empty for a job that Slurm has forgotten
    reason: str = ""  # why it waits or has ended
    start: str = ""  # when it is expected to begin
    nodes: str = ""

    @property
    def has_ended(self) -> bool:
        return not self.state or self.state in _ENDED

    @property
    def has_begun(self) -> bool:
        """Whether its first process may be there; the nodes of a job that is CONFIGURING still boot."""
        return self.state not in ("PENDING", "CONFIGURING")

    def sentence(self, job: str) -> str:
        if self.state == "RUNNING":
            return f"Slurm job {job} runs on {self.nodes}"
        if self.state == "PENDING":
            when = f", and is expected to begin at {self.start}" if self.start not in ("", "N/A", "Unknown") else ""
            why = "" if self.reason in ("", "None") else f" ({self.reason})"
            return f"Slurm job {job} waits for its nodes{why}{when}"
        return f"Slurm job {job} is {self.state.lower() or 'gone'}"


def submit(spec: SlurmSpec, name: str, log: str, command: Sequence[str], marks: Mapping[str, str]) -> str:
    """Submit a job whose first process is the command; return its number.

    It survives the loss of nodes but the first. Before its time limit, and when it
    is stopped, the command gets SIGINT.
    """
    words = [
        "sbatch",
        "--parsable",
        *spec.options(),
        f"--job-name={name}",
        f"--output={log}",
        "--open-mode=append",
        "--requeue",
        f"--signal=B:INT@{SAVE_S}",
    ]
    exports = "".join(f"export {key}={shlex.quote(value)}\n" for key, value in marks.items())
    script = f"#!/bin/sh\n{exports}exec {shlex.join(command)}\n"
    return run_slurm(*words, stdin=script, within_s=_SUBMIT_WITHIN_S).strip().partition(";")[0]


def look_at(job: str) -> JobState:
    """Return the state of a job. Slurm forgets a job some minutes after its end."""
    try:
        text = run_slurm("scontrol", "show", "job", "--oneliner", job)
    except RunFailed as error:
        if "Invalid job id" in error.seen:
            return JobState("")
        raise
    fields = dict(word.partition("=")[::2] for word in text.split())
    reason, start, nodes = (fields.get(name, "") for name in ("Reason", "StartTime", "NodeList"))
    return JobState(fields.get("JobState", ""), reason, start, nodes)


def send_signal(job: str, signum: signal.Signals) -> None:
    """Send a signal to the first process of the job."""
    run_slurm("scancel", "--batch", f"--signal={signum.name.removeprefix('SIG')}", job)


def cancel(job: str) -> None:
    run_slurm("scancel", job)


def enter_allocation(*places: str) -> None:
    """Run this command line again within an allocation with enough nodes for every `--on`, unless it is in one or needs
    none. It then does not return."""
    specs = [spec for spec in map(parse_on, places) if isinstance(spec, SlurmSpec)]
    if in_allocation() or not specs:
        return
    widest = max(specs, key=lambda spec: spec.nodes or 0)
    run_slurm("sinfo", "--noheader")  # Where there is no Slurm, that raises an error that explains it.
    words = ["salloc", *widest.options(), "--job-name=shoal", "--", sys.executable, "-P", "-m", "shoal"]
    sys.stdout.flush()
    os.execvp(words[0], [*words, *sys.argv[1:]])  # noqa: S606 - salloc gives the nodes back when it ends
