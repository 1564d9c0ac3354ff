"""shoal_lab: an emulated cluster on one machine, to test any distributed program on; docs/lab.md describes it.

The names are resolved on first use, so that a command which only needs the names of link profiles stays quick.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal_lab.errors import LabError as LabError
    from shoal_lab.errors import LabUsageError as LabUsageError
    from shoal_lab.lab import Lab as Lab
    from shoal_lab.lab import Node as Node
    from shoal_lab.spec import LabSpec as LabSpec
    from shoal_lab.spec import Link as Link
    from shoal_lab.spec import make_spec as make_spec

_MODULE_OF = {
    "Lab": "shoal_lab.lab",
    "LabError": "shoal_lab.errors",
    "LabSpec": "shoal_lab.spec",
    "LabUsageError": "shoal_lab.errors",
    "Link": "shoal_lab.spec",
    "Node": "shoal_lab.lab",
    "make_spec": "shoal_lab.spec",
}
__all__ = list(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'shoal_lab' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)
