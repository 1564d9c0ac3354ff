"""Real machines over SSH: list them, reach them, prepare them, and start agents on them."""
