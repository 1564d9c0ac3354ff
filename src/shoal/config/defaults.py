"""Defaults of settings that packages without the schema need too. Each is defined here and nowhere else."""

from __future__ import annotations

from pathlib import Path

SEED = 35_000
DEFAULT_PRESET = "grammar"  # of `shoal train` without one

# Seconds without a heartbeat after which a member counts as silent.
SILENT_AFTER_S = 2.5
MIN_NODES = 1
MAX_NODES = 64
# How often an agent restarts a rank that was killed.
RESTARTS = 3
# After how many timeouts that it causes in a row a rank that hangs is killed. Two: a single one may be a slow step.
HUNG_TRIES = 2

# A rank is slow when its part of a step takes this many times as long as the median of the others', and the difference
# is this part of a step.
SLOW_RATIO = 1.5
MIN_WAIT_PART = 0.1
# Without a setting, ranks have equal shares until their speeds differ by more than this.
SIMILAR_SPEED = 1.1

# Seconds that a collective of a rank may take, and that ranks may take to form a process group.
SYNC_TIMEOUT_S = 60.0
JOIN_TIMEOUT_S = 60.0

# How long a run may take to stop: a step of a large model on a slow machine, and the checkpoint after it.
ASK_S = 60.0
# What the ranks of a script have to end once they are asked to; torchrun gives as much between SIGTERM and SIGKILL.
GRACE_S = 30.0

# The volume of a Kubernetes job: where the pods mount it, and its claim; and the least memory of a pod, in GiB.
MOUNT = Path("/data")
DEFAULT_CLAIM = "shoal"
LEAST_POD_GIB = 4
