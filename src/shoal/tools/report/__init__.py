"""TODO tools/report."""
