"""Labs in tests: whether this machine can build one, and whether a test left part of one behind."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from shoal_lab import state as lab_state
from shoal_lab.errors import LabError
from shoal_lab.kernel import find_features
from shoal_lab.lab import Lab
from shoal_lab.processes import first_process, holders, is_dead
from shoal_lab.spec import SWITCH, make_spec
from tests.support.needs import need_library, need_tool
from tests.support.waiting import wait_until

_GRACE_S = 5.0
_COMMAND_TIMEOUT_S = 90
_count = itertools.count()


def need_lab() -> None:
    """Skip the test if no lab can be built; fail it with SHOAL_REQUIRE_ALL=1."""
    need_tool("nft")
    try:
        find_features()
    except LabError as error:
        if os.environ.get("SHOAL_REQUIRE_ALL") == "1":
            pytest.fail(str(error))
        pytest.skip(error.seen)


def new_name() -> str:
    """Return a unique name: other labs of this user may run at the same time."""
    return f"test-{os.getpid()}-{next(_count)}"


@dataclass
class Traces:
    """The parts of a lab, recorded while it runs, to search for them afterwards.

    The kernel reuses the number of a deleted namespace, perhaps for another lab. A namespace of this lab lives as long
    as its first process, which is older than the record.
    """

    name: str
    namespaces: set[str] = field(default_factory=set)
    noted_ticks: float = 0.0

    def note(self) -> None:
        folder = lab_state.lab_folder(self.name)
        state = lab_state.read_state(self.name)
        for node in (SWITCH, *(node.name for node in state.spec.nodes)) if state else ():
            if pid := first_process(folder, node):
                own = (Path(f"/proc/{pid}/ns/{kind}") for kind in ("net", "pid", "uts", "mnt"))
                self.namespaces |= {str(path.readlink()) for path in own}
        self.noted_ticks = float(Path("/proc/uptime").read_text().split()[0]) * os.sysconf("SC_CLK_TCK")

    def found(self) -> list[str]:
        lab = Lab(self.name)
        return [
            *(f"process {pid}" for pid in holders(lab.folder)),
            *(f"folder {path}" for path in lab.places if path.exists()),
            *(f"namespace {name}" for name in self.namespaces & living_namespaces(self.noted_ticks)),
        ]


def living_namespaces(before_ticks: float) -> set[str]:
    """Return the namespaces of processes started before that moment, in the kernel's ticks since boot."""
    namespaces = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            started_ticks = int((process / "stat").read_text().rpartition(")")[2].split()[19])
            if started_ticks <= before_ticks and not is_dead(int(process.name)):
                namespaces |= {str(path.readlink()) for path in (process / "ns").iterdir()}
    return namespaces - {str(path.readlink()) for path in Path("/proc/self/ns").iterdir()}


def new_labs(before: Set[str]) -> set[str]:
    """Return labs that did not exist before, without those of other sessions: neither the builder of such a lab nor its
    processes have the cache folder of this session in their environment."""
    return {name for name in lab_state.list_labs() if name not in before and not _is_foreign(name)}


def _is_foreign(name: str) -> bool:
    builder = re.search(r"-(\d+)", name)
    pids = [*([int(builder[1])] if builder else []), *holders(lab_state.lab_folder(name))]
    environments = [variables for pid in pids if (variables := _environment(pid))]
    mark = f"XDG_CACHE_HOME={os.environ['XDG_CACHE_HOME']}".encode()
    return bool(environments) and not any(mark in variables for variables in environments)


def _environment(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes()
    return b""


def assert_gone(traces: Traces) -> None:
    wait_until(lambda: not traces.found(), _GRACE_S, why=lambda: f"lab {traces.name} left {traces.found()}")


@contextlib.contextmanager
def running_lab(
    count: int,
    link: str | None = "1gbit",
    cpu: str | None = None,
    sshd: bool = False,
    delay: str | None = None,
    memory: str | None = None,
) -> Iterator[Lab]:
    """Run a lab and check afterwards that it is gone, including its interfaces on the host."""
    need_lab()
    before = interfaces()
    lab = Lab.build(make_spec(count, name=new_name(), link=link, delay=delay, cpu=cpu, memory=memory, sshd=sshd))
    traces = Traces(lab.name)
    traces.note()
    own = {SWITCH, *(node.name for node in lab.nodes)}
    try:
        assert len(traces.namespaces) >= 3 * count, "the lab's namespaces were not recorded"
        yield lab
    finally:
        lab.close()
    assert_gone(traces)
    assert not (interfaces() - before) & own


def run_on(lab: Lab, node: str, *argv: str, **variables: str) -> subprocess.CompletedProcess[str]:
    words, env = lab.command(node, argv), {**os.environ, **variables}
    done = subprocess.run(words, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, env=env)
    assert done.returncode == 0, done.stderr
    return done


@contextlib.contextmanager
def mounted(lab: Lab, node: str, *words: str) -> Iterator[None]:
    """Mount for this node only; the last word is the mount point."""
    run_on(lab, node, "mount", *words)
    try:
        yield
    finally:
        run_on(lab, node, "sh", "-c", 'cd / && umount "$0"', words[-1])


@contextlib.contextmanager
def own_etc(lab: Lab, node: str, copy: Path) -> Iterator[Path]:
    """Give the node its own copy of /etc, without files that an ordinary user may not read."""
    subprocess.run(lab.command(node, ["cp", "-a", "/etc", str(copy)]), capture_output=True, timeout=_COMMAND_TIMEOUT_S)
    with mounted(lab, node, "--bind", str(copy), "/etc"):
        yield copy


@contextlib.contextmanager
def own_clock(lab: Lab, node: str, etc: Path, offset: str) -> Iterator[Path]:
    """Shift the clock of every program of the node with a preloaded library; the yielded file has the offset. The
    library leaves files in /dev/shm, which is a tmpfs of the node."""
    library = need_library("faketime/libfaketime.so.1")
    with mounted(lab, node, "-t", "tmpfs", "tmpfs", "/dev/shm"), own_etc(lab, node, etc):
        clock = etc / "faketimerc"
        clock.write_text(f"{offset}\n")
        (etc / "ld.so.preload").write_text(f"{library}\n")
        yield clock


def interfaces() -> set[str]:
    return {path.name for path in Path("/sys/class/net").iterdir()}


def as_ordinary_user(argv: list[str]) -> list[str]:
    """Run as an ordinary user with Debian's PATH. As root, become `nobody` with the right to read all files: the
    interpreter may be in root's home."""
    clean = ["env", "-u", "XDG_RUNTIME_DIR", "PYTHONDONTWRITEBYTECODE=1", "PATH=/usr/local/bin:/usr/bin:/bin", *argv]
    if os.geteuid() != 0:
        return clean
    reading = (
        "--inh-caps=-all,+dac_read_search",
        "--ambient-caps=+dac_read_search",
        "--bounding-set=-all,+dac_read_search",
    )
    return [need_tool("setpriv"), "--reuid=65534", "--regid=65534", "--clear-groups", *reading, *clean]


def shoal(*words: str) -> list[str]:
    return [sys.executable, "-m", "shoal", *words]
