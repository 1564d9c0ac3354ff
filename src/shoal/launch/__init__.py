"""Plans and starts the ranks of a run, follows their agents to the end, and finds out why a run failed."""
