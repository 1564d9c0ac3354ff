"""Lists of processors as the kernel writes them, and what ranks get from the launcher."""

from __future__ import annotations

import pytest

from shoal.cluster.node import Rendezvous, local_node
from shoal.config.schema import RunConfig
from shoal.host.proc import parse_cpu_list
from shoal.launch.plan import KEEP_MEMORY, plan_ranks, plan_script


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("0-3,8\n", {0, 1, 2, 3, 8}),
        ("5", {5}),
        ("", set()),
        ("\n", set()),
        ("zero", set()),
        ("1-", {1}),
        ("3-x", set()),
    ],
)
def test_cpu_lists_of_the_kernel_are_parsed(text: str, cpus: set[int]) -> None:
    assert parse_cpu_list(text) == cpus


def test_ranks_keep_freed_memory_and_scripts_get_no_allocator_settings() -> None:
    nodes, rendezvous = [local_node(2)], Rendezvous("127.0.0.1", 1)
    for launcher in ("shoal", "torchrun", "spawn"):
        run = RunConfig(launcher=launcher)
        for command in plan_ranks(run, lambda node: "runs/x", nodes, rendezvous, resume=False):
            assert command.env["MIMALLOC_PURGE_DELAY"] == "-1"
    for command in plan_script(RunConfig(), ["script.py"], nodes, rendezvous):
        assert not command.env.keys() & KEEP_MEMORY.keys()
