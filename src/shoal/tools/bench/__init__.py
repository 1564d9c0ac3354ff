"""Compare trainings: speed by number of ranks, and the levers (sync modes and wire formats) beside each other."""
