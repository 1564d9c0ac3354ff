"""Labs in tests: may this machine build one, and did a test leave anything of one behind?"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from shoal.cluster.lab import state as lab_state
from shoal.cluster.lab.commands import read_groups
from shoal.cluster.lab.kernel import find_features
from shoal.cluster.lab.lab import Lab, build_lab
from shoal.cluster.lab.processes import first_process, holders
from shoal.cluster.lab.spec import SWITCH, make_spec
from shoal.errors import ShoalError
from shoal.host.proc import is_dead
from tests.support.needs import need_library, need_tool

_GRACE_S = 5.0
_PATIENCE_S = 90
_count = itertools.count()


def need_lab() -> None:
    """Skips by name where no lab can be built; where everything is promised, that is a failure."""
    need_tool("nft")
    try:
        find_features()
    except ShoalError as error:
        if os.environ.get("SHOAL_REQUIRE_ALL") == "1":
            pytest.fail(error.render())
        pytest.skip(error.seen)


def new_name() -> str:
    """Nobody else's: other labs of this user go on beside ours."""
    return f"test-{os.getpid()}-{next(_count)}"


@dataclass
class Traces:
    """What a lab consists of, noted while it stands, so that it can be looked for afterwards.

    The kernel gives the number of a namespace that is gone to the next one, perhaps of another lab. A namespace of ours
    lives as long as its first process, which is older than the note.
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
        folder = lab_state.lab_folder(self.name)
        groups = [group.of_lab(self.name) for group in read_groups().all()]
        return [
            *(f"process {pid}" for pid in holders(folder)),
            *(f"folder {path}" for path in (folder, *groups) if path.exists()),
            *(f"namespace {each}" for each in self.namespaces & living_namespaces(self.noted_ticks)),
        ]


def living_namespaces(before_ticks: float) -> set[str]:
    """Of processes that were started before that moment, in the kernel's ticks since it was booted."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            started_ticks = int((process / "stat").read_text().rpartition(")")[2].split()[19])
            if started_ticks <= before_ticks and not is_dead(int(process.name)):
                found |= {str(path.readlink()) for path in (process / "ns").iterdir()}
    return found - {str(path.readlink()) for path in Path("/proc/self/ns").iterdir()}


def new_labs(before: Set[str]) -> set[str]:
    """Labs that were not there before, those of other sessions left out: neither who built such a lab nor what runs in
    it has the cache folder of this session in its environment."""
    return {name for name in lab_state.list_labs() if name not in before and not _is_foreign(name)}


def _is_foreign(name: str) -> bool:
    builder = re.search(r"-(\d+)", name)
    pids = [*([int(builder[1])] if builder else []), *holders(lab_state.lab_folder(name))]
    environments = [found for pid in pids if (found := _environment(pid))]
    mark = f"XDG_CACHE_HOME={os.environ['XDG_CACHE_HOME']}".encode()
    return bool(environments) and not any(mark in each for each in environments)


def _environment(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes()
    return b""


def assert_gone(traces: Traces) -> None:
    deadline = time.monotonic() + _GRACE_S
    while left := traces.found():
        assert time.monotonic() < deadline, f"lab {traces.name} left {left}"
        time.sleep(0.02)


@contextlib.contextmanager
def standing_lab(
    count: int, link: str | None = "1gbit", cpu: str | None = None, sshd: bool = False, delay: str | None = None
) -> Iterator[Lab]:
    """Up, and afterwards provably gone; interfaces of the host included, by the names that this lab uses."""
    need_lab()
    before = interfaces()
    lab = build_lab(make_spec(count, name=new_name(), link=link, delay=delay, cpu=cpu, sshd=sshd))
    traces = Traces(lab.name)
    traces.note()
    own = {SWITCH, *(node.name for node in lab.nodes)}
    try:
        assert len(traces.namespaces) >= 3 * count, "a lab's namespaces were not seen"
        yield lab
    finally:
        lab.close()
    assert_gone(traces)
    assert not (interfaces() - before) & own


def run_on(lab: Lab, node: str, *argv: str, **variables: str) -> subprocess.CompletedProcess[str]:
    words, env = lab.command(node, argv), {**os.environ, **variables}
    done = subprocess.run(words, capture_output=True, text=True, timeout=_PATIENCE_S, env=env)
    assert done.returncode == 0, done.stderr
    return done


@contextlib.contextmanager
def mounted(lab: Lab, node: str, *words: str) -> Iterator[None]:
    """`words` end with the place, which nobody but this node sees changed."""
    run_on(lab, node, "mount", *words)
    try:
        yield
    finally:
        run_on(lab, node, "sh", "-c", 'cd / && umount "$0"', words[-1])


@contextlib.contextmanager
def own_etc(lab: Lab, node: str, copy: Path) -> Iterator[Path]:
    """A copy of /etc for the node alone; what an ordinary user may not read is missing from it."""
    subprocess.run(lab.command(node, ["cp", "-a", "/etc", str(copy)]), capture_output=True, timeout=_PATIENCE_S)
    with mounted(lab, node, "--bind", str(copy), "/etc"):
        yield copy


@contextlib.contextmanager
def own_clock(lab: Lab, node: str, etc: Path, offset: str) -> Iterator[Path]:
    """Every program of the node believes what a preloaded library tells it; the file says what. The library leaves
    files in /dev/shm behind, which go with it."""
    library = need_library("faketime/libfaketime.so.1")
    with mounted(lab, node, "-t", "tmpfs", "tmpfs", "/dev/shm"), own_etc(lab, node, etc):
        clock = etc / "faketimerc"
        clock.write_text(f"{offset}\n")
        (etc / "ld.so.preload").write_text(f"{library}\n")
        yield clock


def interfaces() -> set[str]:
    return {path.name for path in Path("/sys/class/net").iterdir()}


def as_ordinary_user(argv: list[str]) -> list[str]:
    """With the PATH that Debian gives one. As root, become `nobody`, who may still read: the interpreter may live in
    root's home."""
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
