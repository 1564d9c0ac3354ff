"""What the server of `run_ranks` imports once, and its ranks and commands have from their start.

pytest and hypothesis are imported by a rank's own test module: a tenth of a second each time.
"""

from __future__ import annotations

import gc
import importlib
import pkgutil

import hypothesis  # noqa: F401
import pytest  # noqa: F401
import torch._dynamo  # noqa: F401

import shoal

for _module in pkgutil.walk_packages(shoal.__path__, "shoal."):
    # Programs, and kernels that need a compiler for GPUs.
    if not _module.name.endswith((".__main__", ".gpu_kernels")):
        importlib.import_module(_module.name)

# A collection in a fork would write to the pages that it shares with the server: a third of a second.
gc.collect()
gc.freeze()
