"""Links and machines by name, each figure with where it comes from.

"Measured" without a name means in this project, see docs/plan.md. Every figure can be overridden on the command line,
and a measured profile beats them all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Link:
    """One direction of a link. `efficiency` is the part of its rate that arrives as payload, `latency_s` what a small
    message waits on the way. `usual` is the machine that is planned with where none is named. `air` is one medium for
    everybody, in both directions."""

    name: str
    bits_per_s: float
    efficiency: float
    latency_s: float
    source: str
    usual: str = "laptop"
    air: bool = False


@dataclass(frozen=True)
class Stack:
    """What exchanges gradients. `message_s` is what it adds to a message, `most_bytes_per_s` what it cannot exceed,
    `cores_per_byte_s` what copying and adding up takes a core."""

    name: str
    message_s: float
    most_bytes_per_s: float
    cores_per_byte_s: float
    trees: bool
    source: str


@dataclass(frozen=True)
class Machine:
    """The shares are the parts of the matrix peaks that training reaches. `inside` is the link between ranks on it,
    `layer_s` what starting the operations of one layer takes, which a small model cannot hide; `spread` how much a
    step's time varies from one to the next (standard deviation, relative)."""

    name: str
    kind: Literal["cpu", "gpu"]
    cores: int
    fp32_flops: float
    bf16_flops: float
    fp32_share: float
    bf16_share: float
    memory_bytes: float
    memory_bytes_per_s: float
    inside: str
    source: str
    layer_s: float = 0.0
    spread: float = 0.013

    def flops(self, gradient_bytes: int) -> float:
        """What training reaches; a model whose gradients are halves computes in halves."""
        if gradient_bytes == 2:
            return self.bf16_share * self.bf16_flops
        return self.fp32_share * self.fp32_flops


_FRAMES = "TCP payload of 1,500-byte frames is 94.1% of the rate (1,448 of 1,538 bytes)"
_NCCL_NET = "latency: NCCL's own estimate for a network message, 14 µs (tuning.cc)"

_LINKS = (
    Link("wifi", 150e6, 1.0, 2e-3, "what iperf3 and ping show in an ordinary flat, as the lab's wifi", air=True),
    Link("100mbit", 100e6, 0.966, 1e-4, "payload measured in the lab: 96.6 Mbit/s"),
    Link("1gbe", 1e9, 0.94, 1e-4, "bus bandwidth of gloo measured in the lab: 0.92–0.97 Gbit/s"),
    Link("2.5gbe", 2.5e9, 0.94, 1e-4, _FRAMES),
    Link("10gbe", 10e9, 0.94, 3e-5, _FRAMES),
    Link("25gbe", 25e9, 0.94, 1.4e-5, f"{_FRAMES}; {_NCCL_NET}", "h100"),
    Link("100gbe", 100e9, 0.94, 1.4e-5, f"{_FRAMES}; {_NCCL_NET}", "h100"),
    Link("400gbe", 400e9, 0.94, 1.4e-5, f"{_FRAMES}; {_NCCL_NET}", "h100"),
    Link(
        "nvlink",
        3600e9,
        0.82,
        3.4e-6,
        "NVLink 4: 450 GB/s each way, 370 with its protocol (nccl-tests issue 212)",
        "h100",
    ),
    Link(
        "xgmi",
        3584e9,
        0.75,
        3.4e-6,
        "MI300X: seven links of 64 GB/s, 48 usable (AMD, ROCm blog on RCCL and xGMI)",
        "mi300x",
    ),
    Link(
        "pcie",
        252e9,
        0.8,
        5.7e-6,
        "PCIe 4.0 ×16: 31.5 GB/s each way; 0.8 assumed; latency: NCCL's tuning.cc",
        "rtx4070",
    ),
    Link("loopback", 100e9, 1.0, 1e-5, "no wire: what moves the bytes is the limit"),
)
LINKS = {link.name: link for link in _LINKS}

GLOO = Stack(
    "gloo",
    message_s=6e-4,
    most_bytes_per_s=7e9 / 8,
    cores_per_byte_s=7e-10,
    trees=False,
    source="measured on two cores: 0.5–1 ms a message, 7 Gbit/s over loopback, 0.6–0.8 ns of a core for a byte",
)
NCCL = Stack("nccl", 0.0, float("inf"), 0.0, trees=True, source="its latency is in the links; it uses no core of note")

_CPU_SHARE = 0.5
_H200 = "share and layer measured on an H200: fp32 0.69 (46 TFLOP/s), bf16 0.38 (374 TFLOP/s), 1.4 ms a layer"
_GPU_LAYER_S = 1.4e-3


def _cpu(name: str, cores: int, gflops: float, memory_gb: float, gbytes_per_s: float, source: str) -> Machine:
    """A processor without instructions for halves computes in floats."""
    flops, share = 1e9 * gflops, _CPU_SHARE
    memory, rate = 1e9 * memory_gb, 1e9 * gbytes_per_s
    told = f"{source}; training reaches half of the peak (measured: 52% on a Neoverse-N1, 60% on x86)"
    return Machine(name, "cpu", cores, flops, flops, share, share, memory, rate, "loopback", told)


def _gpu(
    name: str, fp32: float, bf16: float, memory_gb: float, gbytes_per_s: float, inside: str, source: str
) -> Machine:
    memory, rate = 1e9 * memory_gb, 1e9 * gbytes_per_s
    return Machine(
        name, "gpu", 1, 1e12 * fp32, 1e12 * bf16, 0.69, 0.38, memory, rate, inside, f"{source}; {_H200}", _GPU_LAYER_S
    )


_MACHINES = (
    _cpu("laptop", 4, 358, 16, 51.2, "Intel Core i7-1165G7: 4 cores of 2.8 GHz, 32 operations a cycle; DDR4-3200"),
    _cpu("desktop", 8, 973, 32, 51.2, "AMD Ryzen 7 5800X: 8 cores of 3.8 GHz, 32 operations a cycle; DDR4-3200"),
    _cpu("m-series", 8, 1400, 16, 100, "Apple M2: 100 GB/s (Apple); 1.4 TFLOP/s through Accelerate (nod.ai, M1 Max)"),
    _gpu("rtx4070", 29.1, 58.3, 12, 504, "pcie", "NVIDIA GeForce RTX 4070 and Ada white paper"),
    _gpu("mi300x", 163.4, 1307.4, 192, 5300, "xgmi", "AMD Instinct MI300X data sheet"),
    _gpu("h100", 66.9, 989.4, 80, 3350, "nvlink", "NVIDIA H100 SXM data sheet, without sparsity"),
    _gpu("h200", 66.9, 989.4, 141, 4800, "nvlink", "NVIDIA H200 SXM data sheet, without sparsity"),
)
MACHINES = {machine.name: machine for machine in _MACHINES}
