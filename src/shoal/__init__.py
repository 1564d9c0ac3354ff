"""shoal: many small machines, training as one.

The names below are for people with a training script of their own; `examples/own_script.py` uses all of them. They are
resolved on first use, so that `import shoal` alone does not import torch.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from shoal.data.shards import make_shard as make_shard
    from shoal.sync.api import barrier as barrier
    from shoal.sync.api import cleanup as cleanup
    from shoal.sync.api import init_distributed as init_distributed
    from shoal.sync.api import is_main_process as is_main_process
    from shoal.sync.api import wrap_for_ddp as wrap_for_ddp
    from shoal.sync.timer import StepTimer as StepTimer
    from shoal.sync.world import World as World

_HOME = {
    "World": "shoal.sync.world",
    "init_distributed": "shoal.sync.api",
    "wrap_for_ddp": "shoal.sync.api",
    "is_main_process": "shoal.sync.api",
    "barrier": "shoal.sync.api",
    "cleanup": "shoal.sync.api",
    "make_shard": "shoal.data.shards",
    "StepTimer": "shoal.sync.timer",
}

__all__ = ["__version__", *_HOME]


def _leave_out_current_folder() -> None:
    """`python -m shoal.…` without `-P` searches the current folder first, where another user may have put a `numpy.py`.

    shoal itself starts all its processes with `-P`. This covers the rest of the imports when a person, or torchrun,
    started one without it. A script that imports shoal keeps its own search path.
    """
    words = getattr(sys, "orig_argv", [])
    module = words[words.index("-m") + 1] if "-m" in words[:-1] else ""
    # While Python looks for the module, this is its name for the program.
    if sys.argv[:1] == ["-m"] and module.partition(".")[0] == "shoal" and not sys.flags.safe_path:
        del sys.path[0]


_leave_out_current_folder()


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'shoal' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
