"""The pods of a Job on the nodes of a lab, started as the manifest of `shoal emit k8s` starts them.

A pod of a lab has no process namespace that ends with its first process: `kill` ends all of its processes, as the end
of a container does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml  # type: ignore[import-untyped]

from shoal.cluster.pods.spec import FOLDER, HOSTS, INDEX
from shoal.control.processes import AGENT, RunProcess, find_processes
from shoal.events import Event, read_events
from shoal.run_folder import RunFolder
from shoal_lab.lab import Lab
from tests.support.programs import TINY, set_flags, shoal
from tests.support.waiting import wait_until


@dataclass
class Job:
    """A Job and its pods; this is its Kubernetes."""

    lab: Lab
    spec: dict[str, Any]  # of the Job
    volume: Path
    uid: str = "uid-1"
    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return int(self.spec["completions"])

    @property
    def container(self) -> dict[str, Any]:
        [container] = self.spec["template"]["spec"]["containers"]
        return dict(container)

    @property
    def run(self) -> RunFolder:
        return RunFolder(self.volume / self.container["args"][0])

    def env(self, index: int) -> dict[str, str]:
        """Return what Kubernetes sets. Names that only its DNS knows are those of the lab; the volume is a folder."""
        container = self.container
        given = {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}
        given[HOSTS] = " ".join(node.name for node in self.lab.nodes[: self.count])
        folder = given[FOLDER].replace("$(SHOAL_JOB)", self.uid).replace(container["workingDir"], str(self.volume))
        return {**os.environ, **given, FOLDER: folder, INDEX: str(index)}

    def start(self, *indices: int) -> None:
        """Start these pods; without any, all."""
        container = self.container
        words = [sys.executable, *container["command"][1:], *container["args"]]
        for index in indices or range(self.count):
            with self.log(index).open("ab") as log:
                self.processes[index] = subprocess.Popen(
                    self.lab.command(self.lab.nodes[index].name, words),
                    env=self.env(index),
                    cwd=self.volume,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )

    def call(self, index: int, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command in a pod, as `kubectl exec` does."""
        command = self.lab.command(self.lab.nodes[index].name, [sys.executable, "-P", "-m", "shoal", *words])
        return subprocess.run(command, env=self.env(index), cwd=self.volume, capture_output=True, text=True, timeout=90)

    def kill(self, index: int) -> None:
        """End a pod at once, with all of its processes, as the loss of its machine does."""
        # Again and again: a process that is started meanwhile inherits the pod's variables.
        wait_until(lambda: not self._kill(index), 10, why=lambda: f"pod {index} does not end")
        self.processes[index].wait(10)

    def _kill(self, index: int) -> bool:
        pids = list(self.pids(index))
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return bool(pids)

    def pids(self, index: int) -> Iterator[int]:
        """Yield the processes of a pod: those that have its variables."""
        own = {f"{name}={value}" for name, value in self.env(index).items() if name in (FOLDER, INDEX)}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                variables = process.environ()
                is_own = own <= {f"{name}={variables.get(name)}" for name in (FOLDER, INDEX)}
                if is_own and process.status() != psutil.STATUS_ZOMBIE:
                    yield process.pid

    def terminate(self, *indices: int) -> None:
        """Ask pods to end, as Kubernetes does before it removes them."""
        for index in indices:
            # The younger one: the other entered the node, and waits for it.
            named = [
                psutil.Process(pid) for pid in self.pids(index) if "shoal.runs.pod" in psutil.Process(pid).cmdline()
            ]
            max(named, key=psutil.Process.create_time).send_signal(signal.SIGTERM)

    def wait(self, index: int, within_s: float = 120.0) -> int:
        """Return the exit code of a pod."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.processes[index].wait(within_s)
        pytest.fail(f"pod {index} has not ended within {within_s:g} s\n{self.logs()}")

    def agent(self, index: int) -> RunProcess:
        agents = [process for process in find_processes(self.run.path) if process.part == AGENT]
        return next(agent for agent in agents if agent.node == f"pod-{index}")

    def steps(self) -> int:
        """Return the last step that a rank has done."""
        texts = [path.read_text() for path in self.run.path.glob("events/rank-*.jsonl")]
        return max((text.count('{"event":"step"') for text in texts), default=0)

    def await_steps(self, count: int, within_s: float = 240.0) -> None:
        """Wait until that many more steps are done."""
        before = self.steps()
        wait_until(lambda: self.steps() >= before + count, within_s, why=self.logs)

    def members(self) -> list[str]:
        """Return the members of the newest generation that any pod has entered."""
        journals = (read_events(self.run.journal(f"pod-{index}")) for index in range(self.count))
        generations = [event for journal in journals for event in journal if event["event"] == "generation"]
        newest: Event = max(generations, key=lambda event: event["time"], default={"members": []})
        return sorted(newest["members"])

    def await_members(self, *indices: int) -> None:
        wanted = [f"pod-{index}" for index in indices]
        wait_until(lambda: self.members() == wanted, 150, why=lambda: f"{self.members()}\n{self.logs()}")

    def logs(self) -> str:
        names = [*(self.log(index) for index in self.processes), *self.run.path.glob("agents/*.jsonl")]
        return "\n".join(f"== {path.name}\n{path.read_text()[-3000:]}" for path in names)

    def log(self, index: int) -> Path:
        return self.volume / f"pod-{index}.log"

    def again(self) -> None:
        """Stand for the same manifest, applied again: a Job with another uid."""
        self.uid = f"uid-{int(self.uid.rpartition('-')[2]) + 1}"


@contextlib.contextmanager
def job_on(lab: Lab, volume: Path, *words: str, sets: tuple[str, ...] = ()) -> Iterator[Job]:
    """Make a Job by `shoal emit k8s`; end its pods afterwards."""
    given = shoal("emit", "k8s", "--out", "runs/pods", *set_flags("run.balance=off", *sets), *words)
    assert given.returncode == 0, given.stderr
    _, manifest = yaml.safe_load_all(given.stdout)
    job = Job(lab, manifest["spec"], volume)
    # A command on a node of a lab begins in the folder of the one that enters it.
    with contextlib.chdir(volume):
        try:
            yield job
        finally:
            for index in job.processes:
                job.kill(index)


def training_job(lab: Lab, volume: Path, pods: int, steps: int) -> contextlib.AbstractContextManager[Job]:
    """Return a Job with the smallest training."""
    never = ("train.checkpoint_every=1000000", "train.eval_every=1000000", "train.compile=off", "run.threads=1")
    return job_on(lab, volume, "--on", f"lab:{pods}", sets=(*TINY, *never, f"train.steps={steps}"))
