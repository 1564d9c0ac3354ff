"""TODO tools/probe."""
