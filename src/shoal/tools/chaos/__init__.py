"""TODO tools/chaos."""
