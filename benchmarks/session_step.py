"""A step of `shoal.Session` against a hand-written DDP loop of the same model: two ranks on this machine, in turns.

    .venv/bin/python benchmarks/session_step.py --rounds 7
    .venv/bin/python benchmarks/session_step.py --checks

`--checks` measures what the checks of a user's loop cost: one process, with them and without in turns of one step.
Each measurement is one torchrun with two ranks of one thread. The loops do the same work: the same model, batches,
clipping and optimizer. The hand-written one measures, commits, compares and saves nothing.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

from _common import median_ratio, options, rounds

WARM_UP = 10
BATCH = 32


def make(name: str):  # type: ignore[no-untyped-def]
    """Return a model, a dataset of inputs and targets, and the loss summed over samples."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    torch.set_num_threads(1)
    torch.manual_seed(1)
    generator = torch.Generator().manual_seed(2)
    if name == "images":
        blocks = [(nn.Conv2d(32, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()) for _ in range(4)]
        model = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1),
            *(layer for block in blocks for layer in block),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(32, 10),
        )
        data = torch.randn(2048, 3, 16, 16, generator=generator), torch.randint(10, (2048,), generator=generator)
    else:
        model = nn.Sequential(
            nn.Linear(256, 1024),
            nn.GELU(),
            nn.Linear(1024, 1024),
            nn.GELU(),
            nn.Linear(1024, 1024),
            nn.GELU(),
            nn.Linear(1024, 10),
        )
        data = torch.randn(2048, 256, generator=generator), torch.randint(10, (2048,), generator=generator)
    return model, data, lambda output, labels: F.cross_entropy(output, labels, reduction="sum")


def train_ddp(name: str, steps: int) -> list[float]:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    model, (inputs, labels), loss_sum = make(name)
    dist.init_process_group("gloo")
    rank, share = dist.get_rank(), BATCH // dist.get_world_size()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ends = []
    for step in range(steps):
        rows = torch.randperm(len(labels), generator=torch.Generator().manual_seed(step))[rank * share :][:share]
        loss = loss_sum(wrapped(inputs[rows]), labels[rows]) / share
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        ends.append(time.perf_counter())
    dist.barrier()
    dist.destroy_process_group()
    return ends


def train_session(name: str, steps: int, folder: str) -> list[float]:
    import torch

    import shoal

    session = shoal.Session(steps=steps, global_batch=BATCH, out=folder, checkpoint_every=10_000)
    model, data, loss_sum = make(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    session.attach(model, optimizer)
    ends = []
    for step in session:
        with step:
            for inputs, labels in step.batches(data):
                step.backward(loss_sum(model(inputs), labels))
            step.update(clip=1.0)
        ends.append(time.perf_counter())
    return ends


def train_checked(name: str, steps: int, folder: str) -> dict[str, list[float]]:
    """Return the times of the steps with the checks of the user's loop, and of those without."""
    import torch

    import shoal
    from shoal.engine.misuse import LoopGuard

    session = shoal.Session(steps=steps, global_batch=BATCH, out=folder, checkpoint_every=10_000)
    model, data, loss_sum = make(name)
    session.attach(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    times: dict[str, list[float]] = {"checked": [], "unchecked": []}
    for step in session:
        way = "checked" if step.number % 2 else "unchecked"
        training = session.entry.step
        training.guard.close()
        if way == "checked":
            training.guard = LoopGuard(session.replica.state)
        began = time.perf_counter()
        with step:
            for inputs, labels in step.batches(data):
                step.backward(loss_sum(model(inputs), labels))
            step.update(clip=1.0)
        if step.number > WARM_UP:
            times[way].append(time.perf_counter() - began)
    return times


def print_checks(names: str, steps: int) -> None:
    for name in set(names.split(",")) - {"gan"}:
        with tempfile.TemporaryDirectory() as folder:
            times = train_checked(name, steps, str(Path(folder) / "run"))
        checked, unchecked = (statistics.median(times[way]) for way in ("checked", "unchecked"))
        print(
            f"{name}: a step of {1e3 * unchecked:.2f} ms takes {checked / unchecked:.4f} of it with the checks "
            f"(medians of {len(times['checked'])} steps each)"
        )


def make_gan():  # type: ignore[no-untyped-def]
    """Return a judge and a maker, their optimizers, images and noise, and the loss of a verdict."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    torch.set_num_threads(1)
    torch.manual_seed(1)
    generator = torch.Generator().manual_seed(2)
    judge = nn.Sequential(
        nn.Conv2d(1, 32, 4, 2, 1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(32, 64, 4, 2, 1),
        nn.LeakyReLU(0.2),
        nn.Flatten(),
        nn.Linear(4096, 1),
    )
    maker = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.Sigmoid())
    optimizers = [torch.optim.Adam(model.parameters(), lr=2e-4, betas=(0.5, 0.999)) for model in (judge, maker)]
    data = torch.rand(2048, 1, 32, 32, generator=generator), torch.randn(2048, 64, generator=generator)

    def verdict(model: nn.Module, pictures: torch.Tensor, label: float) -> torch.Tensor:
        logits = model(pictures)
        return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, label))

    return judge, maker, optimizers, data, verdict


def train_gan_ddp(steps: int) -> list[float]:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    judge, maker, (judge_optimizer, maker_optimizer), (images, noise), verdict = make_gan()  # type: ignore[no-untyped-call]
    dist.init_process_group("gloo")
    rank, share = dist.get_rank(), BATCH // dist.get_world_size()
    wrapped_judge = DistributedDataParallel(judge, broadcast_buffers=False)
    wrapped_maker = DistributedDataParallel(maker, broadcast_buffers=False)
    ends = []
    for step in range(steps):
        rows = torch.randperm(len(images), generator=torch.Generator().manual_seed(step))[rank * share :][:share]
        real, fake = images[rows], wrapped_maker(noise[rows]).view(-1, 1, 32, 32)
        judge.zero_grad(set_to_none=True)
        (verdict(wrapped_judge, real, 1.0) + verdict(wrapped_judge, fake.detach(), 0.0)).backward()
        judge_optimizer.step()
        maker.zero_grad(set_to_none=True)
        verdict(judge, fake, 1.0).backward()
        maker_optimizer.step()
        ends.append(time.perf_counter())
    dist.barrier()
    dist.destroy_process_group()
    return ends


def train_gan_session(steps: int, folder: str) -> list[float]:
    import shoal

    session = shoal.Session(steps=steps, global_batch=BATCH, out=folder, checkpoint_every=10_000)
    judge, maker, optimizers, data, verdict = make_gan()  # type: ignore[no-untyped-call]
    session.attach(judge, maker, *optimizers)
    ends = []
    for step in session:
        fakes = []
        with step:
            with step.part(optimizers[0]):
                for real, noise in step.batches(data):
                    fakes.append(maker(noise).view_as(real))
                    loss = verdict(judge, real, 1.0) + verdict(judge, fakes[-1].detach(), 0.0)
                    step.backward(loss, mean_of=len(real))
            for fake in fakes:
                step.backward(verdict(judge, fake, 1.0), mean_of=len(fake))
            step.update()
        ends.append(time.perf_counter())
    return ends


def rank_main(way: str, name: str, steps: int, folder: str) -> None:
    import os

    if name == "gan":
        ends = train_gan_ddp(steps) if way == "ddp" else train_gan_session(steps, folder)
    else:
        ends = train_ddp(name, steps) if way == "ddp" else train_session(name, steps, folder)
    if os.environ["RANK"] == "0":
        # From end to end, so that what a loop does between two steps counts.
        times = [end - begin for begin, end in pairwise(ends[min(WARM_UP, steps // 3) :])]
        print(f"median {statistics.median(times)}", flush=True)


def measure(way: str, name: str, steps: int) -> Callable[[], float]:
    def run() -> float:
        with tempfile.TemporaryDirectory() as folder:
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
            argv = [*torchrun, __file__, "--rank", way, name, str(steps), str(Path(folder) / "run")]
            done = subprocess.run(argv, capture_output=True, text=True, timeout=600, check=True)
        return float(next(line for line in done.stdout.splitlines() if line.startswith("median ")).split()[1])

    return run


def main() -> None:
    if sys.argv[1:2] == ["--rank"]:
        rank_main(sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5])
        return
    parser = options(__doc__, rounds_=7, steps=80, quick={"steps": 6, "models": "dense"})
    parser.add_argument(
        "--models", default="images,dense,gan", help="of images, dense and gan, which has two updates in a step"
    )
    parser.add_argument("--checks", action="store_true")
    chosen = parser.parse_args()
    if chosen.checks:
        print_checks(chosen.models, 20 * chosen.steps)
        return
    for name in chosen.models.split(","):
        print(f"{name}:")
        found = rounds({way: measure(way, name, chosen.steps) for way in ("ddp", "session")}, chosen.rounds)
        ratio = 1 / median_ratio(found["ddp"], found["session"])
        print(f"{name}: a step of the session takes {ratio:.3f} of the hand-written one (median of rounds)")


if __name__ == "__main__":
    main()
