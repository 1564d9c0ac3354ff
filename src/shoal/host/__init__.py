"""TODO host."""
