"""Whether a training fits into the memory of its machines, decided before a rank is started."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shoal.cluster.node import Node
from shoal.config.load import build_config
from shoal.config.schema import Config
from shoal.cost import memory
from shoal.cost.memory import PROCESS_BYTES
from shoal.cost.strategy import SyncStrategy, strategy_of_config
from shoal.cost.workload import Workload, workload_of
from shoal.errors import ConfigError
from shoal.launch.memory_check import check_memory

GB = 1_000_000_000
# GPT-2 small keeps 124,439,808 parameters four times: 1.99 GB.
STATE = 16 * 124_439_808


def gpt2(*sets: str) -> Config:
    return build_config("gpt2-124m", sets=["train.global_batch=40", "train.micro_batch=4", *sets])


def machines(*free_bytes: float | None, slots: int = 1) -> list[Node]:
    node = Node("node", "10.0.0.1", "eth0", slots, 4, cpu_only=True)
    return [
        replace(node, name=f"node{number}", free_memory_bytes=size if size is None else int(size))
        for number, size in enumerate(free_bytes, start=1)
    ]


def test_a_model_that_fits_nowhere_is_refused_with_need_and_free_memory() -> None:
    with pytest.raises(ConfigError) as refused:
        check_memory(gpt2(), machines(GB, 8 * GB, GB / 2))
    assert refused.value.seen == "gpt2-124m does not fit into the memory of node1 and node3"
    assert "every rank keeps 1.99 GB (weights 498 MB, gradients 498 MB, moments 996 MB)" in refused.value.why
    assert refused.value.why.endswith("1 GB on node1, 500 MB on node3")
    assert refused.value.fix == "train a smaller model, or on machines with more memory"


def test_the_ranks_of_a_machine_share_its_memory() -> None:
    assert check_memory(gpt2(), machines(20 * GB, 20 * GB, slots=2)) == ""
    with pytest.raises(ConfigError, match="memory of node2"):
        check_memory(gpt2(), machines(20 * GB, 1.9 * STATE, slots=2))


def test_an_estimate_of_activations_only_warns_and_names_a_micro_batch_that_fits() -> None:
    free = memory.needed(*_workload(gpt2()), 2, 2).total / memory.USABLE + 1e6
    warning = check_memory(gpt2(), machines(8 * GB, free))
    assert warning.startswith("memory may not suffice: a rank takes about ")
    assert f"{free / 1e9:.2f} GB on node2 (--micro-batch 2 needs" in warning
    # Room for three sequences is no room for a micro-batch of three, which does not divide the batch.
    three = memory.needed(*_workload(gpt2()), 3, 2).total / memory.USABLE + 1e6
    assert "--micro-batch 2 needs" in check_memory(gpt2(), machines(8 * GB, three))
    tiny = check_memory(gpt2(), machines(STATE + PROCESS_BYTES / 2, 8 * GB))
    assert tiny
    assert "--sync zero2 --micro-batch 1 needs" in tiny


def _workload(config: Config) -> tuple[Workload, SyncStrategy]:
    return workload_of(config), strategy_of_config(config.sync)


def test_the_sync_method_that_divides_least_among_those_that_fit_is_named() -> None:
    sets = ["train.global_batch=4", "train.micro_batch=1", "model.seq_len=128", "sync.copies=0"]
    config, fixes = build_config("gpt2-350m", sets=sets), []
    for size in (1.5, 3.5, 4.5, 5.3):
        with pytest.raises(ConfigError) as refused:
            check_memory(config, machines(*[size * GB] * 4))
        fixes.append(refused.value.fix)
    assert fixes[0] == "train a smaller model, or on machines with more memory"
    assert [fix.partition(" needs ")[0] for fix in fixes[1:]] == ["--sync zero3", "--sync zero2", "--sync zero1"]
    assert fixes[3].endswith(" GB a rank")


@pytest.mark.parametrize(
    "nodes",
    [
        machines(None, None),
        [replace(node, cpu_only=False) for node in machines(GB, GB)],
    ],
)
def test_what_is_not_known_is_not_refused(nodes: list[Node]) -> None:
    """The memory of a machine that was not asked yet, and whether a rank computes on a GPU."""
    assert check_memory(gpt2(), nodes) == ""


def test_the_device_of_each_rank_decides() -> None:
    with_gpu = [replace(node, cpu_only=False) for node in machines(GB, GB)]
    assert check_memory(gpt2("train.device=cuda"), machines(GB, GB)) == ""
    assert check_memory(gpt2("run.devices=cuda/auto"), with_gpu) == ""
    with pytest.raises(ConfigError, match="memory of node2"):
        check_memory(gpt2("run.devices=cuda/cpu"), with_gpu)


def test_a_vocabulary_that_is_not_known_yet_is_counted_as_small(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    sets = [f"data.path={text}", "data.tokenizer=bpe", "data.bpe_vocab=65536", "model.width=64", "model.layers=1"]
    config = build_config("grammar", sets=[*sets, "model.heads=1"])
    # With 65,536 pieces the embedding alone takes 67 MB.
    assert "does not fit" not in check_memory(config, machines(60e6, 60e6))
