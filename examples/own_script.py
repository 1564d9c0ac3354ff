"""Your own training script, data-parallel: runs alone and under torchrun, unchanged.

python examples/own_script.py
torchrun --nproc-per-node=2 examples/own_script.py
"""

import torch
from torch.nn import functional as F

from shoal import StepTimer, barrier, cleanup, init_distributed, is_main_process, make_shard, wrap_for_ddp

STEPS, BATCH, LENGTH = 60, 32, 24


def letters(sentence: str) -> torch.Tensor:
    """Fixed-length rows of character codes, padded with blanks."""
    return torch.tensor([ord(letter) for letter in sentence[: LENGTH + 1].ljust(LENGTH + 1)])


def main() -> None:
    world = init_distributed()
    rank, world_size = world
    torch.manual_seed(35_000)
    net = torch.nn.Sequential(
        torch.nn.Embedding(128, 64), torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 128)
    )
    model = wrap_for_ddp(net.to(world.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    shard = make_shard(rank, world_size)
    print(f"rank {rank}: {len(shard)} sentences, the first is {shard[0]!r}", flush=True)
    rows = torch.stack([letters(sentence) for sentence in shard[: BATCH * STEPS]]).to(world.device)

    timer = StepTimer()
    for step in range(STEPS):
        timer.start()
        with timer.phase("data"):
            batch = rows[torch.arange(step * BATCH, (step + 1) * BATCH) % len(rows)]
        with timer.phase("forward"):
            loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        with timer.phase("backward"):
            loss.backward()
        with timer.phase("optimizer"):
            optimizer.step()
            optimizer.zero_grad()
        if is_main_process() and step % 20 == 19:
            phases = "  ".join(f"{name} {1e3 * seconds:.1f} ms" for name, seconds in timer.finish().items())
            print(f"step {step + 1}: loss {loss.item():.3f}  {phases}", flush=True)

    barrier()
    cleanup()


if __name__ == "__main__":
    main()
