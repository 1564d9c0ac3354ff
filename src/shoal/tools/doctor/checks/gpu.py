"""Checks of GPUs: driver, torch's build, which cards are visible and free, shared memory, and NCCL's variables."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence

from shoal.cluster.node import Node
from shoal.host.facts import ROCM_BUILD, cuda_build, public_version, torch_install_command
from shoal.tools.doctor.facts import ClusterFacts, Facts, Finding, Severity, sudo
from shoal.units import format_si, pluralize

# A card with less memory is the graphics of a processor, which torch seldom supports.
_LEAST_CARD_BYTES = 4 << 30
_LEAST_FREE_BYTES, _LEAST_FREE_PART = 2 << 30, 0.1
# NCCL takes tens of MB for each pair of ranks on a machine; a container has 64 MB.
_LEAST_SHARED_BYTES = 512 << 20
_NCCL_LEVELS = ("VERSION", "WARN", "INFO", "TRACE", "ABORT")


def check_driver(cluster: ClusterFacts) -> Iterator[Finding]:
    for node, facts, gpu in cluster.topic("gpu"):
        nvidia, on_bus = gpu["nvidia"], gpu["pci"]
        if nvidia.get("error"):
            mismatch = "mismatch" in nvidia["error"]
            yield Finding(
                "gpu.driver",
                Severity.WARNING,
                node.name,
                f"nvidia-smi does not work: {nvidia['error']}",
                "torch finds no GPU there"
                + ("; the driver was updated and its kernel module was not: restart" if mismatch else ""),
                f"{sudo(facts)}reboot" if mismatch else "nvidia-smi",
                "nvidia-smi",
            )
        elif on_bus.get("nvidia") and not nvidia:
            yield Finding(
                "gpu.driver",
                Severity.INFO,
                node.name,
                f"{pluralize(on_bus['nvidia'], 'NVIDIA GPU')} on its PCI bus, but no driver (no nvidia-smi)",
                "ranks compute on the processor; install NVIDIA's driver, or start the container with --gpus all",
            )
        if (amd := gpu["amd"]) and not amd["may_open"]:
            yield Finding(
                "gpu.driver",
                Severity.WARNING,
                node.name,
                f"{_names(amd['gpus'])}: this user may not open /dev/kfd",
                "torch finds no GPU there; the user must be in the groups render and video, and log in again",
                f"{sudo(facts)}usermod -aG render,video {facts.get('processes', {}).get('user', '$USER')}",
                "groups",
            )


def check_torch_build(cluster: ClusterFacts) -> Iterator[Finding]:
    """Compare torch's build with the GPUs and their driver, and with the other machines."""
    for node, facts, gpu in cluster.topic("gpu"):
        build = gpu["torch"]
        if build and (problem := _build_problem(gpu)):
            evidence, meaning, wanted, severity = problem
            python = facts.get("machine", {}).get("executable", "python3")
            fix = torch_install_command(python, public_version(build["version"]), wanted) if wanted else ""
            yield Finding("gpu.torch", severity, node.name, evidence, meaning, fix)
    yield from _compare_builds(cluster)


def _build_problem(gpu: Facts) -> tuple[str, str, str | None, Severity] | None:
    """Return what is wrong with torch's build: evidence, meaning, the build to install, and how bad it is."""
    build, nvidia, amd = gpu["torch"], gpu["nvidia"], gpu["amd"]
    if cards := nvidia.get("gpus"):
        driver = f"driver {nvidia['driver']}, CUDA up to {nvidia['cuda'] or '?'}"
        wanted = cuda_build(nvidia["cuda"])
        if build["cuda"] is None:
            kind = f"a ROCm build ({build['hip']})" if build["hip"] else "a CPU build"
            meaning = "ranks compute on the processor" + ("" if wanted else "; the driver is too old: update it first")
            return (
                f"{_names(cards)} ({driver}), but torch {build['version']} is {kind}",
                meaning,
                wanted,
                Severity.WARNING,
            )
        if nvidia["cuda"] and _major(build["cuda"]) > _major(nvidia["cuda"]):
            meaning = f"torch finds no GPU: CUDA {_major(build['cuda'])} needs a newer driver. Update the driver" + (
                ", or install the build for this one" if wanted else ""
            )
            return f"torch {build['version']} is for CUDA {build['cuda']}; {driver}", meaning, wanted, Severity.WARNING
    elif (cards := amd.get("gpus")) and build["hip"] is None:
        is_card = max(card["total"] for card in cards) >= _LEAST_CARD_BYTES
        kind = f"for CUDA {build['cuda']}" if build["cuda"] else "a CPU build"
        evidence = f"{_names(cards)} (ROCm's /dev/kfd), but torch {build['version']} is {kind}"
        return evidence, "ranks compute on the processor", ROCM_BUILD, Severity.WARNING if is_card else Severity.INFO
    return None


def _compare_builds(cluster: ClusterFacts) -> Iterator[Finding]:
    builds = {node.name: gpu["torch"] for node, _, gpu in cluster.topic("gpu") if gpu["torch"]}
    kinds = {name: _kind(build) for name, build in builds.items()}
    if len(set(kinds.values())) < 2:
        return
    with_gpu = {kind for kind in kinds.values() if kind != "CPU"}
    if len(with_gpu) > 1:
        meaning = (
            "NCCL needs the same version on all machines, and does not speak with AMD's RCCL: NCCL fails, or gradients "
            "go by gloo. Install one build everywhere"
        )
        severity = Severity.WARNING
    else:
        meaning = "they train together by gloo, through pinned memory; NCCL is used where every rank has a GPU"
        severity = Severity.INFO
    evidence = "; ".join(f"{name}: {builds[name]['version']} ({kind})" for name, kind in kinds.items())
    yield Finding("sameness.build", severity, "", f"builds of torch differ: {evidence}", meaning)


def _kind(build: Facts) -> str:
    if build["hip"]:
        return f"ROCm {'.'.join(build['hip'].split('.')[:2])}"
    return f"CUDA {build['cuda']}" if build["cuda"] else "CPU"


def check_visible(cluster: ClusterFacts) -> Iterator[Finding]:
    for node, _, gpu in cluster.topic("gpu"):
        cards, variables = gpu["nvidia"].get("gpus") or gpu["amd"].get("gpus") or [], gpu["variables"]
        names = (
            ["CUDA_VISIBLE_DEVICES"] if gpu["nvidia"].get("gpus") else ["HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"]
        )
        count = len(cards)
        for name in names if cards else ():
            if name not in variables:
                continue
            count, unknown = visible_gpus(variables[name], cards)
            setting = f"{name}={variables[name]!r}"
            if unknown:
                yield Finding(
                    "gpu.visible",
                    Severity.WARNING,
                    node.name,
                    f"{setting} names {unknown!r}, which is none of {_names(cards)}",
                    f"torch stops reading there and sees {pluralize(count, 'GPU')}; numbers count from 0",
                    f"unset {name}",
                )
            elif count < len(cards):
                meaning = "ranks see no others" if count else "ranks compute on the processor"
                evidence = f"{setting}: {count} of {pluralize(len(cards), 'GPU')} visible"
                yield Finding("gpu.visible", Severity.INFO, node.name, evidence, meaning, f"unset {name}")
        if 0 < count < node.slots:
            evidence = f"{pluralize(node.slots, 'rank')} and {pluralize(count, 'GPU')} to share"
            meaning = "with --device auto all its ranks compute on the processor, with --device cuda they share GPUs"
            yield Finding("gpu.visible", Severity.INFO, node.name, evidence, meaning)


def visible_gpus(value: str, cards: Sequence[Facts]) -> tuple[int, str]:
    """Return how many cards CUDA shows for a value of CUDA_VISIBLE_DEVICES, and the first entry that names none.

    CUDA ignores everything from that entry on. -1 hides the rest on purpose.
    """
    entries = [entry.strip() for entry in value.split(",")] if value.strip() else []
    for number, entry in enumerate(entries):
        is_index = entry.isdigit() and int(entry) < len(cards)
        is_uuid = entry.startswith(("GPU-", "MIG-")) and (
            entry.startswith("MIG-") or any(card.get("uuid", "").startswith(entry) for card in cards)
        )
        if not is_index and not is_uuid:
            return number, "" if entry == "-1" else entry
    return len(entries), ""


def check_cards(cluster: ClusterFacts) -> Iterator[Finding]:
    """Check each card's free memory, and whether its compute mode lets ranks in."""
    for node, facts, gpu in cluster.topic("gpu"):
        cards = gpu["nvidia"].get("gpus", [])
        for card in cards:
            free, total = card["free"], card["total"] or 0
            if free is not None and free < max(_LEAST_FREE_BYTES, _LEAST_FREE_PART * total):
                yield Finding(
                    "gpu.memory",
                    Severity.WARNING,
                    node.name,
                    f"GPU {card['index']} ({card['name']}): {format_si(free, 'B')} of {format_si(total, 'B')} are free",
                    "another program holds the rest, perhaps a rank of an earlier run; a training may not fit",
                    "nvidia-smi --query-compute-apps=pid,name,used_memory --format=csv",
                    "nvidia-smi",
                )
            is_closed = card["mode"] == "Prohibited"
            if is_closed or (card["mode"].startswith("Exclusive") and node.slots > len(cards)):
                meaning = (
                    "no program may compute on it" if is_closed else "only one process may use it, and ranks share it"
                )
                yield Finding(
                    "gpu.mode",
                    Severity.ERROR if is_closed else Severity.WARNING,
                    node.name,
                    f"GPU {card['index']} ({card['name']}) has compute mode {card['mode']}",
                    meaning,
                    f"{sudo(facts)}nvidia-smi -i {card['index']} -c DEFAULT",
                    "nvidia-smi",
                )


def check_shared_memory(cluster: ClusterFacts) -> Iterator[Finding]:
    for node, facts, gpu in cluster.topic("gpu"):
        memory, cards = gpu["shared_memory"], len(_cards(gpu))
        if cards and memory and memory["free"] < _LEAST_SHARED_BYTES:
            yield Finding(
                "memory.shm",
                Severity.WARNING if cards > 1 else Severity.INFO,
                node.name,
                f"{format_si(memory['free'], 'B')} of {format_si(memory['total'], 'B')} are free in /dev/shm",
                "NCCL connects the GPUs of one machine through it, and a DataLoader's workers pass batches by it: both "
                "fail when it is full. In a container: docker run --shm-size=8g, or --ipc=host",
                f"{sudo(facts)}mount -o remount,size=8G /dev/shm",
                "df -h /dev/shm",
            )


def check_nccl(cluster: ClusterFacts) -> Iterator[Finding]:
    """Explain NCCL's variables where GPUs would read them, and name those that are wrong there."""
    for node, facts, gpu in cluster.topic("gpu"):
        variables = gpu["variables"]
        if not _cards(gpu):
            continue
        if value := variables.get("NCCL_SOCKET_IFNAME"):
            yield _judge_interfaces(cluster, node, facts, value)
        if value := variables.get("NCCL_IB_HCA"):
            yield _judge_adapters(node, gpu["adapters"], value)
        if level := variables.get("NCCL_DEBUG"):
            known = level.upper() in _NCCL_LEVELS
            yield Finding(
                "nccl.debug",
                Severity.INFO,
                node.name,
                f"NCCL_DEBUG={level}" + ("" if known else ", which is not a level of NCCL"),
                "what NCCL writes to each rank's log: VERSION, WARN (only errors), INFO (which interface and adapter "
                "it takes: the first thing to look at when it hangs), TRACE",
                "" if known else "export NCCL_DEBUG=INFO",
            )


def _judge_interfaces(cluster: ClusterFacts, node: Node, facts: Facts, value: str) -> Finding:
    interfaces = list(facts.get("network", {}).get("interfaces", {}))
    chosen = chosen_names(value, interfaces)
    id_, seen = "nccl.interface", f"NCCL_SOCKET_IFNAME={value}"
    syntax = "NCCL takes the interfaces whose names begin so (`=eth0`: exactly this one, `^docker`: all but these)"
    if interfaces and not chosen:
        return Finding(
            id_,
            Severity.ERROR,
            node.name,
            f"{seen} fits no interface; there are {', '.join(interfaces)}",
            f"{syntax}, and fails without one. shoal sets it for its own ranks where it knows the interface",
            "unset NCCL_SOCKET_IFNAME",
        )
    own = cluster.interface_with(node, node.address).get("name")
    if len(cluster.nodes) > 1 and own and own not in chosen:
        return Finding(
            id_,
            Severity.WARNING,
            node.name,
            f"{seen} takes {', '.join(chosen)}, but the other machines reach this one by {own} ({node.address})",
            f"{syntax}. It may hang until its timeout, if the others do not reach that interface",
            f"export NCCL_SOCKET_IFNAME={own}",
        )
    return Finding(id_, Severity.INFO, node.name, f"{seen}: {', '.join(chosen) or 'not examined'}", syntax)


def _judge_adapters(node: Node, adapters: Sequence[str], value: str) -> Finding:
    chosen = chosen_names(value, adapters)
    syntax = "NCCL takes the InfiniBand or RoCE adapters whose names begin so (`=mlx5_1`: exactly, `^`: all but these)"
    there = f"there are {', '.join(adapters)}" if adapters else "this machine has none"
    if not chosen:
        return Finding(
            "nccl.adapter",
            Severity.WARNING,
            node.name,
            f"NCCL_IB_HCA={value} fits no adapter; {there} (/sys/class/infiniband)",
            f"{syntax}; without one it sends by TCP, several times as slow",
            "unset NCCL_IB_HCA",
        )
    return Finding("nccl.adapter", Severity.INFO, node.name, f"NCCL_IB_HCA={value}: {', '.join(chosen)}", syntax)


def chosen_names(value: str, names: Sequence[str]) -> list[str]:
    """Return the names that NCCL takes: `eth,ib` by prefix, `=eth0` exactly, `^docker,lo` all others; ports (`:1`) are
    left out."""
    excludes, rest = value.startswith("^"), value.removeprefix("^")
    suffix, rest = ("", rest[1:]) if rest.startswith("=") else ("*", rest)
    patterns = [entry.strip().partition(":")[0] + suffix for entry in rest.split(",") if entry.strip()]
    return [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns) != excludes]


def _cards(gpu: Facts) -> list[Facts]:
    return [*gpu["nvidia"].get("gpus", []), *gpu["amd"].get("gpus", [])]


def _names(cards: Sequence[Facts]) -> str:
    """Return for example `2 × NVIDIA H200`."""
    names = [card["name"] for card in cards]
    counts = dict.fromkeys(names)
    return ", ".join(f"{names.count(name)} × {name}" if names.count(name) > 1 else name for name in counts)


def _major(version: str) -> int:
    return int(version.partition(".")[0])
