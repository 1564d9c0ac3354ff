"""Failures of a machine with an NVIDIA GPU. Without one they are skipped, and the earlier logs stay."""

from __future__ import annotations

from functools import partial

from tests.support.failures.bench import TORCHRUN, Bench, free_port, meeting_here, place, wrong
from tests.support.failures.registry import here

NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
ALONE = {
    "cuda.memory": "cuda_memory",
    "cuda.ordinal": "cuda_ordinal",
    "cuda.assertion": "cuda_assertion",
    "cuda.two-devices": "two_devices",
}


def _register() -> None:
    for name, program in ALONE.items():
        here(name, needs_gpu=True)(partial(alone, program=program))


def alone(bench: Bench, program: str) -> None:
    bench.run(wrong(program))


_register()


@here("cuda.missing+none-visible", needs_gpu=True)
def none_visible(bench: Bench) -> None:
    bench.run(wrong("to_cuda"), NO_GPU)


@here("cuda.nccl+none-visible", needs_gpu=True)
def nccl_without_gpu(bench: Bench) -> None:
    bench.run(wrong("nccl"), {**NO_GPU, **place(0, 1), **meeting_here()})


def nccl_alone(bench: Bench, program: str, **variables: str) -> None:
    bench.run(wrong(program), {**place(0, 1), **meeting_here(), **variables})


here("cuda.no-backend", needs_gpu=True)(partial(nccl_alone, program="cpu_tensor_for_nccl"))
here("cuda.watchdog", needs_gpu=True)(partial(nccl_alone, program="slow_collective"))
here("cuda.nccl-interface", needs_gpu=True)(partial(nccl_alone, program="over_nccl", NCCL_SOCKET_IFNAME="nosuch0"))
here("cuda.nccl-system", needs_gpu=True)(partial(nccl_alone, program="over_nccl", NCCL_COMM_ID="10.99.99.99:5000"))


@here("cuda.nccl-internal", needs_gpu=True)
def broken_topology(bench: Bench) -> None:
    nccl_alone(bench, "over_nccl", NCCL_TOPO_FILE=str(bench.write("topology.xml", "<system\n")))


@here("cuda.one-for-two", needs_gpu=True)
def one_for_two(bench: Bench) -> None:
    bench.run([*TORCHRUN, "--nproc-per-node=2", f"--master-port={free_port()}", *wrong("one_gpu_for_two")[1:]])


@here("cuda.checkpoint", needs_gpu=True)
def checkpoint_of_a_gpu(bench: Bench) -> None:
    file = str(bench.folder / "model.pt")
    bench.run(wrong("save_from_gpu", file))
    bench.run(wrong("load_from_gpu", file), NO_GPU)
