"""Devices in `--on`, and what a cluster says of its ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.cluster.lab import LabSpec
from shoal.cluster.target import LocalSpec, first_nodes, on_first_ranks, parse_on, place_ranks
from shoal.config.load import build_config
from shoal.config.schema import Config
from shoal.errors import ConfigError, UsageError

MIXED = """
[[host]]
host = "tower"
device = "cuda"
slots = 2
[[host]]
host = "laptop"
[[host]]
host = "attic"
device = "cpu"
"""


def placed(*sets: str) -> Config:
    return place_ranks(build_config("grammar", sets=sets))


def test_local_ranks_may_have_devices() -> None:
    assert parse_on("local:2") == LocalSpec(2)
    assert parse_on("local,device=cuda") == LocalSpec(1, ("cuda",))
    assert parse_on("local:3,device=cuda/cpu/auto") == LocalSpec(3, ("cuda", "cpu", "auto"))
    assert placed("run.on=local:2,device=cuda").run.devices == "cuda/cuda"


@pytest.mark.parametrize(
    ("on", "seen", "why"),
    [
        ("local:2,device=gpu", "'gpu' is not a device", "cpu"),
        ("local:2,devices=cpu", "cannot use 'devices=cpu'", "device"),
        ("local:2,link=1gbit", "cannot use 'link=1gbit'", "one setting, their device"),
        ("local:3,device=cuda/cpu", "2 values for 3 ranks", "one for each"),
        ("lab:2,device=cuda", "cannot use 'device=cuda'", "--set run.devices=cuda/cpu"),
        ("local:1,device=", "'' is not a device", "a device is"),
    ],
)
def test_a_wrong_device_is_refused(on: str, seen: str, why: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_on(on)
    assert seen in refused.value.seen
    assert why in refused.value.why
    assert refused.value.fix


def test_a_hosts_file_gives_each_machine_its_device(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts.toml"
    hosts.write_text(MIXED)
    assert placed(f"run.on={hosts}").run.devices == "cuda/cuda/auto/cpu"
    assert placed(f"run.on={hosts}", "run.devices=cuda/cuda/cuda/cpu").run.devices == "cuda/cuda/cuda/cpu"
    hosts.write_text(MIXED.replace("cpu", "tpu"))
    with pytest.raises(ConfigError, match="device='tpu' of host 'attic'"):
        parse_on(str(hosts))


def test_placing_twice_changes_nothing(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts.toml"
    hosts.write_text(MIXED)
    once = placed(f"run.on={hosts}")
    assert place_ranks(once) == once
    assert placed("run.on=local:2").run.devices is None


@pytest.mark.parametrize(
    ("sets", "seen"),
    [
        (
            ["run.on=local:2,device=cuda", "train.device=cpu"],
            "train.device=cpu (--device) and --on local:2,dev",
        ),
        (
            ["run.on=local:2", "run.devices=cuda/cpu", "train.device=cuda"],
            "train.device=cuda (--device) and run.",
        ),
        (["run.on=local:2,device=cuda", "run.devices=cuda/cpu"], "--on local:2,device=cuda and run.devices=cuda/cpu"),
        (["run.on=local:3", "run.devices=cuda/cpu"], "run.devices=cuda/cpu has 2 devices for 3 ranks"),
    ],
)
def test_contradicting_devices_are_refused(sets: list[str], seen: str) -> None:
    with pytest.raises(ConfigError) as refused:
        placed(*sets)
    assert seen in refused.value.seen
    assert refused.value.why
    assert refused.value.fix


def test_the_first_nodes_keep_their_settings(tmp_path: Path) -> None:
    lab = parse_on("lab:3,link=100mbit/1gbit/1gbit,delay=2ms,loss=1%,cpu=1/0.5/none,memory=2gb,slots=2/1/1")
    assert first_nodes(lab, 1, tmp_path) == "lab:1,cpu=1,memory=2gb,slots=2"
    two = first_nodes(lab, 2, tmp_path)
    assert two is not None
    smaller_lab = parse_on(two)
    assert isinstance(lab, LabSpec)
    assert isinstance(smaller_lab, LabSpec)
    assert smaller_lab.nodes == lab.nodes[:2]
    hosts = tmp_path / "hosts.toml"
    hosts.write_text(MIXED)
    smaller = first_nodes(parse_on(str(hosts)), 2, tmp_path)
    assert smaller is not None
    config = build_config("grammar", sets=[f"run.on={hosts}", "run.weights=4/4/2/1", "run.devices=cuda/cuda/cpu/cpu"])
    cut = place_ranks(on_first_ranks(config, smaller)).run
    assert (cut.weights, cut.devices) == ("4/4/2", "cuda/cuda/cpu")
