"""TODO tools/plan."""
