"""TODO tools/explain."""
