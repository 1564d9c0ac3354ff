"""Control groups make a node slow (cpu quota) and stop it (freezer): version 1, version 2, or one beside the other."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from shoal.cluster.lab.spec import Frozen
from shoal.cluster.lab.steps import RemoveGroup, Run, Step, Write

# A node at 0.3 cores stands still 70% of each period. Short ones look like a slow machine, long ones like a stuttering
# one; the kernel takes no quota below 1 ms.
_PERIOD_US = 10_000
_LONG_PERIOD_US = 100_000
_SHORT_PERIOD_FROM = 0.1


class Group(Frozen):
    """A place in one hierarchy below which a lab may make groups."""

    parent: Path
    version: int

    def of_lab(self, lab: str) -> Path:
        return self.parent / f"shoal-{lab}"

    def of_node(self, lab: str, node: str) -> Path:
        return self.of_lab(lab) / node


class Groups(Frozen):
    """None where this machine, or this user, has no such controller."""

    cpu: Group | None = None
    freezer: Group | None = None

    def all(self) -> list[Group]:
        """In version 2 both controllers live in one place."""
        return list(dict.fromkeys(group for group in (self.cpu, self.freezer) if group))


def read_groups() -> Groups:
    """What is mounted here and lets us make groups."""
    mounts = Path("/proc/self/mounts").read_text(encoding="utf-8")
    found = find_groups(mounts, os.geteuid())
    return Groups(
        cpu=found.cpu if _has_cpu(found.cpu) and _usable(found.cpu) else None,
        freezer=found.freezer if _usable(found.freezer) else None,
    )


def find_groups(mounts: str, uid: int) -> Groups:
    """From the text of /proc/self/mounts. Version 1 is asked first: where it holds a controller, version 2 cannot."""
    v1: dict[str, Group] = {}
    v2: Group | None = None
    for fields in (line.split() for line in mounts.splitlines()):
        if len(fields) > 3 and fields[2] == "cgroup":
            v1.update({name: Group(parent=Path(fields[1]), version=1) for name in fields[3].split(",")})
        elif len(fields) > 3 and fields[2] == "cgroup2":
            v2 = Group(parent=_delegated(Path(fields[1]), uid), version=2)
    return Groups(cpu=v1.get("cpu", v2), freezer=v1.get("freezer", v2))


def _delegated(mount: Path, uid: int) -> Path:
    """What systemd hands to an ordinary user to manage alone."""
    return mount if uid == 0 else mount / f"user.slice/user-{uid}.slice/user@{uid}.service"


def _usable(group: Group | None) -> bool:
    """By trying: a read-only mount, a container and a missing controller each hide behind good-looking permissions."""
    if group is None:
        return False
    probe = group.parent / f"shoal-probe-{os.getpid()}"
    try:
        probe.mkdir()
    except OSError:
        return False
    with contextlib.suppress(OSError):
        probe.rmdir()
    return True


def _has_cpu(group: Group | None) -> bool:
    """A version 2 place without the cpu controller can still freeze."""
    if group is None or group.version == 1:
        return group is not None
    try:
        return "cpu" in (group.parent / "cgroup.controllers").read_text(encoding="utf-8").split()
    except OSError:
        return False


def make_lab_groups(groups: Groups, lab: str) -> list[Step]:
    steps: list[Step] = []
    for group in groups.all():
        steps.append(Run(("mkdir", "-p", str(group.of_lab(lab)))))
        if group.version == 2 and group == groups.cpu:
            steps += [Write(folder / "cgroup.subtree_control", "+cpu") for folder in (group.parent, group.of_lab(lab))]
    return steps


def make_node_groups(groups: Groups, lab: str, node: str) -> list[Step]:
    folders = [str(group.of_node(lab, node)) for group in groups.all()]
    return [Run(("mkdir", "-p", *folders))] if folders else []


def limit_cpu(groups: Groups, lab: str, node: str, cpu: float | None) -> list[Step]:
    if groups.cpu is None:
        return []
    folder = groups.cpu.of_node(lab, node)
    period_us = _PERIOD_US if cpu is None or cpu >= _SHORT_PERIOD_FROM else _LONG_PERIOD_US
    quota_us = None if cpu is None else round(cpu * period_us)
    if groups.cpu.version == 2:
        return [Write(folder / "cpu.max", f"{'max' if quota_us is None else quota_us} {period_us}")]
    return [
        Write(folder / "cpu.cfs_period_us", str(period_us)),
        Write(folder / "cpu.cfs_quota_us", str(-1 if quota_us is None else quota_us)),
    ]


def freeze(groups: Groups, lab: str, node: str, frozen: bool) -> list[Step]:
    if groups.freezer is None:
        return []
    folder = groups.freezer.of_node(lab, node)
    if groups.freezer.version == 2:
        return [Write(folder / "cgroup.freeze", str(int(frozen)))]
    return [Write(folder / "freezer.state", "FROZEN" if frozen else "THAWED")]


def remove_groups(groups: Groups, lab: str, nodes: list[str]) -> list[Step]:
    folders = [group.of_node(lab, node) for group in groups.all() for node in nodes]
    return [RemoveGroup(folder) for folder in (*folders, *(group.of_lab(lab) for group in groups.all()))]


def node_groups_on_disk(groups: Groups, lab: str) -> list[str]:
    """The nodes for which groups exist, whatever the lab's own notes say."""
    folders = [folder for group in groups.all() if group.of_lab(lab).is_dir() for folder in group.of_lab(lab).iterdir()]
    return sorted({folder.name for folder in folders if folder.is_dir()})


def joining(groups: Groups, lab: str, node: str) -> str:
    """A line of shell that puts the shell itself, and what it becomes, into the node's groups."""
    files = [group.of_node(lab, node) / "cgroup.procs" for group in groups.all()]
    return "".join(f"echo $$ > {file} && " for file in files)
