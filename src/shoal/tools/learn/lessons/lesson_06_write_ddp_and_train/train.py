"""Train on two ranks with the functions of ddp.py, and write what each rank saw. This file is complete."""

import faulthandler
import hashlib
import json
from pathlib import Path

import ddp
import torch
from torch import nn

SAMPLES, WIDTH, STEPS, MICRO_BATCHES, BATCH = 47, 16, 5, 2, 4


def main() -> None:
    # A rank that waits for an exchange that the other one does not make ends after a minute.
    faulthandler.dump_traceback_later(60, exit=True)
    rank, world_size = ddp.init_distributed()
    group_size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    torch.manual_seed(35_000)
    model = ddp.wrap_for_ddp(nn.Linear(WIDTH, WIDTH))
    doing: list[int] = [0]  # the micro-batch of the step that is computed now
    exchanges = note_exchanges(model, doing)
    shard = ddp.make_shard(list(range(SAMPLES)), rank, world_size)
    rows = torch.randn(SAMPLES, WIDTH)[shard]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        for number in range(MICRO_BATCHES):
            doing[0] = number
            with ddp.exchange_only_with_the_last(model, is_last=number == MICRO_BATCHES - 1):
                first = (step * MICRO_BATCHES + number) * BATCH % (len(rows) - BATCH)
                model(rows[first : first + BATCH]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    facts = {
        "rank": rank,
        "group_size": group_size,
        "backend": torch.distributed.get_backend() if torch.distributed.is_initialized() else "none",
        "shard": shard,
        "samples": SAMPLES,
        "is_ddp": isinstance(model, nn.parallel.DistributedDataParallel),
        "gradient_as_bucket_view": bool(getattr(model, "gradient_as_bucket_view", False)),
        "is_main": ddp.is_main_process(),
        "steps": STEPS,
        "micro_batches": MICRO_BATCHES,
        "exchanged": exchanges,
        "digest": digest_of(model),
    }
    Path(f"facts-{rank}.json").write_text(json.dumps(facts))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def note_exchanges(model: nn.Module, doing: list[int]) -> list[int]:
    """Return a list that gets the micro-batch of each exchange of gradients; the model is one bucket."""
    exchanges: list[int] = []

    def hook(_: object, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
        exchanges.append(doing[0])
        buffer = bucket.buffer().div_(torch.distributed.get_world_size())
        done = torch.distributed.all_reduce(buffer, async_op=True).get_future()
        return done.then(lambda future: future.value()[0])  # type: ignore[no-any-return]

    if isinstance(model, nn.parallel.DistributedDataParallel):
        model.register_comm_hook(None, hook)
    return exchanges


def digest_of(model: nn.Module) -> str:
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return hashlib.sha256(weights.numpy().tobytes()).hexdigest()


if __name__ == "__main__":
    main()
