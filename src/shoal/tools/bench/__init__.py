"""TODO tools/bench."""
