"""Where a scenario is played: a lab of its own, or this machine; with a small disk if needed."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from shoal.cluster.lab import LabSpec, ShoalLab, can_limit_cpu
from shoal.cluster.target import LocalSpec, parse_on
from shoal.errors import LabError, UsageError
from shoal.run_folder import RunFolder
from shoal.tools.chaos.scenario import ChaosScenario


@dataclass(frozen=True)
class TestBed:
    """Where a scenario is played: a lab of its own or this machine, with a small disk if needed."""

    on: str  # for the training
    lab: ShoalLab | None = None  # None on this machine itself
    disk: Path | None = None  # can be filled, or lose its power
    holds_run: bool = False  # the whole run folder is on the disk, not only the checkpoints

    def need_lab(self) -> ShoalLab:
        if self.lab is None:
            raise UsageError("this fault needs emulated nodes", fix="--on lab:3")
        return self.lab

    def thaw_all(self) -> None:
        """Thaw all nodes: the kernel ends no frozen process."""
        for name in sorted(self.lab.state.frozen) if self.lab is not None else ():
            with contextlib.suppress(LabError):
                self.need_lab().node(name).thaw()

    def before(self, run: RunFolder) -> None:
        """Put the run's checkpoints on the small disk."""
        if self.disk is not None and not self.holds_run:
            run.checkpoints.symlink_to(self.disk)

    def run_folder(self, kept: Path) -> Path:
        """Return where to create the run that `keep_run` later copies to `kept`."""
        return self.disk / "run" if self.disk is not None and self.holds_run else kept

    def keep_run(self, kept: Path) -> None:
        """Copy the run from the small disk, which will be removed."""
        folder = self.run_folder(kept)
        if folder != kept and folder.is_dir():
            shutil.copytree(folder, kept, dirs_exist_ok=True)

    def cut_power(self) -> None:
        """Lose all content that the kernel has not written to the disk.

        The disk's image is copied as it is now, and the copy is mounted: its file system recovers as after a real
        power cut.
        """
        disk = self.disk
        if disk is None or not _image(disk).is_file():
            raise LabError("there is no disk that could lose its power", fix='disk_mb = 64, disk_holds = "run"')
        after = _image(disk).with_suffix(".after")
        shutil.copyfile(_image(disk), after)
        _run_as_root("umount", "--lazy", str(disk))
        after.replace(_image(disk))
        _mount_image(disk)


def why_not(scenario: ChaosScenario, on: str) -> str:
    """Return why the scenario cannot be played there; empty when it can."""
    match parse_on(on):
        case LabSpec(nodes=nodes):
            count, kind = len(nodes), "nodes"
            if any(node.slots > 1 for node in nodes):
                return "scenarios count one rank on each node: leave slots out of --on"
            if scenario.cuts_power:
                return "it needs the disk of this machine itself: --on local:2"
        case LocalSpec(ranks=count):
            kind = "ranks"
            if scenario.needs_lab:
                return "it needs emulated nodes: --on lab:3"
        case _:
            return "faults are played on a lab made for them (--on lab:3) or on this machine (--on local:3)"
    if scenario.disk_mb and os.geteuid() != 0:
        return "it needs root, to make a disk that can be filled"
    if scenario.limits_cpu and not can_limit_cpu():
        needs_root = "" if os.geteuid() == 0 else "; as root it usually can"
        return f"it needs a control group with a cpu controller, which this user cannot make here{needs_root}"
    return f"it needs {scenario.nodes} {kind}" if count < scenario.nodes else ""


@contextlib.contextmanager
def opened(scenario: ChaosScenario, on: str, folder: Path, number: int) -> Iterator[TestBed]:
    """Open a test bed that is removed however the block ends.

    The disk is mounted before the lab starts: nodes see only the mounts of their beginning.
    """
    with contextlib.ExitStack() as stack:
        disk, holds_run = None, scenario.disk_holds == "run"
        if scenario.disk_mb:
            place = folder / f"disk-{scenario.name}-{number}"
            disk = stack.enter_context(_small_disk(place, scenario.disk_mb, scenario.cuts_power))
        match parse_on(on):
            case LabSpec() as spec:
                own = replace(spec, name=f"chaos-{os.getpid()}-{number}", nodes=spec.nodes[: scenario.nodes])
                lab = stack.enter_context(ShoalLab.build(own, owner=os.getpid()))
                yield TestBed(f"lab:{lab.name}", lab, disk, holds_run)
            case _:
                yield TestBed(f"local:{scenario.nodes}", None, disk, holds_run)


@contextlib.contextmanager
def _small_disk(folder: Path, size_mb: int, can_lose_power: bool) -> Iterator[Path]:
    folder.mkdir(parents=True)
    try:
        if can_lose_power:
            with _image(folder).open("wb") as file:
                file.truncate(size_mb << 20)
            _run_as_root("mkfs.ext4", "-q", "-F", str(_image(folder)))
            _mount_image(folder)
        else:
            _run_as_root("mount", "-t", "tmpfs", "-o", f"size={size_mb}m", "shoal-chaos", str(folder))
    except LabError:
        folder.rmdir()
        _image(folder).unlink(missing_ok=True)
        raise
    try:
        yield folder
    finally:
        unmount = ("umount", "--lazy", str(folder))
        subprocess.run(unmount, check=False, capture_output=True)
        shutil.rmtree(folder, ignore_errors=True)
        _image(folder).unlink(missing_ok=True)


def _image(folder: Path) -> Path:
    """Return the file that holds the disk mounted at `folder`."""
    return folder.with_name(f"{folder.name}.image")


def _mount_image(folder: Path) -> None:
    """Mount the disk. The kernel writes nothing to it by itself for five minutes, only on fsync."""
    _run_as_root("mount", "-o", "loop,commit=300", str(_image(folder)), str(folder))


def _run_as_root(*words: str) -> None:
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise LabError(f"cannot make a small disk: there is no {words[0]}", fix="install e2fsprogs") from None
    if done.returncode:
        raise LabError("cannot make a small disk", why=done.stderr.strip(), fix="run as root, outside a container")


def keep_checkpoints(run: RunFolder, disk: Path | None) -> None:
    """Copy the checkpoints from the small disk, which will be removed, to the run."""
    if disk is not None and run.checkpoints.is_symlink():
        copy = run.checkpoints.with_name("checkpoints.copy")
        shutil.copytree(disk, copy, ignore=shutil.ignore_patterns("filler"))
        run.checkpoints.unlink()
        copy.rename(run.checkpoints)
