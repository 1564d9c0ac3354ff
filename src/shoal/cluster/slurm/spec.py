"""What `--on slurm…` asks for, and the allocation that this process is in."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from shoal.config.presets import did_you_mean
from shoal.errors import UsageError
from shoal.units import pluralize

_ON = re.compile(r"slurm(?::(\d{1,6}))?((?:,.*)?)")
# What sbatch and salloc call the settings that they get. Numbers are for each node.
_OPTIONS = {
    "partition": "--partition",
    "account": "--account",
    "qos": "--qos",
    "reservation": "--reservation",
    "constraint": "--constraint",
    "time": "--time",
    "memory": "--mem",
    "gpus": "--gpus-per-node",
}
_NUMBERS = ("gpus", "cpus", "slots")
_KEYS = (*_OPTIONS, "cpus", "slots", "interface")
_FIX = "write for example: --on slurm:2,partition=main,time=2:00:00"
# 2(x3),1: two tasks on each of three nodes, and one on the last.
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


@dataclass(frozen=True)
class AllocatedNode:
    name: str
    slots: int
    group: int | None = None  # of a heterogeneous job


@dataclass(frozen=True)
class SlurmSpec:
    """Nodes of the allocation that this process is in, or of one that is asked for."""

    nodes: int | None = None  # None: all of the allocation
    settings: tuple[tuple[str, str], ...] = ()

    @property
    def slots(self) -> int | None:
        """The ranks of each node, where they were given."""
        slots = self._get("slots") or self._get("gpus")
        return int(slots) if slots else None

    @property
    def interface(self) -> str | None:
        return self._get("interface")

    def rank_count(self) -> int:
        if in_allocation():
            return sum(slots for slots, _ in self.places())
        return self._asked_nodes() * (self.slots or 1)

    def places(self) -> list[tuple[int, int | None]]:
        """Return the ranks of each node of this allocation, and the node's group."""
        places = [(self.slots or slots, group) for slots, group in _allocated_slots(os.environ)]
        if self.nodes is not None and self.nodes > len(places):
            raise UsageError(
                f"--on slurm:{self.nodes} asks for {pluralize(self.nodes, 'node')}, and job {job_id()} has "
                f"{len(places)}",
                why="inside an allocation the ranks run on its nodes",
                fix=f"write --on slurm for all of them, or ask for more: salloc --nodes={self.nodes} --no-kill",
            )
        return places[: self.nodes]

    def options(self) -> list[str]:
        """Return the options with which sbatch and salloc get what this asks for."""
        given = dict(self.settings)
        words = [f"{_OPTIONS[key]}={value}" for key, value in self.settings if key in _OPTIONS]
        slots = self.slots or 1
        words += [f"--nodes={self._asked_nodes()}", f"--ntasks-per-node={slots}", "--no-kill"]
        if "cpus" in given:
            words.append(f"--cpus-per-task={max(1, int(given['cpus']) // slots)}")
        elif "gpus" not in given:
            # Slurm's own default is one core for each task, and its default memory also with --exclusive.
            words += ["--exclusive", *([] if "memory" in given else ["--mem=0"])]
        return words

    def absolute(self) -> str:
        """Return the text that names as many nodes from everywhere."""
        nodes = len(self.places()) if in_allocation() else self._asked_nodes()
        return f"slurm:{nodes}" + "".join(f",{key}={value}" for key, value in self.settings)

    def first(self, count: int) -> SlurmSpec:
        return SlurmSpec(count, self.settings)

    def _get(self, key: str) -> str | None:
        return dict(self.settings).get(key)

    def _asked_nodes(self) -> int:
        if self.nodes is None:
            raise UsageError(
                "--on slurm names no number of nodes",
                why="this process is in no allocation of Slurm whose nodes it could use",
                fix="write for example: --on slurm:2; or begin inside an allocation: salloc --nodes=2 --no-kill",
            )
        return self.nodes


def parse_slurm(text: str) -> SlurmSpec:
    match = _ON.fullmatch(text)
    if match is None or match[1] == "0":
        raise UsageError(
            f"--on {text!r} names no nodes of Slurm", why="they are written slurm:NODES[,setting=value…]", fix=_FIX
        )
    settings: dict[str, str] = {}
    for word in match[2].split(",")[1:]:
        key, _, value = word.partition("=")
        if fault := _fault(key, value, settings):
            raise UsageError(f"--on {text}: cannot use {word!r}", why=fault, fix=_FIX)
        settings[key] = value
    return SlurmSpec(int(match[1]) if match[1] else None, tuple(settings.items()))


def _fault(key: str, value: str, seen: Mapping[str, str]) -> str:
    if key not in _KEYS:
        return did_you_mean(key, _KEYS) or f"the settings of slurm are {', '.join(_KEYS)}"
    if key in seen:
        return f"{key} is given twice"
    if not value:
        return f"{key} has no value"
    if key in _NUMBERS and not re.fullmatch(r"[1-9]\d{0,4}", value):
        return f"{key} is a number of 1 or more, for each node"
    return ""


def in_allocation() -> bool:
    return bool(job_id())


def in_batch_job() -> bool:
    """Whether this process belongs to a job of sbatch; the one of salloc ends with the user's shell."""
    return in_allocation() and os.environ.get("ENVIRONMENT") == "BATCH"


def job_id() -> str:
    return os.environ.get("SLURM_JOB_ID", "")


def restart_count() -> int:
    """Return how often Slurm has started this job again, after a lost node or `scontrol requeue`."""
    count = os.environ.get("SLURM_RESTART_COUNT", "")
    return int(count) if count.isdecimal() else 0


def node_lists(env: Mapping[str, str]) -> list[tuple[str, int | None]]:
    """Return Slurm's short names of the nodes, with the group of each in a heterogeneous job."""
    size = env.get("SLURM_HET_SIZE", "")
    if size.isdecimal():
        return [(env.get(f"SLURM_JOB_NODELIST_HET_GROUP_{group}", ""), group) for group in range(int(size))]
    return [(env.get("SLURM_JOB_NODELIST", ""), None)]


def _allocated_slots(env: Mapping[str, str]) -> Iterator[tuple[int, int | None]]:
    for _, group in node_lists(env):
        suffix = "" if group is None else f"_HET_GROUP_{group}"
        count = int(env.get(f"SLURM_JOB_NUM_NODES{suffix}") or 1)
        tasks = [
            int(tasks)
            for tasks, times in _TASKS.findall(env.get(f"SLURM_TASKS_PER_NODE{suffix}", ""))
            for _ in range(int(times or 1))
        ]
        # Where no tasks were asked for, Slurm gives the number of cores here; within a step, as of `srun --pty bash`,
        # the tasks of the step.
        is_asked = any(f"{name}{suffix}" in env for name in ("SLURM_NTASKS", "SLURM_NTASKS_PER_NODE"))
        for slots in tasks if is_asked and len(tasks) == count else [1] * count:
            yield slots, group
