"""TODO tools/doctor."""
