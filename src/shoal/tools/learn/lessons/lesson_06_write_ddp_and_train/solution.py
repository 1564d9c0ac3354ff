"""What a training needs to run on several ranks."""

import contextlib
import datetime

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def init_distributed() -> tuple[int, int]:
    """Join the group of all ranks; return this rank and the number of ranks."""
    # gap 1: join a group over gloo; address, rank and number of ranks are in the environment
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=30))
    return dist.get_rank(), dist.get_world_size()


def make_shard(samples: list[int], rank: int, world_size: int) -> list[int]:
    """Return the samples of this rank: each sample belongs to one rank, and sizes differ by one at most."""
    # gap 2: each sample belongs to exactly one rank
    return samples[rank::world_size]


def wrap_for_ddp(model: nn.Module) -> nn.Module:
    """Return the model with gradients that are averaged over all ranks, without a second copy of them in memory."""
    # gap 3: DistributedDataParallel, with the option that makes gradients views of its buckets
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def is_main_process() -> bool:
    """Return whether this rank writes files and prints: one rank does."""
    # gap 4: true on one rank
    return dist.get_rank() == 0


def exchange_only_with_the_last(model: nn.Module, is_last: bool) -> contextlib.AbstractContextManager[None]:
    """Return a context in which backward exchanges gradients only if the micro-batch is the last one of its step."""
    # gap 5: DistributedDataParallel has a context in which it does not exchange
    return contextlib.nullcontext() if is_last else model.no_sync()
