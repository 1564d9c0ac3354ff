"""Doctor's facts and findings about GPUs, from texts that nvidia-smi and the kernel write. Nothing is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.host.facts import cuda_build, torch_install_command
from shoal.tools.doctor.checks.gpu import chosen_names, visible_gpus
from shoal.tools.doctor.collect import gpu as collector
from shoal.tools.doctor.facts import ClusterFacts, Severity
from tests.support.doctor_facts import complaints, gpu, gpu_card, machine, nodes, only, remarks, scene

# Texts as the programs write them

HEADER_535 = """\
Tue Nov  3 10:12:44 2026
+---------------------------------------------------------------------------------------+
| NVIDIA-SMI 535.183.01             Driver Version: 535.183.01   CUDA Version: 12.2     |
|-----------------------------------------+----------------------+----------------------+
"""
HEADER_610 = """\
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 610.43.02              KMD Version: 610.43.02     CUDA UMD Version: 13.3     |
+-----------------------------------------+------------------------+----------------------+
"""
QUERY = """\
0, GPU-6c3f4a1e-0b7a-5d0e-9a53-1f1c2b3d4e5f, NVIDIA H200, 143771, 143154, Default
1, GPU-11111111-0b7a-5d0e-9a53-1f1c2b3d4e5f, NVIDIA GeForce RTX 4090, 24564, 312, Exclusive_Process
2, GPU-22222222-0b7a-5d0e-9a53-1f1c2b3d4e5f, NVIDIA GB10, [N/A], [N/A], Default
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (HEADER_535, ("535.183.01", "12.2")),
        (HEADER_610, ("610.43.02", "13.3")),
        ("| NVIDIA-SMI 580.95  Driver Version: 580.95  CUDA Version: N/A |", ("580.95", None)),
        ("No devices were found", (None, None)),
    ],
)
def test_driver_and_cuda_are_read_from_old_and_new_headers(text: str, expected: tuple[str | None, str | None]) -> None:
    assert collector.parse_header(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024\n"
            "GCC version:  gcc version 12.3.0",
            "535.183.01",
        ),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build", "580.95.05"),
        ("", None),
    ],
)
def test_the_driver_is_read_from_proc(text: str, expected: str | None) -> None:
    assert collector.parse_driver(text) == expected


def test_cards_are_read_from_the_query() -> None:
    cards = collector.parse_gpus(QUERY)
    assert [(card["index"], card["name"], card["mode"]) for card in cards] == [
        (0, "NVIDIA H200", "Default"),
        (1, "NVIDIA GeForce RTX 4090", "Exclusive_Process"),
        (2, "NVIDIA GB10", "Default"),
    ]
    assert (cards[0]["total"], cards[0]["free"]) == (143771 << 20, 143154 << 20)
    # A chip that shares the processor's memory reports none.
    assert (cards[2]["total"], cards[2]["free"]) == (None, None)
    assert collector.parse_gpus("No devices were found\n") == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\nhip: Optional[str] = None\n",
            {"version": "2.13.0+cpu", "cuda": None, "hip": None},
        ),
        (
            "__all__ = ['__version__', 'cuda', 'hip']\n__version__ = '2.11.0+cu130'\n"
            "cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n",
            {"version": "2.11.0+cu130", "cuda": "13.0", "hip": None},
        ),
        (
            "__version__ = '2.13.0+rocm7.2'\ncuda: Optional[str] = None\nhip: Optional[str] = '7.2.26015-fc0010cf6a'\n",
            {"version": "2.13.0+rocm7.2", "cuda": None, "hip": "7.2.26015-fc0010cf6a"},
        ),
        ("nothing\n", {}),
    ],
)
def test_the_build_is_read_without_importing_torch(text: str, expected: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "version.py").write_text(text)
    assert collector.torch_build(tmp_path) == expected


def test_the_build_of_this_environment_is_torchs_own() -> None:
    import torch

    build = collector.torch_build()
    assert build == {"version": str(torch.__version__), "cuda": torch.version.cuda, "hip": torch.version.hip}


def test_cards_on_the_bus_are_counted_by_vendor(tmp_path: Path) -> None:
    devices = {
        "0": ("0x10de", "0x030200"),
        "1": ("0x1002", "0x120000"),
        "2": ("0x10de", "0x0c0330"),
        "3": ("0x8086", "0x030000"),
    }
    for name, (vendor, class_) in devices.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_text(vendor + "\n")
        (tmp_path / name / "class").write_text(class_ + "\n")
    assert collector.pci_gpus(tmp_path) == {"nvidia": 1, "amd": 1}
    assert collector.pci_gpus(tmp_path / "none") == {}


def test_amd_cards_are_read_from_the_kernels_topology(tmp_path: Path) -> None:
    for name, simd_count, memory in (("0", 0, 0), ("1", 1216, 206141652992)):
        (tmp_path / name / "mem_banks" / "0").mkdir(parents=True)
        (tmp_path / name / "properties").write_text(
            f"cpu_cores_count 0\nsimd_count {simd_count}\ngfx_target_version 90402\n"
        )
        (tmp_path / name / "mem_banks" / "0" / "properties").write_text(f"heap_type 1\nsize_in_bytes {memory}\n")
    cards = collector.amd(tmp_path)["gpus"]
    assert cards == [{"index": 0, "name": "AMD GPU gfx942", "total": 206141652992}]
    assert collector.amd(tmp_path / "none") == {}


# Findings


def two(first: dict[str, Any], second: dict[str, Any] | None = None, **more: Any) -> ClusterFacts:
    """Return a cluster of two machines with these facts about GPUs."""
    return scene({"gpu": first, **more}, {"gpu": second or gpu()}, count=2)


def test_healthy_gpus_give_no_complaints() -> None:
    assert complaints(two(gpu())) == []


@pytest.mark.parametrize(
    ("cuda", "build"), [("13.0", "cu130"), ("14.1", "cu130"), ("12.2", "cu126"), ("11.8", None), (None, "cu130")]
)
def test_the_build_to_install_follows_the_driver(cuda: str | None, build: str | None) -> None:
    assert cuda_build(cuda) == build


def test_a_gpu_with_a_cpu_build_gets_the_command_that_installs_the_right_one() -> None:
    cpu = {"version": "2.13.0+cpu", "cuda": None, "hip": None}
    found = scene({"gpu": gpu(torch=cpu), "machine": machine()}, count=1)
    finding = only(complaints(found))
    assert (finding.id, finding.severity) == ("gpu.torch", Severity.WARNING)
    assert (
        "2 × NVIDIA H200 (driver 580.95.05, CUDA up to 13.0), but torch 2.13.0+cpu is a CPU build" in finding.evidence
    )
    assert finding.fix == torch_install_command("/env/bin/python", "2.13.0", "cu130")
    assert finding.fix == (
        "/env/bin/python -m pip install torch==2.13.0+cu130 --index-url https://download.pytorch.org/whl/cu130"
    )


def test_a_build_newer_than_the_driver_is_named_with_the_one_that_it_runs() -> None:
    old = gpu()["nvidia"] | {"driver": "535.183.01", "cuda": "12.2"}
    finding = only(complaints(scene({"gpu": gpu(nvidia=old)}, count=1)))
    assert "torch 2.13.0+cu130 is for CUDA 13.0; driver 535.183.01, CUDA up to 12.2" in finding.evidence
    assert "torch==2.13.0+cu126" in finding.fix
    # The same major version is enough.
    minor = {"version": "2.13.0+cu126", "cuda": "12.6", "hip": None}
    assert complaints(scene({"gpu": gpu(nvidia=old, torch=minor)}, count=1)) == []


@pytest.mark.parametrize(("total", "severity"), [(192 << 30, Severity.WARNING), (512 << 20, Severity.INFO)])
def test_an_amd_card_needs_the_rocm_build(total: int, severity: Severity) -> None:
    card = {"index": 0, "name": "AMD Instinct MI300X", "total": total}
    facts = gpu(nvidia={}, pci={"amd": 1}, amd={"driver": "6.12", "gpus": [card], "may_open": True})
    hip = {"version": "2.13.0+rocm7.2", "cuda": None, "hip": "7.2.26015"}
    assert complaints(scene({"gpu": {**facts, "torch": hip}}, count=1)) == []
    found = scene({"gpu": facts}, count=1)
    finding = only([*complaints(found), *remarks(found, "gpu.torch")])
    assert (finding.id, finding.severity) == ("gpu.torch", severity)
    assert "AMD Instinct MI300X (ROCm's /dev/kfd), but torch 2.13.0+cu130 is for CUDA 13.0" in finding.evidence
    assert "torch==2.13.0+rocm7.2 --index-url https://download.pytorch.org/whl/rocm7.2" in finding.fix
    closed = {**facts, "torch": hip, "amd": {**facts["amd"], "may_open": False}}
    finding = only(complaints(scene({"gpu": closed}, count=1)))
    assert (finding.id, finding.fix) == ("gpu.driver", "sudo usermod -aG render,video me")


@pytest.mark.parametrize(
    ("error", "fix"),
    [
        ("Failed to initialize NVML: Driver/library version mismatch", "sudo reboot"),
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", "nvidia-smi"),
    ],
)
def test_a_broken_driver_is_reported_in_its_own_words(error: str, fix: str) -> None:
    broken: dict[str, Any] = {"driver": "580.95.05", "cuda": None, "gpus": [], "error": error}
    finding = only(complaints(scene({"gpu": gpu(nvidia=broken)}, count=1)))
    assert (finding.id, finding.fix) == ("gpu.driver", fix)
    assert error in finding.evidence


def test_a_card_without_a_driver_is_a_remark() -> None:
    found = scene({"gpu": gpu(nvidia={}, pci={"nvidia": 1})}, count=1)
    assert complaints(found) == []
    assert "1 NVIDIA GPU on its PCI bus, but no driver" in only(remarks(found, "gpu.driver")).evidence


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("0,1", (2, "")),
        ("1", (1, "")),
        ("", (0, "")),
        ("-1", (0, "")),
        ("0,-1", (1, "")),
        ("0,7,1", (1, "7")),
        ("GPU-0b,GPU-1b7c", (2, "")),
        ("GPU-9", (0, "GPU-9")),
        ("MIG-6c3f4a1e", (1, "")),
        ("all", (0, "all")),
    ],
)
def test_visible_devices_are_read_as_cuda_reads_them(value: str, expected: tuple[int, str]) -> None:
    assert visible_gpus(value, [gpu_card(0), gpu_card(1)]) == expected


def test_hidden_and_misnamed_gpus_are_reported() -> None:
    wrong = gpu(variables={"CUDA_VISIBLE_DEVICES": "0,7"})
    finding = only(complaints(scene({"gpu": wrong}, count=1)))
    assert (finding.id, finding.severity, finding.fix) == (
        "gpu.visible",
        Severity.WARNING,
        "unset CUDA_VISIBLE_DEVICES",
    )
    assert "names '7', which is none of 2 × NVIDIA H200" in finding.evidence
    hidden = scene({"gpu": gpu(variables={"CUDA_VISIBLE_DEVICES": ""})}, count=1)
    assert complaints(hidden) == []
    finding = only(remarks(hidden, "gpu.visible"))
    assert (finding.evidence, finding.meaning) == (
        "CUDA_VISIBLE_DEVICES='': 0 of 2 GPUs visible",
        "ranks compute on the processor",
    )


def test_full_and_closed_cards_are_reported() -> None:
    cards = [gpu_card(0, free=300 << 20), gpu_card(1, mode="Prohibited")]
    found = scene({"gpu": gpu(nvidia={**gpu()["nvidia"], "gpus": cards})}, count=1)
    full, closed = complaints(found)
    assert (full.id, full.severity) == ("gpu.memory", Severity.WARNING)
    assert "GPU 0 (NVIDIA H200): 315 MB of 151 GB are free" in full.evidence
    assert (closed.id, closed.severity, closed.fix) == ("gpu.mode", Severity.ERROR, "sudo nvidia-smi -i 1 -c DEFAULT")


def test_an_exclusive_card_cannot_be_shared() -> None:
    only_card = {**gpu()["nvidia"], "gpus": [gpu_card(0, mode="Exclusive_Process")]}
    seen = scene({"gpu": gpu(nvidia=only_card)}, count=1)
    assert complaints(seen) == []
    shared = ClusterFacts([nodes(1)[0].__class__("node1", "10.77.0.1", "eth0", 2, 4)], seen.facts, on=seen.on)
    finding = only(complaints(shared))
    assert (finding.id, finding.severity) == ("gpu.mode", Severity.WARNING)
    assert "2 ranks and 1 GPU to share" in only(remarks(shared, "gpu.visible")).evidence


def test_a_small_shared_memory_matters_to_several_gpus() -> None:
    small = {"total": 64 << 20, "free": 64 << 20}
    finding = only(complaints(scene({"gpu": gpu(shared_memory=small)}, count=1)))
    assert (finding.id, finding.evidence) == ("memory.shm", "67.1 MB of 67.1 MB are free in /dev/shm")
    one = gpu(shared_memory=small, nvidia={**gpu()["nvidia"], "gpus": [gpu_card()]})
    assert complaints(scene({"gpu": one}, count=1)) == []


@pytest.mark.parametrize(
    ("other", "severity"),
    [
        ({"version": "2.13.0+cpu", "cuda": None, "hip": None}, Severity.INFO),
        ({"version": "2.13.0+cu126", "cuda": "12.6", "hip": None}, Severity.WARNING),
        ({"version": "2.13.0+rocm7.2", "cuda": None, "hip": "7.2.26015-x"}, Severity.WARNING),
    ],
)
def test_builds_that_differ_between_machines_are_named(other: dict[str, Any], severity: Severity) -> None:
    bare = gpu(nvidia={}, pci={}, torch=other)
    found = two(gpu(), bare)
    finding = only([*remarks(found, "sameness.build"), *complaints(found)])
    assert (finding.id, finding.severity) == ("sameness.build", severity)
    assert "node1: 2.13.0+cu130 (CUDA 13.0); node2: 2.13.0" in finding.evidence


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("eth", ["eth0", "eth1"]),
        ("=eth0", ["eth0"]),
        ("=eth", []),
        ("^docker,lo", ["eth0", "eth1"]),
        ("^=eth0", ["lo", "eth1", "docker0"]),
        ("ib", []),
        ("eth1:1", ["eth1"]),
    ],
)
def test_names_are_chosen_as_nccl_chooses_them(value: str, expected: list[str]) -> None:
    assert chosen_names(value, ["lo", "eth0", "eth1", "docker0"]) == expected


def interfaces() -> dict[str, Any]:
    addresses = {"lo": ["127.0.0.1/8"], "eth0": ["10.77.0.1/24"], "docker0": ["172.17.0.1/16"]}
    return {"interfaces": {name: {"addresses": own} for name, own in addresses.items()}, "routes": {}}


@pytest.mark.parametrize(
    ("value", "severity", "words"),
    [
        ("ib0", Severity.ERROR, "fits no interface; there are lo, eth0, docker0"),
        ("docker", Severity.WARNING, "takes docker0, but the other machines reach this one by eth0 (10.77.0.1)"),
        ("=eth0", Severity.INFO, "NCCL_SOCKET_IFNAME==eth0: eth0"),
    ],
)
def test_the_interface_of_nccl_is_compared_with_those_that_are_there(
    value: str, severity: Severity, words: str
) -> None:
    from shoal.tools.doctor.checks.gpu import check_nccl

    found = two(gpu(variables={"NCCL_SOCKET_IFNAME": value}), network=interfaces())
    finding = only(list(check_nccl(found)))
    assert (finding.id, finding.severity, finding.node) == ("nccl.interface", severity, "node1")
    assert words in finding.evidence
    # Without a GPU no program reads it.
    bare = gpu(variables={"NCCL_SOCKET_IFNAME": value}, nvidia={}, pci={})
    assert list(check_nccl(two(bare, network=interfaces()))) == []


def test_adapters_and_the_level_of_the_log_are_explained() -> None:
    right = {"NCCL_IB_HCA": "mlx5_0:1", "NCCL_DEBUG": "info"}
    found = two(gpu(variables=right, adapters=["mlx5_0", "mlx5_1"]))
    assert complaints(found) == []
    assert only(remarks(found, "nccl.adapter")).evidence == "NCCL_IB_HCA=mlx5_0:1: mlx5_0"
    assert only(remarks(found, "nccl.debug")).fix == ""
    wrong = two(gpu(variables={"NCCL_IB_HCA": "mlx4", "NCCL_DEBUG": "VERBOSE"}))
    finding = only(complaints(wrong))
    assert "NCCL_IB_HCA=mlx4 fits no adapter; this machine has none" in finding.evidence
    assert only(remarks(wrong, "nccl.debug")).fix == "export NCCL_DEBUG=INFO"
