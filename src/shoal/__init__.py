"""shoal: data-parallel training on ordinary machines.

The public API below is for your own training scripts; `examples/own_script.py` uses all of it. The names are resolved
on first use, so that `import shoal` alone does not import torch.
"""

# Python has loaded both before the first line of any program. All other imports wait until the search path is safe.
import os
import sys


def _drop_current_folder() -> None:
    """Remove the current folder from the search path of shoal's own programs: another user may have put a `numpy.py`
    there.

    `python -m shoal.…` without `-P` searches the current folder first. shoal starts its processes with `-P`; this
    covers a user or torchrun. An empty entry in PYTHONPATH, as in `PYTHONPATH=$PYTHONPATH:/lib`, also means the current
    folder; it is removed for child processes too. A script that imports shoal keeps its own search path.
    """
    # While Python searches for the module, sys.argv[0] is `-m`.
    is_module = sys.argv[:1] == ["-m"] and any(word.partition(".")[0] == "shoal" for word in sys.orig_argv[1:])
    if not is_module and os.path.basename(sys.argv[0] if sys.argv else "") != "shoal":  # noqa: PTH119 - not loaded yet
        return
    if is_module and not sys.flags.safe_path:
        del sys.path[0]
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    named = [entry for entry in entries if entry]
    if named and len(named) < len(entries):
        os.environ["PYTHONPATH"] = os.pathsep.join(named)
        here = os.getcwd()  # noqa: PTH109 - not loaded yet
        if here not in named:
            sys.path[:] = [entry for entry in sys.path if entry != here]


_drop_current_folder()

import importlib  # noqa: E402
from typing import TYPE_CHECKING, Any  # noqa: E402

__version__ = "0.2.0"

if TYPE_CHECKING:
    from shoal.data.corpus import make_shard as make_shard
    from shoal.engine import loggers as loggers
    from shoal.engine.batches import weighted as weighted
    from shoal.engine.batches import with_replacement as with_replacement
    from shoal.engine.numbers import Numbers as Numbers
    from shoal.engine.session import Session as Session
    from shoal.engine.session import Step as Step
    from shoal.engine.step_callbacks import StepRecord as StepRecord
    from shoal.engine.streams import Carried as Carried
    from shoal.engine.streams import streams as streams
    from shoal.sync.public_api import barrier as barrier
    from shoal.sync.public_api import cleanup as cleanup
    from shoal.sync.public_api import init_distributed as init_distributed
    from shoal.sync.public_api import is_main_process as is_main_process
    from shoal.sync.public_api import wrap_for_ddp as wrap_for_ddp
    from shoal.sync.step_stats import StepTimer as StepTimer
    from shoal.sync.world import World as World

_MODULE_OF = {
    "Session": "shoal.engine.session",
    "Step": "shoal.engine.session",
    "Numbers": "shoal.engine.numbers",
    "weighted": "shoal.engine.batches",
    "with_replacement": "shoal.engine.batches",
    "Carried": "shoal.engine.streams",
    "streams": "shoal.engine.streams",
    "StepRecord": "shoal.engine.step_callbacks",
    "loggers": "shoal.engine.loggers",
    "World": "shoal.sync.world",
    "init_distributed": "shoal.sync.public_api",
    "wrap_for_ddp": "shoal.sync.public_api",
    "is_main_process": "shoal.sync.public_api",
    "barrier": "shoal.sync.public_api",
    "cleanup": "shoal.sync.public_api",
    "make_shard": "shoal.data.corpus",
    "StepTimer": "shoal.sync.step_stats",
}

__all__ = ["__version__", *_MODULE_OF]


def __dir__() -> list[str]:
    """List the public API, for completion in a Python prompt; nothing is imported for it."""
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'shoal' has no attribute {name!r}")
    module = importlib.import_module(_MODULE_OF[name])
    return module if name == "loggers" else getattr(module, name)
