"""The agent: one process per node that starts the ranks, restarts them, and agrees with the other agents."""
