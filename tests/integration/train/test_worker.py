"""The process of a rank starts without torch's compiler.

Exercises train.worker.
"""

from __future__ import annotations

import subprocess
import sys

_TRAIN = """
import sys, torch
from shoal.train.worker import LateCompiler

LateCompiler.install()
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
optimizer.zero_grad()
print("torch._dynamo.convert_frame" in sys.modules)
print(torch.compile(lambda x: x + 1, backend="eager")(torch.zeros(2)).tolist())
print("torch._dynamo.convert_frame" in sys.modules)
optimizer.step()
"""


def test_the_compiler_is_imported_when_it_is_used() -> None:
    done = subprocess.run([sys.executable, "-c", _TRAIN], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines() == ["False", "[1.0, 1.0]", "True"]
