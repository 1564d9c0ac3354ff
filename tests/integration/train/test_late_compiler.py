"""torch's compiler in a rank's process: not imported by an uncompiled training, and whole when something needs it.

Exercises train.worker.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

TRAIN = """
import sys

import torch
from torch.distributed import HashStore, init_process_group
from torch.nn.parallel import DistributedDataParallel

from shoal.train.worker import LateCompiler

LateCompiler.install()
late = sys.modules["torch._dynamo"]
init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
model = DistributedDataParallel(torch.nn.Linear(2, 2))
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    model.module(torch.ones(2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())
assert sys.modules["torch._dynamo"] is late
assert not [name for name in sys.modules if name.startswith("torch._dynamo.")]
"""
COMPILE = """
assert late not in sys.meta_path
assert torch.compile(lambda x: x * 2 + 1, backend="eager")(torch.ones(1)).item() == 3
optimizer.step()
"""


def run(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_uncompiled_training_imports_no_compiler() -> None:
    run(TRAIN)


@pytest.mark.long
@pytest.mark.parametrize(
    "need",
    [
        "import torch._dynamo.config as part; assert sys.modules['torch._dynamo'].config is part",
        "from torch._dynamo.utils import counters; assert sys.modules['torch._dynamo'].utils.counters is counters",
        "from torch._dynamo import utils; assert utils.counters is sys.modules['torch._dynamo'].utils.counters",
        "late.config",
    ],
)
def test_the_compiler_is_imported_once_when_it_is_needed(need: str) -> None:
    run(TRAIN + need + COMPILE)
