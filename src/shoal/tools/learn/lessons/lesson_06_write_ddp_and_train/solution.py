"""What a training needs to run on several ranks."""

import contextlib
import datetime

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def init_distributed() -> tuple[int, int]:
    """Join the group of all ranks; return this rank and the number of ranks."""
    # gap 1: join a group over gloo; the environment has address, rank and number
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=30))
    return dist.get_rank(), dist.get_world_size()


def make_shard(samples: list[int], rank: int, world_size: int) -> list[int]:
    """Return the samples of this rank; the ranks' sizes differ by one at most."""
    # gap 2: each sample belongs to exactly one rank
    return samples[rank::world_size]


def wrap_for_ddp(model: nn.Module) -> nn.Module:
    """Average the gradients over all ranks, without a second copy of them in memory."""
    # gap 3: DistributedDataParallel, with gradients that are views of its buckets
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def is_main_process() -> bool:
    """Return whether this rank writes files and prints: one rank does."""
    # gap 4: true on one rank
    return dist.get_rank() == 0


def exchange_only_with_the_last(
    model: nn.Module,
    is_last: bool,
) -> contextlib.AbstractContextManager[None]:
    """Return a context for a micro-batch: only the last of a step exchanges gradients."""
    # gap 5: DistributedDataParallel has a context in which it does not exchange
    return contextlib.nullcontext() if is_last else model.no_sync()
