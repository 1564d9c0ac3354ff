"""The memory that a process may use, from trees of /proc and /sys as kernels write them."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from shoal.host.memory import available_bytes, count_oom_kills, memory_limit_bytes, total_bytes

GB = 1_000_000_000
KB = 1024
UNLIMITED_V1 = "9223372036854771712"
V1 = "sys/fs/cgroup/memory"
V2 = "sys/fs/cgroup"


class Tree:
    """A machine with 16 GB of memory, of which 8 GB are available, and 2 GB of free swap."""

    def __init__(self, root: Path) -> None:
        self.root = root
        sizes = {"MemTotal": 16 * GB, "MemAvailable": 8 * GB, "SwapFree": 2 * GB}
        self.write("proc/meminfo", "".join(f"{name}: {size // KB} kB\n" for name, size in sizes.items()))
        self.write("proc/vmstat", "pgfault 7\noom_kill 41\n")
        (root / "sys").mkdir()

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")

    def group_v2(self, path: str, limit: str, used: int = 0, **files: str) -> None:
        self.write(f"{V2}/{path}/memory.max", limit)
        self.write(f"{V2}/{path}/memory.current", str(used))
        for name, text in files.items():
            self.write(f"{V2}/{path}/memory.{name.replace('_', '.')}", text)

    def group_v1(self, path: str, limit: str, used: int = 0, **files: str) -> None:
        self.write(f"{V1}/{path}/memory.limit_in_bytes", limit)
        self.write(f"{V1}/{path}/memory.usage_in_bytes", str(used))
        for name, text in files.items():
            self.write(f"{V1}/{path}/memory.{name}", text)

    def places(self) -> tuple[Path, Path]:
        return self.root / "sys", self.root / "proc"

    def limit(self) -> int | None:
        return memory_limit_bytes(*self.places())

    def available(self, with_swap: bool = False) -> int:
        return available_bytes(*self.places(), with_swap=with_swap)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_without_a_group_the_memory_is_that_of_the_machine(tree: Tree) -> None:
    assert tree.limit() is None
    assert total_bytes(*tree.places()) == 16 * GB
    assert (tree.available(), tree.available(with_swap=True)) == (8 * GB, 10 * GB)
    assert count_oom_kills(*tree.places()) == 41


def test_a_group_of_version_2_limits_what_is_available_and_its_file_cache_can_be_dropped(tree: Tree) -> None:
    tree.write("proc/self/cgroup", "0::/box/job")
    stat = f"anon {GB}\ninactive_file {GB // 4}\nactive_file {GB // 4}\nshmem {GB // 8}"
    tree.group_v2("box/job", str(2 * GB), 3 * GB // 2, stat=stat, swap_max="0", events="oom 3\noom_kill 2")
    assert (tree.limit(), total_bytes(*tree.places())) == (2 * GB, 2 * GB)
    assert tree.available() == tree.available(with_swap=True) == GB
    assert count_oom_kills(*tree.places()) == 2
    tree.group_v2("box/job", str(2 * GB), 2 * GB, swap_max="max", stat="")
    assert (tree.available(), tree.available(with_swap=True)) == (0, 2 * GB)
    tree.group_v2("box/job", str(2 * GB), 2 * GB, swap_max=str(GB), swap_current=str(GB // 2))
    assert tree.available(with_swap=True) == GB // 2


def test_the_lowest_limit_of_all_parents_counts(tree: Tree) -> None:
    tree.write("proc/self/cgroup", "0::/box/job")
    tree.group_v2("box/job", "max", GB)
    tree.group_v2("box", str(4 * GB), 3 * GB)
    assert (tree.limit(), tree.available()) == (4 * GB, GB)
    tree.group_v2("box/job", str(3 * GB), GB)
    assert (tree.limit(), tree.available()) == (3 * GB, GB), "other groups of the parent use its memory"


def test_a_group_of_version_1_limits_too(tree: Tree) -> None:
    tree.write("proc/self/cgroup", "4:memory:/docker/abc\n1:cpu:/\n0::/")
    files = {"swappiness": "0", "oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 5"}
    stat = f"inactive_file 7\ntotal_inactive_file {GB // 2}\ntotal_active_file 0"
    tree.group_v1("docker/abc", str(2 * GB), GB, stat=stat, **files)
    tree.group_v1("docker", UNLIMITED_V1, 9 * GB)
    assert (tree.limit(), total_bytes(*tree.places())) == (2 * GB, 2 * GB)
    assert tree.available() == tree.available(with_swap=True) == 3 * GB // 2
    assert count_oom_kills(*tree.places()) == 5


def test_in_a_container_the_path_of_its_group_may_be_of_the_host(tree: Tree) -> None:
    tree.write("proc/self/cgroup", "4:memory:/docker/abc")
    tree.group_v1("", str(GB), 0)
    assert tree.limit() == GB


def test_a_limit_above_the_memory_of_the_machine_is_none(tree: Tree) -> None:
    tree.write("proc/self/cgroup", "0::/box")
    tree.group_v2("box", str(64 * GB), 0)
    assert (tree.limit(), tree.available()) == (None, 8 * GB)


def test_a_machine_without_meminfo_is_asked_with_psutil(tmp_path: Path) -> None:
    assert total_bytes(tmp_path, tmp_path) == psutil.virtual_memory().total
    assert available_bytes(tmp_path, tmp_path, with_swap=True) > 0
    assert count_oom_kills(tmp_path, tmp_path) == 0
