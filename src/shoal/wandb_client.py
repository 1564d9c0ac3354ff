"""The module wandb, which is imported only where a program or a command asks for Weights & Biases."""

from __future__ import annotations

import importlib
from typing import Any, Protocol, cast

from shoal.errors import UsageError


class WandbLike(Protocol):
    """What shoal needs of the module wandb, or of an object that stands for it."""

    def init(self, **settings: Any) -> Any: ...

    def log(self, data: dict[str, Any], *, step: int) -> Any: ...

    def finish(self) -> Any: ...


def import_wandb(then: str = "") -> WandbLike:
    """Return the module; `then` is the command that follows its installation."""
    try:
        return cast(WandbLike, importlib.import_module("wandb"))
    except ImportError as error:
        raise UsageError(
            f"wandb cannot be imported: {error}",
            why="shoal needs it for Weights & Biases only, so it is not installed with shoal",
            fix=f"pip install 'shoal[wandb]'{then}",
        ) from None
