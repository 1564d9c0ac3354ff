"""A node with a memory limit: what runs there sees it, and is killed above it.

Exercises `shoal lab`, host.memory.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator

import pytest

from shoal_lab.lab import Lab, Node
from tests.support.labs import running_lab

LIMIT_MB = 200
_READ = """
import json
from shoal.host.memory import available_bytes, count_oom_kills, memory_limit_bytes, total_bytes
print(json.dumps([memory_limit_bytes(), total_bytes(), available_bytes(), count_oom_kills()]))
"""


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with running_lab(2, memory=f"{LIMIT_MB}mb/none") as built:
        if built.state.groups.memory is None:
            pytest.skip("no control groups for memory here")
        yield built


def run_python(node: Node, code: str) -> tuple[int, str]:
    done = node.run(sys.executable, "-c", code, timeout_s=60)
    return done.returncode, done.stdout


def fill(node: Node, size_mb: int) -> int:
    """Return the exit code of a process that writes to this much memory."""
    # b"x" * size writes to every page.
    return run_python(node, f"print(len(b'x' * {size_mb * 1_000_000}))")[0]


def read_memory(node: Node) -> list[int]:
    """Return the limit, the total, what is available, and how often the kernel has killed."""
    code, text = run_python(node, _READ)
    assert code == 0
    return [size or 0 for size in json.loads(text)]


def test_a_process_above_the_limit_of_its_node_is_killed_and_counted(lab: Lab) -> None:
    limited, unlimited = lab.nodes
    assert fill(limited, 50) == 0
    kills = read_memory(limited)[3]
    assert fill(limited, 400) == -signal.SIGKILL
    assert read_memory(limited)[3] == kills + 1
    assert fill(unlimited, 400) == 0


def test_the_limit_is_seen_on_its_node_only(lab: Lab) -> None:
    (limit, total, available, _), (_, other_total, _, _) = map(read_memory, lab.nodes)
    # The kernel rounds down to whole pages.
    assert LIMIT_MB * 1_000_000 - 65536 < limit == total <= LIMIT_MB * 1_000_000
    assert 0 < available < limit
    assert other_total > limit


def test_a_limit_can_be_changed_and_lasts_over_a_restart(lab: Lab) -> None:
    node = lab.node("node1")
    node.set_memory(1_000_000_000)
    try:
        assert fill(node, 400) == 0
        node.set_memory(LIMIT_MB * 1_000_000)
        node.kill()
        node.restart()
        assert fill(node, 400) == -signal.SIGKILL
        node.set_memory(None)
        assert fill(node, 400) == 0
        assert node.spec.memory_bytes is None
    finally:
        node.set_memory(LIMIT_MB * 1_000_000)
