"""Where a scenario is played: a lab of its own, or this machine; with a small disk for the checkpoints if need be."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shoal.cluster.lab.build import up
from shoal.cluster.lab.changes import stop_or_go
from shoal.cluster.lab.lab import Lab
from shoal.cluster.lab.spec import LabSpec
from shoal.cluster.spec import LocalSpec, parse_on
from shoal.errors import LabError, UsageError
from shoal.runfolder import RunFolder
from shoal.trials.chaos.spec import Scenario


@dataclass(frozen=True)
class Ground:
    """`on` is what the training gets; `lab` is None on this machine itself; `disk` is the one that can be filled."""

    on: str
    lab: Lab | None = None
    disk: Path | None = None

    def need_lab(self) -> Lab:
        if self.lab is None:
            raise UsageError("this fault needs emulated nodes", fix="--on lab:3")
        return self.lab

    def thaw_all(self) -> None:
        """The kernel ends no process that it keeps frozen."""
        for name in sorted(self.lab.state.frozen) if self.lab is not None else ():
            with contextlib.suppress(LabError):
                self.need_lab().perform(stop_or_go(name, frozen=False))

    def before(self, run: RunFolder) -> None:
        """The run's checkpoints go to the small disk."""
        if self.disk is not None:
            run.checkpoints.symlink_to(self.disk)


def why_not(scenario: Scenario, on: str) -> str:
    """Why the scenario cannot be played there; nothing when it can."""
    match parse_on(on):
        case LabSpec(nodes=nodes):
            count, kind = len(nodes), "nodes"
        case LocalSpec(ranks=count):
            kind = "ranks"
            if scenario.needs_lab:
                return "it needs emulated nodes: --on lab:3"
        case _:
            return "faults are played on a lab made for them (--on lab:3) or on this machine (--on local:3)"
    if scenario.disk_mb and os.geteuid() != 0:
        return "it needs root, to make a disk that can be filled"
    return f"it needs {scenario.nodes} {kind}" if count < scenario.nodes else ""


@contextlib.contextmanager
def opened(scenario: Scenario, on: str, folder: Path, number: int) -> Iterator[Ground]:
    """Gone with us, whatever ends us. The disk stands before the lab does: nodes see the mounts of their beginning."""
    with contextlib.ExitStack() as stack:
        disk = (
            stack.enter_context(_small_disk(folder / f"disk-{number}", scenario.disk_mb)) if scenario.disk_mb else None
        )
        match parse_on(on):
            case LabSpec() as spec:
                own = {"name": f"chaos-{os.getpid()}-{number}", "nodes": spec.nodes[: scenario.nodes]}
                lab = up(spec.model_copy(update=own), owner=os.getpid())
                stack.callback(lab.close)
                yield Ground(f"lab:{lab.name}", lab, disk)
            case _:
                yield Ground(f"local:{scenario.nodes}", None, disk)


@contextlib.contextmanager
def _small_disk(folder: Path, size_mb: int) -> Iterator[Path]:
    folder.mkdir(parents=True)
    mount = ("mount", "-t", "tmpfs", "-o", f"size={size_mb}m", "shoal-chaos", str(folder))
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        folder.rmdir()
        raise LabError("cannot make a small disk", why=done.stderr.strip(), fix="run as root, outside a container")
    try:
        yield folder
    finally:
        unmount = ("umount", "--lazy", str(folder))
        subprocess.run(unmount, check=False, capture_output=True)
        shutil.rmtree(folder, ignore_errors=True)


def keep_checkpoints(run: RunFolder, disk: Path | None) -> None:
    """What the small disk held stays with the run when the disk goes."""
    if disk is not None and run.checkpoints.is_symlink():
        copy = run.checkpoints.with_name("checkpoints.copy")
        shutil.copytree(disk, copy, ignore=shutil.ignore_patterns("filler"))
        run.checkpoints.unlink()
        copy.rename(run.checkpoints)
