"""Defaults of settings that packages without the schema need too. Each is defined here and nowhere else."""

from __future__ import annotations

SEED = 35_000

# Seconds without a heartbeat after which a member counts as silent.
SILENT_AFTER_S = 2.5
MIN_NODES = 1
MAX_NODES = 64
# How often an agent restarts a rank that was killed.
RESTARTS = 3

# A rank is slow when its part of a step takes so many times as long as the median of the others', and the difference is
# such a part of a step.
SLOW_RATIO = 1.5
MIN_WAIT_PART = 0.1

# Seconds that a collective of a rank may take, and that ranks may take to form a process group.
SYNC_TIMEOUT_S = 60.0
JOIN_TIMEOUT_S = 60.0
