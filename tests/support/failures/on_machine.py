"""Failures that need only one machine: programs, limits, disks."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from tests.support.failures.bench import SHOAL, TORCHRUN, Bench, free_port, meeting_here, place, wrong
from tests.support.failures.registry import here, quoted
from tests.support.labs import as_ordinary_user
from tests.support.programs import TINY, set_flags
from tests.support.waiting import wait_until

# Programs that fail with one process.
ALONE = {
    "launch.no-group": "no_group",
    "launch.local-rank": "local_rank_missing",
    "launch.pickle": "unpicklable",
    "train.nan": "not_a_number",
    "train.state-dict": "other_checkpoint",
    "train.token-range": "token_out_of_range",
    "data.worker-killed": "killed_worker",
    "python.module": "missing_module",
    "cuda.missing": "to_cuda",
    "cuda.missing+set-device": "set_cuda_device",
    "store.key-timeout": "wait_for_a_key",
}
# Programs that fail with two ranks on this machine.
PAIRS = {
    "gloo.timeout+late": "one_rank_is_late",
    "gloo.barrier": "one_rank_skips_the_barrier",
    "gloo.size-mismatch": "different_sizes",
    "gloo.gather-sizes": "different_sizes_gathered",
    "gloo.dtype": "float8",
    "gloo.future": "no_future",
    "ddp.unused-parameters": "unused_parameters",
    "ddp.different-models": "different_models",
    "ddp.different-models+count": "different_parameter_counts",
    "ddp.nothing-to-train": "nothing_to_train",
    "launch.group-twice": "group_twice",
}
TORCHRUNS = {
    "torchrun.killed": "kill_yourself",
    "torchrun.crashed": "crash",
    "torchrun.child-failed": "one_rank_ends",
}

NO_MAIN_GUARD = "import torch.multiprocessing as mp\n\ndef train(rank): print(rank)\n\nmp.spawn(train, nprocs=2)\n"
ADDRESS_SPACE_KB = 6_000_000


def _register() -> None:
    for how, programs in ((alone, ALONE), (pair, PAIRS), (torchrun, TORCHRUNS)):
        for name, program in programs.items():
            here(name)(partial(how, program=program))


def alone(bench: Bench, program: str) -> None:
    bench.run(wrong(program), meeting_here())


def pair(bench: Bench, program: str) -> None:
    bench.ranks(program)
    bench.wait()


def torchrun(bench: Bench, program: str) -> None:
    bench.run([*TORCHRUN, "--nproc-per-node=2", f"--master-port={free_port()}", *wrong(program)[1:]])


_register()


@here("gloo.collective-mismatch")
def collective_mismatch(bench: Bench) -> None:
    bench.ranks("different_collectives", env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
    bench.wait()


@here("gloo.transport")
def transport(bench: Bench) -> None:
    bench.ranks("healthy", env={"GLOO_DEVICE_TRANSPORT": "TCP_TLS"})
    bench.wait()


@here("gloo.peer-closed")
def peer_closed(bench: Bench) -> None:
    bench.ranks("one_rank_ends")
    bench.wait()


@here("store.port-taken")
def port_taken(bench: Bench) -> None:
    with socket.create_server(("", 0)) as holder:
        taken = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(holder.getsockname()[1])}
        bench.run(wrong("healthy"), {**place(0, 2), **taken})


@here("store.port-taken+torch-2.0", torch="2.0")
def port_taken_of_older(bench: Bench) -> None:
    with socket.create_server(("", 0)) as holder:
        taken = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(holder.getsockname()[1])}
        bench.run(wrong("healthy", torch="2.0"), {**place(0, 2), **taken})


@here("store.port-taken+python")
def port_taken_in_python(bench: Bench) -> None:
    bench.run(wrong("listen_twice"))


@here("store.port-denied")
def port_denied(bench: Bench) -> None:
    bench.run(as_ordinary_user(wrong("healthy")), {**place(0, 2), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "80"})


@here("launch.variable")
def variable(bench: Bench) -> None:
    bench.run(["env", "-u", "MASTER_ADDR", *wrong("healthy")], place(0, 2))


@here("launch.main-guard")
def main_guard(bench: Bench) -> None:
    bench.run([sys.executable, str(bench.write("train.py", NO_MAIN_GUARD))])


@here("torchrun.no-script")
def no_script(bench: Bench) -> None:
    bench.run([*TORCHRUN, "--nproc-per-node=1", f"--master-port={free_port()}", "trian.py"])


@here("torchrun.hangup")
def hangup(bench: Bench) -> None:
    command = [*TORCHRUN, "--nproc-per-node=1", f"--master-port={free_port()}", *wrong("work_for_ever")[1:]]
    agent = bench.start(command)
    bench.wait_for("is at work")
    agent.send_signal(signal.SIGHUP)
    bench.wait()


@here("train.compiler")
def compiler(bench: Bench) -> None:
    bench.run(wrong("no_compiler"), {"CXX": "/usr/bin/no-such-compiler", "TORCHINDUCTOR_CACHE_DIR": str(bench.folder)})


def short_library(bench: Bench, keep_bytes: int) -> None:
    """The first run leaves its kernels in a folder; they are truncated before the second run."""
    cache = bench.folder / "kernels"
    variables = {"TORCHINDUCTOR_CACHE_DIR": str(cache)}
    bench.run(wrong("no_compiler"), variables)
    for library in cache.rglob("*.so"):
        os.truncate(library, keep_bytes)
    bench.run(wrong("no_compiler"), variables)


here("train.short-library")(partial(short_library, keep_bytes=0))
here("train.short-library+in-the-middle")(partial(short_library, keep_bytes=100))


@here("cuda.nccl")
def no_nccl(bench: Bench) -> None:
    bench.run(wrong("nccl"), {**place(0, 1), **meeting_here()})


@here("cuda.backend-name")
def name_of_the_library(bench: Bench) -> None:
    bench.run(wrong("rccl"), {**place(0, 1), **meeting_here()})


@here("memory.allocation")
def allocation(bench: Bench) -> None:
    bench.run(["sh", "-c", f'ulimit -v {ADDRESS_SPACE_KB}; exec "$@"', "sh", *wrong("too_much_memory")])


@here("memory.allocation+numpy")
def numpy_allocation(bench: Bench) -> None:
    bench.run(["sh", "-c", f'ulimit -v {ADDRESS_SPACE_KB}; exec "$@"', "sh", *wrong("too_much_memory_for_numpy")])


@here("memory.killed")
def killed_for_memory(bench: Bench) -> None:
    """Print the kernel's log entry of the kill."""
    with memory_limit(600 << 20) as group:
        bench.run(["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh", *wrong("eat_memory")])
    bench.run(["sh", "-c", "dmesg | grep -i 'out of memory' | tail -n 1"])


quoted("memory.slurm")
quoted("memory.slurm+step")


@here("memory.silent-kill")
def killed_in_a_shell(bench: Bench) -> None:
    bench.run(["sh", "-c", '"$@"; true', "sh", *wrong("kill_yourself")])


@here("memory.silent-kill+script")
def killed_in_a_script(bench: Bench) -> None:
    script = bench.write("train.sh", f"{' '.join(wrong('kill_yourself'))}\necho done\n")
    bench.run(["bash", str(script)])


@contextmanager
def memory_limit(limit_bytes: int) -> Iterator[Path]:
    """Create a control group of version 1 or 2, as this machine has. Needs root."""
    first = Path("/sys/fs/cgroup/memory")
    group = (first if first.is_dir() else first.parent) / f"failures-{time.monotonic_ns()}"
    group.mkdir()
    try:
        setting = group / ("memory.limit_in_bytes" if first.is_dir() else "memory.max")
        setting.write_text(str(limit_bytes))
        yield group
    finally:
        wait_until(lambda: not (group / "cgroup.procs").read_text(), 10, lambda: "processes are left in the group")
        group.rmdir()


@here("disk.full")
def full_disk(bench: Bench) -> None:
    on_small_disk(bench, "size=4m", "write_text")


@here("disk.full+checkpoint")
def full_disk_for_checkpoint(bench: Bench) -> None:
    on_small_disk(bench, "size=4m", "save_checkpoint")


@here("disk.read-only")
def read_only_disk(bench: Bench) -> None:
    on_small_disk(bench, "ro", "save_checkpoint")


@here("data.shared-memory")
def small_shared_memory(bench: Bench) -> None:
    mount = 'mount -t tmpfs -o size=16m tmpfs /dev/shm; exec "$@"'
    bench.run(["unshare", "--mount", "sh", "-ec", mount, "sh", *wrong("small_shared_memory")])


@here("system.bus-error")
def no_room_for_a_map(bench: Bench) -> None:
    mount = 'mount -t tmpfs -o size=16m tmpfs /dev/shm; "$@"; true'
    bench.run(["unshare", "--mount", "sh", "-ec", mount, "sh", *wrong("map_too_much")])


def on_small_disk(bench: Bench, options: str, program: str) -> None:
    """Run a program on a file system in memory that is mounted for it alone."""
    place = bench.folder / "disk"
    place.mkdir()
    mount = f'mount -t tmpfs -o {options} tmpfs {place}; exec "$@"'
    bench.run(["unshare", "--mount", "sh", "-ec", mount, "sh", *wrong(program, str(place))])


@here("system.files")
def many_files(bench: Bench) -> None:
    bench.run(["sh", "-c", 'ulimit -n 200; exec "$@"', "sh", *wrong("many_files")])


@here("system.threads")
def many_threads(bench: Bench) -> None:
    bench.run(as_ordinary_user(["prlimit", "--nproc=40", *wrong("many_threads")]))


@here("healthy+torchrun")
def healthy_torchrun(bench: Bench) -> None:
    torchrun(bench, "healthy")


@here("healthy+training")
def healthy_training(bench: Bench) -> None:
    run = bench.folder / "run"
    bench.run([*SHOAL, "train", "--out", str(run), "--steps", "20", *set_flags(*TINY)])
    bench.run(["sh", "-c", f"cat {run}/logs/*/*.log {run}/supervisor.jsonl {run}/agents/*.jsonl"])


@here("unknown")
def unknown(bench: Bench) -> None:
    torchrun(bench, "my_own_mistake_on_one_rank")
