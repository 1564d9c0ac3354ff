"""Programs that fail in one way each: `python wrong.py NAME`. `produce.py` starts them and stores their output."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

SHORT = timedelta(seconds=3)


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def meet(backend: str = "gloo", timeout: timedelta = SHORT) -> None:
    dist.init_process_group(backend, timeout=timeout)


def healthy(timeout: timedelta = SHORT) -> None:
    meet(timeout=timeout)
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(5):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        optimizer.step()
        print(f"rank {rank()} step {step} loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


def healthy_with_patience() -> None:
    healthy(timedelta(seconds=8))


def work_for_ever() -> None:
    """Act as a training: all ranks exchange in every step."""
    meet()
    for step in range(1_000_000):
        dist.all_reduce(torch.ones(1000))
        if step == 5:
            print(f"rank {rank()} is at work", flush=True)
        time.sleep(0.01)


def meet_with_patience() -> None:
    """Wait long enough that the kernel gives up before torch."""
    meet(timeout=timedelta(seconds=12))


def meet_in_a_file() -> None:
    world = int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", f"file://{sys.argv[2]}", SHORT, world, rank())
    dist.all_reduce(torch.ones(3))
    print(f"rank {rank()} has met the others", flush=True)
    os._exit(0)


def one_rank_ends() -> None:
    meet()
    if rank() == 1:
        sys.exit(5)
    dist.recv(torch.ones(10), src=1)


def one_rank_is_late() -> None:
    meet()
    if rank() == 1:
        time.sleep(8)
    dist.all_reduce(torch.ones(10))


def one_rank_skips_the_barrier() -> None:
    meet()
    if rank() == 0:
        dist.monitored_barrier(timeout=timedelta(seconds=2))
    else:
        time.sleep(6)


def different_sizes() -> None:
    meet()
    dist.all_reduce(torch.ones(10 + 10 * rank()))


def different_sizes_gathered() -> None:
    meet()
    dist.all_gather([torch.empty(10), torch.empty(20)], torch.ones(10))


def different_collectives() -> None:
    meet()
    tensor = torch.ones(4)
    dist.all_reduce(tensor) if rank() == 0 else dist.broadcast(tensor, src=1)


def float8() -> None:
    meet()
    dist.all_reduce(torch.ones(4).to(torch.float8_e4m3fn))


def no_future() -> None:
    meet()
    work = dist.reduce_scatter_tensor(torch.ones(2), torch.ones(4), async_op=True)
    work.get_future().wait()


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(4, 4)
        self.unused = nn.Linear(4, 4)

    def forward(self, inputs: Tensor) -> Any:
        return self.used(inputs)


def unused_parameters() -> None:
    meet()
    model = DistributedDataParallel(TwoHeads())
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()


def different_models() -> None:
    meet()
    DistributedDataParallel(nn.Linear(4, 4 + rank()))


def different_parameter_counts() -> None:
    meet()
    DistributedDataParallel(nn.Sequential(*(nn.Linear(4, 4) for _ in range(1 + rank()))))


def nothing_to_train() -> None:
    meet()
    DistributedDataParallel(nn.Linear(4, 4).requires_grad_(False))


def not_a_number() -> None:
    torch.autograd.set_detect_anomaly(True)
    weight = torch.zeros(3, requires_grad=True)
    (torch.sqrt(weight) * 0).sum().backward()


def no_group() -> None:
    print(dist.get_rank())


def group_twice() -> None:
    meet()
    meet()


def local_rank_missing() -> None:
    print(int(os.environ["LOCAL_RANK"]))


def store() -> dist.TCPStore:
    return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, rank() == 0, SHORT)


def wait_for_a_key() -> None:
    store().get("the learning rate")


def use_the_store() -> None:
    """Use only the store, so that its loss is the first error of the other ranks when rank 0 dies."""
    key_store = store()
    print(f"rank {rank()} is at work", flush=True)
    while True:
        key_store.set(f"rank {rank()}", "here")
        time.sleep(0.01)


def to_cuda() -> None:
    torch.ones(3).to("cuda")


def set_cuda_device() -> None:
    torch.cuda.set_device(0)


def nccl() -> None:
    meet("nccl")


def rccl() -> None:
    meet("rccl")


def over_nccl() -> None:
    meet("nccl", timedelta(seconds=30))
    dist.all_reduce(torch.ones(4, device="cuda"))
    torch.cuda.synchronize()


def cpu_tensor_for_nccl() -> None:
    meet("nccl")
    dist.all_reduce(torch.ones(4))


def slow_collective() -> None:
    """Keep the GPU busy for longer than the timeout of the collective."""
    meet("nccl")
    dist.all_reduce(torch.ones(4, device="cuda"))
    torch.cuda.synchronize()
    torch.cuda._sleep(30_000_000_000)
    dist.all_reduce(torch.ones(4, device="cuda"))
    torch.cuda.synchronize()


def cuda_memory() -> None:
    print(torch.empty(1 << 44, dtype=torch.uint8, device="cuda").sum())


def cuda_ordinal() -> None:
    torch.cuda.set_device(7)


def one_gpu_for_two() -> None:
    torch.cuda.set_device(0)
    meet("nccl", timedelta(seconds=30))
    dist.all_reduce(torch.ones(4, device="cuda"))


def cuda_assertion() -> None:
    print(nn.Embedding(10, 4).cuda()(torch.tensor([3, 10], device="cuda")).sum().item())


def two_devices() -> None:
    nn.Linear(4, 4).cuda()(torch.ones(2, 4))


def save_from_gpu() -> None:
    torch.save(torch.ones(3, device="cuda"), sys.argv[2])


def load_from_gpu() -> None:
    torch.load(sys.argv[2])


def other_checkpoint() -> None:
    nn.Linear(4, 4).load_state_dict({f"module.{name}": value for name, value in nn.Linear(4, 4).state_dict().items()})


def too_much_memory() -> None:
    """Run under an address-space limit: a machine that overcommits memory would kill a process instead."""
    print(torch.ones(1 << 33).sum())


def too_much_memory_for_numpy() -> None:
    import numpy as np

    print(np.ones(1 << 33).sum())


def eat_memory() -> None:
    """Write to the memory, so that the kernel has to provide it. Run only under a limit."""
    eaten = []
    while True:
        eaten.append(torch.ones(1 << 22))


def save_checkpoint() -> None:
    torch.save(torch.ones(8 << 20), f"{sys.argv[2]}/model.pt")


def write_text() -> None:
    Path(sys.argv[2], "log").write_text("loss 1.234\n" * (1 << 20), encoding="utf-8")


def many_files() -> None:
    held = [os.open(__file__, os.O_RDONLY) for _ in range(10_000)]
    print(len(held))


def many_threads() -> None:
    import threading

    for _ in range(10_000):
        threading.Thread(target=time.sleep, args=(5,), daemon=True).start()


class Rows(Dataset[Tensor]):
    def __init__(self, numbers: int, deadly: int = -1) -> None:
        self.numbers = numbers
        self.deadly = deadly

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Tensor:
        if index == self.deadly:
            os.kill(os.getpid(), 9)
        return torch.full((self.numbers,), float(index))


def small_shared_memory() -> None:
    for batch in DataLoader(Rows(1 << 22), batch_size=8, num_workers=2):
        print(batch.shape)


def killed_worker() -> None:
    for batch in DataLoader(Rows(4, deadly=5), batch_size=4, num_workers=2):
        print(batch.shape)


def unpicklable() -> None:
    import torch.multiprocessing as mp

    def train(number: int) -> None:
        print(number)

    mp.spawn(train, nprocs=2)


def map_too_much() -> None:
    """Map a file that is larger than the free space of its file system."""
    import mmap

    with Path("/dev/shm/batch").open("w+b") as file:
        file.truncate(64 << 20)
        view = mmap.mmap(file.fileno(), 64 << 20)
        view[:] = bytes(64 << 20)


def listen_twice() -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as holder:
        socket.create_server(holder.getsockname())


def crash() -> None:
    import ctypes

    ctypes.string_at(0)


def kill_yourself() -> None:
    os.kill(os.getpid(), 9)


def missing_module() -> None:
    import flash_attn  # type: ignore[import-not-found]  # noqa: F401


def no_compiler() -> None:
    torch.compile(nn.Sequential(nn.Linear(4, 4), nn.GELU()))(torch.ones(2, 4))


def token_out_of_range() -> None:
    nn.Embedding(10, 4)(torch.tensor([3, 10]))


def my_own_mistake() -> None:
    raise ValueError("the answer is 42, not 41")


def my_own_mistake_on_one_rank() -> None:
    meet()
    if rank() == 1:
        my_own_mistake()
    for _ in range(1000):
        dist.all_reduce(torch.ones(10))


PROGRAMS: dict[str, Callable[[], Any]] = {
    name: value for name, value in list(globals().items()) if getattr(value, "__module__", "") == __name__
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    PROGRAMS[sys.argv[1]]()
