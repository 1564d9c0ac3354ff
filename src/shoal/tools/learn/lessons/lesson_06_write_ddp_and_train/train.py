"""Train on two ranks with the functions of ddp.py, and write what each rank saw.

This file is complete.
"""

import faulthandler
import hashlib
import json
from pathlib import Path

import ddp
import torch
from torch import nn

SAMPLES, WIDTH, STEPS, MICRO_BATCHES, BATCH = 47, 16, 5, 2, 4


def main() -> None:
    # A rank that waits for an exchange which the other does not make ends.
    faulthandler.dump_traceback_later(60, exit=True)
    rank, world_size = ddp.init_distributed()
    is_group = torch.distributed.is_initialized()
    torch.manual_seed(35_000)
    model = ddp.wrap_for_ddp(nn.Linear(WIDTH, WIDTH))
    doing: list[int] = [0]  # the micro-batch that is computed now
    exchanges = note_exchanges(model, doing)
    shard = ddp.make_shard(list(range(SAMPLES)), rank, world_size)
    rows = torch.randn(SAMPLES, WIDTH)[shard]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        for number in range(MICRO_BATCHES):
            doing[0] = number
            is_last = number == MICRO_BATCHES - 1
            with ddp.exchange_only_with_the_last(model, is_last):
                first = (step * MICRO_BATCHES + number) * BATCH
                batch = rows.roll(-first, dims=0)[:BATCH]
                model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    facts = {
        "rank": rank,
        "group_size": torch.distributed.get_world_size() if is_group else 1,
        "backend": torch.distributed.get_backend() if is_group else "none",
        "shard": shard,
        "samples": SAMPLES,
        "is_ddp": isinstance(model, nn.parallel.DistributedDataParallel),
        "gradient_as_bucket_view": getattr(model, "gradient_as_bucket_view", False),
        "is_main": ddp.is_main_process(),
        "steps": STEPS,
        "micro_batches": MICRO_BATCHES,
        "exchanged": exchanges,
        "digest": digest_of(model),
    }
    Path(f"facts-{rank}.json").write_text(json.dumps(facts))
    if is_group:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def note_exchanges(model: nn.Module, doing: list[int]) -> list[int]:
    """Return a list that gets the micro-batch of each exchange of gradients."""
    exchanges: list[int] = []

    def hook(_, bucket):  # once a backward pass: the model is one bucket
        exchanges.append(doing[0])
        buffer = bucket.buffer().div_(torch.distributed.get_world_size())
        work = torch.distributed.all_reduce(buffer, async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    if isinstance(model, nn.parallel.DistributedDataParallel):
        model.register_comm_hook(None, hook)
    return exchanges


def digest_of(model: nn.Module) -> str:
    weights = torch.cat([weight.detach().flatten() for weight in model.parameters()])
    return hashlib.sha256(weights.numpy().tobytes()).hexdigest()


if __name__ == "__main__":
    main()
