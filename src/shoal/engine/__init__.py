"""The training engine for any `nn.Module`: world, exchange, step, commit, recovery, checkpoints, events."""
