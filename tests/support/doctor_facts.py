"""Facts of healthy machines as collectors report them; tests change them."""

from __future__ import annotations

from typing import Any

from shoal.cluster.node import Node
from shoal.tools.doctor.checks import judge
from shoal.tools.doctor.facts import ClusterFacts, Facts, Finding, Severity

ON = "hosts.toml"


def nodes(count: int) -> list[Node]:
    return [Node(f"node{number}", f"10.77.0.{number}", "eth0", 1, 4) for number in range(1, count + 1)]


def machine(**other: Any) -> dict[str, Any]:
    return {
        "system": "Linux",
        "arch": "x86_64",
        "cpu": "Some CPU",
        "avx2": True,
        "python": "3.11.2",
        "executable": "/env/bin/python",
        "torch": "2.13.0+cpu",
        "shoal": "0.1.0",
        "is_root": False,
        "cores": cores(),
        "memory": {"total": 16e9, "available": 8e9, "available_with_swap": 9e9, "swap_used": 0},
        "disks": [disk()],
        **other,
    }


def cores(**other: Any) -> dict[str, Any]:
    usual = {"threads": 8, "physical": 4, "usable": 4, "quota": None, "quota_file": None, "numa_nodes": 1}
    return {**usual, **other}


def gpu(**other: Any) -> dict[str, Any]:
    """Return the facts of a machine with two healthy H200."""
    nvidia = {"driver": "580.95.05", "cuda": "13.0", "gpus": [gpu_card(0), gpu_card(1)], "error": ""}
    return {
        "pci": {"nvidia": 2},
        "nvidia": nvidia,
        "amd": {},
        "torch": {"version": "2.13.0+cu130", "cuda": "13.0", "hip": None},
        "variables": {},
        "shared_memory": {"total": 64 << 30, "free": 64 << 30},
        "adapters": [],
        **other,
    }


def gpu_card(index: int = 0, **other: Any) -> dict[str, Any]:
    memory = {"total": 143771 << 20, "free": 143154 << 20}
    return {"index": index, "uuid": f"GPU-{index}b7c", "name": "NVIDIA H200", **memory, "mode": "Default", **other}


def disk(**other: Any) -> dict[str, Any]:
    purposes = ["temporary files", "runs", "encoded text"]
    return {"path": "/tmp", "for": purposes, "free": 50e9, "files_free": 10**6, "read_only": False, **other}


def names(number: int, **other: Any) -> dict[str, Any]:
    address = f"10.77.0.{number}"
    return {
        "host_name": f"node{number}",
        "means": [address],
        "took_s": 0.001,
        "published": address,
        "reverse": {},
        "in_hosts_file": [address],
        "sources": ["files", "dns"],
        **other,
    }


def processes(**other: Any) -> dict[str, Any]:
    usual = {"user": "me", "has_command": True, "over_ssh": False, "marked": [], "strays": []}
    return {"files": {"soft": 1024, "hard": 4096}, **usual, **other}


def process(pid: int, **other: Any) -> dict[str, Any]:
    return {"pid": pid, "command": "python train.py", "age_s": 65.0, "stopped": False, **other}


def scene(*changes: Facts, count: int = 3, on: str = ON) -> ClusterFacts:
    """Return healthy machines; the n-th argument replaces whole topics of the n-th machine."""
    facts: dict[str, Facts] = {}
    for number, node in enumerate(nodes(count), start=1):
        own = {"machine": machine(), "names": names(number), "processes": processes()}
        clock = {"offset_s": 0.0, "uncertainty_s": 0.001}
        facts[node.name] = {
            "failed": {},
            **own,
            "clock": clock,
            **(changes[number - 1] if number <= len(changes) else {}),
        }
    return ClusterFacts(nodes(count), facts, on=on)


def complaints(seen: ClusterFacts) -> list[Finding]:
    """Return all findings that make doctor fail."""
    return [finding for finding in judge(seen) if finding.severity is not Severity.INFO]


def remarks(seen: ClusterFacts, id_: str) -> list[Finding]:
    return [finding for finding in judge(seen) if finding.id == id_ and finding.severity is Severity.INFO]


def only(findings: list[Finding]) -> Finding:
    (finding,) = findings
    return finding
