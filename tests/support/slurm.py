"""A real Slurm on the nodes of a lab: the controller and the user on the first, jobs on the others.

Debian's slurmd takes its node's name from the host name, which each emulated node has of its own. One munged serves
all of them: they share this machine's files.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from shoal.control.processes import RunProcess, find_processes
from shoal.run_folder import RunFolder
from shoal_lab.lab import Lab
from tests.support.labs import mounted, run_on, running_lab
from tests.support.needs import need_tool
from tests.support.programs import TINY, set_flags, shoal_command
from tests.support.runs import ended_afterwards
from tests.support.waiting import wait_until

LOGIN = "node1"
_count = itertools.count()
_SETTINGS = """\
ClusterName=shoal
SlurmctldHost={login}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
SlurmUser=root
SlurmdUser=root
SlurmdTimeout=10
KillWait=20
MinJobAge=300
SchedulerParameters=sched_min_interval=200000,batch_sched_delay=0
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
NodeName={nodes} CPUs=2 RealMemory=2000 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@dataclass(frozen=True)
class Command:
    """A command that runs beside the test; its output is a file."""

    process: subprocess.Popen[bytes]
    output: Path

    def end(self, within_s: float) -> tuple[int, str]:
        """Wait for its end; return its exit code, and all that it printed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(within_s), self.output.read_text()
        pytest.fail(f"no end within {within_s:g} s: {self.process.args!r}\n{self.output.read_text()}")


class Slurm:
    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab = lab
        self.folder = folder
        self.nodes = [node.name for node in lab.nodes if node.name != LOGIN]
        # The job that this machine may be in is another one.
        foreign = {name: "" for name in os.environ if name.startswith("SLURM")}
        # A node shares its files with the others, but for the temporary ones.
        places = {"TMPDIR": str(folder / "tmp"), "SLURM_CONF": str(folder / "slurm.conf")}
        self._env = {**foreign, **places, "PYTHONWARNINGS": ""}

    def run(self, *argv: str, node: str = LOGIN) -> str:
        """Run a command on a node and return what it prints; one that fails fails the test."""
        return run_on(self.lab, node, "env", *self._variables(), *argv).stdout

    @contextlib.contextmanager
    def start(self, *argv: str, node: str = LOGIN) -> Iterator[Command]:
        """Start a command on a node; end it afterwards."""
        output = self.folder / f"{Path(argv[0]).name}-{node}-{next(_count)}.out"
        with output.open("wb") as file:
            process = subprocess.Popen(
                self.lab.command(node, ["env", *self._variables(), *argv]),
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            yield Command(process, output)
        finally:
            # What it has started on the node ends with the lab.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def shoal(self, *words: str | Path, timeout_s: float = 180.0) -> tuple[int, str]:
        """Run a shoal command on the login node; return its exit code, and all that it printed."""
        with self.start(*shoal_command(*words)) as command:
            return command.end(timeout_s)

    def state_of(self, job: str) -> str:
        return self.run("squeue", "--noheader", "--format=%T", "--states=all", "--jobs", job).strip()

    def jobs(self) -> list[str]:
        """Return the jobs that wait, run or are being cleaned up."""
        return self.run("squeue", "--noheader", "--format=%i").split()

    def _variables(self) -> list[str]:
        return [f"{name}={value}" for name, value in self._env.items()]


@contextlib.contextmanager
def running_slurm(folder: Path, nodes: int = 2) -> Iterator[Slurm]:
    if os.geteuid():
        pytest.skip("a Slurm of its own is started as root")
    for tool in ("munged", "slurmctld", "slurmd", "srun"):
        need_tool(tool)
    with running_lab(nodes + 1) as lab, contextlib.ExitStack() as stack:
        slurm = Slurm(lab, folder)
        text = _SETTINGS.format(login=LOGIN, folder=folder, nodes=",".join(slurm.nodes))
        (folder / "slurm.conf").write_text(text)
        for name in ("state", "tmp"):
            (folder / name).mkdir()
        key = folder / "munge.key"
        key.touch(mode=0o400)
        key.write_bytes(secrets.token_bytes(128))
        files = {"socket": "sock", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        options = [f"--{option}={folder}/munge.{suffix}" for option, suffix in files.items()]
        # --force: the folders of pytest are open to other users.
        munged = ["munged", "--foreground", "--force", f"--key-file={key}", *options]
        stack.enter_context(slurm.start(*munged))
        wait_until((folder / "munge.sock").exists)
        stack.enter_context(slurm.start("slurmctld", "-D"))
        for node in slurm.nodes:
            (folder / f"spool-{node}").mkdir()
            stack.enter_context(mounted(lab, node, "-t", "tmpfs", "tmpfs", str(folder / "tmp")))
            stack.enter_context(slurm.start("slurmd", "-D", node=node))
        wait_until(lambda: _idle(slurm) == nodes, 30)
        yield slurm


def _idle(slurm: Slurm) -> int:
    with contextlib.suppress(AssertionError):
        return slurm.run("sinfo", "--noheader", "--Node", "--states=idle").count("\n")
    return 0


class SlurmRun:
    """A run that was started by a shoal command on the login node."""

    def __init__(self, slurm: Slurm, path: Path, command: Command) -> None:
        self.slurm, self.path, self.command = slurm, path, command

    def steps(self) -> int:
        """Return the last step that a rank has done."""
        files = self.path.glob("events/rank-*.jsonl")
        return max((text.count('{"event":"step"') for text in map(Path.read_text, files)), default=0)

    def await_steps(self, count: int, within_s: float = 240.0) -> None:
        """Wait until that many more steps are done."""
        before = self.steps()
        wait_until(lambda: self.steps() >= before + count, within_s, why=self.output_so_far)

    def saved(self) -> int:
        """Return the step of the newest checkpoint."""
        return RunFolder(self.path).newest_checkpoint()

    def part(self, part: str, node: str | None = None) -> RunProcess:
        return next(
            process for process in find_processes(self.path) if process.part == part and node in (None, process.node)
        )

    def output_so_far(self) -> str:
        files = [self.path / "supervisor.jsonl", *self.path.glob("agents/*.log"), *self.path.glob("agents/*.jsonl")]
        return "\n".join(f"{path.name}: {path.read_text()[-2000:]}" for path in files if path.exists())

    def end(self, within_s: float = 180.0) -> tuple[int, str]:
        return self.command.end(within_s)

    def stop(self) -> tuple[int, str]:
        code, output = self.slurm.shoal("stop", self.path)
        assert code == 0, output
        return self.end()


@contextlib.contextmanager
def training(slurm: Slurm, path: Path, *words: str, steps: int = 100_000, inside: bool = False) -> Iterator[SlurmRun]:
    """Start the smallest training: as a job of its own, or `inside` an allocation that salloc gives."""
    never = ("train.compile=off", "train.checkpoint_every=1000000", "train.eval_every=1000000")
    sets = set_flags(*TINY, *never, f"train.steps={steps}")
    if not any(word.startswith("slurm") for word in words):
        words = ("--on", "slurm" if inside else "slurm:2", *words)
    command = shoal_command("train", "--out", path, *sets, *words)
    salloc = ["salloc", "--nodes=2", "--no-kill"] if inside else []
    with ended_afterwards(path), slurm.start(*salloc, *command) as started:
        yield SlurmRun(slurm, path, started)
