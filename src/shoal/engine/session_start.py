"""What a launcher decided about a session."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

from shoal.config.schema import EngineConfig
from shoal.control.rank_env import Placement
from shoal.control.rank_messages import MEMBERSHIP_FD
from shoal.engine.console import Console
from shoal.engine.engine import StopRequest
from shoal.run_folder import RunFolder
from shoal.sync.world import World


@dataclass
class SessionStart:
    """What a launcher decided about a session."""

    config: EngineConfig
    run: RunFolder
    placement: Placement
    resume: bool = False
    sharding: str = "cursor"
    stop: StopRequest = field(default_factory=StopRequest)
    # Records an error that ends this rank.
    note_fault: Callable[[Exception], None] = lambda error: None
    world: World | None = None  # Where the ranks have met already.
    seeds_steps: bool = True  # torch's random numbers follow from seed, rank and step.
    lower_rate_advice: str = ""  # How to train with a lower learning rate, if the program has a setting for it.
    console: Console | None = None  # Of rank 0 where no launcher of shoal shows the progress.
    held: ExitStack = field(default_factory=ExitStack)  # Closed when the session ends: the lock of its run folder.

    @property
    def is_elastic(self) -> bool:
        """Whether an agent moves this rank from generation to generation."""
        return MEMBERSHIP_FD in os.environ
