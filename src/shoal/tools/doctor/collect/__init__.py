"""TODO tools/doctor/collect."""
