"""How fast a machine computes: the protocol, and the answer of a data sheet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from shoal.config.profile import Bound, ComputeProfile
from shoal.cost.buckets import Lever
from shoal.cost.workload import RankWork, Workload
from shoal.units import format_number

# SECTION cost/catalogue
# Links and machines by name, each figure with where it comes from.
#
# "Measured" without a name means in this project, see docs/plan.md. Every figure can be overridden on the command line,
# and a measured profile beats them all.


@dataclass(frozen=True)
class LinkSheet:
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
class CommStack:
    """What exchanges gradients. `message_s` is what it adds to a message, `most_bytes_per_s` what it cannot exceed,
    `cores_per_byte_s` what copying and adding up takes a core."""

    name: str
    message_s: float
    most_bytes_per_s: float
    cores_per_byte_s: float
    trees: bool
    source: str


@dataclass(frozen=True)
class MachineSheet:
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
    LinkSheet("wifi", 150e6, 1.0, 2e-3, "what iperf3 and ping show in an ordinary flat, as the lab's wifi", air=True),
    LinkSheet("100mbit", 100e6, 0.966, 1e-4, "payload measured in the lab: 96.6 Mbit/s"),
    LinkSheet("1gbe", 1e9, 0.94, 1e-4, "bus bandwidth of gloo measured in the lab: 0.92–0.97 Gbit/s"),
    LinkSheet("2.5gbe", 2.5e9, 0.94, 1e-4, _FRAMES),
    LinkSheet("10gbe", 10e9, 0.94, 3e-5, _FRAMES),
    LinkSheet("25gbe", 25e9, 0.94, 1.4e-5, f"{_FRAMES}; {_NCCL_NET}", "h100"),
    LinkSheet("100gbe", 100e9, 0.94, 1.4e-5, f"{_FRAMES}; {_NCCL_NET}", "h100"),
    LinkSheet("400gbe", 400e9, 0.94, 1.4e-5, f"{_FRAMES}; {_NCCL_NET}", "h100"),
    LinkSheet(
        "nvlink",
        3600e9,
        0.82,
        3.4e-6,
        "NVLink 4: 450 GB/s each way, 370 with its protocol (nccl-tests issue 212)",
        "h100",
    ),
    LinkSheet(
        "xgmi",
        3584e9,
        0.75,
        3.4e-6,
        "MI300X: seven links of 64 GB/s, 48 usable (AMD, ROCm blog on RCCL and xGMI)",
        "mi300x",
    ),
    LinkSheet(
        "pcie",
        252e9,
        0.8,
        5.7e-6,
        "PCIe 4.0 ×16: 31.5 GB/s each way; 0.8 assumed; latency: NCCL's tuning.cc",
        "rtx4070",
    ),
    LinkSheet("loopback", 100e9, 1.0, 1e-5, "no wire: what moves the bytes is the limit"),
)
LINKS = {link.name: link for link in _LINKS}

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
_H200 = "share and layer measured on an H200: fp32 0.69 (46 TFLOP/s), bf16 0.38 (374 TFLOP/s), 1.4 ms a layer"
_GPU_LAYER_S = 1.4e-3


def _cpu(name: str, cores: int, gflops: float, memory_gb: float, gbytes_per_s: float, source: str) -> MachineSheet:
    """A processor without instructions for halves computes in floats."""
    flops, share = 1e9 * gflops, _CPU_SHARE
    memory, rate = 1e9 * memory_gb, 1e9 * gbytes_per_s
    told = f"{source}; training reaches half of the peak (measured: 52% on a Neoverse-N1, 60% on x86)"
    return MachineSheet(name, "cpu", cores, flops, flops, share, share, memory, rate, "loopback", told)


def _gpu(
    name: str, fp32: float, bf16: float, memory_gb: float, gbytes_per_s: float, inside: str, source: str
) -> MachineSheet:
    memory, rate = 1e9 * memory_gb, 1e9 * gbytes_per_s
    return MachineSheet(
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


# SECTION cost/wire
# Wire formats: how many bytes of a gradient travel, and what making them takes.


# Seconds of one thread for each parameter, there and back, measured for 124M parameters between two ranks (see
# docs/results.md): fp16 in torch on x86 (our kernel on an ARM core takes half of it), the others by our kernels.
THREAD_S = {"fp32": 0.0, "fp16": 0.15 / 124e6, "bf16": 0.27 / 124e6, "int8": 0.3 / 124e6, "powersgd": 0.71 / 124e6}
# Bytes of memory that each parameter crosses on the way, which is what takes the time on a GPU.
MEMORY_BYTES = {"fp32": 0, "fp16": 12, "bf16": 12, "int8": 30, "powersgd": 40}

_INT8_BLOCK = 256
_FLOAT_BYTES = 4
_ELEMENT_BYTES = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0, "int8": 1 + _FLOAT_BYTES / _INT8_BLOCK}


def is_encoded(lever: Lever, workload: Workload) -> bool:
    """Gradients that are halves already gain nothing from being sent as halves."""
    return lever.wire == "powersgd" or _ELEMENT_BYTES[lever.wire] < workload.gradient_bytes


def bytes_per_parameter(lever: Lever, workload: Workload) -> float:
    """On average over the model: of PowerSGD's factors, those of all matrices, and the vectors as they are."""
    if lever.wire == "powersgd":
        return workload.gradient_bytes * _low_rank_part(lever.rank, workload)
    return min(float(workload.gradient_bytes), _ELEMENT_BYTES[lever.wire])


def element_bytes(lever: Lever, workload: Workload) -> int:
    """Of what is added up on the way."""
    return workload.gradient_bytes if lever.wire == "powersgd" else int(bytes_per_parameter(lever, workload))


def cpu_encode_s(lever: Lever, parameters: int, threads: float) -> float:
    """There and back; every thread takes its part."""
    return THREAD_S[lever.wire] * parameters / threads


def _low_rank_part(rank: int, workload: Workload) -> float:
    """A matrix of n by m travels as rank·(n+m) numbers, unless that is more."""
    shape, width = workload.shape, workload.shape.width
    block = ((3 * width, width), (width, width), (4 * width, width), (width, 4 * width))
    matrices = [*block * shape.layers, (shape.vocab_size, width), (shape.seq_len, width)]
    whole = sum(rows * columns for rows, columns in matrices)
    low = sum(min(rows * columns, rank * (rows + columns)) for rows, columns in matrices)
    vectors = 13 * width * shape.layers + 2 * width
    return (low + vectors) / (whole + vectors)


# Of a parameter in one update: AdamW reads four floats and writes three; clipping reads, reads and writes; clearing.
_UPDATE_BYTES = 4 * 11
# Operations of an update against those of forward and backward, as the times of small models on an H200 show them.
_UPDATE_STARTS = 0.2


class Speed(Protocol):
    def in_world(self, world_size: int) -> Speed:
        """The same machines while so many ranks take part; those of one machine are in each other's way."""
        ...

    def work(self, workload: Workload, rank: int, micro_batch: int, micro_batches: int) -> RankWork:
        """What `rank` computes in a step with so many micro-batches of `micro_batch` sequences."""
        ...

    def encode_s(self, lever: Lever, rank: int, parameters: int) -> float:
        """What making the wire format out of all gradients and back takes the rank; `wire.cpu_encode_s` knows CPUs."""
        ...

    def memory_bytes(self, rank: int) -> float:
        """What the rank may fill."""
        ...


@runtime_checkable
class HasKinds(Protocol):
    """Of a speed that knows which ranks are alike: asking one of them is enough, of sixteen thousand."""

    def kind(self, rank: int) -> int: ...


def rank_kinds(speed: Speed, world_size: int) -> list[int]:
    """Ranks with the same number are equally fast; each is a kind of its own where nobody knows better."""
    return [speed.kind(rank) for rank in range(world_size)] if isinstance(speed, HasKinds) else list(range(world_size))


@dataclass(frozen=True)
class SheetSpeed:
    """From the catalogue. Node k is `machines[k]`, and the last one repeats; a CPU is shared by its node's ranks, a
    GPU is not."""

    machines: tuple[MachineSheet, ...]
    ranks_per_node: int = 1

    def in_world(self, world_size: int) -> SheetSpeed:
        return self

    def machine(self, rank: int) -> MachineSheet:
        return self.machines[self.kind(rank)]

    def kind(self, rank: int) -> int:
        return min(rank // self.ranks_per_node, len(self.machines) - 1)

    def work(self, workload: Workload, rank: int, micro_batch: int, micro_batches: int) -> RankWork:
        machine, part = self.machine(rank), self._part(rank)
        tokens = micro_batch * workload.seq_len
        computing_s = tokens * workload.flops_per_token / (part * machine.flops(workload.gradient_bytes))
        # A GPU computes while the next operations are started: the slower of both counts.
        starting_s = machine.layer_s * workload.shape.layers
        busy_s = max(computing_s, starting_s)
        updating_s = _UPDATE_BYTES * workload.parameters / (part * machine.memory_bytes_per_s)
        return RankWork(
            micro_batches=micro_batches,
            forward_s=busy_s / 3,
            backward_s=busy_s * 2 / 3,
            optimizer_s=max(updating_s, _UPDATE_STARTS * starting_s),
            busy_cores=part * machine.cores,
            spread=machine.spread,
        )

    def encode_s(self, lever: Lever, rank: int, parameters: int) -> float:
        machine, part = self.machine(rank), self._part(rank)
        moving_s = MEMORY_BYTES[lever.wire] * parameters / (part * machine.memory_bytes_per_s)
        if machine.kind == "gpu":
            return moving_s
        return max(moving_s, cpu_encode_s(lever, parameters, part * machine.cores))

    def memory_bytes(self, rank: int) -> float:
        return self._part(rank) * self.machine(rank).memory_bytes

    def _part(self, rank: int) -> float:
        return 1 / self.ranks_per_node if self.machine(rank).kind == "cpu" else 1.0


# SECTION cost/roofline
# The roofline: what limits a computation, its arithmetic or the memory it reads from?


# A program this far below both roofs is held up by something else: dispatching many small operations, or other load.
_FAR_BELOW = 0.25


@dataclass(frozen=True)
class Roofline:
    peak_gflops: float
    memory_gbytes_per_s: float

    @property
    def ridge(self) -> float:
        """Operations a byte from which on arithmetic is the limit."""
        return self.peak_gflops / self.memory_gbytes_per_s

    def roof_gflops(self, intensity: float) -> float:
        return min(self.peak_gflops, intensity * self.memory_gbytes_per_s)

    def bound(self, intensity: float, gflops: float) -> Bound:
        if gflops < _FAR_BELOW * self.roof_gflops(intensity):
            return "overhead"
        return "memory" if intensity < self.ridge else "arithmetic"


def roofline_of(compute: ComputeProfile) -> Roofline:
    return Roofline(compute.fp32_gflops, compute.memory_gbytes_per_s)


def explain(name: str, compute: ComputeProfile) -> str:
    roof, best = roofline_of(compute), compute.best
    reached = best.gflops / roof.roof_gflops(compute.intensity)
    threads = f"{best.threads} thread" + ("s" if best.threads > 1 else "")
    point = f"the small GPT reaches {format_number(best.gflops)} GFLOP/s with {threads}, {reached:.0%} of its roof"
    ridge = f"{compute.intensity:.3g} operations a byte, and from {roof.ridge:.3g} on arithmetic is the limit"
    match compute.bound:
        case "arithmetic":
            verdict = f"bound by arithmetic: it does {ridge}"
        case "memory":
            verdict = f"bound by memory: it does only {ridge}"
        case "overhead":
            verdict = "bound by neither: many small operations, or other programs, take the time"
    return f"{name}: {point}; {verdict}"
