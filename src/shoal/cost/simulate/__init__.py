"""Training over time, simulated: stragglers, failures, recovery, checkpoints, membership. Seeded arithmetic, no I/O."""
