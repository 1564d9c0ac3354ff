"""Links and machines by name, with figures from data sheets, and the cluster model that is made of them.

Each figure names its source. "Measured" without a name means in this project, see docs/plan.md. Every figure can be
overridden on the command line, and a measured profile replaces them all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from shoal.config.presets import did_you_mean
from shoal.errors import UsageError
from shoal.units import format_duration, format_rate, format_si, parse_delay, parse_rate

if TYPE_CHECKING:
    from shoal.cost.network import RingNetwork
    from shoal.cost.predict import ClusterModel
    from shoal.cost.strategy import SyncStrategy
    from shoal.cost.workload import RankWork, Workload


@dataclass(frozen=True)
class LinkSheet:
    """One direction of a link."""

    name: str
    bits_per_s: float
    efficiency: float  # fraction of the rate that arrives as payload
    latency_s: float  # of a small message
    source: str
    usual: str = "laptop"  # the machine that a plan assumes when none is named
    is_shared_medium: bool = False  # one medium for all nodes and both directions
    peers: int = 1  # of a rank that has such a link to each of them


@dataclass(frozen=True)
class CommStack:
    """The library that exchanges gradients."""

    name: str
    message_s: float  # added to the link's latency
    most_bytes_per_s: float
    cores_per_byte_s: float  # seconds of a core to copy and add up one byte
    trees: bool
    source: str


@dataclass(frozen=True)
class MachineSheet:
    name: str
    kind: Literal["cpu", "gpu"]
    cores: int
    fp32_flops: float
    bf16_flops: float
    fp32_share: float  # fraction of the peak of matrix products that training reaches
    bf16_share: float
    memory_bytes: float
    memory_bytes_per_s: float
    inside: str  # the link between ranks of this machine
    source: str
    layer_s: float = 0.0  # to start the operations of one layer, which a small model cannot hide
    spread: float = 0.013  # standard deviation of the step time, relative

    def flops(self, gradient_bytes: int) -> float:
        """Return the speed that training reaches; a model with 16-bit gradients computes in bf16."""
        if gradient_bytes == 2:
            return self.bf16_share * self.bf16_flops
        return self.fp32_share * self.fp32_flops


_FRAMES = "TCP payload of 1,500-byte frames is 94.1% of the rate (1,448 of 1,538 bytes)"
_NCCL_NET = "latency: NCCL's own estimate for a network message, 14 µs (tuning.cc)"
_NVLINK = "NVLink 4: 450 GB/s each way, 370 with its protocol (nccl-tests issue 212)"
_XGMI = "MI300X: a link of 64 GB/s to each of seven peers, 48 usable (AMD, ROCm blog on RCCL and xGMI)"
_PCIE = "PCIe 4.0 ×16: 31.5 GB/s each way; 0.8 assumed; latency: NCCL's tuning.cc"

LINKS = {
    link.name: link
    for link in (
        LinkSheet(
            "wifi",
            150e6,
            1.0,
            2e-3,
            "what iperf3 and ping show in an ordinary flat, as the lab's wifi",
            is_shared_medium=True,
        ),
        LinkSheet("100mbit", 100e6, 0.966, 1e-4, "payload measured in the lab: 96.6 Mbit/s"),
        LinkSheet("1gbe", 1e9, 0.94, 1e-4, "bus bandwidth of gloo measured in the lab: 0.92–0.97 Gbit/s"),
        LinkSheet("2.5gbe", 2.5e9, 0.94, 1e-4, _FRAMES),
        LinkSheet("10gbe", 10e9, 0.94, 3e-5, _FRAMES),
        LinkSheet("25gbe", 25e9, 0.94, 1.4e-5, f"{_FRAMES}; {_NCCL_NET}", "h100"),
        LinkSheet("100gbe", 100e9, 0.94, 1.4e-5, f"{_FRAMES}; {_NCCL_NET}", "h100"),
        LinkSheet("400gbe", 400e9, 0.94, 1.4e-5, f"{_FRAMES}; {_NCCL_NET}", "h100"),
        LinkSheet("nvlink", 3600e9, 0.82, 3.4e-6, _NVLINK, "h100"),
        LinkSheet("xgmi", 512e9, 0.75, 3.4e-6, _XGMI, "mi300x", peers=7),
        LinkSheet("pcie", 252e9, 0.8, 5.7e-6, _PCIE, "rtx4070"),
        LinkSheet("loopback", 100e9, 1.0, 1e-5, "no wire: what moves the bytes is the limit"),
    )
}

GLOO = CommStack(
    "gloo",
    message_s=6e-4,
    most_bytes_per_s=7e9 / 8,
    cores_per_byte_s=7e-10,
    trees=False,
    source="measured on two cores: 0.5–1 ms a message, 7 Gbit/s over loopback, 0.6–0.8 ns of a core for a byte",
)
NCCL = CommStack(
    "nccl", 0.0, float("inf"), 0.0, trees=True, source="its latency is in the links; it uses no core of note"
)

_CPU_SHARE = 0.5
_CPU_SOURCE = "training reaches half of the peak (measured: 52% on a Neoverse-N1, 60% on x86)"
_GPU_SOURCE = "share and layer measured on an H200: fp32 0.69 (46 TFLOP/s), bf16 0.38 (374 TFLOP/s), 1.4 ms a layer"
_GPU_LAYER_S = 1.4e-3


def _cpu(name: str, cores: int, gflops: float, memory_gb: float, gbytes_per_s: float, source: str) -> MachineSheet:
    """A processor without instructions for bf16 computes in fp32."""
    flops, memory, rate = 1e9 * gflops, 1e9 * memory_gb, 1e9 * gbytes_per_s
    source = f"{source}; {_CPU_SOURCE}"
    return MachineSheet(name, "cpu", cores, flops, flops, _CPU_SHARE, _CPU_SHARE, memory, rate, "loopback", source)


def _gpu(
    name: str, fp32: float, bf16: float, memory_gb: float, gbytes_per_s: float, inside: str, source: str
) -> MachineSheet:
    memory, rate, source = 1e9 * memory_gb, 1e9 * gbytes_per_s, f"{source}; {_GPU_SOURCE}"
    return MachineSheet(
        name, "gpu", 1, 1e12 * fp32, 1e12 * bf16, 0.69, 0.38, memory, rate, inside, source, _GPU_LAYER_S
    )


MACHINES = {
    machine.name: machine
    for machine in (
        _cpu("laptop", 4, 358, 16, 51.2, "Intel Core i7-1165G7: 4 cores of 2.8 GHz, 32 operations a cycle; DDR4-3200"),
        _cpu("desktop", 8, 973, 32, 51.2, "AMD Ryzen 7 5800X: 8 cores of 3.8 GHz, 32 operations a cycle; DDR4-3200"),
        _cpu(
            "m-series", 8, 1400, 16, 100, "Apple M2: 100 GB/s (Apple); 1.4 TFLOP/s through Accelerate (nod.ai, M1 Max)"
        ),
        _gpu("rtx4070", 29.1, 58.3, 12, 504, "pcie", "NVIDIA GeForce RTX 4070 and Ada white paper"),
        _gpu("mi300x", 163.4, 1307.4, 192, 5300, "xgmi", "AMD Instinct MI300X data sheet"),
        _gpu("h100", 66.9, 989.4, 80, 3350, "nvlink", "NVIDIA H100 SXM data sheet, without sparsity"),
        _gpu("h200", 66.9, 989.4, 141, 4800, "nvlink", "NVIDIA H200 SXM data sheet, without sparsity"),
    )
}

# Bytes per parameter of one update: AdamW reads four floats and writes three; clipping reads, reads and writes; zeros.
_UPDATE_BYTES = 4 * 11
# Operations of an update relative to those of forward and backward, from the times of small models on an H200.
_UPDATE_STARTS = 0.2


@dataclass(frozen=True)
class SheetSpeed:
    """The speed of machines by data sheet. Node k is `machines[k]`, and the last one repeats. The ranks of a node share
    its CPU, but each has a GPU of its own."""

    machines: tuple[MachineSheet, ...]
    ranks_per_node: int = 1

    def in_world(self, world_size: int) -> SheetSpeed:
        return self

    def machine(self, rank: int) -> MachineSheet:
        return self.machines[self.kind(rank)]

    def kind(self, rank: int) -> int:
        return min(rank // self.ranks_per_node, len(self.machines) - 1)

    def work(self, workload: Workload, rank: int, micro_batch: int, micro_batches: int) -> RankWork:
        from shoal.cost.workload import RankWork

        machine, share = self.machine(rank), self._share(rank)
        tokens = micro_batch * workload.seq_len
        computing_s = tokens * workload.flops_per_token / (share * machine.flops(workload.gradient_bytes))
        # A GPU computes while the next operations are started: the slower of both counts.
        starting_s = machine.layer_s * workload.shape.layers
        busy_s = max(computing_s, starting_s)
        updating_s = _UPDATE_BYTES * workload.parameters / (share * machine.memory_bytes_per_s)
        return RankWork(
            micro_batches=micro_batches,
            forward_s=busy_s / 3,
            backward_s=busy_s * 2 / 3,
            optimizer_s=max(updating_s, _UPDATE_STARTS * starting_s),
            busy_cores=share * machine.cores,
            spread=machine.spread,
        )

    def encode_s(self, strategy: SyncStrategy, rank: int, parameters: int) -> float:
        from shoal.cost.strategy import cpu_encode_s

        machine, share = self.machine(rank), self._share(rank)
        moving_s = strategy.format.memory_bytes * parameters / (share * machine.memory_bytes_per_s)
        if machine.kind == "gpu":
            return moving_s
        return max(moving_s, cpu_encode_s(strategy, parameters, share * machine.cores))

    def memory_bytes(self, rank: int) -> float:
        return self._share(rank) * self.machine(rank).memory_bytes

    def _share(self, rank: int) -> float:
        return 1 / self.ranks_per_node if self.machine(rank).kind == "cpu" else 1.0


@dataclass(frozen=True)
class SheetOverrides:
    """Figures of the user that replace those of the data sheets; None keeps the data sheet's."""

    efficiency: float | None = None
    latency: str | None = None
    flops: float | None = None
    mfu: float | None = None
    memory_gb: float | None = None


def find_links(text: str) -> tuple[LinkSheet, ...]:
    """Find `1gbe`, or one link per node: `1gbe,1gbe,wifi`."""
    return tuple(find_link(name) for name in text.split(","))


def find_link(text: str) -> LinkSheet:
    """Find a link by name; any rate such as `300mbit` is taken for Ethernet."""
    name = text.strip().lower()
    if name in LINKS:
        return LINKS[name]
    if not any(character.isdigit() for character in name):
        raise _unknown_name("link", text, LINKS, "or any rate such as 300mbit")
    try:
        rate_bps = parse_rate(name)
    except UsageError as error:
        near = "" if name.endswith("bit") else did_you_mean(name, LINKS)
        raise UsageError(error.seen, why=near or error.why, fix=f"{error.fix}, or {', '.join(LINKS)}") from None
    slower = [link for link in LINKS.values() if "gbe" in link.name and link.bits_per_s <= rate_bps]
    like = slower[-1] if slower else LINKS["100mbit"]
    return replace(like, name=format_rate(rate_bps), bits_per_s=rate_bps)


def find_machines(text: str | None, link: LinkSheet) -> tuple[MachineSheet, ...]:
    """Find `laptop`, or one machine per node: `desktop,laptop,laptop`. None: what such a link usually connects."""
    machines = []
    for name in (text or link.usual).split(","):
        machine = MACHINES.get(name.strip().lower())
        if machine is None:
            raise _unknown_name("machine", name, MACHINES, "with --flops and --memory-gb for one of your own")
        machines.append(machine)
    return tuple(machines)


def _unknown_name(what: str, name: str, known: Iterable[str], more: str) -> UsageError:
    return UsageError(
        f"there is no {what} {name!r}",
        why=did_you_mean(name.lower(), known),
        fix=f"use one of: {', '.join(known)}; {more}",
    )


def make_cluster_model(
    links: tuple[LinkSheet, ...], machines: tuple[MachineSheet, ...], ranks_per_node: int, given: SheetOverrides
) -> ClusterModel:
    from shoal.cost.network import NodesNetwork
    from shoal.cost.predict import ClusterModel

    machines = tuple(_override(machine, given) for machine in machines)
    stack = stack_of(machines)
    speed = SheetSpeed(machines, ranks_per_node)
    names = tuple(machine.name for machine in machines)
    between = ring(links, stack, given)
    if ranks_per_node == 1:
        return ClusterModel(speed, between, node_names=names)
    inside = ring((LINKS[machines[0].inside],), stack, SheetOverrides())
    flat = NodesNetwork(ranks_per_node, inside, between)
    return ClusterModel(speed, flat, replace(flat, hierarchical=True), ranks_per_node, names)


def _override(machine: MachineSheet, given: SheetOverrides) -> MachineSheet:
    if given.flops is not None:
        flops = positive("--flops", given.flops)
        machine = replace(machine, fp32_flops=flops, bf16_flops=flops)
    if given.mfu is not None:
        share = _check_fraction("--mfu", given.mfu)
        machine = replace(machine, fp32_share=share, bf16_share=share)
    if given.memory_gb is not None:
        machine = replace(machine, memory_bytes=1e9 * positive("--memory-gb", given.memory_gb, 1e9))
    return machine


def stack_of(machines: Iterable[MachineSheet]) -> CommStack:
    """Return NCCL where all machines have a GPU, otherwise gloo."""
    return NCCL if all(machine.kind == "gpu" for machine in machines) else GLOO


def ring(links: tuple[LinkSheet, ...], stack: CommStack, given: SheetOverrides) -> RingNetwork:
    """Combine the links of the nodes and the library.

    An efficiency given by the user already contains the library's limit and latency.
    """
    from shoal.cost.network import RingNetwork

    link = links[0]
    if given.efficiency is None:
        bytes_per_s = min(link.efficiency * link.bits_per_s / 8, stack.most_bytes_per_s)
        latency_s = link.latency_s + stack.message_s
    else:
        bytes_per_s = _check_fraction("--efficiency", given.efficiency) * link.bits_per_s / 8
        latency_s = link.latency_s
    if given.latency is not None:
        latency_s = parse_delay(given.latency)
    later = tuple(ring((other,), stack, given) for other in links[1:])
    shared, trees = link.is_shared_medium, stack.trees
    return RingNetwork(bytes_per_s, latency_s, stack.cores_per_byte_s, shared, trees, later, link.peers)


def describe(links: tuple[LinkSheet, ...], machines: tuple[MachineSheet, ...], setting: ClusterModel) -> str:
    """Return what a plan without a profile is made from: `laptop over 1gbe by gloo: 118 MB/s, 0.7 ms a message`."""
    from shoal.cost.network import NodesNetwork, RingNetwork

    network = setting.network.between if isinstance(setting.network, NodesNetwork) else setting.network
    assert isinstance(network, RingNetwork)  # noqa: S101 - made by make_setting
    names, over = (", ".join(sheet.name for sheet in sheets) for sheets in (machines, links))
    return f"{names} over {over} by {stack_of(machines).name}: {describe_ring(network)}, by data sheet"


def describe_ring(network: RingNetwork) -> str:
    """Return `118 MB/s, 0.7 ms a message`: the slowest link, where nodes have links of their own."""
    links = (network, *network.later)
    rate = format_si(min(link.bytes_per_s for link in links), "B/s")
    slowest = "as the slowest of these links, " if len({link.bytes_per_s for link in links}) > 1 else ""
    peers = f" to each of {network.peers} peers" if network.peers > 1 else ""
    return f"{slowest}{rate}{peers}, {format_duration(max(link.latency_s for link in links))} a message"


def positive(flag: str, value: float, most: float = 1e18) -> float:
    """Return the value of a flag; refuse zero, negative numbers, infinity and NaN."""
    if not 0 < value <= most or not math.isfinite(value):
        raise UsageError(
            f"{flag} {value:g} is out of range", why=f"it is a number above 0, up to {most:g}", fix=f"correct {flag}"
        )
    return value


def _check_fraction(flag: str, value: float) -> float:
    if not 0 < value <= 1:
        raise UsageError(
            f"{flag} {value:g} is out of range", why="it is a part: above 0, 1 at most", fix=f"write {flag} 0.85"
        )
    return value
